"""A real engine that receives into a second copy while it decodes, and applies by a load plan.

Its linear layers keep their weights as they are (a fault of the test plugin), as they do on a
GPU; elsewhere on the CPU they are packed, there is no plan, and each update is a reload.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from actors.adapters import RayEngine
from actors.engine_settings import EngineSettings
from orchestrator.context import operation
from orchestrator.errors import ChannelError, SyncError, TransferError
from orchestrator.types import KVPolicy, PauseMode, PhaseTimeouts, TransferBackend
from tests.real_engine import RealRig, engine_options, make_model, state
from tests.swaps import LocalSender, check_completion

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]
DEADLINE_S = 60.0


class StagedRig(RealRig):
    """Receives into a second copy; knows when the load plan was proven."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.staged = True
        self.proven = asyncio.Event()

    def heard(self, name: str, record: dict[str, Any]) -> None:
        if any("copies, proven" in how for how in record.get("workers", ())):
            self.proven.set()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    ray_session: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[StagedRig]:
    folder = tmp_path_factory.mktemp("staged")
    models = {
        "a": make_model(folder / "a", 1, tied=True),
        "b": make_model(folder / "b", 2, tied=True),
    }
    heard: list[StagedRig] = []
    engine = RayEngine(
        "staged",
        EngineSettings(
            model=str(folder / "a"),
            dtype="float32",
            max_model_len=512,
            log_path=str(folder / "engine.log"),
        ),
        on_event=lambda name, record: [rig.heard(name, record) for rig in heard] and None,
        options=engine_options(folder / "faults", MIDFLIGHT_TEST_PLAIN_WEIGHTS="1"),
    )
    sender = LocalSender({which: state(model) for which, model in models.items()})
    try:
        await engine.start()
        rig = StagedRig(engine, sender, models, folder / "faults")
        heard.append(rig)
        yield rig
    finally:
        await sender.aclose()
        await engine.aclose()


async def test_the_first_update_proves_the_plan_and_the_others_replay_it(rig: StagedRig) -> None:
    async with asyncio.timeout(DEADLINE_S):
        seen = []
        for which in ("b", "a", "b", "a"):
            swapped = await rig.swap(which)
            assert await rig.engine.digests(swapped.update) == swapped.sent
            seen.append(dict(swapped.sent))
            request = rig.request(24, 5)
            completion = await rig.generate(request)
            assert completion.token_ids == rig.greedy(which, request.prompt.token_ids, 24)
            await rig.proven.wait()
    assert seen[0] == seen[2] != seen[1] == seen[3]


@pytest.mark.parametrize("kv", KVPolicy)
async def test_bytes_arrive_while_requests_go_on_and_one_call_swaps(
    rig: StagedRig, kv: KVPolicy
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await rig.swap("a")
        old = rig.version
        requests = [rig.request(160, i) for i in range(4)]
        running = [asyncio.create_task(rig.generate(r)) for r in requests]
        await rig.engine.wait_for_tokens(5)
        update = rig.next_update(kv=kv)
        rig.use("b")
        sent = await rig.sender.stage(update.version)
        with operation(sync_id=update.sync_id, version=update.version):
            stats = await rig.prefetch(update)
            assert not (await rig.engine.status()).paused
            swapped = await rig.engine.swap(update, PhaseTimeouts())
        rig.version = update.version
        first = await rig.engine.wait_first_tokens(update)
        assert await rig.engine.digests(update) == sent
        completions = await asyncio.gather(*running)
    assert stats.nbytes == swapped.stats.nbytes > 0
    assert swapped.ack.requests_in_flight == 4
    assert len(first.stalls) == 4
    for request, completion in zip(requests, completions, strict=True):
        check_completion(completion, request)
        assert [span.version for span in completion.spans] == [old, rig.version]
        cut = completion.spans[0].end
        prompt, written = request.prompt.token_ids, completion.token_ids
        assert written[:cut] == rig.greedy("a", prompt, cut), "labelled old, and new"
        if kv is KVPolicy.RECOMPUTE:
            assert written[cut:] == rig.greedy("b", prompt + written[:cut], 160 - cut)


async def test_a_bit_that_flips_in_the_second_copy_is_found_in_the_live_weights(
    rig: StagedRig,
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    async with asyncio.timeout(DEADLINE_S):
        rig.fault("FLIP_BIT", name)
        swapped = await rig.swap("b")
        rig.fault()
        received = await rig.engine.digests(swapped.update)
        assert {n for n in swapped.sent if received[n] != swapped.sent[n]} == {name}
        healed = await rig.swap("a")
        assert await rig.engine.digests(healed.update) == healed.sent


async def test_a_bit_that_flips_in_the_model_after_a_replay_is_found_in_its_tensor(
    rig: StagedRig,
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        proof = await rig.swap("a")
        assert await rig.engine.digests(proof.update) == proof.sent
        await rig.proven.wait()
        rig.fault("FLIP_LIVE", "model.layers.1.mlp.gate_up_proj.weight")  # no tensor arrives so
        swapped = await rig.swap("b")
        rig.fault()
        held = await rig.engine.digests(swapped.update)
        assert {n for n in swapped.sent if held[n] != swapped.sent[n]} == {
            "model.layers.1.mlp.gate_proj.weight"
        }
        healed = await rig.swap("a")
        assert await rig.engine.digests(healed.update) == healed.sent


async def test_what_was_not_fetched_costs_no_pause(rig: StagedRig) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await rig.swap("a")
        update = rig.next_update()
        rig.use("b")
        await rig.sender.stage(update.version)
        with pytest.raises(SyncError, match="is not at hand") as caught:
            await rig.engine.swap(update, PhaseTimeouts())
        assert caught.value.phase == "PAUSING"
        assert not (await rig.engine.status()).paused
        await rig.prefetch(update)
        await rig.engine.swap(update, PhaseTimeouts())
        rig.version = update.version
        request = rig.request(8, 5)
        assert (await rig.generate(request)).token_ids == rig.greedy(
            "b", request.prompt.token_ids, 8
        )


async def test_mapped_memory_and_a_tied_duplicate_go_the_same_way(rig: StagedRig) -> None:
    """Backend ipc over host memory: a copy of its own first, the sender's memory from then on."""
    tensors = {which: dict(state(model)) for which, model in rig.models.items()}
    for named in tensors.values():
        named["lm_head.weight"] = named["model.embed_tokens.weight"]
    tensors["untied"] = tensors["a"] | {"lm_head.weight": tensors["b"]["lm_head.weight"]}
    honest = rig.sender, rig.use, rig.backend
    rig.sender = LocalSender(tensors, backend=TransferBackend.IPC)
    rig.use, rig.backend, rig.staged = rig.sender.use, TransferBackend.IPC, False
    try:
        async with asyncio.timeout(DEADLINE_S):
            await rig.open()
            for which in ("b", "a", "b"):
                swapped = await rig.swap(which)
                assert await rig.engine.digests(swapped.update) == swapped.sent
                request = rig.request(12, 5)
                tokens = (await rig.generate(request)).token_ids
                assert tokens == rig.greedy(which, request.prompt.token_ids, 12)
            swapped = await rig.swap("untied")
            received = await rig.engine.digests(swapped.update)
            assert [n for n in received if received[n] != swapped.sent[n]] == ["lm_head.weight"]
            await rig.swap("a")
    finally:
        await rig.sender.aclose()
        (rig.sender, rig.use, rig.backend), rig.staged = honest, True
        await rig.open()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("missing", "1 parameters get nothing: model.norm.weight"),
        ("unexpected", "model.extra.weight"),
        ("misshaped", "model.layers.0.mlp.down_proj.weight"),
    ],
)
async def test_names_and_shapes_that_do_not_fit_are_refused_before_any_swap(
    rig: StagedRig, wrong: str, words: str
) -> None:
    tensors = dict(state(rig.models["a"]))
    if wrong == "missing":
        del tensors["model.norm.weight"]
    elif wrong == "unexpected":
        tensors["model.extra.weight"] = torch.zeros(3)
    else:
        tensors[words] = tensors[words][:, :-4].contiguous()
    honest, rig.sender = rig.sender, LocalSender({"a": tensors})
    try:
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ChannelError, match=words):
                await rig.open()
    finally:
        await rig.sender.aclose()
        rig.sender = honest
    async with asyncio.timeout(DEADLINE_S):
        await rig.open()
        swapped = await rig.swap("b")
        assert await rig.engine.digests(swapped.update) == swapped.sent


async def test_a_fetch_that_is_called_off_costs_the_requests_nothing(rig: StagedRig) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await rig.swap("a")
        request = rig.request(120, 3)
        running = asyncio.create_task(rig.generate(request))
        await rig.engine.wait_for_tokens(5)
        update = rig.next_update()
        rig.use("b")
        await rig.sender.stage(update.version)
        fetching = asyncio.ensure_future(rig.engine.prefetch(update))  # and nobody sends
        await rig.engine.wait_for_tokens(30)
        assert not fetching.done()
        await rig.engine.close_channel()
        with pytest.raises((ChannelError, TransferError)):
            await fetching
        completion = await running
        assert completion.token_ids == rig.greedy("a", request.prompt.token_ids, 120)
        await rig.open()
        swapped = await rig.swap("b", PauseMode.KEEP, KVPolicy.KEEP)
        assert await rig.engine.digests(swapped.update) == swapped.sent
