"""Requests of a replica whose engine core dies: what they had is not lost with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from actors import vllm_compat
from actors.core import Core
from actors.in_flight import Requests
from actors.reporting import ActorReporter
from actors.weights import Weights
from orchestrator.continuation import published
from orchestrator.errors import EngineDied, EngineError, MidflightError
from orchestrator.testing import all_blocked
from orchestrator.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    PolicyVersion,
    Prompt,
    TokenSpan,
)

T = TypeVar("T")


class FakeCore:
    """What Requests knows of a Core; ``llm`` hands tokens out as vLLM's output processor does."""

    name, tokenizer, dead = "engine-0", None, False

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}
        self.collectors: dict[str, Any] = {}
        self.output_processor = SimpleNamespace(request_states=self.states)

    def running(self) -> FakeCore:
        return self

    async def or_death(self, work: Awaitable[T]) -> T:
        return await work

    def translate(self, error: Exception) -> MidflightError:
        if type(error).__name__ == "EngineDeadError":
            return EngineDied(self.name, "its engine core failed")
        return EngineError(self.name, str(error))

    async def abort(self, request_id: str, internal: bool) -> None:
        pass

    def submit(self, request_id: str) -> vllm_compat.Stream:
        self.states[request_id] = SimpleNamespace(weight_version_starts=[])
        collector = SimpleNamespace(request_id=request_id, output=None, close=lambda: None)
        self.collectors[request_id] = collector
        return vllm_compat.Stream(self, collector)

    def write(self, request_id: str, label: str, first: int, *tokens: int) -> None:
        """``tokens``, the first of which is the request's ``first``-th, under ``label``."""
        starts = self.states[request_id].weight_version_starts
        if not starts or starts[-1][0] != label:
            starts.append((label, first))
        logprobs = SimpleNamespace(
            start_indices=range(len(tokens)),
            end_indices=range(1, len(tokens) + 1),
            token_ids=list(tokens),
            logprobs=[-t / 8 for t in tokens],
        )
        part = SimpleNamespace(token_ids=list(tokens), logprobs=logprobs)
        self.collectors[request_id].put(SimpleNamespace(outputs=[part], finished=False))

    def fail(self, error: Exception) -> None:
        """The same error to all, as vLLM does it."""
        for collector in self.collectors.values():
            collector.put(error)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> FakeCore:
    core = FakeCore()

    async def submit(llm: Any, request_id: str, *rest: object) -> vllm_compat.Stream:
        return core.submit(request_id)

    monkeypatch.setattr(vllm_compat, "submit", submit)
    monkeypatch.setattr(vllm_compat, "sampling", lambda *options: "greedy")
    return core


def requests_of(core: FakeCore) -> Requests:
    weights = cast(Weights, SimpleNamespace(cache_salt="0"))
    return Requests(cast(Core, core), weights, ActorReporter("engine-0"))


def generate(requests: Requests, name: str) -> asyncio.Task[Completion]:
    return asyncio.create_task(requests.generate(GenerationRequest(name, Prompt((1, 2)), 40)))


class EngineDeadError(Exception):
    """Named as vLLM's own."""


@pytest.mark.parametrize("error", [EngineDied("engine-0", "SIGKILL"), EngineDeadError()])
async def test_a_request_cut_by_the_death_of_the_core_keeps_its_tokens(
    core: FakeCore, error: Exception
) -> None:
    requests = requests_of(core)
    tasks = [generate(requests, name) for name in ("a", "b", "c")]
    await all_blocked()
    core.write("a", "default", 0, 7)
    core.write("a", "default", 1, 8, 9)
    core.write("a", "3", 3, 10)
    core.write("b", "3", 0, 5)
    core.fail(error)
    a, b, c = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(a, EngineDied) and isinstance(b, EngineDied) and isinstance(c, EngineDied)
    assert len({str(a), str(b), str(c)}) == 1
    old, new = PolicyVersion(0), PolicyVersion(3)
    assert a.partial == Completion(
        "a",
        "engine-0",
        (7, 8, 9, 10),
        (-7 / 8, -1.0, -9 / 8, -10 / 8),
        (TokenSpan(old, 0, 3), TokenSpan(new, 3, 4)),
        FinishReason.ABORT,
    )
    assert b.partial is not None and b.partial.token_ids == (5,)
    assert c.partial is None, "it had nothing"
    # A version that was never published is cut off by the controller.
    assert published(a.partial, old).token_ids == (7, 8, 9)
    assert requests.running == 0


async def test_tokens_of_an_unknown_version_are_not_handed_over(core: FakeCore) -> None:
    requests = requests_of(core)
    task = generate(requests, "a")
    await all_blocked()
    core.write("a", "default", 0, 7)
    core.states["a"].weight_version_starts.clear()
    core.fail(EngineDied("engine-0", "SIGKILL"))
    with pytest.raises(EngineDied) as caught:
        await task
    assert caught.value.partial is None


async def test_an_engine_that_lives_gives_its_own_error(core: FakeCore) -> None:
    requests = requests_of(core)
    task = generate(requests, "a")
    await all_blocked()
    core.write("a", "default", 0, 7)
    core.fail(ValueError("no such token"))
    with pytest.raises(EngineError, match="no such token") as caught:
        await task
    assert not isinstance(caught.value, EngineDied)
