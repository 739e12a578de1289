"""What an embedder sees of a run that fails, over fakes and virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from orchestrator import (
    EngineDied,
    EngineError,
    MidflightError,
    Orchestrator,
    Outcome,
    RecoveryOptions,
    State,
    SyncError,
)
from orchestrator.testing import FakeWorld
from tests.harness import DIGEST, GENERATION, Rig, make_rig
from tests.unit.test_recovery import TRIES, kill_on

SAYS = r"^sync failed in SYNCING: KeyError: 'layers\.0' \(fenced: engine-0\)$"


def a_rig(recovery: RecoveryOptions = TRIES) -> Rig:
    """One engine that is not replaced, and a sender that fails each time."""
    rig = make_rig(FakeWorld(), 1, validation=DIGEST, recovery=recovery)
    rig.world.faults.fail("trainer", "send", call=None, error=KeyError("layers.0"))
    return rig


def check_the_end(rig: Rig, error: BaseException) -> None:
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    assert (rig.ended.outcome, rig.ended.error) == (Outcome.FAILED, error)
    rig.assert_invariants()


@pytest.mark.parametrize("attempts", [0, 1, 3])
async def test_a_sync_that_fails_for_good_raises_what_failed(attempts: int) -> None:
    rig = a_rig(RecoveryOptions(attempts=attempts))
    seen: list[BaseException] = []
    with pytest.raises(SyncError, match=SAYS) as left:
        async with rig.orchestrator as o:
            try:
                await o.sync()
            except BaseException as error:
                seen.append(error)
                raise
    assert seen == [left.value]
    assert isinstance(left.value.__cause__, KeyError)
    check_the_end(rig, left.value)
    await asyncio.sleep(1)  # no cancel is left over


async def test_a_body_that_catches_it_and_leaves_is_told_again() -> None:
    rig = a_rig()
    with pytest.raises(SyncError) as left:
        async with rig.orchestrator as o:
            with pytest.raises(SyncError, match=SAYS) as caught:
                await o.sync()
    assert left.value is caught.value
    check_the_end(rig, left.value)


async def test_an_error_that_the_body_makes_of_it_is_raised_as_it_is() -> None:
    rig = a_rig()
    with pytest.raises(ZeroDivisionError) as left:
        async with rig.orchestrator as o:
            try:
                await o.sync()
            except SyncError as error:
                raise ZeroDivisionError("mine") from error
    check_the_end(rig, left.value)


async def _idle(o: Orchestrator) -> None:
    await asyncio.Event().wait()


async def _consume(o: Orchestrator) -> None:
    async for _ in o.rollouts():
        pass


async def _again(o: Orchestrator) -> None:
    for _ in range(1000):  # without end it would block the loop, and this test
        try:
            await o.sync()
        except MidflightError:
            continue
    raise AssertionError("nobody ended it")


async def _run(o: Orchestrator) -> None:
    for _ in range(1000):
        try:
            await o.run(1)
        except MidflightError:
            continue
    raise AssertionError("nobody ended it")


@pytest.mark.parametrize("goes_on", [_idle, _consume, _again, _run])
@pytest.mark.parametrize("consumes", [False, True])
async def test_a_body_that_catches_it_and_goes_on_is_cancelled(
    goes_on: Any, consumes: bool
) -> None:
    rig = a_rig()
    ended = False
    with pytest.raises(SyncError, match=SAYS) as left:
        async with rig.orchestrator as o:
            if consumes:
                await anext(o.rollouts())
            with pytest.raises(SyncError, match=SAYS):
                await o.sync()
            began = asyncio.get_running_loop().time()
            try:
                await goes_on(o)
            except asyncio.CancelledError:
                ended = asyncio.get_running_loop().time() == began
                raise
    assert ended
    check_the_end(rig, left.value)


async def test_rollouts_that_a_body_was_taking_end_when_it_catches_the_error() -> None:
    rig = a_rig()
    taken = 0
    with pytest.raises(SyncError, match=SAYS) as left:
        async with rig.orchestrator as o:
            await asyncio.sleep(10)  # the buffer is full
            async for _ in o.rollouts():
                taken += 1
                if taken == 1:
                    with pytest.raises(SyncError, match=SAYS):
                        await o.sync()
    assert taken == GENERATION.group_size
    check_the_end(rig, left.value)


async def test_a_timeout_around_the_sync_does_not_hide_it() -> None:
    rig = a_rig()
    with pytest.raises(SyncError, match=SAYS) as left:
        async with rig.orchestrator as o:
            with pytest.raises(SyncError, match=SAYS):
                async with asyncio.timeout(1000):
                    await o.sync()
    check_the_end(rig, left.value)


@pytest.mark.parametrize("recovery", [TRIES, RecoveryOptions(attempts=0)], ids=["tries", "none"])
@pytest.mark.parametrize("engines", [1, 2])
async def test_engines_that_die_in_a_sync_are_told_by_the_sync(
    recovery: RecoveryOptions, engines: int
) -> None:
    """Whether or not the swap itself would end: nobody waits for its deadline."""
    rig = make_rig(FakeWorld(), engines, validation=DIGEST, recovery=recovery)
    rig.world.faults.block("trainer", "send")
    for engine in rig.engines:
        kill_on(rig, State.SYNCING, engine.name)
    with pytest.raises((EngineDied, SyncError), match="engine-0") as left:
        async with rig.orchestrator as o:
            with pytest.raises((EngineDied, SyncError), match="engine-0") as caught:
                await o.sync()
            began = asyncio.get_running_loop().time()
            await asyncio.Event().wait()
    assert asyncio.get_running_loop().time() == began
    assert left.value is caught.value
    check_the_end(rig, left.value)


def failing_behind_a_sync() -> Rig:
    rig = make_rig(FakeWorld(), 1, validation=DIGEST, recovery=TRIES)
    rig.world.faults.block("trainer", "stage")
    rig.world.faults.fail("engine-0", "generate", call=6, error=EngineError("engine-0", "bad"))
    return rig


async def test_a_run_that_fails_behind_a_sync_is_told_by_the_sync() -> None:
    rig = failing_behind_a_sync()
    with pytest.raises(EngineError, match="engine engine-0: bad") as left:
        async with rig.orchestrator as o:
            with pytest.raises(EngineError, match="engine engine-0: bad") as caught:
                await o.sync()
    assert left.value is caught.value
    check_the_end(rig, left.value)


async def test_syncs_of_other_tasks_are_told_too() -> None:
    rig = failing_behind_a_sync()
    with pytest.raises(EngineError, match="engine engine-0: bad") as left:
        async with rig.orchestrator as o:
            others = [asyncio.create_task(o.sync()) for _ in range(2)]
            await asyncio.Event().wait()
    results = await asyncio.gather(*others, return_exceptions=True)
    assert results == [left.value, left.value]
    check_the_end(rig, left.value)


async def test_a_cancel_and_an_interrupt_of_a_sync_are_no_failure() -> None:
    for interrupts in (False, True):
        rig = make_rig(FakeWorld(), 1, validation=DIGEST, recovery=TRIES)
        gate = rig.world.faults.block("trainer", "stage")
        seen: list[BaseException] = []

        async def job(rig: Rig = rig, seen: list[BaseException] = seen) -> None:
            async with rig.orchestrator as o:
                try:
                    await o.sync()
                except BaseException as error:
                    seen.append(error)
                    raise

        task = asyncio.create_task(job())
        await gate.reached()
        if interrupts:
            rig.orchestrator.interrupt()
        else:
            task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(result, asyncio.CancelledError)
        assert [type(e) for e in seen] == [asyncio.CancelledError]
        assert rig.ended.outcome is Outcome.INTERRUPTED


async def test_a_task_group_that_takes_the_cancel_for_its_own_is_not_left_waiting() -> None:
    """Before Python 3.13 it does, when it is cancelled while it already ends."""
    rig = a_rig()
    told: list[BaseException] = []

    async def body() -> None:
        async with rig.orchestrator as o:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(asyncio.sleep(1e6))
                    await o.sync()
            except* MidflightError as errors:
                told.extend(errors.exceptions)
            await asyncio.Event().wait()

    with pytest.raises(SyncError):
        async with asyncio.timeout(3600):
            await body()
    assert told


async def test_what_failed_is_raised_where_all_warnings_were_swallowed() -> None:
    rig = a_rig()
    with pytest.raises(SyncError):
        async with rig.orchestrator as o:
            with contextlib.suppress(SyncError):
                await o.sync()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            async for _ in o.rollouts():
                pass
