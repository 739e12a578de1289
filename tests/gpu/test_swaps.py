"""One real engine on a GPU, swapped over each backend that needs only one; A-B-A every time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from actors import hardware
from actors.adapters import RayEngine
from actors.engine_settings import EngineSettings
from orchestrator.context import operation
from orchestrator.types import KVPolicy, PhaseTimeouts, TransferBackend
from tests.real_engine import RealRig, make_model, ray_session, state
from tests.swaps import LocalSender

GPUS = len(hardware.detect().gpus)
DEADLINE_S = 120.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(GPUS < 1, reason="needs an NVIDIA GPU of compute capability 9.0 or later"),
]
ROUTES = [
    (TransferBackend.IPC, False),
    (TransferBackend.IPC, True),
    (TransferBackend.GLOO, True),
    (TransferBackend.NATIVE_IPC, False),
]

__all__ = ["ray_session"]


class GpuRig(RealRig):
    """Knows how the engine says that it applies updates."""

    how = ""

    def heard(self, name: str, record: dict[str, Any]) -> None:
        self.how = "; ".join(record.get("workers", [self.how]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GpuRig]:
    folder = tmp_path_factory.mktemp("gpu")
    models = {"a": make_model(folder / "a", 1), "b": make_model(folder / "b", 2)}
    heard: list[GpuRig] = []
    settings = EngineSettings(
        model=str(folder / "a"),
        dtype="bfloat16",
        max_model_len=512,
        cpu=False,
        gpu_memory_utilization=0.2,
        batch_invariant=True,
        extra={"attention_backend": "FLASH_ATTN"},
        log_path=str(folder / "engine.log"),
    )
    engine = RayEngine(
        "gpu",
        settings,
        on_event=lambda name, record: [rig.heard(name, record) for rig in heard] and None,
        options={"num_gpus": 0.5},
    )
    for model in models.values():
        model.to("cuda", torch.bfloat16)
    sender = LocalSender({which: state(model) for which, model in models.items()})
    try:
        await engine.start()
        rig = GpuRig(engine, sender, models, folder / "faults")
        heard.append(rig)
        yield rig
    finally:
        await sender.aclose()
        await engine.aclose()


@pytest.mark.parametrize(("backend", "staged"), ROUTES)
async def test_a_b_a_holds_and_writes_the_same_again(
    rig: GpuRig, backend: TransferBackend, staged: bool, tmp_path: Path
) -> None:
    await rig.sender.aclose()
    rig.sender = LocalSender({w: state(m) for w, m in rig.models.items()}, backend=backend)
    rig.use, rig.backend, rig.staged = rig.sender.use, backend, staged
    seen = []
    async with asyncio.timeout(DEADLINE_S):
        await rig.open()
        for which in ("b", "a", "b", "a", "b"):
            swapped = await rig.swap(which)
            assert await rig.engine.digests(swapped.update) == swapped.sent
            tokens = (await rig.generate(rig.request(24, 5))).token_ids
            seen.append((dict(swapped.sent), tokens))
    assert seen[0] == seen[2] == seen[4] and seen[1] == seen[3]
    assert seen[0][0] != seen[1][0] and seen[0][1] != seen[1][1]
    if not backend.native:
        assert "proven" in rig.how and "to be" not in rig.how


@pytest.mark.parametrize("kv", KVPolicy)
async def test_one_call_swaps_what_is_at_hand_under_load(rig: GpuRig, kv: KVPolicy) -> None:
    """Batch-invariant: what a request writes under the old label, it writes without a swap too."""
    await rig.sender.aclose()
    rig.sender = LocalSender(
        {w: state(m) for w, m in rig.models.items()}, backend=TransferBackend.IPC
    )
    rig.use, rig.backend, rig.staged = rig.sender.use, TransferBackend.IPC, False
    async with asyncio.timeout(DEADLINE_S):
        await rig.open()
        for which in ("b", "a"):  # the first update only proves the plan
            await rig.swap(which)
        alone = await asyncio.gather(*(rig.generate(rig.request(300, i)) for i in range(4)))
        running = [asyncio.create_task(rig.generate(rig.request(300, i))) for i in range(4)]
        await rig.engine.wait_for_tokens(10)
        update = rig.next_update(kv=kv)
        rig.use("b")
        sent = await rig.sender.stage(update.version)
        with operation(sync_id=update.sync_id, version=update.version):
            await rig.prefetch(update)
            swapped = await rig.engine.swap(update, PhaseTimeouts())
        rig.version = update.version
        assert await rig.engine.digests(update) == sent
        completions = await asyncio.gather(*running)
    assert swapped.ack.requests_in_flight == 4
    for completion, uncut in zip(completions, alone, strict=True):
        assert [span.version for span in completion.spans] == [rig.version - 1, rig.version]
        cut = completion.spans[0].end
        assert completion.token_ids[:cut] == uncut.token_ids[:cut]
        differs = [a != b for a, b in zip(completion.token_ids, uncut.token_ids, strict=True)]
        first = differs.index(True)
        assert cut <= first <= cut + 2, "the new label came too early, or the new weights too late"
