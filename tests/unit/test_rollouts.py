"""Prompts in, whole groups of rollouts out: bounded, in order, none lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from orchestrator.errors import Closed, EngineError
from orchestrator.options import GenerationOptions
from orchestrator.rollouts import RolloutSource
from orchestrator.tasks import settle
from orchestrator.testing import all_blocked
from orchestrator.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    PolicyVersion,
    Rollout,
    TokenSpan,
)
from tests.harness import PROMPTS

OPTIONS = GenerationOptions(
    max_tokens=4, group_size=2, prompts_per_step=1, max_in_flight=4, buffer_size=6
)


class Desk:
    """Where requests arrive; the test ends them."""

    def __init__(self, options: GenerationOptions = OPTIONS) -> None:
        self.options = options
        self.version = PolicyVersion(0)
        self.requests: list[GenerationRequest] = []
        self.open: dict[str, asyncio.Future[Completion]] = {}
        self.most = 0
        self.finished: list[str] = []
        self.consumed: list[tuple[str, bool]] = []
        self.source = RolloutSource(
            PROMPTS,
            options,
            self.generate,
            lambda: self.version,
            lambda r: self.finished.append(r.request.request_id),
            lambda r, ok: self.consumed.append((r.request.request_id, ok)),
        )

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.open[request.request_id] = future
        self.most = max(self.most, len(self.open))
        try:
            return await future
        finally:
            del self.open[request.request_id]

    def end(self, *ids: str, reason: FinishReason = FinishReason.LENGTH) -> None:
        for request_id in ids:
            span = TokenSpan(self.version, 0, 4)
            self.open[request_id].set_result(
                Completion(request_id, "e", (1, 2, 3, 4), (0.0,) * 4, (span,), reason)
            )

    async def end_all(self) -> None:
        """Until nothing new is submitted any more."""
        await all_blocked()
        while self.open:
            self.end(*self.open)
            await all_blocked()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RolloutSource]:
        run = asyncio.create_task(self.source.run())
        await all_blocked()
        try:
            yield self.source
        finally:
            await settle([run])
            await self.source.drain(1)


def ids(rollouts: Sequence[Rollout]) -> list[str]:
    return [r.request.request_id for r in rollouts]


async def test_a_group_shares_its_prompt_and_no_two_samples_share_a_seed() -> None:
    desk = Desk(replace(OPTIONS, buffer_size=16))
    async with desk.running():
        await desk.end_all()
    groups = {r.group for r in desk.requests}
    assert len(desk.requests) == 16
    assert len(groups) == 8
    for group in groups:
        members = [r for r in desk.requests if r.group == group]
        assert len(members) == 2
        assert len({m.prompt for m in members}) == 1
    assert len({r.seed for r in desk.requests}) == 16
    assert len({r.request_id for r in desk.requests}) == 16
    assert {r.prompt for r in desk.requests} == set(PROMPTS)


async def test_another_seed_of_the_run_shares_no_seed_of_a_request() -> None:
    seeds = []
    for seed in (0, 1):
        desk = Desk(replace(OPTIONS, seed=seed))
        async with desk.running():
            await desk.end_all()
        seeds.append({r.seed for r in desk.requests})
    assert not seeds[0] & seeds[1]


async def test_never_more_requests_than_allowed_generate_at_once() -> None:
    desk = Desk(replace(OPTIONS, max_in_flight=3, buffer_size=12))
    async with desk.running() as source:
        assert (len(desk.open), source.in_flight) == (3, 3)
        await desk.end_all()
    assert desk.most == 3


async def test_generation_stops_when_the_buffer_is_full_and_goes_on_after_take() -> None:
    desk = Desk()
    async with desk.running() as source:
        await desk.end_all()
        assert len(desk.requests) == OPTIONS.buffer_size
        assert source.in_flight == 0
        assert ids(await source.take(1)) == ["r0.0", "r0.1"]
        await all_blocked()
        assert sorted(desk.open) == ["r3.0", "r3.1"]


async def test_take_waits_for_whole_groups_and_gives_the_oldest_first() -> None:
    desk = Desk()
    async with desk.running() as source:
        taking = asyncio.create_task(source.take(2))
        desk.end("r0.1", "r1.0", "r1.1")
        await all_blocked()
        assert not taking.done()
        desk.end("r0.0")
        assert ids(await taking) == ["r1.0", "r1.1", "r0.0", "r0.1"]


async def test_a_cancelled_take_loses_nothing() -> None:
    desk = Desk()
    async with desk.running() as source:
        desk.end("r0.0", "r0.1")
        taking = asyncio.create_task(source.take(2))
        await all_blocked()
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert ids(await source.take(1)) == ["r0.0", "r0.1"]


async def test_a_take_cancelled_in_the_moment_a_group_ends_loses_nothing() -> None:
    desk = Desk()
    async with desk.running() as source:
        taking = asyncio.create_task(source.take(1))
        await all_blocked()
        desk.end("r0.0", "r0.1")
        taken: list[str] = []
        for _ in range(12):  # at each turn of the loop until it has the group
            taking.cancel()
            try:
                taken += ids(await taking)
                break
            except asyncio.CancelledError:
                taking = asyncio.create_task(source.take(1))
                await asyncio.sleep(0)
        await settle([taking])
        await desk.end_all()
        while len(taken) < OPTIONS.buffer_size:
            taken += ids(await source.take(1))
        assert taken[:2] == ["r0.0", "r0.1"]
        assert len(set(taken)) == OPTIONS.buffer_size


async def test_a_take_cancelled_while_stale_groups_are_replaced_keeps_the_fresh_one() -> None:
    desk = Desk(replace(OPTIONS, max_staleness=0))
    async with desk.running() as source:
        desk.end("r0.0", "r0.1")
        await all_blocked()
        desk.version = PolicyVersion(1)
        desk.end("r1.0", "r1.1")
        taking = asyncio.create_task(source.take(2))
        await all_blocked()
        assert source.discarded == 2  # r0 was too stale, r1 is held by the taker
        taking.cancel()
        await settle([taking])
        assert ids(await source.take(1)) == ["r1.0", "r1.1"]


async def test_stale_groups_are_discarded_whole_counted_and_replaced() -> None:
    desk = Desk(replace(OPTIONS, max_staleness=1))
    async with desk.running() as source:
        desk.end("r0.0")
        desk.version = PolicyVersion(1)
        desk.end("r0.1", "r1.0", "r1.1")
        await all_blocked()
        desk.version = PolicyVersion(2)
        taken = await source.take(1)
        assert ids(taken) == ["r1.0", "r1.1"]
        assert [r.staleness for r in taken] == [1, 1]
        assert source.discarded == 2
        assert desk.consumed == [
            ("r0.0", False),
            ("r0.1", False),
            ("r1.0", True),
            ("r1.1", True),
        ]


async def test_discarded_groups_give_their_room_back() -> None:
    desk = Desk(replace(OPTIONS, max_staleness=0))
    async with desk.running() as source:
        await desk.end_all()
        desk.version = PolicyVersion(1)
        taking = asyncio.create_task(source.take(1))
        await all_blocked()
        assert source.discarded == OPTIONS.buffer_size
        assert len(desk.open) == 4
        desk.end("r3.0", "r3.1")
        assert ids(await taking) == ["r3.0", "r3.1"]


async def test_staleness_is_judged_when_the_batch_is_whole_not_when_a_group_ended() -> None:
    desk = Desk(replace(OPTIONS, max_staleness=0))
    async with desk.running() as source:
        taking = asyncio.create_task(source.take(2))
        desk.end("r0.0", "r0.1")
        await all_blocked()
        desk.version = PolicyVersion(1)
        desk.end("r1.0", "r1.1")
        await all_blocked()
        assert source.discarded == 2
        desk.end("r2.0", "r2.1")
        assert ids(await taking) == ["r1.0", "r1.1", "r2.0", "r2.1"]


async def test_a_request_that_fails_ends_the_run_and_the_wait_with_its_error() -> None:
    desk = Desk()
    run = asyncio.create_task(desk.source.run())
    taking = asyncio.create_task(desk.source.take(1))
    await all_blocked()
    desk.open["r0.1"].set_exception(EngineError("engine-0", "the prompt is too long"))
    for task in (run, taking):
        with pytest.raises(EngineError, match="prompt is too long"):
            await task
    await desk.source.drain(1)
    assert desk.open == {}


async def test_a_partial_rollout_is_handed_over_but_not_trained_on() -> None:
    desk = Desk()
    async with desk.running() as source:
        desk.end("r0.0", reason=FinishReason.ABORT)
        desk.end("r0.1", "r1.0", "r1.1")
        assert ids(await source.take(1)) == ["r1.0", "r1.1"]
        assert "r0.0" in desk.finished
        assert ("r0.0", False) in desk.consumed


async def test_draining_waits_for_what_ends_and_cancels_what_does_not() -> None:
    desk = Desk()
    run = asyncio.create_task(desk.source.run())
    await all_blocked()
    await settle([run])
    draining = asyncio.create_task(desk.source.drain(5))
    await all_blocked()
    desk.end("r0.0")
    await draining
    assert asyncio.get_running_loop().time() == 5
    assert (desk.finished, desk.open, desk.source.in_flight) == (["r0.0"], {}, 0)


async def test_a_closed_source_hands_out_whole_groups_then_says_closed() -> None:
    desk = Desk()
    async with desk.running():
        desk.end("r0.0", "r0.1", "r1.0")
        await all_blocked()
    assert ids(await desk.source.take(1)) == ["r0.0", "r0.1"]
    with pytest.raises(Closed):
        await desk.source.take(1)


async def test_closing_wakes_who_waits() -> None:
    desk = Desk()
    async with desk.running() as source:
        taking = asyncio.create_task(source.take(1))
        await all_blocked()
    with pytest.raises(Closed):
        await taking


async def test_nothing_is_submitted_while_draining() -> None:
    """A request that ends frees a slot; a stopping run must not fill it again."""
    desk = Desk()
    run = asyncio.create_task(desk.source.run())
    await all_blocked()
    before = len(desk.requests)
    draining = asyncio.create_task(desk.source.drain(5))
    await all_blocked()
    desk.end(*desk.open)
    await draining
    assert (len(desk.requests), desk.source.in_flight) == (before, 0)
    await settle([run])


def test_a_buffer_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="holds less than one batch"):
        Desk(replace(OPTIONS, prompts_per_step=4))


@pytest.mark.parametrize("name", ["max_tokens", "group_size", "prompts_per_step", "max_in_flight"])
def test_a_size_below_one_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Desk(replace(OPTIONS, **{name: 0}))


def test_no_prompts_are_refused() -> None:
    async def generate(request: GenerationRequest) -> Completion:
        raise AssertionError

    with pytest.raises(ValueError, match="no prompts"):
        RolloutSource((), OPTIONS, generate, lambda: PolicyVersion(0))
