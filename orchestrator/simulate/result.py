"""What a simulated run came to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution by the nearest-rank method; None where there is no value."""

    count: int
    p50: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of ``values``."""
        if not values:
            return cls(0, None, None, None)
        ordered = sorted(values)

        def rank(q: float) -> float:
            return ordered[max(0, math.ceil(q * len(ordered)) - 1)]

        return cls(len(ordered), rank(0.50), rank(0.99), ordered[-1])


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Seconds are virtual, but for those of a CPU. ``trace`` is equal for equal scenarios."""

    scenario: Mapping[str, Any]
    """What was asked for."""
    steps: int
    """Train steps done."""
    swaps: int
    """Swaps published and validated."""
    failed_swaps: int
    error: str | None
    """What ended the run; None when it was completed."""
    pause_s: Spread
    """From asking for a pause to the last replica's acknowledgement, one a swap."""
    commit_s: Spread
    """From then to the version being published."""
    stopped_s: Spread
    """From asking for a pause to the last first token."""
    waiting_s: Spread
    """What of ``stopped_s`` is more than the longest call of each phase, one after the other."""
    overhead_cpu_s: Spread
    """CPU seconds of the controller within ``stopped_s``: real ones, never equal twice."""
    tokens_written: int
    tokens_lost: int
    """Written by an engine and never handed over."""
    requests: int
    """Given to an engine."""
    requests_lost: int
    """Given to an engine and never answered to who asked."""
    faults: Mapping[str, int]
    """Planned, by kind."""
    faults_struck: Mapping[str, int]
    """That met somebody, by kind."""
    deaths: int
    recovery_s: Spread
    """From a replica's death or fence until it, or what replaces it, serves again."""
    still_out: int
    """Replicas that did not serve again before the run ended."""
    seconds: float
    """Of the run."""
    controller_cpu_s: float
    simulation_cpu_s: float
    collection_cpu_s: float
    """Of garbage collections that started in the controller's time; in neither of the others."""
    trace: str
    """SHA-256 over all events and calls with their virtual times."""
    broken: tuple[str, ...] = field(default=())
    """Invariants that did not hold."""

    @property
    def ok(self) -> bool:
        """Completed, no request lost, every invariant held."""
        return self.error is None and not self.broken and self.requests_lost == 0

    @property
    def controller_cpu_per_replica_step_s(self) -> float | None:
        """CPU seconds of the controller for one replica and one step."""
        count = self.steps * int(self.scenario["engines"])
        return self.controller_cpu_s / count if count else None

    def to_json(self) -> dict[str, Any]:
        """See docs/scaling.md."""
        return {
            "schema_version": SCHEMA,
            "ok": self.ok,
            **asdict(self),
            "controller_cpu_per_replica_step_s": self.controller_cpu_per_replica_step_s,
        }
