"""Which faults a simulated run has: the grammar of ``--faults``, and the plan made from it.

::

    SPEC   = RULE {"," RULE}
    RULE   = KIND "=" AMOUNT ["x" FACTOR]
    KIND   = "crash" | "hang" | "flip" | "slow" | "trainer-crash"
    AMOUNT = N      exactly so many, spread evenly over the steps
           | P "%"  this share of all engine-steps (of the steps for trainer-crash), by chance

``crash=300,hang=1%,flip=20,slow=5x8``: 300 engines die, in one of a hundred engine-steps a control
call never answers, 20 times a tensor arrives wrong, 5 calls take eight times as long.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.errors import ConfigError


class FaultKind(StrEnum):
    """What goes wrong."""

    CRASH = "crash"
    """The engine's process dies: while it decodes, or inside a call of a swap."""
    HANG = "hang"
    """A call of a swap never answers; the engine lives on."""
    FLIP = "flip"
    """One tensor arrives with one bit inverted, and nobody says so."""
    SLOW = "slow"
    """A call of a swap takes FACTOR times as long."""
    TRAINER_CRASH = "trainer-crash"
    """The trainer's process dies: while it trains, or inside a call of a swap."""


SLOW_FACTOR = 10.0
"""FACTOR where none is given."""
DECODING = ""
"""The moment of a fault that strikes between swaps."""
_SWAP_CALLS = (
    "pause",
    "start_update",
    "receive_update",
    "finish_update",
    "resume",
    "wait_first_tokens",
    "digests",
)
_TRAINER_MOMENTS = (DECODING, "stage")
_RULE = re.compile(
    r"(?P<kind>[a-z-]+)\s*=\s*(?:(?P<count>\d+)|(?P<percent>\d+(?:\.\d*)?|\.\d+)%)"
    r"(?:x(?P<factor>\d+(?:\.\d+)?))?"
)


@dataclass(frozen=True, slots=True)
class FaultRule:
    """One item of ``--faults``: ``count`` of a kind, or a ``rate`` per engine-step."""

    kind: FaultKind
    count: int | None = None
    rate: float | None = None
    """Probability in [0, 1]."""
    factor: float = SLOW_FACTOR
    """Of ``slow``."""

    def __str__(self) -> str:
        amount = str(self.count) if self.rate is None else f"{100 * self.rate:g}%"
        factor = f"x{self.factor:g}" if self.kind is FaultKind.SLOW else ""
        return f"{self.kind}={amount}{factor}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault."""

    kind: FaultKind
    slot: int
    """Number of the engine that is to have it."""
    moment: str
    """Method in whose next call it strikes; :data:`DECODING`: while the trainer trains."""
    share: float
    """How far into the call or the training, in [0, 1)."""
    factor: float


def parse_faults(spec: str) -> tuple[FaultRule, ...]:
    """Rules of a SPEC, empty for an empty one. ConfigError names the item and what is wrong."""
    return tuple(_rule(item.strip()) for item in spec.split(",")) if spec.strip() else ()


def _rule(item: str) -> FaultRule:
    found = _RULE.fullmatch(item)
    if found is None:
        raise ConfigError(
            f"--faults: {item!r} is not KIND=COUNT or KIND=PERCENT%, for example crash=3 or hang=1%"
        )
    kinds = [kind.value for kind in FaultKind]
    if found["kind"] not in kinds:
        raise ConfigError(f"--faults: {found['kind']!r} is none of {', '.join(kinds)}")
    kind = FaultKind(found["kind"])
    if found["factor"] is not None and kind is not FaultKind.SLOW:
        raise ConfigError(f"--faults: {item!r}: only slow has a factor (slow=5x{found['factor']})")
    factor = float(found["factor"] or SLOW_FACTOR)
    if factor < 1:
        raise ConfigError(f"--faults: {item!r}: a call that is slow takes at least 1 times as long")
    if found["count"] is not None:
        return FaultRule(kind, count=int(found["count"]), factor=factor)
    rate = float(found["percent"]) / 100
    if rate > 1:
        raise ConfigError(f"--faults: {item!r}: at most 100% of the engine-steps can fail")
    return FaultRule(kind, rate=rate, factor=factor)


def plan(
    rules: Sequence[FaultRule], engines: int, steps: int, seed: int, *, prefetched: bool
) -> tuple[tuple[Fault, ...], ...]:
    """The faults of each step, in the order they are dealt out. ``prefetched``: bytes come first.

    Engines of one rule and step differ while there are enough.
    """
    rng = random.Random(f"{seed}/faults")
    calls = (*(("prefetch",) if prefetched else ()), *_SWAP_CALLS)
    found: list[list[Fault]] = [[] for _ in range(steps)]
    for rule in rules:
        for step, wanted in enumerate(_amounts(rule, engines, steps, rng)):
            slots: list[int] = []
            while len(slots) < wanted:
                slots += rng.sample(range(engines), min(engines, wanted - len(slots)))
            found[step] += [_fault(rule, slot, calls, rng) for slot in slots]
    return tuple(map(tuple, found))


def _amounts(rule: FaultRule, engines: int, steps: int, rng: random.Random) -> list[int]:
    amounts = [0] * steps
    if rule.rate is None:
        count = rule.count or 0
        for n in range(count):
            amounts[int((n + rng.random()) * steps / count)] += 1
        return amounts
    chances = 1 if rule.kind is FaultKind.TRAINER_CRASH else engines
    return [sum(rng.random() < rule.rate for _ in range(chances)) for _ in amounts]


def _fault(rule: FaultRule, slot: int, calls: tuple[str, ...], rng: random.Random) -> Fault:
    match rule.kind:
        case FaultKind.CRASH:
            # As often between swaps as in them: else hardly one would meet a swap.
            moment = rng.choice((DECODING, rng.choice(calls)))
        case FaultKind.FLIP:
            moment = "prefetch" if "prefetch" in calls else "receive_update"
        case FaultKind.TRAINER_CRASH:
            moment = rng.choice(_TRAINER_MOMENTS)
        case _:
            moment = rng.choice(calls)
    return Fault(rule.kind, slot, moment, rng.random(), rule.factor)
