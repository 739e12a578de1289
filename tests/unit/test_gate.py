"""The way into a replica, and digests that several workers must agree on."""

from __future__ import annotations

import asyncio

import pytest

from actors.gate import Gate
from actors.weights import same_on_all
from orchestrator.errors import TransferError
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


def test_workers_that_received_different_bytes_are_named_with_the_tensor() -> None:
    same = {"w": "1", "b": "2"}
    assert same_on_all("e", {3: same, 4: dict(same)}) == same
    with pytest.raises(TransferError, match=r"ranks 3 and 5 of engine e received.*: w$"):
        same_on_all("e", {3: same, 4: dict(same), 5: {**same, "w": "x"}})
    with pytest.raises(TransferError, match="ranks 3 and 4"):
        same_on_all("e", {3: same, 4: {**same, "more": "3"}})
