"""Waiting for several things at once: nothing is left behind, no cancel is swallowed."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.errors import EngineError, PhaseTimeout
from orchestrator.tasks import all_or_first_error, deadline, first_error, settle, uninterrupted
from orchestrator.testing import all_blocked
from orchestrator.types import State
from tests.harness import now


async def after(seconds: float, result: object) -> object:
    await asyncio.sleep(seconds)
    if isinstance(result, BaseException):
        raise result
    return result


async def test_results_come_in_the_order_of_the_calls() -> None:
    assert await all_or_first_error([after(3, "a"), after(1, "b"), after(2, "c")]) == list("abc")
    assert now() == 3


async def test_the_first_error_is_raised_alone_and_the_others_are_cancelled() -> None:
    error = EngineError("engine-1", "broke")
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("slow")

    with pytest.raises(EngineError) as caught:
        await all_or_first_error([slow(), after(2, error)])
    assert caught.value is error
    assert (now(), ended) == (2, ["slow"])


async def test_a_cancelled_fan_out_cancels_every_call() -> None:
    task = asyncio.create_task(all_or_first_error([after(60, 1), after(70, 2)]))
    await all_blocked()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert now() == 0


def test_an_error_of_ours_says_more_than_any_other_and_a_cancel_says_least() -> None:
    ours, other, cancel = EngineError("e", "x"), OSError("y"), asyncio.CancelledError()
    inner = BaseExceptionGroup("inner", [other, ours])
    assert first_error(BaseExceptionGroup("outer", [cancel, inner])) is ours
    assert first_error(BaseExceptionGroup("outer", [cancel, other])) is other
    assert first_error(cancel) is cancel
    assert first_error(other) is other


async def test_settle_waits_for_clean_up_and_keeps_errors_quiet() -> None:
    cleaned = asyncio.Event()

    async def with_clean_up() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(2)
            cleaned.set()

    tasks = [asyncio.create_task(with_clean_up()), asyncio.create_task(after(0, OSError("x")))]
    await all_blocked()
    await settle(tasks)
    assert cleaned.is_set()
    assert now() == 2
    assert all(t.done() for t in tasks)


async def test_settle_can_wait_without_cancelling() -> None:
    task = asyncio.create_task(after(5, "whole"))
    await settle([task], cancel=False)
    assert (task.result(), now()) == ("whole", 5)


async def test_a_critical_section_ends_whole_then_the_cancel_goes_on() -> None:
    done: list[float] = []

    async def section() -> None:
        await asyncio.sleep(4)
        done.append(now())

    task = asyncio.create_task(uninterrupted(section()))
    for at in (1, 2):  # a second Ctrl-C does not tear it either
        asyncio.get_running_loop().call_at(at, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [4]


async def test_a_critical_section_returns_and_raises_as_usual() -> None:
    assert await uninterrupted(after(1, "x")) == "x"
    with pytest.raises(OSError, match="y"):
        await uninterrupted(after(1, OSError("y")))


async def test_a_timeout_around_a_critical_section_strikes_after_it() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await uninterrupted(after(3, None))
    assert now() == 3


async def test_a_deadline_names_the_phase_the_seconds_and_who_is_missing() -> None:
    with pytest.raises(PhaseTimeout) as caught:
        async with deadline(State.PAUSING, 2.5, lambda: "pause of engine-1"):
            await asyncio.sleep(60)
    error = caught.value
    assert (error.phase, error.seconds, error.waiting_for) == ("PAUSING", 2.5, "pause of engine-1")
    assert "PAUSING took longer than 2.5 s; still waiting for pause of engine-1" in str(error)
    assert "--timeout-pausing" in str(error)
    assert now() == 2.5


async def test_a_timeout_of_somebody_else_is_not_taken_for_the_deadline() -> None:
    with pytest.raises(TimeoutError) as caught:
        async with deadline(State.SYNCING, 10):
            raise TimeoutError("the engine's own")
    assert not isinstance(caught.value, PhaseTimeout)


async def test_the_inner_deadline_keeps_its_name() -> None:
    with pytest.raises(PhaseTimeout, match="PAUSING"):
        async with deadline(State.STARTING, 10), deadline(State.PAUSING, 1):
            await asyncio.sleep(60)


async def test_a_cancel_inside_a_deadline_stays_a_cancel() -> None:
    async def phase() -> None:
        async with deadline(State.SYNCING, 10):
            await asyncio.sleep(60)

    task = asyncio.create_task(phase())
    await all_blocked()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert now() == 0
