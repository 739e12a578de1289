"""What ``rollouts.jsonl`` and ``summary.json`` hold. ``docs/output.md`` describes the same.

``schema_version`` is raised whenever a field is removed, renamed or changes its meaning;
fields may be added within a version. Seconds are wall-clock; null means "not measured", never 0.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from orchestrator.types import (
    FinishReason,
    KVPolicy,
    Outcome,
    PauseMode,
    RequestKind,
    State,
    Verdict,
)

SCHEMA_VERSION = 1


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SpanRecord(_Record):
    """Output tokens ``[start, end)`` and their text, written by policy ``version``."""

    version: int
    start: int
    end: int
    text: str


class StallRecord(_Record):
    """What the swap ``sync_id`` cost this request."""

    sync_id: str
    seconds: float | None


RolloutStatus = Literal["trained", "consumed", "discarded", "unused", "probe"]


class RolloutRecord(_Record):
    """One line of ``rollouts.jsonl``: one request, whole or partial."""

    schema_version: Literal[1] = 1
    id: str
    kind: RequestKind
    status: RolloutStatus
    """trained; consumed but not trained on; discarded as too stale; unused at the end; probe."""
    group: str
    prompt: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    logprobs: list[float | None]
    spans: list[SpanRecord]
    reward: float | None
    staleness: int | None
    finish_reason: FinishReason
    engine: str
    stalls: list[StallRecord]
    temperature: float
    seed: int | None


class PhaseRecord(_Record):
    """Seconds of one swap."""

    quiesce: float | None
    transfer: float | None
    finalize: float | None
    resume: float | None
    first_token: float | None
    prefetch: float | None = None
    """Before the pause; null where the bytes travelled inside it."""


class StallSummary(_Record):
    """Seconds over the requests that ran at a pause; null where there was none."""

    count: int
    p50: float | None
    p95: float | None
    max: float | None


class CheckRecord(_Record):
    """One check of one swap."""

    verdict: Verdict
    detail: dict[str, JsonValue]


class SwapRecord(_Record):
    """One committed swap."""

    step: int
    sync_id: str
    from_version: int
    to_version: int
    backend: str
    """As ``--backend`` names it: ``ipc``, ``staged-gloo``."""
    kv_policy: KVPolicy
    pause_mode: PauseMode
    bytes: int
    requests_in_flight: int
    probes_cut: int
    rollouts_cut: int
    seconds: PhaseRecord
    stall_s: StallSummary
    validate_s: float | None
    checks: dict[str, CheckRecord]


class FailedSwapRecord(_Record):
    """One swap that was not committed, or not proved."""

    step: int | None
    sync_id: str | None
    version: int | None
    state: str | None
    error: str
    fenced: list[str]


class RecoveryRecord(_Record):
    """A process that was lost, or a replica that serves again."""

    event: Literal["lost", "admitted"]
    actor: str
    version: int | None
    """The committed one at that moment."""
    seconds: float | None
    """How long it did not serve (admitted)."""
    cause: str | None


class TrainRecord(_Record):
    """One optimizer step."""

    step: int
    loss: float | None
    reward: float | None
    grad_norm: float | None
    tokens: int
    seconds: float | None


class CanaryRecord(_Record):
    """Log-probabilities of engine and trainer, at the last canary that ran."""

    verdict: Verdict
    control: str | None
    max_abs_diff: float | None
    control_max_abs_diff: float | None
    tolerance: float | None


class ValidationRecord(_Record):
    """The last fresh check, and the last canary with its control; null where none ran."""

    prompts: int | None
    passed: int | None
    pass_rate: float | None
    required: float | None
    control: str | None
    canary: CanaryRecord | None


class RolloutCounts(_Record):
    """How many requests ended, by what became of them."""

    finished: int
    trained: int
    consumed: int
    discarded: int
    unused: int
    probes: int
    cut: int


class SoFar(_Record):
    """What of the summary a checkpoint keeps. The rest of it is counted again from
    ``rollouts.jsonl``, of which ``rollouts_bytes`` are known."""

    started: float
    """Unix time."""
    seconds: float
    """The run went on for so long."""
    rollouts_bytes: int
    training: list[TrainRecord]
    swaps: list[SwapRecord]
    failed_swaps: list[FailedSwapRecord]
    state_seconds: dict[State, float]
    resumed_at: list[int]


class Summary(_Record):
    """``summary.json``."""

    schema_version: Literal[1] = 1
    run_id: str
    outcome: Outcome
    error: str | None
    error_type: str | None
    started_at: str
    ended_at: str
    duration_s: float
    hardware: str
    packages: dict[str, str]
    steps: int
    steps_done: int
    final_version: int | None
    reward: list[float | None]
    training: list[TrainRecord]
    swaps: list[SwapRecord]
    failed_swaps: list[FailedSwapRecord]
    stall_s: StallSummary
    recoveries: list[RecoveryRecord] = []
    validation: ValidationRecord
    tokens: dict[str, int]
    rollouts: RolloutCounts
    state_seconds: dict[State, float]
    resumed_at: list[int] = []
    """Steps after which the run was resumed from a checkpoint."""
