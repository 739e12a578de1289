"""What the control plane needs of the data plane. Bring your own by implementing these.

Every method is a coroutine and must be cancellable. Deadlines are the caller's: an
implementation never waits for ever on something it could notice (a dead process, a closed
channel). Errors are raised as :mod:`orchestrator.errors` kinds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from orchestrator.types import (
    ChannelSpec,
    Completion,
    EngineInfo,
    EngineStatus,
    GenerationRequest,
    KVPolicy,
    PauseAck,
    PauseMode,
    PhaseTimeouts,
    PolicyVersion,
    Rollout,
    Swapped,
    TrainerInfo,
    TrainStats,
    TransferBackend,
    TransferStats,
    WeightUpdate,
)

Digests = Mapping[str, str]
"""Tensor name -> digest of its bytes."""


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """What requests saw of a swap at one replica."""

    seconds: float | None
    """Resume to the first token of any request frozen by the pause; None when there was none."""
    stalls: tuple[float, ...]
    """One a request that was running at the pause and wrote a token after it (see ``Stall``)."""
    transfer: float | None = None
    """What bringing the update into the model took on the device, where that went on while the
    engine resumed."""


@runtime_checkable
class Engine(Protocol):
    """One engine replica: generates, and swaps its weights while doing so."""

    @property
    def name(self) -> str:
        """Unique in the fleet; appears in logs, errors and reports."""
        ...

    async def start(self) -> EngineInfo:
        """Bring the replica up with policy version 0. Called once."""
        ...

    async def generate(self, request: GenerationRequest) -> Completion:
        """Run ``request`` to its end. Cancelling the call ends the request in the engine.

        While the replica is paused a new request is held back and starts on resume.
        A request ended by :meth:`abort_requests` or pause mode ``abort`` returns what it has; one
        cut by the engine's death may leave it in ``EngineDied.partial``.
        """
        ...

    async def wait_for_tokens(self, threshold: int, among: Collection[str] | None = None) -> int:
        """Wait until a live request (one of the ids in ``among``) has ``threshold`` tokens.

        Returns how many requests are live. With none live it waits for one.
        """
        ...

    async def open_channel(self, spec: ChannelSpec, first_rank: int) -> None:
        """Join the transfer group and receive the known pattern bit for bit (ChannelError)."""
        ...

    async def close_channel(self) -> None:
        """Leave the transfer group; a transfer that is under way fails. Idempotent."""
        ...

    async def prefetch(self, update: WeightUpdate) -> TransferStats:
        """Bring the bytes of ``update`` to this replica while decoding goes on.

        Only for updates that are ``at_hand``; the sender sends at the same time. Nothing that
        serves is touched: a failure or a cancel leaves the replica as it was. What was
        prefetched before and not applied is replaced.
        """
        ...

    async def pause(self, mode: PauseMode, kv: KVPolicy) -> PauseAck:
        """Return when nothing is scheduled any more. Idempotent."""
        ...

    async def start_update(self, update: WeightUpdate) -> None:
        """Get ready to receive; from here on the weights are not to be served."""
        ...

    async def receive_update(self, update: WeightUpdate) -> TransferStats:
        """Receive every tensor and load it. Returns when the data is usable."""
        ...

    async def finish_update(self, update: WeightUpdate) -> None:
        """Finalise the weights; tokens written from now on carry ``update.version``."""
        ...

    async def resume(self) -> None:
        """Let requests go on. Idempotent."""
        ...

    async def swap(self, update: WeightUpdate, timeouts: PhaseTimeouts) -> Swapped:
        """Pause, apply what was prefetched or comes now, set the version, resume: in one call.

        SyncError says in which phase it failed: in PAUSING nothing was applied and the replica
        goes on as it was; in SYNCING it stays paused and is dirty; in RESUMING it holds the
        version whole and stays paused. Any other error leaves open how far it came.
        """
        ...

    async def wait_first_tokens(self, update: WeightUpdate) -> FirstTokens:
        """Wait until every request the pause froze has written a token or ended."""
        ...

    async def digests(self, update: WeightUpdate) -> Digests:
        """Digest of the bytes received for ``update``, taken before they were loaded."""
        ...

    async def prompt_logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[tuple[float, ...], ...]:
        """Log-probability of each prompt token but the first, under the current weights."""
        ...

    async def status(self) -> EngineStatus:
        """How the replica is now."""
        ...

    async def abort_requests(self) -> int:
        """End every live request with what it has; returns how many."""
        ...

    async def wait_dead(self) -> str:
        """Return why the replica is gone, when it is. Never returns while it is alive."""
        ...

    async def aclose(self) -> None:
        """Release everything: processes, ports, memory. Idempotent, works on a dead replica."""
        ...


@runtime_checkable
class WeightSender(Protocol):
    """The trainer's side of the channel: all that :meth:`Orchestrator.sync` needs of a trainer."""

    async def listen(
        self, backend: TransferBackend, world_size: int, timeout_s: float
    ) -> ChannelSpec:
        """Open the rendezvous for ``world_size`` ranks, itself being rank 0."""
        ...

    async def open_channel(self, spec: ChannelSpec) -> None:
        """Join the group as rank 0 and send the known pattern (ChannelError)."""
        ...

    async def close_channel(self) -> None:
        """Leave the group; a send that is under way fails. Idempotent."""
        ...

    async def stage(self, version: PolicyVersion) -> Digests:
        """Freeze the current weights as ``version``, to be sent; digests of those very bytes."""
        ...

    async def send(self, update: WeightUpdate) -> TransferStats:
        """Send the staged weights to every rank of the channel."""
        ...

    async def wait_dead(self) -> str:
        """Return why the sender is gone, when it is. Never returns while it is alive."""
        ...

    async def aclose(self) -> None:
        """Release everything. Idempotent."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """A second implementation of the policy, against which the canary is compared."""

    async def reference_logprobs(
        self, prompts: Sequence[Sequence[int]], *, initial: bool = False
    ) -> tuple[tuple[float, ...], ...]:
        """Log-probability of each prompt token but the first, under the staged weights.

        ``initial``: under the weights that the engines were started with (the control).
        """
        ...


@runtime_checkable
class Trainer(WeightSender, Scorer, Protocol):
    """What :meth:`Orchestrator.run` needs: a sender that also trains."""

    async def start(self) -> TrainerInfo | None:
        """Bring the trainer up. Called once. May say what it is (``TrainerStarted``)."""
        ...

    async def train(self, batch: Sequence[Rollout], step: int) -> TrainStats:
        """One optimizer step on ``batch`` (whole prompt groups)."""
        ...

    async def save_checkpoint(self, name: str) -> str:
        """Save the staged weights where an engine can be started from; returns the path."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """A trainer that can be brought back to where it was: what checkpoints of a run need."""

    async def save_state(self, path: str) -> None:
        """Save all that training needs to go on into the folder ``path``, on the disk on return.

        Weights, optimizer, random number generators, the step and version it is at. Atomic: a
        crash leaves what was there. Never runs beside :meth:`Trainer.train`.
        """
        ...

    async def load_state(self, path: str) -> None:
        """Go on from what :meth:`save_state` saved: the next step is the one it would have been.

        TrainerError with the reason when it does not fit; nothing was changed then.
        """
        ...


EngineFactory = Callable[[str], Awaitable[Engine]]
"""Makes an engine that is not yet started from a checkpoint path (the fresh check)."""

TrainerMaker = Callable[[], Trainer]
"""Makes a trainer that is not yet started: what one that died is replaced by."""

EngineMaker = Callable[[str], Engine]
"""Makes an engine of this name that is not yet started: what a lost replica is replaced by."""
