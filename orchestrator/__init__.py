"""midflight: swaps a policy's weights inside running engines, and proves each swap."""

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
    TransferError,
    ValidationFailed,
)
from orchestrator.events import (
    ActorLogged,
    EngineStarted,
    Event,
    FaultInjected,
    Observer,
    PrefetchStarted,
    ReplicaDied,
    RolloutConsumed,
    RolloutFinished,
    RunEnded,
    StateChanged,
    SwapDone,
    SwapFailed,
    TrainerStarted,
    TrainStepDone,
)
from orchestrator.options import GenerationOptions, SwapOptions, ValidationOptions
from orchestrator.protocols import (
    Digests,
    Engine,
    EngineFactory,
    FirstTokens,
    Scorer,
    Trainer,
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
    from orchestrator.scheduler import Orchestrator

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # The controller is imported when it is first asked for: --help must not wait for it.
    if name == "Orchestrator":
        from orchestrator.scheduler import Orchestrator

        globals()[name] = Orchestrator
        return Orchestrator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    # the controller and how it behaves
    "Orchestrator",
    "SwapOptions",
    "GenerationOptions",
    "ValidationOptions",
    "PhaseTimeouts",
    # bring your own
    "Engine",
    "EngineFactory",
    "Trainer",
    "WeightSender",
    "Scorer",
    "Digests",
    "FirstTokens",
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
    "EngineStarted",
    "FaultInjected",
    "PrefetchStarted",
    "ReplicaDied",
    "RolloutConsumed",
    "RolloutFinished",
    "RunEnded",
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
    "TransferError",
    "ValidationFailed",
]
