"""The public surface as others build on it. A change here is a change for them.

Before you edit a snapshot: is it an addition with a default? Else it needs a line under
"Changed" or "Removed" in the changelog.
"""

from __future__ import annotations

import enum
import inspect
import pickle
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, fields, is_dataclass

import pytest

import orchestrator

NAMES = """
    Orchestrator SwapOptions GenerationOptions RecoveryOptions ValidationOptions PhaseTimeouts
    Engine EngineFactory EngineMaker Trainer TrainerMaker WeightSender Scorer Digests FirstTokens
    Resumable Checkpoints RunCheckpoint SourceState ChannelSpec CheckResult
    Completion EngineInfo EngineStatus FinishReason GenerationRequest KVPolicy OpContext
    Outcome PauseAck PauseMode PhaseSeconds PolicyVersion Prompt RequestKind Rollout Stall
    StallStats State Strategy Swapped SyncReport TensorSpec TokenSpan TrainerInfo TrainStats
    TransferBackend TransferStats Verdict WeightUpdate Event Observer ActorLogged
    CheckpointWritten EngineStarted FaultInjected PrefetchStarted ReplicaAdmitted ReplicaDied
    RolloutConsumed RolloutFinished RunEnded RunResumed StateChanged SwapDone SwapFailed
    TrainerStarted TrainStepDone
    MidflightError ChannelError Closed ConfigError EngineDied EngineError IllegalTransition
    PhaseTimeout StaleRollout SyncBusy SyncError TrainerDied TrainerError TrainingDiverged
    TransferError ValidationFailed
"""

SIGNATURES = {
    "Orchestrator": """
        __init__(engines: Sequence[Engine], trainer: WeightSender, *, prompts: Sequence[Prompt],
            probes: Sequence[Prompt] = (), swap: SwapOptions | None = None, generation:
            GenerationOptions | None = None, validation: ValidationOptions | None = None,
            engine_factory: EngineFactory | None = None, recovery: RecoveryOptions | None = None,
            replace_engine: EngineMaker | None = None, replace_trainer: TrainerMaker | None = None,
            observers: Sequence[Observer] = (), run_id: str | None = None,
            checkpoints: Checkpoints | None = None,
            checkpoint_every: int = 0, resume: RunCheckpoint | None = None) -> None
        state: State
        version: PolicyVersion
        history: tuple[Transition, ...]
        async aclose() -> None
        interrupt() -> None
        async run(steps: int) -> None
        async sync(version: int | None = None, *, wait: bool = True) -> SyncReport
        async for rollouts() -> AsyncIterator[Rollout]
    """,
    "Engine": """
        name: str
        async start() -> EngineInfo
        async generate(request: GenerationRequest) -> Completion
        async wait_for_tokens(threshold: int, among: Collection[str] | None = None) -> int
        async open_channel(spec: ChannelSpec, first_rank: int) -> None
        async close_channel() -> None
        async prefetch(update: WeightUpdate) -> TransferStats
        async pause(mode: PauseMode, kv: KVPolicy) -> PauseAck
        async start_update(update: WeightUpdate) -> None
        async receive_update(update: WeightUpdate) -> TransferStats
        async finish_update(update: WeightUpdate) -> None
        async resume() -> None
        async swap(update: WeightUpdate, timeouts: PhaseTimeouts) -> Swapped
        async wait_first_tokens(update: WeightUpdate) -> FirstTokens
        async digests(update: WeightUpdate) -> Digests
        async prompt_logprobs(prompts: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]
        async status() -> EngineStatus
        async abort_requests() -> int
        async wait_dead() -> str
        async aclose() -> None
    """,
    "WeightSender": """
        async listen(backend: TransferBackend, world_size: int, timeout_s: float) -> ChannelSpec
        async open_channel(spec: ChannelSpec) -> None
        async close_channel() -> None
        async stage(version: PolicyVersion) -> Digests
        async send(update: WeightUpdate) -> TransferStats
        async wait_dead() -> str
        async aclose() -> None
    """,
    "Scorer": """
        async reference_logprobs(prompts: Sequence[Sequence[int]], *, initial: bool = False) ->
            tuple[tuple[float, ...], ...]
    """,
    "Resumable": """
        async save_state(path: str) -> None
        async load_state(path: str) -> None
    """,
    "Checkpoints": """
        resumed() -> None
        latest() -> RunCheckpoint
        async write(checkpoint: RunCheckpoint, save_trainer: Callable[[str], Awaitable[None]]) ->
            RunCheckpoint
    """,
    "Trainer": """
        async start() -> TrainerInfo | None
        async train(batch: Sequence[Rollout], step: int) -> TrainStats
        async save_checkpoint(name: str) -> str
    """,
}

# Field names in order; "=" marks one with a default.
FIELDS = {
    "SwapOptions": "backend= staged= pause_mode= kv_policy= strategy= max_unavailable= "
    "pause_after_tokens= timeouts=",
    "GenerationOptions": (
        "max_tokens= temperature= group_size= prompts_per_step= max_in_flight="
        " buffer_size= max_staleness= probe_tokens= seed="
    ),
    "ValidationOptions": "digest= canary= fresh= fresh_every= min_pass_rate= canary_tolerance= "
    "canary_control_factor=",
    "PhaseTimeouts": (
        "starting= generating= pausing= syncing= resuming= validating= stopping= staging="
    ),
    "FirstTokens": "seconds stalls transfer=",
    "ChannelSpec": "backend host port world_size nonce tensors= timeout_s= extra= staged=",
    "CheckResult": "check verdict detail=",
    "Completion": (
        "request_id engine token_ids logprobs spans finish_reason text= span_texts= stalls="
    ),
    "EngineInfo": "name workers dtype max_model_len vocab_size pids= node_ip= packages= hardware=",
    "EngineStatus": "name version paused live_requests held_requests",
    "GenerationRequest": "request_id prompt max_tokens temperature= seed= kind= group= ignore_eos=",
    "OpContext": "run_id= sync_id= step= version= state=",
    "PauseAck": "engine requests_in_flight",
    "PhaseSeconds": "quiesce transfer finalize resume first_token prefetch=",
    "Prompt": "token_ids text=",
    "Rollout": "request completion reward= staleness=",
    "RunCheckpoint": "run_id step version source attached= schema_version= folder=",
    "SourceState": "next_group unfinished= waiting= group_size= seed=",
    "Stall": "sync_id seconds",
    "StallStats": "count p50 p95 max",
    "Swapped": "ack stats quiesce transfer finalize resume",
    "SyncReport": "update nbytes requests_in_flight seconds stall_s checks= validate_s= stalls=",
    "TensorSpec": "name dtype shape nbytes",
    "TokenSpan": "version start end",
    "TrainerInfo": "pids= node_ip=",
    "TrainStats": "step loss reward grad_norm tokens seconds rewards=",
    "TransferStats": "nbytes seconds",
    "WeightUpdate": "sync_id from_version version step backend pause_mode kv_policy staged=",
    "Event": "at op",
    "ActorLogged": "at op actor level message fields=",
    "CheckpointWritten": "at op step version path seconds",
    "EngineStarted": "at op info",
    "FaultInjected": "at op actor kind place step pids= seconds=",
    "PrefetchStarted": "at op update",
    "ReplicaDied": "at op actor cause",
    "ReplicaAdmitted": "at op engine version seconds",
    "RecoveryOptions": "attempts= backoff_s= backoff_max_s= min_engines=",
    "RolloutConsumed": "at op rollout accepted=",
    "RolloutFinished": "at op rollout",
    "RunEnded": "at op outcome version error=",
    "RunResumed": "at op step version path",
    "StateChanged": "at op source target trigger reason= seconds=",
    "SwapDone": "at op report",
    "SwapFailed": "at op error fenced=",
    "TrainerStarted": "at op info",
    "TrainStepDone": "at op stats rollouts=",
}

ENUMS = {
    "FinishReason": "stop length abort",
    "KVPolicy": "recompute keep",
    "Outcome": "completed failed interrupted",
    "PauseMode": "keep wait abort",
    "RequestKind": "rollout probe",
    "State": "STARTING GENERATING PAUSING SYNCING RESUMING VALIDATING RECOVERING STOPPED FAILED",
    "Strategy": "all-at-once rolling",
    "TransferBackend": "gloo nccl ipc native-nccl native-ipc",
    "Verdict": "match mismatch inconclusive skipped",
}

# Bases and the exit code of a run that ends with it.
ERRORS = {
    "MidflightError": "Exception 1",
    "ChannelError": "TransferError 1",
    "Closed": "MidflightError RuntimeError 1",
    "ConfigError": "MidflightError ValueError 2",
    "EngineDied": "EngineError 1",
    "EngineError": "MidflightError RuntimeError 1",
    "IllegalTransition": "MidflightError RuntimeError 1",
    "PhaseTimeout": "MidflightError TimeoutError 1",
    "StaleRollout": "MidflightError ValueError 1",
    "SyncBusy": "MidflightError RuntimeError 1",
    "SyncError": "MidflightError RuntimeError 1",
    "TrainerDied": "TrainerError 1",
    "TrainerError": "MidflightError RuntimeError 1",
    "TrainingDiverged": "TrainerError ValidationFailed 1",
    "TransferError": "MidflightError RuntimeError 1",
    "ValidationFailed": "MidflightError RuntimeError 1",
}


def _signature(function: Callable[..., object]) -> str:
    whole = inspect.signature(function)
    shown = [p for p in whole.parameters.values() if p.name != "self"]
    return str(whole.replace(parameters=shown)).replace("'", "")


def _surface(cls: type) -> list[str]:
    lines = []
    for name, member in vars(cls).items():
        if name.startswith("_") and not (name == "__init__" and cls is orchestrator.Orchestrator):
            continue
        if isinstance(member, property):
            assert member.fget is not None
            lines.append(f"{name}: {_signature(member.fget).removeprefix('() -> ')}")
        elif inspect.isasyncgenfunction(member):
            lines.append(f"async for {name}{_signature(member)}")
        elif inspect.iscoroutinefunction(member):
            lines.append(f"async {name}{_signature(member)}")
        elif callable(member):
            lines.append(f"{name}{_signature(member)}")
    return lines


def _public(kind: type) -> dict[str, type]:
    found = {n: getattr(orchestrator, n) for n in orchestrator.__all__}
    return {n: v for n, v in found.items() if inspect.isclass(v) and issubclass(v, kind)}


def test_the_exported_names_are_these() -> None:
    assert list(orchestrator.__all__) == NAMES.split()
    assert len(set(orchestrator.__all__)) == len(orchestrator.__all__)


def test_every_exported_name_exists_and_is_documented() -> None:
    for name in orchestrator.__all__:
        member = getattr(orchestrator, name)
        if inspect.isclass(member):
            assert inspect.getdoc(member), name
            assert member.__module__.startswith("orchestrator"), name


@pytest.mark.parametrize("name", SIGNATURES)
def test_methods_have_these_signatures(name: str) -> None:
    found = " ".join(_surface(getattr(orchestrator, name)))
    assert found.split() == SIGNATURES[name].split()


def test_a_trainer_is_a_sender_and_a_scorer_and_more() -> None:
    assert orchestrator.Trainer.__mro__[1:3] == (orchestrator.WeightSender, orchestrator.Scorer)


def test_value_types_have_these_fields_in_this_order() -> None:
    found = {
        name: " ".join(
            f.name + ("" if f.default is MISSING and f.default_factory is MISSING else "=")
            for f in fields(value)
        )
        for name in orchestrator.__all__
        if is_dataclass(value := getattr(orchestrator, name))
    }
    assert found == FIELDS


def test_value_types_cannot_be_changed() -> None:
    for name in FIELDS:
        params = getattr(orchestrator, name).__dataclass_params__
        assert params.frozen, f"{name} is mutable"
    with pytest.raises(FrozenInstanceError):
        orchestrator.Prompt((1,)).text = "x"  # type: ignore[misc]


def test_enumerations_have_these_values() -> None:
    assert {n: " ".join(m.value for m in list(v)) for n, v in _public(enum.Enum).items()} == ENUMS


def test_errors_have_these_bases_and_exit_codes() -> None:
    errors = _public(BaseException)
    found = {
        n: f"{' '.join(b.__name__ for b in e.__bases__)} {e.exit_code}"  # type: ignore[attr-defined]
        for n, e in errors.items()
    }
    assert found == ERRORS
    assert all(issubclass(e, orchestrator.MidflightError) for e in errors.values())


@pytest.mark.parametrize(
    "error",
    [
        orchestrator.ConfigError("--steps 0"),
        orchestrator.IllegalTransition("PAUSING", "pause", "already"),
        orchestrator.PhaseTimeout("SYNCING", 120.0, "send"),
        orchestrator.EngineDied("engine-1", "SIGKILL"),
        orchestrator.SyncError("SYNCING", "broke", ("engine-1", "engine-2")),
        orchestrator.TrainingDiverged("training diverged at step 3"),
        orchestrator.StaleRollout(3, 2),
        orchestrator.Closed("closed"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_an_error_crosses_a_process_boundary_whole(error: orchestrator.MidflightError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__
    assert copy.exit_code == error.exit_code
