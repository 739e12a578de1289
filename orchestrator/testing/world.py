"""What the fakes of one test share: the call log, the faults, the wire, the checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.testing.channel import FakeChannel
from orchestrator.testing.faults import Faults


@dataclass(slots=True, eq=False)
class Call:
    """One call of a fake's method. Seconds are virtual; ``seq`` orders begins and ends."""

    seq: int
    at: float
    actor: str
    method: str
    args: tuple[object, ...]
    nth: int
    """Number of this call of this method at this actor, from 1."""
    ended: float | None = None
    ended_seq: int | None = None
    error: BaseException | None = None
    """What it raised (CancelledError too); None while it runs and when it returned."""

    @property
    def ok(self) -> bool:
        """Whether it returned."""
        return self.ended is not None and self.error is None

    def __str__(self) -> str:
        end = "..." if self.ended is None else f"{self.ended:g}"
        failed = f" !{type(self.error).__name__}" if self.error else ""
        return f"{self.at:g}-{end} {self.actor}.{self.method}{failed}"


@dataclass(slots=True)
class FakeWorld:
    """Shared state of the fakes of one test."""

    faults: Faults = field(default_factory=Faults)
    tensor_seconds: float = 0.001
    """Virtual seconds one tensor takes on the wire."""
    commit_seconds: float = 0.0001
    """Virtual seconds to apply one tensor that was prefetched."""
    log: list[Call] = field(default_factory=list)
    """Every call, in the order they began; none with ``keep_log`` off."""
    keep_log: bool = True
    """Off for long runs of many engines: no call stays in memory."""
    told: dict[str, set[str]] = field(default_factory=dict)
    """Receivers that were told of an update, by its sync id."""
    violations: list[str] = field(default_factory=list)
    """Every breach of a protocol by the code under test; a good test ends with none."""
    checkpoints: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Saved weights by path."""
    channels: dict[int, FakeChannel] = field(default_factory=dict)
    """Open rendezvous by port. Empty when nothing leaks."""
    _seq: int = 0
    _port: int = 40_000

    def tick(self) -> int:
        """Next sequence number."""
        self._seq += 1
        return self._seq

    def next_port(self) -> int:
        """A port nobody has used."""
        self._port += 1
        return self._port

    def calls(self, method: str | None = None, actor: str | None = None) -> list[Call]:
        """The log, filtered, in the order the calls began."""
        return [
            c
            for c in self.log
            if (method is None or c.method == method) and (actor is None or c.actor == actor)
        ]

    def methods(self, actor: str) -> list[str]:
        """Names of the methods called at ``actor``, in order."""
        return [c.method for c in self.log if c.actor == actor]

    def running(self) -> list[Call]:
        """Calls that have not ended."""
        return [c for c in self.log if c.ended is None]
