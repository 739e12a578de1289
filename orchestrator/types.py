"""Value types shared by the control plane and the data plane. Standard library only.

Everything here is immutable and picklable: it crosses Ray's process boundary.
Seconds are wall-clock durations; bytes are counts; token offsets are half-open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

PolicyVersion = NewType("PolicyVersion", int)
"""Counts published policies. 0 is what the engines were started with."""


class PauseMode(StrEnum):
    """What happens to the requests that are running when a replica pauses."""

    KEEP = "keep"
    """They freeze where they are and go on after the swap."""
    WAIT = "wait"
    """They run to their end first; new ones are held back."""
    ABORT = "abort"
    """They end now with what they have; the fleet continues them from there."""


class Strategy(StrEnum):
    """In which order the replicas of a fleet are swapped."""

    ALL_AT_ONCE = "all-at-once"
    """Together: one version serves at a time."""
    ROLLING = "rolling"
    """A few at a time: requests go on at the others, under the version before."""


class KVPolicy(StrEnum):
    """What happens to the KV cache computed under the old weights (pause mode ``keep``)."""

    RECOMPUTE = "recompute"
    """It is dropped and computed again under the new weights: exact."""
    KEEP = "keep"
    """It stays: faster, slightly off-policy."""


class TransferBackend(StrEnum):
    """How weights travel from the trainer to the engines."""

    GLOO = "gloo"
    """CPU tensors over sockets; needs no GPU."""
    NCCL = "nccl"
    """GPU to GPU; trainer and engine on different devices."""
    IPC = "ipc"
    """Mapped device memory; trainer and engine share one device."""
    NATIVE_NCCL = "native-nccl"
    """vLLM's own NCCL engine: baseline and fallback."""
    NATIVE_IPC = "native-ipc"
    """vLLM's own CUDA IPC engine: baseline and fallback."""

    @property
    def native(self) -> bool:
        """How the bytes move and are loaded is vLLM's own; the channel around it is ours."""
        return self in (TransferBackend.NATIVE_NCCL, TransferBackend.NATIVE_IPC)


def route(backend: TransferBackend, staged: bool) -> str:
    """Name of a way for weights to travel: ``nccl``, ``staged-nccl``."""
    return f"staged-{backend}" if staged else backend.value


def at_hand(backend: TransferBackend, staged: bool) -> bool:
    """The bytes are at the engine before the pause: to commit them, nobody else is needed."""
    return staged or backend is TransferBackend.IPC


class State(StrEnum):
    """States of the swap machine. ``docs/machine.md`` shows the table."""

    STARTING = "STARTING"
    GENERATING = "GENERATING"
    PAUSING = "PAUSING"
    SYNCING = "SYNCING"
    RESUMING = "RESUMING"
    VALIDATING = "VALIDATING"
    RECOVERING = "RECOVERING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class RequestKind(StrEnum):
    """What a request is for."""

    ROLLOUT = "rollout"
    """Sampled, trained on."""
    PROBE = "probe"
    """Greedy, runs across a swap, checked by a fresh engine; never trained on."""


class Verdict(StrEnum):
    """Outcome of one check of a swap."""

    MATCH = "match"
    MISMATCH = "mismatch"
    INCONCLUSIVE = "inconclusive"
    """The control failed too, so the check can tell nothing."""
    SKIPPED = "skipped"


class Outcome(StrEnum):
    """How a run ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class OpContext:
    """Who asks: bound to every log line of an operation, in every process."""

    run_id: str = ""
    sync_id: str | None = None
    step: int | None = None
    version: int | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as token ids. ``text`` is what it was encoded from, if known."""

    token_ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request to an engine replica."""

    request_id: str
    prompt: Prompt
    max_tokens: int
    """Budget of new tokens, counted over the whole life of the request."""
    temperature: float = 1.0
    seed: int | None = None
    kind: RequestKind = RequestKind.ROLLOUT
    group: str = ""
    """Requests of one group share a prompt; advantages are relative to the group."""
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Output tokens ``[start, end)`` were written by policy ``version``."""

    version: PolicyVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Stall:
    """What one swap cost one running request, measured at the engine.

    ``seconds`` = (first token after - last token before) - the request's median token gap, or 0
    where the swap took less than the request usually waits for a token. Where the engine core swaps
    by itself, the longest gap that ended after the asking, up to that first token, counts.
    """

    sync_id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for a request. ``spans`` cover ``token_ids`` exactly."""

    request_id: str
    engine: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each chosen token under the policy that wrote it, before temperature."""
    spans: tuple[TokenSpan, ...]
    finish_reason: FinishReason
    text: str = ""
    span_texts: tuple[str, ...] = ()
    """``text`` cut at the spans."""
    stalls: tuple[Stall, ...] = ()


@dataclass(frozen=True, slots=True)
class Rollout:
    """A finished request with its reward and the policy versions that wrote it."""

    request: GenerationRequest
    completion: Completion
    reward: float | None = None
    staleness: int | None = None
    """Versions between the oldest span and the policy at consumption; None if not consumed."""

    @property
    def min_version(self) -> PolicyVersion:
        """Oldest policy that wrote a token (ValueError when there is no token)."""
        return min(span.version for span in self.completion.spans)

    @property
    def max_version(self) -> PolicyVersion:
        """Newest policy that wrote a token (ValueError when there is no token)."""
        return max(span.version for span in self.completion.spans)

    @property
    def cut(self) -> bool:
        """Whether a swap happened inside this rollout."""
        return len({span.version for span in self.completion.spans}) > 1


UNUSED = "unused"
"""In place of a digest: the engine's model has no place for the tensor (a tied duplicate)."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor on the wire, in the checkpoint's naming."""

    name: str
    dtype: str
    """Torch's name without the prefix: ``float32``, ``bfloat16``."""
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """How a trainer and the workers of the engines find each other.

    Rank 0 is the sender; replica *i* takes ``ranks[i]`` and the following ones, one a worker.
    """

    backend: TransferBackend
    host: str
    port: int
    world_size: int
    nonce: str
    """Seeds the known pattern that proves the channel."""
    tensors: tuple[TensorSpec, ...] = ()
    timeout_s: float = 120.0
    extra: Mapping[str, object] = field(default_factory=dict)
    """Backend-specific plain data."""
    staged: bool = False
    """Workers hold a second copy of the weights, allocated when they join."""

    @property
    def nbytes(self) -> int:
        """Bytes of one full update."""
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One swap: which version replaces which, and how."""

    sync_id: str
    from_version: PolicyVersion
    version: PolicyVersion
    step: int
    backend: TransferBackend
    pause_mode: PauseMode
    kv_policy: KVPolicy
    staged: bool = False
    """The bytes arrive in a second copy while decoding goes on."""

    @property
    def at_hand(self) -> bool:
        """See :func:`at_hand`."""
        return at_hand(self.backend, self.staged)

    @property
    def one_call(self) -> bool:
        """A single replica pauses, takes the update and resumes in one call: the bytes are at hand,
        or come from device to device in milliseconds."""
        return self.at_hand or self.backend is TransferBackend.NCCL

    @property
    def route(self) -> str:
        """How the bytes travel, as ``--backend`` names it."""
        return route(self.backend, self.staged)


@dataclass(frozen=True, slots=True)
class PauseAck:
    """A replica is idle; nothing is scheduled until it is resumed."""

    engine: str
    requests_in_flight: int
    """Requests frozen by the pause (0 after ``wait`` and ``abort``)."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one side of a transfer moved. ``seconds`` ends when the data is usable there."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Swapped:
    """One replica's swap made in one call. Seconds as in :class:`PhaseSeconds`."""

    ack: PauseAck
    stats: TransferStats
    quiesce: float
    transfer: float
    finalize: float
    resume: float


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started replica says about itself."""

    name: str
    workers: int
    """Ranks it needs in a transfer group (tensor x pipeline parallel size)."""
    dtype: str
    max_model_len: int
    vocab_size: int
    pids: tuple[int, ...] = ()
    """Its processes, the actor's first."""
    node_ip: str = "127.0.0.1"
    packages: Mapping[str, str] = field(default_factory=dict)
    hardware: str = ""


@dataclass(frozen=True, slots=True)
class TrainerInfo:
    """What a started trainer says about itself."""

    pids: tuple[int, ...] = ()
    """Its processes, the actor's first."""
    node_ip: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A replica as it says it is, now."""

    name: str
    version: PolicyVersion
    paused: bool
    live_requests: int
    held_requests: int
    """Submitted while paused, not yet given to the scheduler."""


@dataclass(frozen=True, slots=True)
class TrainStats:
    """One optimizer step."""

    step: int
    loss: float
    reward: float
    """Mean reward of the batch."""
    grad_norm: float
    tokens: int
    seconds: float
    rewards: tuple[float, ...] = ()
    """One a rollout, in the order of the batch."""


@dataclass(frozen=True, slots=True)
class PhaseTimeouts:
    """Seconds each phase may take before it counts as failed."""

    starting: float = 600.0
    generating: float = 900.0
    pausing: float = 30.0
    syncing: float = 120.0
    resuming: float = 60.0
    validating: float = 600.0
    stopping: float = 8.0
    staging: float = 120.0
    """For bytes that are brought to the engines before the pause (GENERATING goes on)."""

    @property
    def channel(self) -> float:
        """What a member of a channel waits for the others: no shorter than who waits for it."""
        return max(self.syncing, self.staging)

    def of(self, state: State) -> float:
        """Budget of ``state``; terminal states have the budget of stopping."""
        return float(getattr(self, state.value.lower(), self.stopping))


@dataclass(frozen=True, slots=True)
class StallStats:
    """Distribution of a duration over requests; None where no request was running."""

    count: int
    p50: float | None
    p95: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of one swap. ``detail`` says what was compared and what differed."""

    check: str
    verdict: Verdict
    detail: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Where the time of a swap went."""

    quiesce: float
    transfer: float
    """Until the data is usable. Where the engine resumed meanwhile: the device's seconds."""
    finalize: float
    resume: float
    first_token: float | None
    """Resume to the first token of any request; None when none was running."""
    prefetch: float = 0.0
    """Until the bytes were at the engines, before the pause: no part of the stall. 0 where the
    transfer brings them."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One finished swap."""

    update: WeightUpdate
    nbytes: int
    requests_in_flight: int
    seconds: PhaseSeconds
    stall_s: StallStats
    checks: tuple[CheckResult, ...] = ()
    validate_s: float = 0.0
    stalls: tuple[float, ...] = ()
    """What ``stall_s`` is the distribution of, one a request that was running."""

    @property
    def ok(self) -> bool:
        """No check found a difference."""
        return all(c.verdict is not Verdict.MISMATCH for c in self.checks)
