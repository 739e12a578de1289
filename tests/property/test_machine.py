"""The swap machine against an independent model of its table, in any order of triggers."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orchestrator.errors import IllegalTransition
from orchestrator.machine import Guard, SwapMachine, Transition, Trigger
from orchestrator.types import State

RING = ("STARTING", "GENERATING", "PAUSING", "SYNCING", "RESUMING", "VALIDATING", "GENERATING")
STEP = {"start": 0, "pause": 1, "sync": 2, "commit": 3, "validate": 4, "verify": 5}
NEEDS = {
    "start": "channel_proved",
    "sync": "all_idle",
    "commit": "all_applied",
    "validate": "all_resumed",
    "next": "all_resumed",
    "verify": "verdict",
    "recover": "all_serving",
}


def model(state: str, trigger: str, facts: frozenset[str]) -> str | None:
    """Where ``trigger`` leads, None where it is refused. Independent of the table."""
    if state in ("STOPPED", "FAILED"):
        return None
    if NEEDS.get(trigger) not in (None, *facts):
        return None
    match trigger:
        case "stop":
            return "STOPPED"
        case "fail":
            return "FAILED"
        case "fault":
            return None if state in ("STARTING", "RECOVERING") else "RECOVERING"
        case "next":
            return "PAUSING" if state == "RESUMING" else None
        case "retry":
            return "PAUSING" if state == "RECOVERING" else None
        case "recover":
            return "GENERATING" if state == "RECOVERING" else None
    step = STEP[trigger]
    return RING[step + 1] if RING[step] == state else None


class SwapMachineModel(RuleBasedStateMachine):
    """Fires anything anywhere; a swap counts when it comes back from VALIDATING."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.told: list[Transition] = []
        self.machine = SwapMachine(self.told.append, clock=lambda: self.now)
        self.expected = "STARTING"
        self.path = ["STARTING"]
        self.swaps = 0

    @rule(trigger=st.sampled_from(Trigger), facts=st.frozensets(st.sampled_from(Guard)))
    def anything(self, trigger: Trigger, facts: frozenset[Guard]) -> None:
        self._fire(trigger, facts)

    @precondition(lambda self: self.expected in RING)
    @rule(seconds=st.floats(0, 10))
    def the_next_step_of_a_swap(self, seconds: float) -> None:
        self.now += seconds
        trigger = next(t for t, step in STEP.items() if RING[step] == self.expected)
        self._fire(Trigger(trigger), frozenset(Guard))

    @precondition(lambda self: self.expected == "RECOVERING")
    @rule()
    def recover(self) -> None:
        self._fire(Trigger.RECOVER, frozenset({Guard.ALL_SERVING}))

    def _fire(self, trigger: Trigger, facts: frozenset[Guard]) -> None:
        target = model(self.expected, trigger.value, frozenset(g.value for g in facts))
        try:
            done = self.machine.fire(trigger, *facts)
        except IllegalTransition as error:
            assert target is None, f"{trigger} was refused in {self.expected}: {error}"
            assert (error.state, error.trigger) == (self.expected, trigger.value)
            return
        assert target is not None, f"{trigger} was taken in {self.expected}"
        assert (done.source.value, done.target.value) == (self.expected, target)
        if trigger is Trigger.VERIFY:
            self.swaps += 1
        self.expected = target
        self.path.append(target)

    @invariant()
    def state_is_the_models(self) -> None:
        assert self.machine.state is State(self.expected)

    @invariant()
    def history_and_observer_saw_the_same_path(self) -> None:
        assert list(self.machine.history) == self.told
        assert [t.target.value for t in self.told] == self.path[1:]

    @invariant()
    def time_adds_up(self) -> None:
        assert sum(t.seconds for t in self.told) <= self.now + 1e-6

    @invariant()
    def what_is_allowed_is_what_is_taken_with_every_fact(self) -> None:
        every = frozenset(g.value for g in Guard)
        allowed = {t.value for t in self.machine.allowed()}
        assert allowed == {t.value for t in Trigger if model(self.expected, t.value, every)}

    @invariant()
    def a_swap_has_one_pause_and_one_commit(self) -> None:
        triggers = [t.trigger for t in self.told]
        assert triggers.count(Trigger.PAUSE) >= triggers.count(Trigger.COMMIT) >= self.swaps


TestSwapMachine = SwapMachineModel.TestCase
TestSwapMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
