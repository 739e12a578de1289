"""What observers are told. Standard library only.

An observer is a callable that takes one event. It is called in the event loop, in order,
and must not block; an exception in it is logged and never disturbs a swap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orchestrator.types import (
    EngineInfo,
    OpContext,
    Outcome,
    PolicyVersion,
    Rollout,
    State,
    SyncReport,
    TrainerInfo,
    TrainStats,
    WeightUpdate,
)


@dataclass(frozen=True, slots=True)
class Event:
    """Root of all events. ``at`` is Unix time, ``op`` the operation it belongs to."""

    at: float
    op: OpContext


@dataclass(frozen=True, slots=True)
class StateChanged(Event):
    """The machine moved. ``seconds`` is the time spent in ``source``."""

    source: State
    target: State
    trigger: str
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStarted(Event):
    """A replica is up."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class TrainerStarted(Event):
    """The trainer is up, and said what it is."""

    info: TrainerInfo


@dataclass(frozen=True, slots=True)
class RolloutFinished(Event):
    """A request ended (rollout or probe). Sent before it is consumed."""

    rollout: Rollout


@dataclass(frozen=True, slots=True)
class RolloutConsumed(Event):
    """A rollout was handed to the consumer, with its staleness, or refused as too stale."""

    rollout: Rollout
    accepted: bool = True


@dataclass(frozen=True, slots=True)
class TrainStepDone(Event):
    """The trainer made a step; ``rollouts`` are its batch with rewards filled in."""

    stats: TrainStats
    rollouts: tuple[Rollout, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefetchStarted(Event):
    """The bytes of ``update`` are about to travel, before the pause."""

    update: WeightUpdate


@dataclass(frozen=True, slots=True)
class SwapDone(Event):
    """A swap was committed and validated."""

    report: SyncReport


@dataclass(frozen=True, slots=True)
class SwapFailed(Event):
    """A swap failed; ``fenced`` replicas must not serve."""

    error: BaseException
    fenced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaDied(Event):
    """A process of the data plane is gone."""

    actor: str
    cause: str


@dataclass(frozen=True, slots=True)
class ReplicaAdmitted(Event):
    """A replica serves again: it holds ``version`` whole, and its digest said so."""

    engine: str
    version: PolicyVersion
    seconds: float
    """Since it was fenced, or since the one it replaces was lost."""


@dataclass(frozen=True, slots=True)
class FaultInjected(Event):
    """A fault that was asked for (``--inject``) has struck ``actor``.

    ``place``: the state it was entering, or STAGING. ``seconds``: how long it stands still,
    where that ends.
    """

    actor: str
    kind: str
    place: str
    step: int
    pids: tuple[int, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ActorLogged(Event):
    """A line from inside an actor."""

    actor: str
    level: str
    message: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointWritten(Event):
    """A checkpoint of the run is whole and on the disk, below ``path``."""

    step: int
    version: PolicyVersion
    path: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RunResumed(Event):
    """Every replica and the trainer are where the checkpoint of ``step`` was."""

    step: int
    version: PolicyVersion
    path: str


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """The last event of a run."""

    outcome: Outcome
    version: PolicyVersion
    error: BaseException | None = None


Observer = Callable[[Event], None]
