"""What an engine's actor makes of its workers' answers; no vLLM."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from actors import vllm_compat
from actors.core import Core
from actors.reporting import ActorReporter
from actors.transfer.channel import Channel
from actors.transfer.digest import digest, parts_of
from actors.transfer.region import Region
from actors.weights import Weights
from orchestrator.types import ChannelSpec, TensorSpec, TransferBackend

WHOLE = torch.arange(12, dtype=torch.float32).view(4, 3)
SPEC = ChannelSpec(
    TransferBackend.GLOO, "h", 1, 3, "n", (TensorSpec("w", "float32", (4, 3), 48),), staged=True
)


class Workers:
    """Two, each with half of the tensor; they say how they apply updates in every answer."""

    def __init__(self) -> None:
        self.how = "layerwise reload"
        self.asked: list[str] = []

    async def collective_rpc(self, method: str, args: tuple[str, ...] = ()) -> list[None]:
        self.asked.append(method)
        return [None, None]

    def take(self, key: str) -> str:
        rank = int(key.rpartition("/")[2])
        first = 2 * (rank - 1)
        region = Region(first * 3, (2, 3), (3, 1))
        parts = parts_of([("w", region, WHOLE[first : first + 2])], {"w": (4, 3)})
        return json.dumps({"parts": parts, "unused": [], "how": self.how})


async def test_a_digest_also_says_how_updates_are_applied_when_that_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def same(work: Awaitable[Any]) -> Any:
        return await work

    workers, reporter = Workers(), ActorReporter("e")
    monkeypatch.setattr(vllm_compat, "model_facts", lambda llm: {"workers": 2})
    core = SimpleNamespace(name="e", running=lambda: workers, or_death=same)
    weights = Weights(cast(Core, core), True, reporter)
    weights._channel = cast(Channel, SimpleNamespace(meeting=workers))
    weights._spec, weights._first_rank = SPEC, 1
    told = []
    for workers.how in ("layerwise reload", "layerwise reload", "load plan, proven"):
        assert await weights.digests() == {"w": digest("w", WHOLE)}
        reporter.info("end")
        events = await reporter.next_events()
        told.append([e["workers"] for e in events if e["event"] == "updates are applied by"])
    assert told == [[["layerwise reload"]], [], [["load plan, proven"]]]
    assert set(workers.asked) == {"midflight_digest"}, "no call for the words alone"
