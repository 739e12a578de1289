"""The way into a replica."""

from __future__ import annotations

import asyncio

from actors.gate import Gate
from orchestrator.testing import all_blocked


async def test_shutting_waits_for_who_is_half_way_through() -> None:
    gate = Gate()
    with gate.entering():
        with gate.entering():
            shutting = asyncio.ensure_future(gate.shut())
            await all_blocked()
            assert gate.is_shut
        await all_blocked()
        assert not shutting.done(), "one of two is still on its way"
    async with asyncio.timeout(1):
        await shutting


async def test_who_is_held_is_let_in_or_sent_away() -> None:
    gate = Gate()
    await gate.shut()
    with gate.holding("a") as a, gate.holding("b") as b:
        assert (gate.held, gate.send_away()) == (2, 2)
        gate.open()
        assert (a.result(), b.result()) == (False, False), "the first word counts"
    assert gate.held == 0
    await gate.shut()
    with gate.holding("c") as c:
        gate.open()
        assert c.result() is True and not gate.is_shut


async def test_a_held_request_that_is_cancelled_keeps_no_place() -> None:
    gate = Gate()
    await gate.shut()

    async def request() -> None:
        with gate.holding("a") as go:
            await go

    waiting = asyncio.ensure_future(request())
    await all_blocked()
    assert gate.held == 1
    waiting.cancel()
    await asyncio.wait({waiting})
    assert (gate.held, gate.send_away()) == (0, 0)
    gate.open()
