"""What only the real engine can show: exact weights, faults on the wire, deaths."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import pytest_asyncio

from actors.adapters import RayEngine
from actors.engine_settings import EngineSettings
from actors.processes import ProcessId, shared_memory
from actors.scratch import SCRATCH_ENV
from actors.warm_up import LARGEST, step_sizes
from orchestrator.errors import (
    ChannelError,
    EngineDied,
    EngineError,
    MidflightError,
    TransferError,
)
from orchestrator.types import (
    EngineInfo,
    FinishReason,
    KVPolicy,
    PauseMode,
    Prompt,
    TokenSpan,
    TransferBackend,
)
from tests.real_engine import HIDDEN_DEFAULTS, RealRig, engine_options, make_model, state
from tests.swaps import LocalSender, Rig, check_completion

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]
DEADLINE_S = 30.0


async def up(rig: RealRig) -> None:
    if not rig.opened:
        await rig.open()


# weights and what follows from them


async def test_the_outputs_are_those_of_the_weights_that_were_sent(real_rig: RealRig) -> None:
    rig = real_rig
    async with asyncio.timeout(DEADLINE_S):
        for which in ("b", "a", "b"):
            await rig.swap(which)
            request = rig.request(24, 5)
            completion = await rig.generate(request)
            expected = rig.greedy(which, request.prompt.token_ids, 24)
            assert completion.token_ids == expected
            scores = rig.logprobs(which, request.prompt.token_ids + expected)[-24:]
            assert completion.logprobs == pytest.approx(scores, abs=1e-4)


async def test_a_cut_request_continues_as_the_new_weights_would(real_rig: RealRig) -> None:
    rig = real_rig
    async with asyncio.timeout(DEADLINE_S):
        await rig.swap("a")
        requests = [rig.request(40, i) for i in range(8)]
        running = [asyncio.create_task(rig.generate(request)) for request in requests]
        await rig.engine.wait_for_tokens(10)
        await rig.swap("b")
        completions = await asyncio.gather(*running)
    for request, completion in zip(requests, completions, strict=True):
        check_completion(completion, request)
        old, new = completion.spans
        written = completion.token_ids[: old.end]
        assert written == rig.greedy("a", request.prompt.token_ids, old.end)
        cut = request.prompt.token_ids + written
        assert completion.token_ids[new.start :] == rig.greedy("b", cut, new.end - new.start)


async def test_logprobs_are_before_temperature(real_rig: RealRig) -> None:
    rig = real_rig
    async with asyncio.timeout(DEADLINE_S):
        await rig.swap("a")
        request = rig.request(20, 2, temperature=0.5)
        completion = await rig.generate(request)
    scores = rig.logprobs("a", request.prompt.token_ids + completion.token_ids)[-20:]
    assert completion.logprobs == pytest.approx(scores, abs=1e-4)


async def test_sampling_defaults_hidden_in_the_checkpoint_shape_nothing(
    real_rig: RealRig,
) -> None:
    rig = real_rig
    async with asyncio.timeout(DEADLINE_S):
        await rig.swap("a")
        request = rig.request(24, 11)
        completion = await rig.generate(request)
    assert completion.token_ids == rig.greedy("a", request.prompt.token_ids, 24)
    assert HIDDEN_DEFAULTS["repetition_penalty"] != 1
    (effective,) = [r["parameters"] for r in rig.records if r["event"] == "sampling parameters"]
    assert "repetition_penalty=1.0" in effective and "top_k=0" in effective


async def test_the_canary_agrees_with_transformers_under_load(real_rig: RealRig) -> None:
    rig = real_rig
    async with asyncio.timeout(DEADLINE_S):
        await rig.swap("b")
        busy = [asyncio.create_task(rig.generate(rig.request(60, i))) for i in range(4)]
        prompts = [rig.request(1, i, length=20 + i).prompt.token_ids for i in range(4)]
        scores = await rig.engine.prompt_logprobs(prompts)
        await asyncio.gather(*busy)
    for prompt, found in zip(prompts, scores, strict=True):
        assert found == pytest.approx(rig.logprobs("b", prompt), abs=1e-4)


async def test_strided_tensors_load_as_what_they_look_like(real_rig: RealRig) -> None:
    import torch

    rig = real_rig

    def strided(tensor: Any) -> Any:
        if tensor.dim() == 2:
            return tensor.t().contiguous().t()
        wide = torch.zeros(2 * tensor.numel())
        wide[::2] = tensor
        return wide[::2]

    weights = {name: strided(tensor) for name, tensor in state(rig.models["b"]).items()}
    assert not any(tensor.is_contiguous() for tensor in weights.values())
    sender = LocalSender({"b": weights})
    other = Rig(rig.engine, sender, sender.use)
    other.version = rig.version
    try:
        async with asyncio.timeout(DEADLINE_S):
            await rig.swap("a")
            other.version = rig.version
            swapped = await other.swap("b")
            assert await rig.engine.digests(swapped.update) == swapped.sent
            request = rig.request(16, 4)
            completion = await rig.generate(request)
            assert completion.token_ids == rig.greedy("b", request.prompt.token_ids, 16)
    finally:
        rig.version, rig.opened = other.version, False
        await sender.aclose()


# load and control


async def test_a_pause_gets_through_more_requests_than_the_engine_has_slots(
    real_rig: RealRig,
) -> None:
    rig = real_rig
    async with asyncio.timeout(DEADLINE_S):
        running = [asyncio.create_task(rig.generate(rig.request(200, i))) for i in range(200)]
        await rig.engine.wait_for_tokens(10)
        try:
            began = time.monotonic()
            ack = await rig.engine.pause(PauseMode.KEEP, KVPolicy.KEEP)
            assert time.monotonic() - began < 2
            assert ack.requests_in_flight > 64
        finally:
            await rig.engine.resume()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert (await rig.engine.status()).live_requests == 0


class Heart:
    """Beats every 20 ms in the running loop until told otherwise; a frozen loop skips beats."""

    def __init__(self, beats: int) -> None:
        self.gaps: list[float] = []
        self.enough = asyncio.Event()
        self._loop, self._beats = asyncio.get_running_loop(), beats
        self._last = time.monotonic()
        self._beat()

    def _beat(self) -> None:
        now = time.monotonic()
        self.gaps.append(now - self._last)
        self._last = now
        if len(self.gaps) > self._beats:
            self.enough.set()
        else:
            self._loop.call_later(0.02, self._beat)


def assert_never_frozen(gaps: list[float]) -> None:
    """No gap over 200 ms; a busy machine may make one now and then, far from the whole second."""
    assert len(gaps) > 20, gaps
    assert sorted(gaps)[int(0.95 * len(gaps))] < 0.2, gaps
    assert max(gaps) < 0.6, gaps


async def test_no_loop_freezes_while_a_slow_transfer_runs(real_rig: RealRig) -> None:
    rig = real_rig
    await up(rig)
    held: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda _, writer: held.set_result(writer), "127.0.0.1", 0)
    answers: list[float] = []

    async def ask(heart: Heart) -> None:
        while not heart.enough.is_set():
            began = time.monotonic()
            assert (await rig.engine.status()).paused
            answers.append(time.monotonic() - began)

    async with asyncio.timeout(DEADLINE_S), server:
        rig.fault("HOLD", str(server.sockets[0].getsockname()[1]))
        update = rig.next_update()
        rig.use("b")
        await rig.sender.stage(update.version)
        await rig.engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
        applying = asyncio.create_task(rig.apply(update))
        writer = await held
        heart = Heart(50)
        await ask(heart)
        assert not applying.done()
        rig.fault()
        writer.close()
        stats = await applying
        await rig.engine.resume()
    assert stats.seconds > 0.9
    assert_never_frozen(heart.gaps)
    assert_never_frozen(answers)


async def test_a_cache_that_cannot_be_reset_fails_the_pause(real_rig: RealRig) -> None:
    rig = real_rig
    async with asyncio.timeout(DEADLINE_S):
        await rig.swap("a")
        request = rig.request(200, 7)
        running = asyncio.create_task(rig.generate(request))
        await rig.engine.wait_for_tokens(5)
        rig.fault("STUCK_CACHE")
        with pytest.raises(EngineError, match="Failed to reset"):
            await rig.engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
        rig.fault()
        await rig.engine.resume()
        completion = await running
    assert completion.token_ids == rig.greedy("a", request.prompt.token_ids, 200)


async def test_a_prompt_that_does_not_fit_is_an_error_of_ours(real_rig: RealRig) -> None:
    rig = real_rig
    request = replace(rig.request(4), prompt=Prompt(tuple(range(1, 250)) * 4))
    with pytest.raises(EngineError) as caught:
        await rig.generate(request)
    assert type(caught.value) is EngineError
    assert "512" in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


# faults on the wire


async def test_one_flipped_bit_is_found_in_its_tensor(real_rig: RealRig) -> None:
    rig = real_rig
    name = "model.layers.1.mlp.down_proj.weight"
    async with asyncio.timeout(DEADLINE_S):
        rig.fault("FLIP_BIT", name)
        swapped = await rig.swap("a")
        received = await rig.engine.digests(swapped.update)
    assert {n for n in swapped.sent if received[n] != swapped.sent[n]} == {name}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("FAIL_TENSOR", "injected fault at model.norm.weight"),
        ("DROP_TENSOR", "model.norm.weight"),
    ],
)
async def test_half_an_update_is_never_served_and_a_whole_one_heals(
    real_rig: RealRig, fault: str, words: str
) -> None:
    rig = real_rig
    await up(rig)
    async with asyncio.timeout(DEADLINE_S):
        running = asyncio.create_task(rig.generate(rig.request(60)))
        await rig.engine.wait_for_tokens(5)
        rig.fault(fault, "model.norm.weight")
        update = rig.next_update()
        rig.use("b")
        await rig.sender.stage(update.version)
        await rig.engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
        await rig.engine.start_update(update)
        sending = asyncio.ensure_future(rig.sender.send(update))
        with pytest.raises(TransferError, match=words):
            await rig.engine.receive_update(update)
        await asyncio.gather(sending, return_exceptions=True)
        with pytest.raises(TransferError):
            await rig.engine.finish_update(update)
        with pytest.raises(EngineError, match="half applied"):
            await rig.engine.resume()
        assert (await rig.engine.status()).version == rig.version
        rig.fault()
        await rig.open()
        whole = rig.next_update()
        await rig.sender.stage(whole.version)
        await rig.apply(whole)
        await rig.engine.resume()
        completion = await running
        assert [span.version for span in completion.spans][-1] == whole.version
        request = rig.request(16, 8)
        tokens = (await rig.generate(request)).token_ids
        assert tokens == rig.greedy("b", request.prompt.token_ids, 16)


async def test_a_channel_that_does_not_carry_the_pattern_is_refused(real_rig: RealRig) -> None:
    rig = real_rig
    async with asyncio.timeout(DEADLINE_S):
        rig.fault("BAD_PATTERN")
        rig.opened = False
        with pytest.raises(ChannelError, match="known pattern"):
            await rig.open()
        rig.fault()
        assert len((await rig.generate(rig.request(4))).token_ids) == 4


async def test_an_engine_that_sleeps_is_refused_before_any_pause(real_rig: RealRig) -> None:
    rig = real_rig
    async with asyncio.timeout(DEADLINE_S):
        rig.fault("ASLEEP")
        rig.opened = False
        with pytest.raises(ChannelError, match="sleeps: wake it up"):
            await rig.open()
        rig.fault()
        assert not (await rig.engine.status()).paused


async def test_loopback_advertised_by_another_machine_is_refused(real_rig: RealRig) -> None:
    rig = real_rig
    async with asyncio.timeout(DEADLINE_S):
        rig.opened = False
        spec = await rig.sender.listen(TransferBackend.GLOO, 2, DEADLINE_S)
        assert spec.host == "127.0.0.1"
        elsewhere = replace(spec, extra={**spec.extra, "node": "another"})
        with pytest.raises(ChannelError, match=r"127\.0\.0\.1, but it runs on another machine"):
            await rig.engine.open_channel(elsewhere, 1)
        await rig.sender.close_channel()


async def test_the_only_worker_lives_in_the_engine_core(real_rig: RealRig) -> None:
    below = [psutil.Process(pid) for pid in real_rig.info.pids if psutil.pid_exists(pid)]
    titles = [" ".join(process.cmdline()).strip() for process in below]
    assert [title for title in titles if title.startswith("VLLM::")] == ["VLLM::EngineCore"]


async def test_a_warm_up_is_of_requests_that_vllm_serves(real_rig: RealRig) -> None:
    rig = real_rig
    async with asyncio.timeout(DEADLINE_S):
        await rig.engine.warm_up()
        status = await rig.engine.status()
        completion = await rig.generate(rig.request(8))
    (record,) = [r for r in rig.records if r["event"] == "engine warmed up"]
    prompts = [-(-size // 511) for size in step_sizes(LARGEST)]
    assert record["requests"] == sum(prompts) + 64
    assert status.live_requests == status.held_requests == 0 and len(completion.token_ids) == 8


async def test_twenty_channels_leave_the_sockets_of_the_engine_as_they_were(
    real_rig: RealRig,
) -> None:
    rig = real_rig
    processes = [psutil.Process(pid) for pid in rig.info.pids if psutil.pid_exists(pid)]
    counts = []
    async with asyncio.timeout(2 * DEADLINE_S):
        for _ in range(20):
            await rig.open()
            counts.append(sum(len(p.net_connections(kind="inet")) for p in processes))
    # One that stays behind each time would make 19 more.
    assert counts[0] > 0 and counts[-1] < counts[0] + 10, counts


async def test_batches_of_ever_new_sizes_leave_the_engine_no_bigger(real_rig: RealRig) -> None:
    """What a swap does to a CPU engine that decodes: a prefill of a size never seen before."""
    rig = real_rig
    processes = [psutil.Process(pid) for pid in rig.info.pids if psutil.pid_exists(pid)]
    held = []
    async with asyncio.timeout(2 * DEADLINE_S):
        for first in (40, 104):
            for length in range(first, first + 64):
                await rig.generate(rig.request(1, length, length=length))
            held.append(sum(p.memory_info().rss for p in processes))
    # Kernels for each size, were they kept: 64 sizes, 4 shapes of weights, 0.28 MiB.
    assert (held[1] - held[0]) >> 20 < 32, held


async def test_other_dtypes_are_refused_before_any_pause(real_rig: RealRig) -> None:
    rig = real_rig
    rig.opened = False
    sender = LocalSender({"a": state(rig.models["a"])}, wire_dtype="bfloat16")
    other = Rig(rig.engine, sender, sender.use)
    try:
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ChannelError, match=r"bfloat16.*float32"):
                await other.open()
            assert not (await rig.engine.status()).paused
    finally:
        await sender.aclose()


# death: engines of their own


class Doomed:
    """Engines that are killed: one alone, one of two workers with tied weights."""

    def __init__(self, engine: RayEngine, info: EngineInfo, rig: Rig, model: Any) -> None:
        self.engine, self.info, self.rig, self.model = engine, info, rig, model
        self.shared_memory = shared_memory(
            known for pid in info.pids if (known := ProcessId.of(pid)) is not None
        )
        self.scratch = Path(self.core().environ()[SCRATCH_ENV])
        assert any(path.is_socket() for path in self.scratch.iterdir())

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(pid) for pid in self.info.pids if psutil.pid_exists(pid)]

    def core(self) -> psutil.Process:
        return next(p for p in self.processes() if "EngineCore" in " ".join(p.cmdline()))

    def left(self) -> list[str]:
        """Its files that are still there."""
        return [path for path in (*self.shared_memory, self.scratch) if Path(path).exists()]

    async def all_gone(self) -> bool:
        """Whether every process ends, within seconds."""
        _, alive = await asyncio.to_thread(psutil.wait_procs, self.processes(), timeout=5)
        return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


async def doomed(name: str, folder: Path, *, workers: int, tied: bool) -> Doomed:
    model = make_model(folder / name, 3, tied=tied)
    other = make_model(folder / f"{name}-b", 4, tied=tied)
    settings = EngineSettings(
        model=str(folder / name),
        dtype="float32",
        max_model_len=512,
        tensor_parallel_size=workers,
        executor="mp",
        log_path=str(folder / f"{name}.log"),
    )
    engine = RayEngine(name, settings, options=engine_options(folder / f"{name}.faults"))
    try:
        info = await engine.start()
    except BaseException:
        await engine.aclose()
        raise
    sender = LocalSender({"a": state(model), "b": state(other)})
    rig = Rig(engine, sender, sender.use)
    rig.workers = info.workers
    return Doomed(engine, info, rig, other)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(
    ray_session: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Doomed, Doomed]]:
    folder = tmp_path_factory.mktemp("doomed")
    both = await asyncio.gather(
        doomed("alone", folder, workers=1, tied=False),
        doomed("tied", folder, workers=2, tied=True),
    )
    yield both
    for one in both:
        await one.rig.sender.aclose()  # type: ignore[attr-defined]
        await one.engine.aclose()


async def test_two_workers_with_a_tied_head_get_the_same_bytes(
    pair: tuple[Doomed, Doomed],
) -> None:
    import torch

    tied = pair[1]
    assert tied.info.workers == 2
    assert "lm_head.weight" not in state(tied.model)
    async with asyncio.timeout(DEADLINE_S):
        swapped = await tied.rig.swap("b")
        assert await tied.engine.digests(swapped.update) == swapped.sent
        request = tied.rig.request(16, 1)
        completion = await tied.rig.generate(request)
    with torch.no_grad():
        out = tied.model.generate(
            torch.tensor([request.prompt.token_ids]),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
    assert completion.token_ids == tuple(out[0, len(request.prompt.token_ids) :].tolist())


async def test_a_head_that_the_engine_ties_must_be_its_embedding(
    pair: tuple[Doomed, Doomed],
) -> None:
    rig = pair[1].rig
    honest = rig.sender, rig.use
    embedding = state(pair[1].model)["model.embed_tokens.weight"]
    tensors = {
        "tied": state(pair[1].model) | {"lm_head.weight": embedding},
        "untied": state(pair[1].model) | {"lm_head.weight": embedding.flip(0)},
    }
    rig.sender = LocalSender(tensors)
    rig.use = rig.sender.use
    try:
        async with asyncio.timeout(DEADLINE_S):
            await rig.open()
            with pytest.raises(TransferError, match="came with different values") as caught:
                await rig.swap("untied")
            assert "lm_head.weight and model.embed_tokens.weight" in str(caught.value)
            await rig.open()
            swapped = await rig.swap("tied")
            assert await rig.engine.digests(swapped.update) == swapped.sent
    finally:
        await rig.sender.aclose()
        rig.sender, rig.use = honest
        await rig.open()


async def test_kill_of_the_engine_core_fails_everything_at_once(
    pair: tuple[Doomed, Doomed],
) -> None:
    victim = pair[1]
    async with asyncio.timeout(DEADLINE_S):
        if not victim.rig.opened:
            await victim.rig.open()
        request = victim.rig.request(400)
        whole = await victim.rig.generate(replace(request, request_id="whole", max_tokens=200))
        running = [asyncio.create_task(victim.rig.generate(request))]
        await victim.engine.wait_for_tokens(3)
        await victim.engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
        update = victim.rig.next_update()
        await victim.rig.sender.stage(update.version)
        await victim.engine.start_update(update)
        receiving = asyncio.ensure_future(victim.engine.receive_update(update))
        os.kill(victim.core().pid, signal.SIGKILL)
        began = time.monotonic()
        assert "engine core" in await victim.engine.wait_dead()
        results = await asyncio.gather(*running, receiving, return_exceptions=True)
        assert time.monotonic() - began < 2
        assert {type(result) for result in results} == {EngineDied}
        # The actor lives: what the request had is not lost, and each token has its version.
        cut = cast(EngineDied, results[0]).partial
        assert cut is not None and cast(EngineDied, results[1]).partial is None
        tokens = len(cut.token_ids)
        assert 3 <= tokens == len(cut.logprobs) < 200
        assert cut.token_ids == whole.token_ids[:tokens]
        assert cut.logprobs == pytest.approx(whole.logprobs[:tokens], abs=1e-4)
        assert cut.spans == (TokenSpan(victim.rig.version, 0, tokens),)
        assert (cut.request_id, cut.finish_reason) == (request.request_id, FinishReason.ABORT)
        assert cut.text and whole.text.startswith(cut.text)
        with pytest.raises(EngineDied):
            await victim.engine.pause(PauseMode.KEEP, KVPolicy.KEEP)
        await victim.engine.aclose()
        await victim.engine.aclose()
    assert await victim.all_gone()
    assert victim.shared_memory
    assert not victim.left()


async def test_kill_of_the_actor_leaves_no_process(pair: tuple[Doomed, Doomed]) -> None:
    victim = pair[0]
    async with asyncio.timeout(DEADLINE_S):
        running = asyncio.create_task(victim.rig.generate(victim.rig.request(400)))
        await victim.engine.wait_for_tokens(3)
        os.kill(victim.info.pids[0], signal.SIGKILL)
        began = time.monotonic()
        assert "gone" in await victim.engine.wait_dead()
        with pytest.raises(EngineDied) as caught:
            await running
        assert type(caught.value) is EngineDied and caught.value.partial is None
        assert time.monotonic() - began < 2
        # Nobody closed it yet: what the actor had started ends with it.
        assert await victim.all_gone()
        with pytest.raises(MidflightError):
            await victim.engine.status()
        await victim.engine.aclose()
        await victim.engine.aclose()
    assert victim.shared_memory
    assert not victim.left()
