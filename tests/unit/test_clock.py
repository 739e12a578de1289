"""The virtual clock: time costs nothing, order is by deadline, hangs and leaks are failures."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.testing import Deadlock, VirtualLoop, all_blocked, assert_no_leaked_tasks, run


def test_an_hour_costs_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run(main()) == 3600
    assert time.monotonic() - began < 5


async def test_the_unit_tests_run_on_virtual_time() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    await asyncio.sleep(0.1)
    await asyncio.sleep(0.2)
    assert loop.time() == 0.3  # exactly: the clock does not collect rounding errors


@pytest.mark.real_time
async def test_a_marked_test_runs_on_real_time() -> None:
    assert not isinstance(asyncio.get_running_loop(), VirtualLoop)


async def test_timeout_and_wait_for_strike_at_their_deadline() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(30):
            await asyncio.sleep(31)
    assert loop.time() == 30
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 12)
    assert loop.time() == 42
    async with asyncio.timeout(30):
        await asyncio.sleep(29)
    assert loop.time() == 71


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_sleepers_wake_in_the_order_of_their_deadlines(delays: list[int]) -> None:
    woken: list[tuple[int, float]] = []

    async def sleeper(delay: int) -> None:
        await asyncio.sleep(delay / 10)
        woken.append((delay, asyncio.get_running_loop().time()))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for delay in delays:
                group.create_task(sleeper(delay))

    run(main())
    assert [d for d, _ in woken] == sorted(delays)
    assert all(at == pytest.approx(delay / 10) for delay, at in woken)


async def test_time_stands_still_while_something_is_ready() -> None:
    timer_ran = asyncio.Event()
    asyncio.get_running_loop().call_later(0.001, timer_ran.set)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert not timer_ran.is_set()
    await timer_ran.wait()


def test_a_hang_is_a_deadlock_that_names_the_task_and_its_line() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(never(), name="the-stuck-one")
        await task

    began = time.monotonic()
    with pytest.raises(Deadlock) as caught:
        run(main())
    assert time.monotonic() - began < 5
    (line,) = [w for w in caught.value.waiting if w.startswith("the-stuck-one")]
    assert "never (unit/test_clock.py:" in line
    assert "Event.wait" in line
    assert len(caught.value.waiting) == 2


def test_an_endless_heartbeat_meets_the_horizon() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - the point of the test
            await asyncio.sleep(1)

    with pytest.raises(Deadlock, match="passed 100 s"):
        run(main(), horizon=100)


def test_a_leaked_task_fails_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().create_task(asyncio.sleep(5), name="orphan")

    with pytest.raises(AssertionError, match=r"(?s)1 tasks have no owner.*orphan"):
        run(main())


async def test_a_finished_task_is_no_leak() -> None:
    task = asyncio.create_task(asyncio.sleep(5))
    with pytest.raises(AssertionError, match="no owner"):
        assert_no_leaked_tasks()
    await task
    assert_no_leaked_tasks()


async def test_all_blocked_lets_everything_run_without_moving_time() -> None:
    loop = asyncio.get_running_loop()
    steps = 0

    async def busy() -> None:
        nonlocal steps
        for _ in range(100):
            steps += 1
            await asyncio.sleep(0)
        await asyncio.sleep(1)
        steps += 1

    task = asyncio.create_task(busy())
    await all_blocked()
    assert (steps, loop.time()) == (100, 0)
    await task
    assert (steps, loop.time()) == (101, 1)


async def test_virtual_time_waits_for_a_thread() -> None:
    loop = asyncio.get_running_loop()
    release = asyncio.Event()
    loop.call_later(5, release.set)
    real = await asyncio.to_thread(_blocking)
    assert real == "answer"
    assert loop.time() == 0
    await release.wait()
    assert loop.time() == 5


def _blocking() -> str:
    time.sleep(0.02)  # real work in a thread, not a wait of the test
    return "answer"
