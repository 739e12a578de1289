"""Faults that a run is asked to suffer: what ``--inject`` takes. Standard library only.

::

    TARGET:KIND@STATE[:step=N][:seconds=S][:times=K]

    engine.1:crash@SYNCING:step=3     engine.*:slow@PAUSING:seconds=0.5     trainer:hang@STAGING

:mod:`orchestrator.injector` carries them out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.errors import ConfigError
from orchestrator.types import State

GRAMMAR = "TARGET:KIND@STATE[:step=N][:seconds=S][:times=K]"
STAGING = "STAGING"
PLACES = (
    State.GENERATING.value,
    STAGING,
    *(s.value for s in (State.PAUSING, State.SYNCING, State.RESUMING, State.VALIDATING)),
)
"""Where a fault may strike: on entry into a state, or as bytes set out before the pause."""
SLOW_S = 1.0
"""Seconds a slow process stands still, where nothing else is asked for."""

_TARGET = re.compile(r"trainer|engine\.([0-9]{1,6}|\*)(?:\.(core|actor))?")
_REPLICA = re.compile(r"engine-([0-9]+)(?:\.r[0-9]+)?")
_OPTIONS = ("step", "seconds", "times")


class FaultKind(StrEnum):
    """What happens to the processes of the target."""

    CRASH = "crash"
    """SIGKILL."""
    HANG = "hang"
    """SIGSTOP: they stand still until the end of the run."""
    SLOW = "slow"
    """SIGSTOP, and SIGCONT after ``seconds``."""


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault to inject; ``str`` of it parses back to an equal one."""

    target: str
    """``trainer``, ``engine.N`` or ``engine.*``; ``.core``: only what runs below the engine's
    actor, ``.actor``: only that."""
    kind: FaultKind
    place: str
    """One of PLACES."""
    step: int | None = None
    """Only in this step; None: in any."""
    seconds: float | None = None
    """How long a ``slow`` one stands still; None for the others."""
    times: int = 1
    """How often it strikes: once each time the place is entered."""

    @property
    def index(self) -> int | None:
        """Of the engine; None for the trainer and for all engines."""
        match = _TARGET.fullmatch(self.target)
        number = match[1] if match else None
        return None if number in (None, "*") else int(number or 0)

    @property
    def part(self) -> str:
        """``core``, ``actor``, or empty for the whole."""
        match = _TARGET.fullmatch(self.target)
        return (match[2] or "") if match else ""

    def concerns(self, actor: str) -> bool:
        """Whether ``actor`` is (one of) the target; ``engine-1.r2`` replaces ``engine-1``."""
        if self.target == "trainer":
            return actor == "trainer"
        replica = _REPLICA.fullmatch(actor)
        return replica is not None and self.index in (None, int(replica[1]))

    def problem(self, engines: int, steps: int) -> str | None:
        """Why it cannot strike in a run of ``engines`` replicas and ``steps`` steps, if so."""
        if self.index is not None and self.index >= engines:
            known = ", ".join([*(f"engine.{n}" for n in range(min(engines, 8))), "engine.*"])
            return f"{self} has no target: there are {known} and trainer"
        if self.step is not None and self.step > steps:
            return f"{self} never strikes: the steps of this run are 1 to {steps}"
        return None

    def __str__(self) -> str:
        words = [f"{self.target}:{self.kind}@{self.place}"]
        if self.step is not None:
            words.append(f"step={self.step}")
        if self.seconds is not None and self.seconds != SLOW_S:
            words.append(f"seconds={self.seconds!r}")
        if self.times != 1:
            words.append(f"times={self.times}")
        return ":".join(words)


def parse_injection(text: str) -> Injection:
    """``text`` in the grammar above (ConfigError, with what is known)."""
    head, *options = text.strip().split(":")
    if not options or "@" not in options[0]:
        raise ConfigError(f"{text!r} is not {GRAMMAR}: write for example engine.0:crash@SYNCING")
    target = re.sub(r"\.0+(?=[0-9])", ".", head)
    if not _TARGET.fullmatch(target):
        _refuse("target", head, ("engine.N", "engine.*", "trainer", "engine.N.core (or .actor)"))
    kind, _, place = options.pop(0).partition("@")
    if kind not in list(FaultKind):
        _refuse("kind", kind, list(FaultKind))
    if place not in PLACES:
        _refuse("state", place, PLACES)
    given: dict[str, str] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in _OPTIONS:
            _refuse("option", name, _OPTIONS)
        if name in given:
            raise ConfigError(f"{name} is given twice in {text!r}: drop one")
        given[name] = value
    slow = kind == FaultKind.SLOW
    if "seconds" in given and not slow:
        raise ConfigError(f"seconds={given['seconds']} belongs to slow, not to {kind}: drop it")
    seconds = SLOW_S
    if "seconds" in given:
        try:
            seconds = float(given["seconds"])
        except ValueError:
            seconds = math.nan
        if not (0 < seconds < math.inf):
            raise ConfigError(f"seconds={given['seconds']}: must be a number above 0")
    return Injection(
        target,
        FaultKind(kind),
        place,
        step=_count(given, "step"),
        seconds=seconds if slow else None,
        times=_count(given, "times") or 1,
    )


def _count(given: dict[str, str], name: str) -> int | None:
    if name not in given:
        return None
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", given[name]):
        raise ConfigError(f"{name}={given[name]}: must be a whole number from 1")
    return int(given[name])


def _refuse(what: str, word: str, known: Sequence[str]) -> None:
    raise ConfigError(f"unknown {what} {word!r}: known are {', '.join(known)}")
