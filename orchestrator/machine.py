"""The swap machine: states, triggers, guards and history, on ``transitions``.

The table below is the whole truth; the diagram in the docs is printed from it
(``python -m orchestrator --show-machine``).

Why the synchronous ``Machine``: the asynchronous one runs long awaits inside transition
callbacks, where a second trigger cancels the first and task cancellation can be swallowed.
Here a transition is instantaneous, callbacks are short, and every await, deadline and
cancellation lives in the cycle that owns the machine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from transitions import EventData, Machine, MachineError

from orchestrator.errors import IllegalTransition
from orchestrator.types import State


class Trigger(StrEnum):
    """What may move the machine."""

    START = "start"
    PAUSE = "pause"
    SYNC = "sync"
    COMMIT = "commit"
    VALIDATE = "validate"
    VERIFY = "verify"
    FAULT = "fault"
    RECOVER = "recover"
    RETRY = "retry"
    NEXT = "next"
    STOP = "stop"
    FAIL = "fail"


class Guard(StrEnum):
    """What must be true for a trigger, asserted by the caller as a fact it has established."""

    CHANNEL_PROVED = "channel_proved"
    ALL_IDLE = "all_idle"
    ALL_APPLIED = "all_applied"
    ALL_RESUMED = "all_resumed"
    VERDICT = "verdict"
    ALL_SERVING = "all_serving"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    trigger: Trigger
    sources: tuple[State, ...]
    target: State
    guard: Guard | None = None
    meaning: str = ""


PHASES = (State.PAUSING, State.SYNCING, State.RESUMING, State.VALIDATING)
TERMINAL = (State.STOPPED, State.FAILED)
_LIVE = tuple(s for s in State if s not in TERMINAL)

TABLE: tuple[Rule, ...] = (
    Rule(
        Trigger.START,
        (State.STARTING,),
        State.GENERATING,
        Guard.CHANNEL_PROVED,
        "every replica is up and the channel carried the known pattern",
    ),
    Rule(
        Trigger.PAUSE,
        (State.GENERATING,),
        State.PAUSING,
        None,
        "train step done and a live request is long enough, or sync() was called",
    ),
    Rule(
        Trigger.SYNC,
        (State.PAUSING,),
        State.SYNCING,
        Guard.ALL_IDLE,
        "every serving replica acknowledged that it is idle",
    ),
    Rule(
        Trigger.COMMIT,
        (State.SYNCING,),
        State.RESUMING,
        Guard.ALL_APPLIED,
        "every serving replica has the new version: it is published",
    ),
    Rule(
        Trigger.VALIDATE,
        (State.RESUMING,),
        State.VALIDATING,
        Guard.ALL_RESUMED,
        "first tokens under the new version are out",
    ),
    Rule(
        Trigger.VERIFY,
        (State.VALIDATING,),
        State.GENERATING,
        Guard.VERDICT,
        "no check found a difference",
    ),
    Rule(
        Trigger.FAULT,
        (State.GENERATING, *PHASES),
        State.RECOVERING,
        None,
        "a phase failed or outlived its deadline, or a replica is to be resynced",
    ),
    Rule(
        Trigger.RECOVER,
        (State.RECOVERING,),
        State.GENERATING,
        Guard.ALL_SERVING,
        "whoever serves holds a committed version",
    ),
    Rule(
        Trigger.RETRY,
        (State.RECOVERING,),
        State.PAUSING,
        None,
        "a swap is tried again, by who serves and who may again",
    ),
    Rule(
        Trigger.NEXT,
        (State.RESUMING,),
        State.PAUSING,
        Guard.ALL_RESUMED,
        "rolling: these replicas go on under the new version, the next ones are swapped",
    ),
    Rule(Trigger.STOP, _LIVE, State.STOPPED, None, "the run is over or was interrupted"),
    Rule(Trigger.FAIL, _LIVE, State.FAILED, None, "no way on; everything is released"),
)


@dataclass(frozen=True, slots=True)
class Transition:
    """One entry of the history. ``seconds`` is the time spent in ``source``."""

    source: State
    target: State
    trigger: Trigger
    reason: str
    seconds: float


class _Place:
    """What ``transitions`` decorates; its own triggers would bypass :meth:`SwapMachine.fire`."""

    state: str
    trigger: Callable[..., bool]


class SwapMachine:
    """The state of one controller.

    ``on_transition`` is called after each move, in the caller's stack; it must not raise.
    ``clock`` returns seconds (the event loop's ``time`` under test).
    """

    def __init__(
        self,
        on_transition: Callable[[Transition], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        history: int = 4096,
    ) -> None:
        self._on_transition = on_transition
        self._clock = clock
        self._entered = clock()
        self._moving = False
        self.history: deque[Transition] = deque(maxlen=history)
        self._place = _Place()
        machine = Machine(
            model=self._place,
            states=[s.value for s in State],
            initial=State.STARTING.value,
            auto_transitions=False,
            send_event=True,
        )
        for rule in TABLE:
            machine.add_transition(
                rule.trigger.value,
                [s.value for s in rule.sources],
                rule.target.value,
                conditions=[self._holds(rule.guard)] if rule.guard else None,
            )

    @staticmethod
    def _holds(guard: Guard) -> Callable[[EventData], bool]:
        return lambda event: guard in event.kwargs["facts"]

    @property
    def state(self) -> State:
        """Where the machine is."""
        return State(self._place.state)

    def allowed(self) -> tuple[Trigger, ...]:
        """Triggers that the table has for the current state, guards aside."""
        return tuple(r.trigger for r in TABLE if self.state in r.sources)

    def fire(
        self, trigger: Trigger, *facts: Guard, reason: str = "", seconds: float | None = None
    ) -> Transition:
        """Move along ``trigger``; ``facts`` are the guards the caller has established.

        ``seconds``: how long the state that is left really lasted, where it ended before it could
        be told; the rest of the time counts for the next one.

        Raises IllegalTransition with the state and the reason; the machine has not moved then.
        """
        if self._moving:
            raise IllegalTransition(
                self.state, trigger, "another transition is running; observers must not fire"
            )
        source = self.state
        self._moving = True
        try:
            moved = self._place.trigger(trigger.value, facts=frozenset(facts))
        except MachineError:
            allowed = ", ".join(self.allowed()) or "nothing"
            raise IllegalTransition(source, trigger, f"allowed here: {allowed}") from None
        finally:
            self._moving = False
        if not moved:
            needed = next(r.guard for r in TABLE if r.trigger is trigger and source in r.sources)
            raise IllegalTransition(source, trigger, f"{needed} was not established")
        left = self._clock()
        if seconds is not None:
            left = min(left, self._entered + seconds)
        done = Transition(source, self.state, trigger, reason, left - self._entered)
        self._entered = left
        self.history.append(done)
        if self._on_transition is not None:
            self._moving = True
            try:
                self._on_transition(done)
            finally:
                self._moving = False
        return done


def mermaid() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.STARTING}"]
    for rule in TABLE:
        guard = f" [{rule.guard}]" if rule.guard else ""
        lines += [f"    {s} --> {rule.target}: {rule.trigger}{guard}" for s in rule.sources]
    lines += [f"    {s} --> [*]" for s in TERMINAL]
    return "\n".join(lines)


def describe() -> list[dict[str, Any]]:
    """The table as rows, for documentation."""
    return [
        {
            "trigger": r.trigger.value,
            "from": [s.value for s in r.sources],
            "to": r.target.value,
            "guard": r.guard.value if r.guard else None,
            "meaning": r.meaning,
        }
        for r in TABLE
    ]
