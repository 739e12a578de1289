"""The engine actor: one vLLM replica that generates and swaps its weights while doing so.

    calls ──▶ EngineActor ──▶ Requests (in_flight)  held by a Gate, booked in a Ledger
             (home loop)        │  asks: are the weights whole? which version?
                                ▼
                              Weights  clean / receiving / dirty, and the channel
                                │
                                ▼
                              Core  vLLM's processes; every call is raced against their death

All state lives in one home loop (see ``home``). Calls that change the replica run one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from orchestrator.errors import EngineError
from orchestrator.protocols import FirstTokens
from orchestrator.types import (
    ChannelSpec,
    Completion,
    EngineInfo,
    EngineStatus,
    GenerationRequest,
    KVPolicy,
    OpContext,
    PauseAck,
    PauseMode,
    PhaseTimeouts,
    Swapped,
    TransferStats,
    WeightUpdate,
)

from . import one_call
from .core import Core
from .engine_settings import EngineSettings
from .home import HomeLoop, at_home
from .in_flight import Requests
from .reporting import ActorReporter, Record, redirect_output
from .weights import Weights


class EngineActor:
    """Mirrors :class:`orchestrator.protocols.Engine`; each call names its operation first."""

    def __init__(self, name: str, settings: EngineSettings) -> None:
        self.name = name
        self.settings = settings
        self.home = HomeLoop(f"engine-{name}")
        self._reporter = ActorReporter(name)
        if settings.log_path is not None:
            redirect_output(settings.log_path)
        self._core = Core(name, settings, self._reporter, self.home.loop)
        self._weights = Weights(self._core, settings.swaps, self._reporter)
        self._requests = Requests(self._core, self._weights, self._reporter)
        self._control = asyncio.Lock()

    @property
    def _llm(self) -> Any:
        """The ``AsyncLLM``, for subclasses (EngineDied, EngineError if there is none)."""
        return self._core.running()

    @asynccontextmanager
    async def _alone(self, ctx: OpContext) -> AsyncIterator[None]:
        """Work on ``ctx`` while no other call changes the replica."""
        with self._reporter.op(ctx):
            async with self._control:
                yield

    # life

    @at_home
    async def start(self, ctx: OpContext) -> EngineInfo:
        """Bring vLLM up. Blocks no loop; EngineError with vLLM's reason if it fails."""
        with self._reporter.op(ctx):
            return await self._core.start()

    async def next_events(self) -> list[Record]:
        """Wait for log records of this actor."""
        return await self._reporter.next_events()

    @at_home
    async def watch(self) -> str:
        """Wait until the engine core is gone; returns why. Event-driven."""
        return await self._core.wait_dead()

    @at_home
    async def status(self, ctx: OpContext) -> EngineStatus:
        """How the replica is now. Asks nobody, so it answers also while an update runs."""
        requests = self._requests
        return EngineStatus(
            self.name, self._weights.version, requests.paused, requests.running, requests.held
        )

    @at_home
    async def aclose(self, ctx: OpContext) -> None:
        """Stop vLLM and its processes. Idempotent. The actor itself is of no use afterwards."""
        await self._core.close()

    # requests

    @at_home
    async def generate(self, ctx: OpContext, request: GenerationRequest) -> Completion:
        """Run ``request`` to its end; held back while the replica is paused."""
        with self._reporter.op(ctx):
            return await self._requests.generate(request)

    @at_home
    async def cancel_request(self, request_id: str) -> None:
        """End a request whose caller is gone; returns when nothing of it is left."""
        await self._requests.cancel(request_id)

    @at_home
    async def wait_for_tokens(
        self, ctx: OpContext, threshold: int, among: Collection[str] | None = None
    ) -> int:
        """Wait until a live request (of ``among``) has ``threshold`` tokens; how many live."""
        return await self._requests.wait_for_tokens(threshold, among)

    @at_home
    async def abort_requests(self, ctx: OpContext) -> int:
        """End every request, held ones too, with what it has; how many there were."""
        return await self._requests.abort_all()

    @at_home
    async def prompt_logprobs(
        self, ctx: OpContext, prompts: Sequence[Sequence[int]]
    ) -> tuple[tuple[float, ...], ...]:
        """Log-probability of each prompt token but the first, under the current weights."""
        return tuple(await asyncio.gather(*(self._requests.score(list(p)) for p in prompts)))

    # the swap

    @at_home
    async def open_channel(self, ctx: OpContext, spec: ChannelSpec, first_rank: int) -> None:
        """Join the transfer group with all workers; the known pattern must arrive."""
        async with self._alone(ctx):
            await self._weights.open_channel(spec, first_rank, paused=self._requests.paused)

    @at_home
    async def close_channel(self, ctx: OpContext) -> None:
        """Leave the group. Idempotent."""
        # Not alone: it has to end a transfer that is under way.
        await self._weights.close_channel()

    @at_home
    async def prefetch(self, ctx: OpContext, update: WeightUpdate) -> TransferStats:
        """Bring the bytes of ``update`` to the workers; requests go on."""
        async with self._alone(ctx):
            return await self._weights.prefetch(update)

    @at_home
    async def pause(self, ctx: OpContext, mode: PauseMode, kv: KVPolicy) -> PauseAck:
        """Return when nothing is scheduled any more. Idempotent."""
        async with self._alone(ctx):
            return await self._requests.pause(mode, kv, ctx.sync_id or "")

    @at_home
    async def start_update(self, ctx: OpContext, update: WeightUpdate) -> None:
        """From here on the weights are not to be served."""
        async with self._alone(ctx):
            self._core.running()
            if not self._requests.idle:
                raise EngineError(self.name, "an update needs a paused replica: pause it first")
            self._weights.start(update)

    @at_home
    async def receive_update(self, ctx: OpContext, update: WeightUpdate) -> TransferStats:
        """Receive every tensor and load it. Returns when the data is usable."""
        async with self._alone(ctx):
            return await self._weights.receive(update)

    @at_home
    async def finish_update(self, ctx: OpContext, update: WeightUpdate) -> None:
        """Finalise; tokens written from now on carry ``update.version``."""
        async with self._alone(ctx):
            await self._weights.finish(update)

    @at_home
    async def resume(self, ctx: OpContext) -> None:
        """Let requests go on. Idempotent. EngineError if the weights are not a whole version."""
        async with self._alone(ctx):
            await self._requests.resume()

    @at_home
    async def swap(self, ctx: OpContext, update: WeightUpdate, timeouts: PhaseTimeouts) -> Swapped:
        """Pause, apply what was prefetched, set the version and resume.

        See :func:`actors.one_call.swap`.
        """
        async with self._alone(ctx):
            return await one_call.swap(self._core, self._weights, self._requests, update, timeouts)

    @at_home
    async def wait_first_tokens(self, ctx: OpContext, update: WeightUpdate) -> FirstTokens:
        """Wait until every request that was writing at the pause has written again or ended."""
        tokens = await self._requests.first_tokens(update.sync_id)
        if update.at_hand:
            # Only now: asked any earlier, the engine core would wait for the copy before it steps.
            tokens = replace(tokens, transfer=await self._weights.device_seconds())
        return tokens

    @at_home
    async def digests(self, ctx: OpContext, update: WeightUpdate) -> dict[str, str]:
        """Digests of the staged bytes; the same on all workers, else TransferError."""
        return await self._weights.digests()
