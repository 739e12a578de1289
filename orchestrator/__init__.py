"""midflight: swaps a policy's weights inside running engines, and proves each swap."""

from importlib import import_module
from typing import TYPE_CHECKING

from orchestrator.errors import (
    ChannelError,
    Closed,
    ConfigError,
    EngineDied,
    EngineError,
    IllegalTransition,
    MidflightError,
    PhaseTimeout,
    StaleRollout,
    SyncBusy,
    SyncError,
    TrainerDied,
    TrainerError,
    TrainingDiverged,
    TransferError,
    ValidationFailed,
)
from orchestrator.events import (
    ActorLogged,
    CheckpointWritten,
    EngineStarted,
    Event,
    FaultInjected,
    Observer,
    PrefetchStarted,
    ReplicaAdmitted,
    ReplicaDied,
    RolloutConsumed,
    RolloutFinished,
    RunEnded,
    RunResumed,
    StateChanged,
    SwapDone,
    SwapFailed,
    TrainerStarted,
    TrainStepDone,
)
from orchestrator.options import (
    GenerationOptions,
    RecoveryOptions,
    SwapOptions,
    ValidationOptions,
)
from orchestrator.protocols import (
    Digests,
    Engine,
    EngineFactory,
    EngineMaker,
    FirstTokens,
    Resumable,
    Scorer,
    Trainer,
    TrainerMaker,
    WeightSender,
)
from orchestrator.types import (
    ChannelSpec,
    CheckResult,
    Completion,
    EngineInfo,
    EngineStatus,
    FinishReason,
    GenerationRequest,
    KVPolicy,
    OpContext,
    Outcome,
    PauseAck,
    PauseMode,
    PhaseSeconds,
    PhaseTimeouts,
    PolicyVersion,
    Prompt,
    RequestKind,
    Rollout,
    Stall,
    StallStats,
    State,
    Strategy,
    Swapped,
    SyncReport,
    TensorSpec,
    TokenSpan,
    TrainerInfo,
    TrainStats,
    TransferBackend,
    TransferStats,
    Verdict,
    WeightUpdate,
)

if TYPE_CHECKING:
    from orchestrator.checkpoint import Checkpoints, RunCheckpoint
    from orchestrator.rollouts import SourceState
    from orchestrator.scheduler import Orchestrator

__version__ = "0.1.0"


_LATER = {
    "Orchestrator": "scheduler",
    "Checkpoints": "checkpoint",
    "RunCheckpoint": "checkpoint",
    "SourceState": "rollouts",
}


def __getattr__(name: str) -> object:
    # Imported when they are first asked for: --help must not wait for the controller.
    if name in _LATER:
        found: object = getattr(import_module(f"orchestrator.{_LATER[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    # the controller and how it behaves
    "Orchestrator",
    "SwapOptions",
    "GenerationOptions",
    "RecoveryOptions",
    "ValidationOptions",
    "PhaseTimeouts",
    # bring your own
    "Engine",
    "EngineFactory",
    "EngineMaker",
    "Trainer",
    "TrainerMaker",
    "WeightSender",
    "Scorer",
    "Digests",
    "FirstTokens",
    # checkpoint and resume
    "Resumable",
    "Checkpoints",
    "RunCheckpoint",
    "SourceState",
    # values
    "ChannelSpec",
    "CheckResult",
    "Completion",
    "EngineInfo",
    "EngineStatus",
    "FinishReason",
    "GenerationRequest",
    "KVPolicy",
    "OpContext",
    "Outcome",
    "PauseAck",
    "PauseMode",
    "PhaseSeconds",
    "PolicyVersion",
    "Prompt",
    "RequestKind",
    "Rollout",
    "Stall",
    "StallStats",
    "State",
    "Strategy",
    "Swapped",
    "SyncReport",
    "TensorSpec",
    "TokenSpan",
    "TrainerInfo",
    "TrainStats",
    "TransferBackend",
    "TransferStats",
    "Verdict",
    "WeightUpdate",
    # events
    "Event",
    "Observer",
    "ActorLogged",
    "CheckpointWritten",
    "EngineStarted",
    "FaultInjected",
    "PrefetchStarted",
    "ReplicaAdmitted",
    "ReplicaDied",
    "RolloutConsumed",
    "RolloutFinished",
    "RunEnded",
    "RunResumed",
    "StateChanged",
    "SwapDone",
    "SwapFailed",
    "TrainerStarted",
    "TrainStepDone",
    # errors
    "MidflightError",
    "ChannelError",
    "Closed",
    "ConfigError",
    "EngineDied",
    "EngineError",
    "IllegalTransition",
    "PhaseTimeout",
    "StaleRollout",
    "SyncBusy",
    "SyncError",
    "TrainerDied",
    "TrainerError",
    "TrainingDiverged",
    "TransferError",
    "ValidationFailed",
]
