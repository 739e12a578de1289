"""The controller over fakes as something to enter and to leave, and what it tells of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orchestrator import (
    Closed,
    ConfigError,
    EngineStarted,
    Event,
    GenerationOptions,
    MidflightError,
    Orchestrator,
    Outcome,
    PhaseTimeouts,
    RolloutFinished,
    RunEnded,
    State,
    StateChanged,
    SwapDone,
    SwapFailed,
    SwapOptions,
    TrainerStarted,
    TrainStepDone,
    ValidationFailed,
)
from orchestrator.testing import FakeEngine, FakeTrainer, FakeWorld, all_blocked
from tests.harness import (
    DIGEST,
    GENERATION,
    PROMPTS,
    SWAP,
    drive,
    make_rig,
    now,
)

# Starting


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: f.fail("engine-1", "start"), "engine engine-1: injected fault in start"),
        (lambda f: f.fail("trainer", "start"), "trainer: injected fault in start"),
        (lambda f: f.fail("trainer", "listen"), "trainer: injected fault in listen"),
        (lambda f: f.fail("engine-1", "open_channel"), "injected fault in open_channel"),
        (lambda f: f.wrong_pattern("engine-1"), "engine-1: the known pattern arrived wrong"),
        (lambda f: f.wrong_pattern("trainer"), "trainer: the known pattern did not come back"),
        (lambda f: f.fail("engine-1", "prompt_logprobs"), "engine engine-1: injected"),
        (lambda f: f.fail("trainer", "reference_logprobs"), "trainer: injected"),
    ],
    ids=[
        "engine start",
        "trainer start",
        "listen",
        "open_channel",
        "engine pattern",
        "trainer pattern",
        "control engine",
        "control trainer",
    ],
)
async def test_a_start_that_fails_releases_everything_and_says_why(
    world: FakeWorld, spoil: Callable[[Any], None], message: str
) -> None:
    rig = make_rig(world, 3)
    spoil(world.faults)
    result = await drive(rig)
    assert isinstance(result, MidflightError)
    assert message in str(result)
    assert rig.ended.outcome is Outcome.FAILED
    assert rig.orchestrator.state is State.FAILED
    assert world.calls("generate") == []
    assert world.calls("start_update") == []
    rig.assert_invariants()


async def test_no_request_runs_before_the_channel_is_proved(world: FakeWorld) -> None:
    rig = make_rig(world, 2)
    world.faults.delay("engine-1", "open_channel", 5, when="after")
    await drive(rig, 1)
    proved = max(c.ended_seq or 0 for c in world.calls("open_channel"))
    assert min(c.seq for c in world.calls("generate")) > proved


# Leaving


async def test_entering_twice_is_refused(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    async with rig.orchestrator as o:
        with pytest.raises(Closed, match="entered once"):
            await o.__aenter__()
    with pytest.raises(Closed, match="entered once"):
        await rig.orchestrator.__aenter__()
    rig.assert_invariants()


async def test_entering_after_closing_is_refused_and_starts_nothing(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    await rig.orchestrator.aclose()
    with pytest.raises(Closed):
        await rig.orchestrator.__aenter__()
    assert world.calls("start") == []


async def test_closing_is_idempotent_and_leaving_still_says_how_it_ended(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, validation=DIGEST)
    async with rig.orchestrator as o:
        await asyncio.sleep(1)
        rollouts = o.rollouts()
        got = [(await anext(rollouts)).request.group]
        await o.aclose()
        await o.aclose()
        with pytest.raises(Closed):
            await o.sync()
        with pytest.raises(Closed):
            await o.run(1)
        with pytest.raises(Closed):
            await anext(o.rollouts())
        left = got + [r.request.group async for r in rollouts]
        assert all(left.count(group) == GENERATION.group_size for group in left)
    await rig.orchestrator.aclose()
    assert rig.ended.outcome is Outcome.COMPLETED
    rig.assert_invariants()


async def test_whoever_closes_second_waits_until_all_is_released(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    world.faults.delay("engine-0", "aclose", 2)
    async with rig.orchestrator as o:
        await asyncio.sleep(1)
        closing = asyncio.create_task(o.aclose())
        await all_blocked()
    assert rig.engines[0].closed
    await closing
    rig.assert_invariants()


async def test_a_sync_that_waits_its_turn_is_told_that_all_was_closed(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    gate = world.faults.block("engine-0", "pause")
    async with rig.orchestrator as o:
        syncs = [asyncio.create_task(o.sync()) for _ in range(3)]
        await gate.reached()
    for sync in syncs:
        with pytest.raises(Closed):
            await sync
    assert len(world.calls("stage")) == 1
    rig.assert_invariants()


async def test_syncs_of_other_tasks_do_not_start_after_an_interrupt(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    gate = world.faults.block("engine-0", "receive_update")
    others: list[asyncio.Task[Any]] = []

    async def job() -> None:
        async with rig.orchestrator as o:
            first = asyncio.create_task(o.sync())
            await gate.reached()
            others.extend([first, asyncio.create_task(o.sync())])
            await o.sync()

    task = asyncio.create_task(job())
    await gate.reached()
    await all_blocked()
    rig.orchestrator.interrupt()
    with pytest.raises(asyncio.CancelledError):
        await task
    for other in others:
        with pytest.raises(Closed):
            await other
    assert len(world.calls("stage")) == 1
    rig.assert_invariants()


@pytest.mark.parametrize("actor", ["engine-0", "trainer"])
async def test_an_actor_that_does_not_close_is_left_in_time_and_told(
    world: FakeWorld, actor: str
) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    world.faults.block(actor, "aclose")
    world.faults.block("engine-1", "abort_requests")
    with pytest.raises(MidflightError, match="may be left: not closed within 16 s"):
        async with rig.orchestrator:
            await asyncio.sleep(1)
    assert now() - 1 <= 3 * SWAP.timeouts.stopping
    assert rig.engines[1].closed
    for stuck in [*rig.engines, rig.trainer]:
        await stuck.aclose()
    rig.assert_invariants()


async def test_stopping_is_bounded_though_an_engine_neither_resumes_nor_closes(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, 2, validation=DIGEST, swap=replace(
        SWAP, timeouts=replace(SWAP.timeouts, resuming=60)
    ))  # fmt: skip
    gate = world.faults.block("engine-0", "pause")
    world.faults.block("engine-0", "resume")
    world.faults.block("engine-0", "aclose")
    task = asyncio.create_task(drive(rig))
    await gate.reached()
    began = now()
    rig.orchestrator.interrupt()
    assert isinstance(await task, asyncio.CancelledError)
    assert now() - began <= SWAP.timeouts.stopping
    await rig.engines[0].aclose()
    rig.assert_invariants()


async def test_a_failed_swap_is_reported_with_its_cause_not_with_the_closing(
    world: FakeWorld,
) -> None:
    """The swap is still cleaning up when the machine has already stopped."""
    rig = make_rig(world, 2, validation=DIGEST)
    gate = world.faults.block("engine-0", "pause")
    world.faults.delay("engine-0", "resume", 3.5)
    task = asyncio.create_task(drive(rig))
    await gate.reached()
    rig.orchestrator.interrupt()
    await task
    (failed,) = rig.of(SwapFailed)
    assert isinstance(failed.error, asyncio.CancelledError)
    rig.assert_invariants()


# Observers


async def test_an_observer_that_raises_is_logged_and_disturbs_nothing(world: FakeWorld) -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))

    def broken(event: Event) -> None:
        raise RuntimeError("dashboard is down")

    rig = make_rig(world, 2, observers=[broken])
    assert await drive(rig, 2) is None
    assert len(rig.of(SwapDone)) == 2
    assert len(logged) == len(rig.events)
    assert "dashboard is down" in str(logged[0]["exception"])
    rig.assert_invariants()


async def test_every_event_of_a_swap_carries_run_sync_step_and_version(world: FakeWorld) -> None:
    rig = make_rig(world, 2)
    await drive(rig, 2)
    for event in rig.events:
        assert event.op.run_id == "run"
    for version in (1, 2):
        moves = [e for e in rig.of(StateChanged) if e.op.sync_id == f"run-s{version}"]
        assert [m.trigger for m in moves] == ["pause", "sync", "commit", "validate", "verify"]
        assert {(m.op.step, m.op.version) for m in moves} == {(version, version)}


async def test_events_tell_the_run_in_order(world: FakeWorld) -> None:
    rig = make_rig(world, 2)
    await drive(rig, 1)
    kinds = [type(e) for e in rig.events]
    assert set(kinds[:3]) == {EngineStarted, TrainerStarted}
    assert kinds[3] is StateChanged
    assert kinds[-2:] == [StateChanged, RunEnded]
    assert kinds.index(TrainStepDone) < kinds.index(SwapDone)
    history = [(m.source, m.target) for m in rig.orchestrator.history]
    assert history == [(e.source, e.target) for e in rig.of(StateChanged)]
    assert history[-1] == (State.VALIDATING, State.GENERATING) or history[-1][1] is State.STOPPED


async def test_an_observer_may_interrupt(world: FakeWorld) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, SwapDone):
            rig.orchestrator.interrupt()

    rig = make_rig(world, observers=[stop])
    result = await drive(rig, 5)
    assert isinstance(result, asyncio.CancelledError)
    assert len(rig.of(SwapDone)) == 1
    assert rig.ended.outcome is Outcome.INTERRUPTED
    rig.assert_invariants()


def test_defaults_are_usable_as_they_are() -> None:
    world = FakeWorld()
    o = Orchestrator([FakeEngine("engine-0", world)], FakeTrainer(world), prompts=PROMPTS)
    assert (o.state, o.version, o.history) == (State.STARTING, 0, ())
    assert len(o.run_id) == 12
    assert SwapOptions().timeouts == PhaseTimeouts()
    assert GenerationOptions().buffer_size >= 32


async def test_sync_takes_the_trainers_own_version_and_only_goes_up(world: FakeWorld) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    async with rig.orchestrator as o:
        assert (await o.sync(7)).update.version == 7
        for none in (8.5, "8"):
            with pytest.raises(ConfigError, match=f"version {none!r}: it must be a whole number"):
                await o.sync(version=none)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="version 7 is not newer than 7"):
            await o.sync(7)
        assert len(world.calls("stage")) == 1, "refused before anything moved"
        assert (await o.sync()).update.version == 8
        assert {e.version for e in rig.engines} == {8}
    rig.assert_invariants()


async def test_what_a_request_says_of_itself_has_the_version_of_then(world: FakeWorld) -> None:
    rig = make_rig(world, 1, validation=DIGEST)
    assert await drive(rig, 3) is None
    seen = {e.op.version for e in rig.of(RolloutFinished)}
    assert {1, 2} <= seen and None not in seen


@pytest.mark.parametrize("slow", ["before", "after"])
async def test_the_reason_of_a_fence_outranks_what_follows_from_it(
    world: FakeWorld, slow: str
) -> None:
    """Fencing all ends their requests, and then none can be submitted: that is not the cause."""
    world.faults.flip_bit("head")
    world.faults.delay("engine-0", "abort_requests", 0.1, when=slow)
    busy = replace(GENERATION, buffer_size=400)  # it never stops to submit
    rig = make_rig(world, 1, validation=DIGEST, generation=busy)
    error = await drive(rig)
    assert isinstance(error, ValidationFailed)
    assert "head on engine-0" in str(error)
    assert rig.ended.error is error
