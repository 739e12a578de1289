"""A source that starts from a state of another: no group lost, none trained twice.

Requests end in any order, batches are taken, policies are published, the state is noted, and the
process dies: then a new source goes on from what was noted last, and what was trained after that
is forgotten, as the trainer forgets it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from orchestrator.errors import ConfigError
from orchestrator.options import GenerationOptions
from orchestrator.rollouts import RolloutSource, SourceState
from orchestrator.tasks import settle
from orchestrator.testing import all_blocked, run
from orchestrator.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    PolicyVersion,
    Rollout,
    TokenSpan,
)
from tests.harness import PROMPTS


@dataclass(frozen=True)
class History:
    """What the trainer knows at a moment."""

    state: SourceState | None = None
    version: int = 0
    trained: tuple[int, ...] = ()
    discarded: tuple[int, ...] = ()


@dataclass
class Life:
    """One process, from a history on."""

    options: GenerationOptions
    begun: History
    requests: dict[str, GenerationRequest]
    """Every request of all lives, by id: one made again must be the same."""
    open: dict[str, asyncio.Future[Completion]] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.version = PolicyVersion(self.begun.version)
        self.trained, self.discarded = list(self.begun.trained), list(self.begun.discarded)
        self.source = RolloutSource(
            PROMPTS,
            self.options,
            self.generate,
            lambda: self.version,
            on_consumed=self.consumed,
            start=self.begun.state,
        )
        self.task = asyncio.create_task(self.source.run())

    async def generate(self, request: GenerationRequest) -> Completion:
        name = request.request_id
        assert name not in self.made, "one process makes a request once"
        assert self.requests.setdefault(name, request) == request
        self.made.add(name)
        self.open[name] = asyncio.get_running_loop().create_future()
        try:
            return await self.open[name]
        finally:
            del self.open[name]

    def consumed(self, rollout: Rollout, accepted: bool) -> None:
        if rollout.request.request_id.endswith(".0"):
            number = int(rollout.request.group[1:])
            (self.trained if accepted else self.discarded).append(number)

    def end(self, name: str) -> None:
        span = TokenSpan(self.version, 0, 1)
        done = Completion(name, "e", (1,), (0.0,), (span,), FinishReason.STOP)
        self.open[name].set_result(done)

    def history(self) -> History:
        state = self.source.state()
        waiting = [int(group[0].request.group[1:]) for group in state.waiting]
        used = [*self.trained, *self.discarded]
        every = [*used, *state.unfinished, *waiting]
        assert sorted(every) == list(range(state.next_group)), "each number is in one place"
        assert all(len(g) == self.options.group_size for g in state.waiting)
        return History(state, self.version, tuple(self.trained), tuple(self.discarded))

    async def die(self) -> None:
        await settle([self.task])
        await self.source.drain(0)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("end"), st.integers(0, 100)),
        st.tuples(st.just("take"), st.integers(1, 2)),
        st.tuples(st.sampled_from(["publish", "note", "die"]), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    actions,
    st.sampled_from([None, 0, 1]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([2, 3, 5]),
)
def test_every_group_is_trained_at_most_once_and_none_is_skipped(
    script: list[tuple[str, int]],
    max_staleness: int | None,
    group_size: int,
    max_in_flight: int,
    groups: int,
) -> None:
    options = GenerationOptions(
        max_tokens=1,
        group_size=group_size,
        prompts_per_step=1,
        max_in_flight=max_in_flight,
        buffer_size=groups * group_size,
        max_staleness=max_staleness,
    )

    async def story() -> None:
        requests: dict[str, GenerationRequest] = {}
        noted = History()
        life = Life(options, noted, requests)
        deaths = 0
        for action, value in script:
            await all_blocked()
            match action:
                case "end":
                    if life.open:
                        life.end(sorted(life.open)[value % len(life.open)])
                case "take":
                    taking = asyncio.create_task(life.source.take(value))
                    await all_blocked()
                    await settle([taking])  # takes what there is, or is cancelled
                case "publish":
                    life.version = PolicyVersion(life.version + 1)
                case "note":
                    noted = life.history()
                case "die":
                    await life.die()
                    life, deaths = Life(options, noted, requests), deaths + 1
            life.history()
        event(f"{min(deaths, 5)} deaths")
        goal = life.source.state().next_group
        await all_blocked()
        for _ in range(1000):
            if {*life.trained, *life.discarded} >= set(range(goal)):
                break
            if life.open:
                life.end(min(life.open))
            await all_blocked()
            taking = asyncio.create_task(life.source.take(1))
            await all_blocked()
            await settle([taking])
        used = [*life.trained, *life.discarded]
        assert len(used) == len(set(used)), "twice"
        assert set(used) >= set(range(goal)), "skipped"
        await life.die()

    run(story())


@pytest.mark.parametrize("change", [{"group_size": 3}, {"seed": 5}])
def test_other_seeds_than_those_of_the_checkpoint_are_refused(change: dict[str, int]) -> None:
    options = GenerationOptions(group_size=2, prompts_per_step=1, seed=1)

    async def generate(request: GenerationRequest) -> Completion:
        raise AssertionError

    def source(o: GenerationOptions, start: SourceState | None = None) -> RolloutSource:
        return RolloutSource(PROMPTS, o, generate, lambda: PolicyVersion(0), start=start)

    (name,) = change
    with pytest.raises(ConfigError, match=f"{name} was {getattr(options, name)} when"):
        source(replace(options, **change), source(options).state())


def test_more_waits_than_a_smaller_buffer_holds() -> None:
    """Nothing is admitted until the surplus was taken."""
    big = GenerationOptions(group_size=1, prompts_per_step=1, max_in_flight=9, buffer_size=4)

    async def story() -> None:
        requests: dict[str, GenerationRequest] = {}
        life = Life(big, History(), requests)
        await all_blocked()
        for name in sorted(life.open):
            life.end(name)
        await all_blocked()
        noted = life.history()
        await life.die()
        life = Life(replace(big, buffer_size=2), noted, requests)
        for expected in ([], [], [], ["r4.0"], ["r4.0", "r5.0"]):
            await all_blocked()
            assert sorted(life.open) == expected
            if len(life.trained) < 4:
                await life.source.take(1)
        assert life.trained == [0, 1, 2, 3]
        await life.die()

    run(story())
