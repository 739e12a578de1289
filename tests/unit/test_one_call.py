"""The actor's side of a swap in one call: what each failure and a cancel leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest

from actors.core import Core
from actors.engine import EngineActor
from actors.engine_settings import EngineSettings
from actors.in_flight import Requests
from actors.reporting import ActorReporter
from actors.transfer.channel import Channel
from actors.weights import Weights
from orchestrator.errors import EngineError, SyncError
from orchestrator.types import (
    ChannelSpec,
    KVPolicy,
    OpContext,
    PauseMode,
    PhaseTimeouts,
    PolicyVersion,
    Swapped,
    TensorSpec,
    TransferBackend,
    WeightUpdate,
)
from tests.harness import at_suspension, now

TIMEOUTS = PhaseTimeouts(pausing=3, syncing=12, resuming=6)
UPDATE = WeightUpdate(
    "s1",
    PolicyVersion(0),
    PolicyVersion(1),
    1,
    TransferBackend.GLOO,
    PauseMode.KEEP,
    KVPolicy.KEEP,
    staged=True,
)
SPEC = ChannelSpec(
    TransferBackend.GLOO, "h", 1, 2, "n", (TensorSpec("w", "float32", (2,), 8),), staged=True
)


class FakeLLM:
    """The few calls of vLLM that a swap makes, in the order they came."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.engine_core = self
        self.outputs_queue: asyncio.Queue[object] = asyncio.Queue()
        self.paused = False
        self.mixed = False
        """Some of the new weights are there, or nobody knows."""
        self.broken: dict[str, BaseException | None] = {}
        """What a call raises after its first half; None: it hangs there."""

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0.001)
        if name in self.broken:
            error = self.broken.pop(name)
            if error is None:
                await asyncio.Event().wait()
            else:
                raise error
        await asyncio.sleep(0.001)

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.paused = True
        await self._call("pause")

    async def resume_scheduler_async(self) -> None:
        await self._call("resume")
        assert not self.mixed, "mixed weights serve"
        self.paused = False

    async def set_weight_version_async(self, version: str) -> None:
        await self._call("version")
        self.mixed = False

    async def collective_rpc(self, method: str, args: tuple[object, ...] = ()) -> list[None]:
        self.mixed = True
        await self._call("apply")
        return [None]


class Actor:
    """An engine actor whose vLLM is a fake, in the loop of the test."""

    def __init__(self) -> None:
        settings = EngineSettings(model="none")
        self.actor = EngineActor("e", settings)
        self.actor.home.stop()
        reporter = ActorReporter("e")
        core = Core("e", settings, reporter, asyncio.get_running_loop())
        self.llm = core._llm = FakeLLM()
        self.weights = Weights(core, settings.swaps, reporter)
        self.weights._channel, self.weights._spec = cast(Channel, object()), SPEC
        self.weights._fetched = UPDATE.sync_id
        self.requests = Requests(core, self.weights, reporter)
        self.actor._weights, self.actor._requests = self.weights, self.requests

    async def swap(self, update: WeightUpdate = UPDATE) -> Swapped:
        swap = cast(Any, EngineActor.swap).__wrapped__
        return cast(Swapped, await swap(self.actor, OpContext(), update, TIMEOUTS))

    def must_be_whole(self) -> bool:
        try:
            self.weights.must_be_whole()
        except EngineError:
            return False
        return True


@pytest.fixture
async def actor() -> AsyncIterator[Actor]:
    yield Actor()


async def test_it_is_four_calls_of_vllm_and_each_phase_is_timed(actor: Actor) -> None:
    done = await actor.swap()
    assert actor.llm.calls == ["pause", "apply", "version", "resume"]
    assert (actor.weights.version, actor.requests.paused, actor.llm.paused) == (1, False, False)
    assert done.ack.engine == "e"
    assert done.stats.nbytes == SPEC.nbytes
    assert min(done.quiesce, done.transfer, done.finalize, done.resume) > 0


async def test_an_update_that_is_not_at_hand_costs_no_pause(actor: Actor) -> None:
    with pytest.raises(SyncError, match="s2 is not at hand") as caught:
        await actor.swap(replace(UPDATE, sync_id="s2"))
    assert caught.value.phase == "PAUSING"
    assert "pause" not in actor.llm.calls and "apply" not in actor.llm.calls
    assert (actor.requests.paused, actor.must_be_whole()) == (False, True)


FAILURES = (
    # call, phase, version after, paused after, whole after, what came after the failure
    ("pause", "PAUSING", 0, False, True, ["resume"]),
    ("apply", "SYNCING", 0, True, False, []),
    ("version", "SYNCING", 0, True, False, []),
    ("resume", "RESUMING", 1, True, True, []),
)


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize(("call", "phase", "version", "paused", "whole", "after"), FAILURES)
async def test_a_failure_says_its_phase_and_leaves_what_is_promised(
    actor: Actor,
    call: str,
    phase: str,
    version: int,
    paused: bool,
    whole: bool,
    after: list[str],
    hangs: bool,
) -> None:
    actor.llm.broken[call] = None if hangs else RuntimeError("no memory")
    began = now()
    words = f"{phase} took longer than .*engine e" if hangs else "engine e: RuntimeError: no mem"
    with pytest.raises(SyncError, match=words) as caught:
        await actor.swap()
    assert caught.value.phase == phase
    assert now() - began <= getattr(TIMEOUTS, phase.lower()) + 0.1
    assert (actor.weights.version, actor.requests.paused) == (version, paused)
    assert actor.must_be_whole() is whole
    assert actor.llm.calls[actor.llm.calls.index(call) + 1 :] == after
    if whole:
        await actor.requests.resume()
        assert not actor.llm.paused
    else:
        with pytest.raises(EngineError, match="half applied"):
            await actor.requests.resume()
        assert actor.llm.paused


async def test_a_pause_that_fails_and_cannot_be_taken_back_says_why_it_failed(
    actor: Actor,
) -> None:
    actor.llm.broken |= {"pause": RuntimeError("no memory"), "resume": RuntimeError("gone")}
    with pytest.raises(SyncError, match="no memory") as caught:
        await actor.swap()
    assert caught.value.phase == "PAUSING"
    assert actor.requests.paused
    await actor.requests.resume()  # by its caller
    assert not actor.llm.paused


async def test_a_whole_swap_heals_a_failed_one(actor: Actor) -> None:
    actor.llm.broken["apply"] = RuntimeError("no memory")
    with pytest.raises(SyncError):
        await actor.swap()
    actor.weights._fetched = "s2"
    await actor.swap(replace(UPDATE, sync_id="s2", version=PolicyVersion(2)))
    assert (actor.weights.version, actor.llm.paused) == (2, False)


async def test_a_cancel_at_any_await_never_resumes_mixed_weights() -> None:
    cancelled = 0
    for at in range(1, 100):
        actor = Actor()
        struck: list[int] = []

        def cancel(struck: list[int] = struck) -> None:
            struck.append(1)
            (task,) = [t for t in asyncio.all_tasks() if t.get_name() == "swap"]
            task.cancel()

        task = asyncio.create_task(at_suspension(actor.swap(), at, cancel), name="swap")
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if not struck:
            assert isinstance(result, Swapped)
            break
        cancelled += 1
        assert isinstance(result, asyncio.CancelledError), f"suspension {at}: {result!r}"
        await asyncio.sleep(1)  # what the call left running ends
        if actor.llm.mixed:
            assert not actor.must_be_whole(), f"suspension {at}: mixed weights pass for whole"
        if actor.must_be_whole():
            await actor.requests.resume()
            assert not actor.llm.paused
        else:
            with pytest.raises(EngineError, match="half applied"):
                await actor.requests.resume()
    else:
        pytest.fail("the swap never got through")
    assert cancelled >= 4
