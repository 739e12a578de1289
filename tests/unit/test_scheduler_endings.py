"""How the controller ends over fakes: cancelled, interrupted, a process dead, a call that hangs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orchestrator import (
    ChannelError,
    Completion,
    EngineDied,
    EngineError,
    FinishReason,
    GenerationRequest,
    MidflightError,
    Outcome,
    PhaseTimeout,
    ReplicaDied,
    Rollout,
    RolloutFinished,
    State,
    SwapDone,
    SwapFailed,
    SyncError,
    TrainerDied,
)
from orchestrator.tasks import settle
from orchestrator.testing import FakeWorld, all_blocked
from tests.harness import (
    DIGEST,
    GENERATION,
    PROMPTS,
    SWAP,
    Rig,
    at_suspension,
    drive,
    make_rig,
    now,
)

NOTICED_S = 5.0


# A sync that is cancelled


PHASE_CALLS = (
    ("trainer", "stage", State.GENERATING),
    ("engine-1", "pause", State.PAUSING),
    ("engine-1", "start_update", State.SYNCING),
    ("engine-1", "receive_update", State.SYNCING),
    ("trainer", "send", State.SYNCING),
    ("engine-1", "finish_update", State.SYNCING),
    ("engine-1", "resume", State.RESUMING),
    ("engine-1", "wait_first_tokens", State.RESUMING),
    ("engine-1", "digests", State.VALIDATING),
)


@pytest.mark.parametrize(("actor", "method", "phase"), PHASE_CALLS)
async def test_a_cancelled_sync_is_called_off_unless_weights_are_half_applied(
    world: FakeWorld, actor: str, method: str, phase: State
) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    gate = world.faults.block(actor, method)
    async with rig.orchestrator as o:
        sync = asyncio.create_task(o.sync())
        await gate.reached()
        assert o.state is phase
        sync.cancel()
        await all_blocked()
        called_off = phase in (State.GENERATING, State.PAUSING, State.VALIDATING)
        assert sync.done() is called_off
        if not called_off:
            assert o.state is phase
            gate.release()
        with pytest.raises(asyncio.CancelledError):
            await sync
        assert o.state is State.GENERATING
        assert o.version == (0 if phase in (State.GENERATING, State.PAUSING) else 1)
        assert not any(e.paused for e in rig.engines)
        assert (await o.sync()).update.version == o.version
    assert rig.ended.outcome is Outcome.COMPLETED
    rig.assert_invariants()


async def test_a_swap_that_fails_after_its_caller_gave_up_is_told_once_by_an_event(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    swaps: list[Any] = []

    def remember() -> None:
        swaps.extend(t for t in asyncio.all_tasks() if t.get_name() == "run-s1")

    world.faults.hook("engine-1", "wait_first_tokens", remember)
    world.faults.delay("engine-1", "wait_first_tokens", 1)
    world.faults.fail("engine-1", "wait_first_tokens")
    async with rig.orchestrator as o:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await o.sync()
        (swap,) = swaps
        assert swap.done()
        assert not swap._log_traceback, "asyncio will log an error that nobody retrieved"
    (failed,) = rig.of(SwapFailed)
    assert isinstance(failed.error, SyncError)
    rig.assert_invariants()


async def test_an_impatient_second_cancel_does_not_let_another_swap_in_between(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    gate = world.faults.block("engine-1", "finish_update")
    async with rig.orchestrator as o:
        first = asyncio.create_task(o.sync())
        await gate.reached()
        for _ in range(2):
            first.cancel()
            await all_blocked()
        second = asyncio.create_task(o.sync())
        await all_blocked()
        gate.release()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await second).update.version == 2
    rig.assert_invariants()


async def test_a_cancel_of_the_run_at_any_await_is_an_interruption_that_leaves_nothing() -> None:
    for at in range(1, 400):
        rig = make_rig(engines=2)
        cancelled: list[State] = []

        def cancel(rig: Rig = rig, cancelled: list[State] = cancelled) -> None:
            cancelled.append(rig.orchestrator.state)
            (task,) = [t for t in asyncio.all_tasks() if t.get_name() == "host"]
            task.cancel()

        async def job(rig: Rig = rig) -> None:
            async with rig.orchestrator as o:
                await o.run(2)

        task = asyncio.create_task(at_suspension(job(), at, cancel), name="host")
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if not cancelled:
            assert result is None
            break
        assert isinstance(result, asyncio.CancelledError), f"suspension {at}: {result!r}"
        assert rig.ended.outcome is Outcome.INTERRUPTED
        rig.assert_invariants()
    else:
        pytest.fail("the run never got through")
    assert at >= 10


# interrupt()


INTERRUPT_AT = (
    ("engine-0", "start", State.STARTING),
    ("engine-0", "open_channel", State.STARTING),
    ("trainer", "train", State.GENERATING),
    *PHASE_CALLS,
    ("engine-0", "prompt_logprobs", State.STARTING),
    ("fresh:fake://v1", "start", State.VALIDATING),
    ("fresh:fake://v1", "generate", State.VALIDATING),
)


@pytest.mark.parametrize(("actor", "method", "phase"), INTERRUPT_AT)
async def test_an_interrupt_in_any_state_ends_within_the_stopping_time(
    world: FakeWorld, actor: str, method: str, phase: State
) -> None:
    rig = make_rig(world, 2)
    at: list[float] = []

    def interrupt() -> None:
        at.append(now())
        assert rig.orchestrator.state is phase
        rig.orchestrator.interrupt()

    world.faults.hook(actor, method, interrupt)
    world.faults.block(actor, method)
    result = await drive(rig, 1)
    assert isinstance(result, asyncio.CancelledError)
    assert now() - at[0] <= SWAP.timeouts.stopping
    assert rig.ended.outcome is Outcome.INTERRUPTED
    assert rig.orchestrator.state is State.STOPPED
    rig.assert_invariants()


@pytest.mark.parametrize(
    ("actor", "method"),
    [
        ("trainer", "train"),
        ("engine-1", "pause"),
        ("trainer", "send"),
        ("engine-1", "finish_update"),
        ("engine-1", "resume"),
    ],
)
async def test_an_interrupt_hands_over_what_every_request_has(
    world: FakeWorld, actor: str, method: str
) -> None:
    rig = make_rig(
        world, 2, generation=replace(GENERATION, max_tokens=2000, buffer_size=8), validation=DIGEST
    )
    gate = world.faults.block(actor, method)

    async def job() -> None:
        async with rig.orchestrator as o:
            for engine in rig.engines:
                await engine.wait_for_tokens(7)
            if method == "train":
                await rig.trainer.train([_any_rollout()], 1)
            await o.sync()

    task = asyncio.create_task(job())
    await gate.reached()
    rig.orchestrator.interrupt()
    await settle([task], cancel=False)
    partial = [e.rollout for e in rig.of(RolloutFinished)]
    assert len(partial) == 4
    assert all(r.completion.finish_reason is FinishReason.ABORT for r in partial)
    assert all(len(r.completion.token_ids) >= 7 for r in partial)
    rig.assert_invariants()


def _any_rollout() -> Rollout:
    done = Completion("x", "e", (1,), (0.0,), (), FinishReason.STOP)
    return Rollout(GenerationRequest("x", PROMPTS[0], 1), done)


async def test_a_partial_rollout_has_every_token_that_was_written(world: FakeWorld) -> None:
    rig = make_rig(world, generation=replace(GENERATION, max_tokens=2000), validation=DIGEST)

    async def job() -> None:
        async with rig.orchestrator:
            await asyncio.Event().wait()

    task = asyncio.create_task(job())
    await all_blocked()
    await rig.engines[0].wait_for_tokens(7)
    rig.orchestrator.interrupt()
    rig.orchestrator.interrupt()
    with pytest.raises(asyncio.CancelledError):
        await task
    partial = [e.rollout.completion for e in rig.of(RolloutFinished)]
    assert [len(c.token_ids) for c in partial] == [7] * 4
    assert rig.ended.outcome is Outcome.INTERRUPTED
    assert len(world.calls("generate")) == 4  # what ended was not replaced
    rig.assert_invariants()


async def test_an_interrupt_when_all_is_over_cancels_nobody(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    async with rig.orchestrator:
        pass
    rig.orchestrator.interrupt()
    await asyncio.sleep(1)
    assert rig.ended.outcome is Outcome.COMPLETED


async def test_after_an_interrupt_the_host_task_is_not_left_cancelled(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    with pytest.raises(asyncio.CancelledError):
        async with rig.orchestrator as o:
            o.interrupt()
            await asyncio.sleep(60)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(1)


async def test_an_interrupt_while_the_fresh_engine_closes_leaves_no_fresh_engine(
    world: FakeWorld,
) -> None:
    rig = make_rig(world)
    fresh = "fresh:fake://v1"
    world.faults.hook(fresh, "aclose", lambda: rig.orchestrator.interrupt())
    world.faults.delay(fresh, "aclose", 2)
    result = await drive(rig, 1)
    assert isinstance(result, asyncio.CancelledError)
    (close,) = world.calls("aclose", fresh)
    assert close.ok
    rig.assert_invariants()


async def test_a_fresh_engine_that_does_not_close_is_an_error_soon(world: FakeWorld) -> None:
    rig = make_rig(world)
    fresh = "fresh:fake://v1"
    world.faults.block(fresh, "aclose")
    result = await drive(rig, 1)
    assert isinstance(result, SyncError)
    assert "fresh:fake://v1: did not close within 15 s" in str(result)
    assert now() < SWAP.timeouts.validating
    rig.assert_invariants()


# Deaths


DIE_AT = (
    ("engine-1", "start"),
    ("engine-1", "open_channel"),
    ("engine-1", "generate"),
    ("engine-1", "wait_for_tokens"),
    ("engine-1", "pause"),
    ("engine-1", "start_update"),
    ("engine-1", "receive_update"),
    ("engine-1", "finish_update"),
    ("engine-1", "resume"),
    ("engine-1", "wait_first_tokens"),
    ("engine-1", "digests"),
    ("engine-1", "prompt_logprobs"),
    ("trainer", "start"),
    ("trainer", "listen"),
    ("trainer", "open_channel"),
    ("trainer", "reference_logprobs"),
    ("trainer", "train"),
    ("trainer", "stage"),
    ("trainer", "send"),
    ("trainer", "save_checkpoint"),
)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("actor", "method"), DIE_AT)
async def test_a_process_that_dies_in_any_call_ends_the_run_within_five_seconds(
    world: FakeWorld, actor: str, method: str, when: str
) -> None:
    rig = make_rig(world, 2)
    died: list[float] = []
    world.faults.hook(actor, method, lambda: died.append(now()), when=when)
    world.faults.die(actor, method, when=when, reason="SIGKILL")
    result = await drive(rig, 2)
    assert isinstance(result, MidflightError), repr(result)
    assert "SIGKILL" in str(result)
    assert actor in str(result)
    assert now() - died[0] <= NOTICED_S
    assert rig.ended.outcome is Outcome.FAILED
    assert rig.ended.error is result
    assert rig.orchestrator.state is State.FAILED
    rig.assert_invariants()


@pytest.mark.parametrize("victim", ["engine-0", "engine-2", "trainer"])
async def test_a_process_that_dies_while_nobody_calls_it_is_noticed(
    world: FakeWorld, victim: str
) -> None:
    rig = make_rig(world, 3, validation=DIGEST)

    async def job() -> None:
        async with rig.orchestrator:
            await asyncio.Event().wait()

    task = asyncio.create_task(job())
    await asyncio.sleep(20)  # the buffer is full, everything is idle
    actor = {a.name: a for a in [*rig.engines, rig.trainer]}[victim]
    actor.kill("OOM killer")
    began = now()
    with pytest.raises(TrainerDied if victim == "trainer" else EngineDied, match="OOM killer"):
        await task
    assert now() - began <= NOTICED_S
    (dead,) = rig.of(ReplicaDied)
    assert (dead.actor, dead.cause) == (victim, "OOM killer")
    rig.assert_invariants()


@pytest.mark.parametrize(("actor", "method", "phase"), PHASE_CALLS)
@pytest.mark.parametrize("victim", ["engine-0", "trainer"])
async def test_a_death_while_another_hangs_ends_the_run_long_before_the_deadline(
    world: FakeWorld, victim: str, actor: str, method: str, phase: State
) -> None:
    rig = make_rig(world, 2)
    gate = world.faults.block(actor, method)
    task = asyncio.create_task(drive(rig, 1))
    await gate.reached()
    assert rig.orchestrator.state is phase
    victims = {a.name: a for a in [*rig.engines, rig.trainer]}
    victims[victim].kill("SIGKILL")
    began = now()
    result = await task
    assert isinstance(result, MidflightError)
    assert "SIGKILL" in str(result)
    assert now() - began <= NOTICED_S
    rig.assert_invariants()


async def test_an_engine_that_dies_while_another_still_starts_is_noticed(world: FakeWorld) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    world.faults.block("engine-1", "start")
    asyncio.get_running_loop().call_later(3, rig.engines[0].kill, "SIGKILL")
    result = await drive(rig)
    assert isinstance(result, EngineDied)
    assert "SIGKILL" in str(result)
    assert now() <= 3 + NOTICED_S
    rig.assert_invariants()


async def test_a_background_task_that_fails_ends_the_job_with_its_cause(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    world.faults.fail(
        "engine-0", "generate", call=6, error=EngineError("engine-0", "request r2.1: bad prompt")
    )

    async def job() -> None:
        async with rig.orchestrator as o:
            async for _ in o.rollouts():
                pass

    with pytest.raises(EngineError, match=r"request r2\.1: bad prompt"):
        await asyncio.create_task(job())
    assert now() <= NOTICED_S
    assert rig.ended.outcome is Outcome.FAILED
    rig.assert_invariants()


async def test_the_body_that_idles_is_cancelled_when_a_background_task_died(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, validation=DIGEST)
    world.faults.fail("engine-0", "generate", call=3)
    began = now()
    with pytest.raises(EngineError, match="injected"):
        async with rig.orchestrator:
            await asyncio.Event().wait()
    assert now() - began <= NOTICED_S
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_an_error_of_the_body_is_raised_as_it_is(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    with pytest.raises(ZeroDivisionError):
        async with rig.orchestrator:
            raise ZeroDivisionError("mine")
    assert rig.ended.outcome is Outcome.FAILED
    assert isinstance(rig.ended.error, ZeroDivisionError)
    rig.assert_invariants()


# Deadlines of the run


HANG_AT = (
    ("engine-1", "start", State.STARTING),
    ("trainer", "start", State.STARTING),
    ("trainer", "listen", State.STARTING),
    ("engine-1", "prompt_logprobs", State.STARTING),
    ("trainer", "train", State.GENERATING),
    *PHASE_CALLS,
    ("trainer", "save_checkpoint", State.VALIDATING),
    ("fresh:fake://v1", "start", State.VALIDATING),
    ("fresh:fake://v1", "generate", State.VALIDATING),
)


@pytest.mark.parametrize(("actor", "method", "phase"), HANG_AT)
async def test_a_call_that_hangs_ends_the_run_at_the_deadline_of_its_phase(
    world: FakeWorld, actor: str, method: str, phase: State
) -> None:
    rig = make_rig(world, 2)
    world.faults.block(actor, method)
    hung: list[float] = []
    world.faults.hook(actor, method, lambda: hung.append(now()))
    task = asyncio.create_task(drive(rig, 1))
    result = await task
    assert isinstance(result, (PhaseTimeout, SyncError)), repr(result)
    timeout = result if isinstance(result, PhaseTimeout) else result.__cause__
    assert isinstance(timeout, PhaseTimeout)
    phase = State.SYNCING if method == "digests" else phase  # whose budget they have
    assert timeout.phase == phase
    budget = SWAP.timeouts.of(phase)
    assert now() <= 2 + budget + 5 + SWAP.timeouts.stopping
    assert rig.ended.outcome is Outcome.FAILED
    rig.assert_invariants()


async def test_a_channel_that_one_side_never_joins_ends_the_start(world: FakeWorld) -> None:
    rig = make_rig(world, 2)
    world.faults.block("engine-1", "open_channel")
    result = await drive(rig)
    assert isinstance(result, ChannelError)
    assert "1 of 3 ranks never joined" in str(result)
    assert now() <= SWAP.timeouts.syncing + SWAP.timeouts.stopping
    rig.assert_invariants()


async def test_probes_that_all_end_before_they_are_long_enough_do_not_hang_the_run(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    world.faults.block("engine-1", "wait_for_tokens")
    assert await drive(rig, 1) is None
    assert len(rig.of(SwapDone)) == 1
    rig.assert_invariants()


async def test_an_engine_that_never_generates_ends_the_run_and_says_what_is_missing(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, validation=DIGEST)
    world.faults.block("engine-0", "generate", call=None)
    result = await drive(rig, 1)
    assert isinstance(result, PhaseTimeout)
    assert "GENERATING took longer than 40 s; still waiting for rollouts" in str(result)
    rig.assert_invariants()
