"""The actor's side of a swap in one call: what each failure and a cancel leave behind."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors import core_swap
from actors.core import Core
from actors.engine import EngineActor
from actors.engine_settings import EngineSettings
from actors.in_flight import Requests
from actors.reporting import ActorReporter
from actors.transfer.channel import Channel
from actors.transfer.wire_errors import wire_errors
from actors.weights import Weights
from orchestrator.errors import ChannelError, EngineError, SyncError, TransferError
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
from tests.harness import now

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


WAKEUP = ("wakeup", None)


class FakeCore:
    """vLLM's engine core as far as ``core_swap`` knows it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.paused = False
        self.mixed = False
        """Some of the new weights are there, or nobody knows."""
        self.broken: dict[str, Exception] = {}
        """What a call raises."""
        self.scheduler = self.model_executor = self
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
        self.batch_queue: deque[str] = deque()
        self.version, self.labels = "0", cast(list[tuple[str, str]], [])
        self.at_hand = False
        """The copies of an update are all there is to do."""
        self.input_queue: queue.Queue[object] = queue.Queue()
        self.idle: Future[None] = Future()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise self.broken.pop(name)

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Future[None]:
        self.paused = True
        self._call("pause")
        self.idle = Future()
        return self.idle

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def resume_scheduler(self) -> None:
        self._call("resume")
        assert not self.mixed, "mixed weights serve"
        self.paused = False

    def get_request_counts(self) -> tuple[int, int]:
        return 3, 1

    def set_weight_version(self, version: str) -> None:
        self._call("version")
        self.mixed = False
        self.version = version

    def _attach_weight_version(self, outputs: str) -> None:
        self.labels.append((outputs, self.version))

    def step(self, name: str) -> None:
        """One that was given to the device comes out, as in vLLM's loop."""
        self.batch_queue.appendleft(name)
        self.out()

    def out(self) -> None:
        self._attach_weight_version(self.batch_queue.pop())

    def collective_rpc(self, method: str, args: tuple[object, ...] = ()) -> list[object]:
        if method == "midflight_replay" and not self.at_hand:
            return [False]
        self.mixed = True
        self._call("apply")
        return [True if method == "midflight_replay" else None]


core_swap.install(FakeCore, WAKEUP)


class FakeLLM:
    """The calls that an actor makes, answered by the one loop of a fake engine core."""

    def __init__(self) -> None:
        self.core = FakeCore()
        self.engine_core = self
        self.step_s = 0.001
        """What the step takes that is under way at the pause."""
        self.hangs = ""
        """The loop hangs in this: ``step`` answers others, ``apply`` nobody."""
        self._turn = asyncio.Lock()
        self.outputs_queue: asyncio.Queue[object] = asyncio.Queue()

    async def call_utility_async(self, method: str, *args: object) -> object:
        async with self._turn:
            await asyncio.sleep(0.001)
            answer = getattr(self.core, method)(*args)
        if isinstance(answer, Future):
            if not answer.done():
                await self._step()
            answer = await asyncio.wrap_future(answer)
        await asyncio.sleep(0.001)
        return answer

    async def _step(self) -> None:
        if self.hangs == "step":
            return
        async with self._turn:
            await asyncio.sleep(self.step_s)
            if self.hangs == "apply":
                self.core.calls.append("apply")
                self.core.mixed = True
                await asyncio.Event().wait()
            while self.core.batch_queue:
                self.core.out()
            self.core.idle.set_result(None)
            assert self.core.input_queue.get_nowait() == WAKEUP, "the loop waits for input"

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.core.paused = True

    async def resume_scheduler_async(self) -> None:
        await asyncio.sleep(0.001)
        self.core.resume_scheduler()
        await asyncio.sleep(0.001)


class Actor:
    """An engine actor whose vLLM is a fake, in the loop of the test."""

    def __init__(self) -> None:
        settings = EngineSettings(model="none")
        self.actor = EngineActor("e", settings)
        self.actor.home.stop()
        reporter = ActorReporter("e")
        core = Core("e", settings, reporter, asyncio.get_running_loop())
        self.llm = core._llm = FakeLLM()
        self.core = self.llm.core
        self.weights = Weights(core, settings.swaps, reporter)
        self.weights._channel, self.weights._spec = cast(Channel, object()), SPEC
        self.weights._fetched = UPDATE.sync_id
        self.requests = Requests(core, self.weights, reporter)
        self.actor._core = core
        self.actor._weights, self.actor._requests = self.weights, self.requests

    async def swap(self, update: WeightUpdate = UPDATE) -> Swapped:
        swap = cast(Any, EngineActor.swap).__wrapped__
        return cast(Swapped, await swap(self.actor, OpContext(), update, TIMEOUTS))

    async def left(self, version: int, paused: bool, whole: bool) -> None:
        """Check how it was left; whole weights can be resumed, others are not."""
        assert (self.weights.version, self.requests.paused) == (version, paused)
        assert self.must_be_whole() is whole
        if whole:
            await self.requests.resume()
            assert not self.core.paused
        else:
            with pytest.raises(EngineError, match="half applied"):
                await self.requests.resume()
            assert self.core.paused

    def must_be_whole(self) -> bool:
        try:
            self.weights.must_be_whole()
        except EngineError:
            return False
        return True


@pytest.fixture
async def actor() -> AsyncIterator[Actor]:
    yield Actor()


async def test_it_is_one_call_of_vllm_and_each_phase_is_timed(actor: Actor) -> None:
    done = await actor.swap()
    assert actor.core.calls == ["pause", "apply", "version", "resume"]
    assert (actor.weights.version, actor.requests.paused, actor.core.paused) == (1, False, False)
    assert (done.ack.engine, done.ack.requests_in_flight) == ("e", 4)
    assert done.stats.nbytes == SPEC.nbytes
    assert min(done.quiesce, done.transfer, done.finalize, done.resume) > 0


async def test_where_only_copies_are_queued_nothing_is_waited_for(actor: Actor) -> None:
    actor.core.at_hand = True
    actor.core.batch_queue.extend(["second", "first"])
    done = await actor.swap()
    assert actor.core.calls == ["apply"]
    actor.core.out()
    actor.core.out()
    actor.core.step("third")
    assert actor.core.labels == [("first", "0"), ("second", "0"), ("third", "1")]
    assert done.ack.requests_in_flight == 4 and done.transfer > 0
    await actor.left(version=1, paused=False, whole=True)


async def test_the_next_swap_waits_until_the_steps_before_this_one_are_out(actor: Actor) -> None:
    actor.core.at_hand = True
    actor.core.batch_queue.append("first")
    await actor.swap()
    actor.weights._fetched = "s2"
    await actor.swap(replace(UPDATE, sync_id="s2", version=PolicyVersion(2)))
    assert actor.core.calls == ["apply", "pause", "version", "apply", "version", "resume"]
    assert actor.core.labels == [("first", "0")]


@pytest.mark.parametrize("several", [False, True])
async def test_caches_and_several_workers_need_a_pause(actor: Actor, several: bool) -> None:
    actor.core.at_hand = True
    if several:
        actor.core.vllm_config.parallel_config.world_size = 2
    await actor.swap(replace(UPDATE, kv_policy=KVPolicy.KEEP if several else KVPolicy.RECOMPUTE))
    assert actor.core.calls == ["pause", "apply", "version", "resume"]


async def test_a_swap_ends_a_pause_that_was_there_before(actor: Actor) -> None:
    actor.core.at_hand = True
    pausing = asyncio.create_task(actor.requests.pause(PauseMode.KEEP, KVPolicy.KEEP, "s0"))
    await pausing
    assert actor.requests.idle
    await actor.swap()
    await actor.left(version=1, paused=False, whole=True)
    assert not actor.requests.idle


async def test_copies_that_cannot_be_queued_leave_the_replica_paused(actor: Actor) -> None:
    actor.core.at_hand = True
    actor.core.broken["apply"] = RuntimeError("no memory")
    with pytest.raises(SyncError, match="no memory") as caught:
        await actor.swap()
    assert (caught.value.phase, actor.core.calls) == ("SYNCING", ["apply", "pause"])
    await actor.left(version=0, paused=True, whole=False)


async def test_an_update_that_is_not_at_hand_costs_no_pause(actor: Actor) -> None:
    with pytest.raises(SyncError, match="s2 is not at hand") as caught:
        await actor.swap(replace(UPDATE, sync_id="s2"))
    assert caught.value.phase == "PAUSING"
    assert actor.core.calls == []
    assert (actor.requests.paused, actor.must_be_whole()) == (False, True)


FAILURES = (
    # call, phase, version after, paused after, whole after, what came after the failure
    ("pause", "PAUSING", 0, False, True, ["resume", "resume"]),
    ("apply", "SYNCING", 0, True, False, []),
    ("version", "SYNCING", 0, True, False, []),
    ("resume", "RESUMING", 1, True, True, []),
)


@pytest.mark.parametrize(("call", "phase", "version", "paused", "whole", "after"), FAILURES)
async def test_a_failure_says_its_phase_and_leaves_what_is_promised(
    actor: Actor,
    call: str,
    phase: str,
    version: int,
    paused: bool,
    whole: bool,
    after: list[str],
) -> None:
    actor.core.broken[call] = RuntimeError("no memory")
    with pytest.raises(SyncError, match="engine e: RuntimeError: no memory") as caught:
        await actor.swap()
    assert caught.value.phase == phase
    assert actor.core.calls[actor.core.calls.index(call) + 1 :] == after
    await actor.left(version, paused, whole)


@wire_errors
def at_a_worker(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("at_hand", [False, True])
@pytest.mark.parametrize("kind", [TransferError, ChannelError])
@pytest.mark.parametrize("around", ["{}", "Worker failed with error '{}', see above"])
async def test_what_a_worker_raised_is_told_in_its_own_words(
    actor: Actor, at_hand: bool, kind: type[TransferError], around: str
) -> None:
    with pytest.raises(Exception, match="midflight") as sent:
        at_a_worker(kind("1 parameters were not sent: 'w'"))
    actor.core.at_hand = at_hand
    actor.core.broken["apply"] = type(sent.value)(around.format(sent.value))
    with pytest.raises(SyncError) as caught:
        await actor.swap()
    reason = "1 parameters were not sent: 'w'"
    assert str(caught.value) == f"sync failed in SYNCING: engine e: {reason}"
    assert (type(caught.value.__cause__), str(caught.value.__cause__)) == (kind, reason)
    with pytest.raises(EngineError) as refused:
        actor.weights.must_be_whole()
    assert str(refused.value) == (
        f"engine e: its weights are half applied (update s1 did not arrive: {reason}): "
        "it may only serve after a whole new update"
    )


async def test_a_pause_that_takes_too_long_is_taken_back(actor: Actor) -> None:
    actor.llm.hangs = "step"
    began = now()
    with pytest.raises(SyncError, match=r"PAUSING took longer than 3 s.*engine e") as caught:
        await actor.swap()
    assert caught.value.phase == "PAUSING"
    assert now() - began <= TIMEOUTS.pausing + 0.1
    actor.core.idle.set_result(None)  # the step ends after all, and nothing comes of it
    assert actor.core.calls == ["pause", "resume"]
    await actor.left(version=0, paused=False, whole=True)


async def test_an_engine_core_that_says_nothing_is_given_up(actor: Actor) -> None:
    actor.llm.hangs = "apply"
    began = now()
    with pytest.raises(SyncError, match=r"SYNCING took longer than 15 s.*engine e") as caught:
        await actor.swap()
    assert caught.value.phase == "SYNCING"
    assert now() - began <= TIMEOUTS.pausing + TIMEOUTS.syncing + 0.1
    assert "resume" not in actor.core.calls
    await actor.left(version=0, paused=True, whole=False)


async def test_what_was_done_before_it_could_be_taken_back_counts(actor: Actor) -> None:
    actor.llm.step_s = TIMEOUTS.pausing + 1
    await actor.swap()
    assert actor.core.calls == ["pause", "apply", "version", "resume", "pause", "resume"]
    await actor.left(version=1, paused=False, whole=True)


async def test_a_pause_that_fails_and_cannot_be_taken_back_says_why_it_failed(
    actor: Actor,
) -> None:
    actor.llm.hangs = "step"
    actor.core.broken["resume"] = RuntimeError("gone")
    with pytest.raises(SyncError, match="PAUSING took longer") as caught:
        await actor.swap()
    assert caught.value.phase == "PAUSING"
    assert actor.requests.paused
    await actor.requests.resume()  # by its caller
    assert not actor.core.paused


@pytest.mark.parametrize("at_hand", [False, True])
async def test_a_whole_swap_heals_a_failed_one(actor: Actor, at_hand: bool) -> None:
    actor.core.at_hand = at_hand
    actor.core.broken["apply"] = RuntimeError("no memory")
    with pytest.raises(SyncError):
        await actor.swap()
    actor.weights._fetched = "s2"
    await actor.swap(replace(UPDATE, sync_id="s2", version=PolicyVersion(2)))
    assert (actor.weights.version, actor.core.paused) == (2, False)


async def test_a_pause_that_is_taken_back_heals_nothing(actor: Actor) -> None:
    actor.core.broken["apply"] = RuntimeError("no memory")
    with pytest.raises(SyncError):
        await actor.swap()
    actor.weights._fetched, actor.llm.hangs = "s2", "step"
    with pytest.raises(SyncError, match="PAUSING took longer"):
        await actor.swap(replace(UPDATE, sync_id="s2", version=PolicyVersion(2)))
    await actor.left(version=0, paused=True, whole=False)


async def test_a_cancel_at_any_time_never_resumes_mixed_weights() -> None:
    cancelled = 0
    for turn in range(100):
        actor = Actor()
        task = asyncio.create_task(actor.swap())
        asyncio.get_running_loop().call_later(turn * 0.0005, task.cancel)
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Swapped):
            break
        cancelled += 1
        assert isinstance(result, asyncio.CancelledError), f"turn {turn}: {result!r}"
        await asyncio.sleep(1)  # what the call left running ends
        assert actor.core.paused or not actor.core.calls, f"turn {turn}: it goes on"
        assert actor.must_be_whole() is ("apply" not in actor.core.calls)
        await actor.left(version=0, paused=actor.requests.paused, whole=actor.must_be_whole())
    else:
        pytest.fail("the swap never got through")
    assert cancelled >= 6


async def test_a_replica_of_several_engine_cores_is_refused_before_vllm_starts() -> None:
    settings = EngineSettings(model="none", extra={"data_parallel_size": 2})
    core = Core("e", settings, ActorReporter("e"), asyncio.get_running_loop())
    with pytest.raises(EngineError, match=r"data_parallel_size 2.*Start more replicas"):
        await core.start()
