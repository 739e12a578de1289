"""The swap machine: what is legal, what is refused and why, what is remembered."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest

from orchestrator.errors import IllegalTransition
from orchestrator.machine import (
    PHASES,
    TABLE,
    TERMINAL,
    Guard,
    SwapMachine,
    Transition,
    Trigger,
    describe,
    mermaid,
)
from orchestrator.types import State

HAPPY = (
    (Trigger.START, Guard.CHANNEL_PROVED, State.GENERATING),
    (Trigger.PAUSE, None, State.PAUSING),
    (Trigger.SYNC, Guard.ALL_IDLE, State.SYNCING),
    (Trigger.COMMIT, Guard.ALL_APPLIED, State.RESUMING),
    (Trigger.VALIDATE, Guard.ALL_RESUMED, State.VALIDATING),
    (Trigger.VERIFY, Guard.VERDICT, State.GENERATING),
)
# Written by hand, not derived from TABLE: (state, trigger) -> (guard, target).
MODEL: dict[tuple[str, str], tuple[str | None, str]] = {
    ("STARTING", "start"): ("channel_proved", "GENERATING"),
    ("GENERATING", "pause"): (None, "PAUSING"),
    ("PAUSING", "sync"): ("all_idle", "SYNCING"),
    ("SYNCING", "commit"): ("all_applied", "RESUMING"),
    ("RESUMING", "validate"): ("all_resumed", "VALIDATING"),
    ("VALIDATING", "verify"): ("verdict", "GENERATING"),
    ("RECOVERING", "recover"): ("all_serving", "GENERATING"),
    ("RECOVERING", "retry"): (None, "PAUSING"),
    ("RESUMING", "next"): ("all_resumed", "PAUSING"),
    **{
        (state, "fault"): (None, "RECOVERING")
        for state in ("GENERATING", "PAUSING", "SYNCING", "RESUMING", "VALIDATING")
    },
    **{
        (state, trigger): (None, target)
        for state in (
            "STARTING",
            "GENERATING",
            "PAUSING",
            "SYNCING",
            "RESUMING",
            "VALIDATING",
            "RECOVERING",
        )
        for trigger, target in (("stop", "STOPPED"), ("fail", "FAILED"))
    },
}


def at(state: State) -> SwapMachine:
    """A machine in ``state``, reached by legal moves."""
    machine = SwapMachine()
    for trigger, guard, target in HAPPY:
        if machine.state is state:
            return machine
        machine.fire(trigger, *([guard] if guard else []))
        assert machine.state is target
    if machine.state is state:
        return machine
    by = {
        State.RECOVERING: Trigger.FAULT,
        State.STOPPED: Trigger.STOP,
        State.FAILED: Trigger.FAIL,
    }[state]
    machine.fire(by)
    assert machine.state is state
    return machine


def test_a_swap_goes_round_and_comes_back_to_generating() -> None:
    machine = SwapMachine()
    for trigger, guard, target in HAPPY:
        machine.fire(trigger, *([guard] if guard else []))
        assert machine.state is target
    for trigger, guard, target in HAPPY[1:]:
        machine.fire(trigger, *([guard] if guard else []))
        assert machine.state is target
    assert [t.trigger for t in machine.history] == [t for t, _, _ in HAPPY + HAPPY[1:]]


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("trigger", list(Trigger))
def test_every_pair_of_state_and_trigger_moves_or_is_refused_as_the_model_says(
    state: State, trigger: Trigger
) -> None:
    machine = at(state)
    moves = len(machine.history)
    legal = MODEL.get((state.value, trigger.value))
    if legal is None:
        with pytest.raises(IllegalTransition) as caught:
            machine.fire(trigger, *Guard)
        assert (caught.value.state, caught.value.trigger) == (state.value, trigger.value)
        assert f"cannot {trigger} while {state}" in str(caught.value)
        assert (machine.state, len(machine.history)) == (state, moves)
        return
    guard, target = legal
    if guard is not None:
        others = [g for g in Guard if g.value != guard]
        with pytest.raises(IllegalTransition, match=f"{guard} was not established"):
            machine.fire(trigger, *others)
        assert (machine.state, len(machine.history)) == (state, moves)
    done = machine.fire(trigger, *([Guard(guard)] if guard else []))
    assert (done.source, done.target.value, machine.state.value) == (state, target, target)


def test_pausing_twice_is_refused_and_names_what_is_allowed() -> None:
    machine = at(State.PAUSING)
    with pytest.raises(IllegalTransition, match=r"cannot pause while PAUSING.*sync, fault"):
        machine.fire(Trigger.PAUSE)
    machine.fire(Trigger.SYNC, Guard.ALL_IDLE)
    assert machine.state is State.SYNCING


def test_resuming_before_a_pause_is_refused() -> None:
    machine = at(State.GENERATING)
    with pytest.raises(IllegalTransition, match="cannot validate while GENERATING"):
        machine.fire(Trigger.VALIDATE, Guard.ALL_RESUMED)
    with pytest.raises(IllegalTransition, match="cannot commit while GENERATING"):
        machine.fire(Trigger.COMMIT, Guard.ALL_APPLIED)
    assert machine.state is State.GENERATING


def test_a_thousand_random_orders_of_triggers_agree_with_the_model() -> None:
    for seed in range(1000):
        rng = random.Random(seed)
        told: list[Transition] = []
        machine = SwapMachine(told.append)
        state, moves = "STARTING", 0
        for _ in range(30):
            trigger = rng.choice(list(Trigger))
            facts = [g for g in Guard if rng.random() < 0.7]
            guard, target = MODEL.get((state, trigger.value), ("never", ""))
            if guard is None or guard in facts:
                machine.fire(trigger, *facts)
                state, moves = target, moves + 1
            else:
                with pytest.raises(IllegalTransition):
                    machine.fire(trigger, *facts)
            assert machine.state.value == state
            assert len(machine.history) == len(told) == moves
        assert list(machine.history) == told
        for before, after in itertools.pairwise(told):
            assert before.target is after.source


def test_a_refused_trigger_forgets_nothing_that_happened_before() -> None:
    machine = at(State.SYNCING)
    before = list(machine.history)
    for trigger in (Trigger.PAUSE, Trigger.START, Trigger.VERIFY):
        with pytest.raises(IllegalTransition):
            machine.fire(trigger, *Guard)
    assert list(machine.history) == before
    machine.fire(Trigger.COMMIT, Guard.ALL_APPLIED)
    assert machine.state is State.RESUMING


@pytest.mark.parametrize("state", TERMINAL)
def test_nothing_leads_out_of_an_end(state: State) -> None:
    machine = at(state)
    assert machine.allowed() == ()
    for trigger in Trigger:
        with pytest.raises(IllegalTransition, match="allowed here: nothing"):
            machine.fire(trigger, *Guard)


def test_an_observer_that_fires_is_refused_and_the_move_stands() -> None:
    refused: list[IllegalTransition] = []

    def meddle(move: Transition) -> None:
        try:
            machine.fire(Trigger.STOP)
        except IllegalTransition as error:
            refused.append(error)

    machine = SwapMachine(meddle)
    machine.fire(Trigger.START, Guard.CHANNEL_PROVED)
    assert machine.state is State.GENERATING
    assert "observers must not fire" in str(refused[0])
    machine.fire(Trigger.PAUSE)
    assert machine.state is State.PAUSING


def test_history_has_the_seconds_spent_and_the_reason() -> None:
    times = iter([10.0, 12.5, 13.0])
    machine = SwapMachine(clock=lambda: next(times))
    machine.fire(Trigger.START, Guard.CHANNEL_PROVED)
    machine.fire(Trigger.PAUSE, reason="version 1")
    assert [(t.seconds, t.reason) for t in machine.history] == [(2.5, ""), (0.5, "version 1")]


def test_history_is_bounded() -> None:
    machine = SwapMachine(history=3)
    machine.fire(Trigger.START, Guard.CHANNEL_PROVED)
    for _ in range(10):
        machine.fire(Trigger.FAULT)
        machine.fire(Trigger.RECOVER, Guard.ALL_SERVING)
    assert len(machine.history) == 3


def test_every_phase_may_fail_and_every_live_state_may_end() -> None:
    for phase in PHASES:
        assert Trigger.FAULT in at(phase).allowed()
    for state in State:
        assert (Trigger.STOP in at(state).allowed()) is (state not in TERMINAL)


def test_the_diagram_has_exactly_the_edges_of_the_model() -> None:
    edges = {
        (source, trigger): (guard or None, target)
        for source, target, trigger, guard in re.findall(
            r"^    (\w+) --> (\w+): (\w+)(?: \[(\w+)\])?$", mermaid(), re.M
        )
    }
    assert edges == MODEL
    assert mermaid().startswith("stateDiagram-v2\n    [*] --> STARTING\n")


def test_the_table_as_rows_has_a_meaning_for_each_rule() -> None:
    rows = describe()
    assert [r["trigger"] for r in rows] == [r.trigger.value for r in TABLE]
    assert all(r["meaning"] for r in rows)


def test_the_documentation_embeds_the_diagram_of_the_table() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "machine.md").read_text()
    assert f"```mermaid\n{mermaid()}\n```" in page
    for rule in TABLE:
        assert rule.meaning in page
