"""What each swap cost each request, by the times at which they wrote."""

from __future__ import annotations

import asyncio

import pytest

from actors.ledger import Ledger, Live
from orchestrator.types import GenerationRequest, PolicyVersion, Prompt

V0, V1 = PolicyVersion(0), PolicyVersion(1)


def live(name: str) -> Live:
    return Live(GenerationRequest(name, Prompt((1,)), 100))


def write(
    ledger: Ledger, request: Live, *times: float, version: PolicyVersion | None = None
) -> None:
    for at in times:
        ledger.wrote(request, [7], [-1.0], at, version)


async def test_a_stall_is_the_gap_over_the_swap_less_the_usual_gap() -> None:
    ledger, one, two = Ledger(), live("one"), live("two")
    ledger.add(one)
    ledger.add(two)
    write(ledger, one, 1.0, 1.1, 1.2)
    write(ledger, two, 1.2)
    swap = ledger.freeze("s1")
    swap.resumed(2.0)
    waiting = asyncio.ensure_future(swap.first_tokens())
    write(ledger, one, 2.2, 2.3)
    assert not waiting.done()
    write(ledger, two, 2.3)
    first = await waiting
    assert first.seconds == pytest.approx(0.2)
    assert first.stalls == pytest.approx((0.9, 1.0))
    assert [s.seconds for s in one.stalls] == pytest.approx([0.9])


async def test_a_request_that_ends_or_never_wrote_is_not_waited_for() -> None:
    ledger, ends, silent = Ledger(), live("ends"), live("silent")
    ledger.add(ends)
    ledger.add(silent)
    write(ledger, ends, 1.0)
    swap = ledger.freeze("s1")
    swap.resumed(2.0)
    ledger.remove(ends)
    first = await swap.first_tokens()
    assert (first.seconds, first.stalls) == (None, ())


async def test_tokens_written_before_the_resume_are_no_first_tokens() -> None:
    ledger, one = Ledger(), live("one")
    ledger.add(one)
    write(ledger, one, 1.0)
    swap = ledger.freeze("s1")
    write(ledger, one, 1.1)
    assert not swap.all_seen
    swap.resumed(2.0)
    write(ledger, one, 2.5)
    assert (await swap.first_tokens()).seconds == pytest.approx(0.5)


async def test_where_the_engine_core_swaps_by_itself_versions_tell_who_has_gone_through() -> None:
    ledger, before, after, new = Ledger(), live("before"), live("after"), live("new")
    for one in (before, after):
        ledger.add(one)
        write(ledger, one, 1.0, 1.1, version=V0)
    swap = ledger.expect("s1", V1, 1.1)
    write(ledger, before, 1.2, version=V0)
    write(ledger, before, 2.2, version=V1)  # before we hear that the swap is done
    write(ledger, before, 2.3, version=V1)
    ledger.add(new)
    write(ledger, new, 2.25, version=V1)
    waiting = asyncio.ensure_future(swap.first_tokens())
    swap.settle(ledger.live.values(), resumed_at=2.0)
    await asyncio.sleep(0)
    assert not waiting.done()
    write(ledger, new, 2.35, version=V1)
    write(ledger, after, 2.4, version=V1)
    first = await waiting
    assert first.seconds == pytest.approx(0.2)
    assert first.stalls == pytest.approx((0.9, 1.2))
    assert [len(one.stalls) for one in (before, after, new)] == [1, 1, 0]


async def test_a_token_of_the_step_under_way_that_comes_late_is_a_stall_too() -> None:
    ledger, one, late = Ledger(), live("one"), live("late")
    ledger.add(one)
    write(ledger, one, 1.0, 1.1, 1.2, version=V0)
    ledger.add(late)
    swap = ledger.expect("s1", V1, 1.2)
    write(ledger, one, 1.7, version=V0)  # of the step under way: 0.4 late
    write(ledger, late, 1.7, version=V0)  # its first: nobody knows whether that is late
    swap.settle(ledger.live.values(), resumed_at=1.7)
    write(ledger, one, 1.85, version=V1)  # 0.05 more
    write(ledger, late, 1.85, version=V1)
    usual = 0.1  # of ``one``; ``late`` has none and takes the median of all, as it is then
    stalls = (await swap.first_tokens()).stalls
    assert stalls == pytest.approx((0.5 - usual, 0.15 - usual))
    assert ledger.written == 7


@pytest.mark.parametrize(
    ("before", "asked_at", "late", "stall"),
    [
        # Being late does not become usual.
        pytest.param((1.0, 1.1), 1.1, 2.1, 0.9, id="young"),
        # Others were prefilled, and the gap was almost over: not the swap's doing.
        pytest.param((1.0, 1.1, 1.2), 1.69, 1.7, 0.01, id="asked-late"),
    ],
)
async def test_a_late_token_costs_what_is_not_usual_and_came_after_the_asking(
    before: tuple[float, ...], asked_at: float, late: float, stall: float
) -> None:
    ledger, one = Ledger(), live("one")
    ledger.add(one)
    write(ledger, one, *before, version=V0)
    swap = ledger.expect("s1", V1, asked_at)
    write(ledger, one, late, version=V0)
    swap.settle(ledger.live.values(), resumed_at=late)
    write(ledger, one, late + 0.1, version=V1)
    assert (await swap.first_tokens()).stalls == pytest.approx((stall,))


async def test_a_request_that_ends_behind_a_swap_we_have_not_heard_of_counts() -> None:
    ledger, one = Ledger(), live("one")
    ledger.add(one)
    write(ledger, one, 1.0, version=V0)
    swap = ledger.expect("s1", V1, 1.0)
    write(ledger, one, 2.0, version=V1)
    ledger.remove(one)
    swap.settle(ledger.live.values(), resumed_at=1.9)
    first = await swap.first_tokens()
    assert (first.seconds, first.stalls) == (pytest.approx(0.1), (1.0,))


def test_a_swap_that_did_not_come_leaves_no_trace() -> None:
    ledger, one = Ledger(), live("one")
    ledger.add(one)
    write(ledger, one, 1.0, version=V0)
    ledger.forget(ledger.expect("s1", V1, 1.0))
    write(ledger, one, 1.5, version=V0)
    assert ledger.swap is None
    assert (one.stalls, list(one.gaps)) == ([], [0.5])
