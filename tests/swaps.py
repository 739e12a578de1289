"""One swap by hand over the protocols, for tests that have no controller."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.context import operation
from orchestrator.protocols import Digests, Engine, FirstTokens, WeightSender
from orchestrator.types import (
    ChannelSpec,
    Completion,
    GenerationRequest,
    KVPolicy,
    PauseAck,
    PauseMode,
    PhaseTimeouts,
    PolicyVersion,
    Prompt,
    TransferBackend,
    TransferStats,
    WeightUpdate,
)
from orchestrator.types import Swapped as OneCall

TIMEOUT_S = 30.0
_ids = itertools.count()


class LocalSender:
    """A real sender in the test's own process: a WeightSender without a trainer.

    ``use(which)`` picks the weights that the next ``stage`` freezes.
    """

    def __init__(
        self,
        weights: Mapping[str, Mapping[str, Any]],
        *,
        wire_dtype: str | None = None,
        backend: TransferBackend = TransferBackend.GLOO,
    ) -> None:
        from actors.transfer.base import make_sender

        self._weights = weights
        self._which = next(iter(weights))
        self.sender = make_sender(
            backend, lambda: self._weights[self._which].items(), wire_dtype=wire_dtype
        )
        self._threads = ThreadPoolExecutor(4, "sender")
        self._closed = False

    def use(self, which: str) -> None:
        self._which = which

    async def _run(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def listen(
        self, backend: TransferBackend, world_size: int, timeout_s: float
    ) -> ChannelSpec:
        spec: ChannelSpec = await self._run(self.sender.listen, world_size, timeout_s)
        return spec

    async def open_channel(self, spec: ChannelSpec) -> None:
        await self._run(self.sender.open, spec)

    async def close_channel(self) -> None:
        await self._run(self.sender.close)

    async def stage(self, version: PolicyVersion) -> Digests:
        digests: Digests = await self._run(self.sender.stage)
        return digests

    async def send(self, update: WeightUpdate) -> TransferStats:
        stats: TransferStats = await self._run(self.sender.send, update)
        return stats

    async def wait_dead(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def aclose(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            await self.close_channel()
            self._threads.shutdown(wait=False)


@dataclass
class Swapped:
    """What one swap left behind."""

    update: WeightUpdate
    ack: PauseAck
    sent: Digests
    stats: TransferStats


@dataclass
class Prefetched:
    """What is at the engine, ready to be applied."""

    update: WeightUpdate
    sent: Digests
    stats: TransferStats


class Rig:
    """One engine, one sender, and the versions they are at."""

    def __init__(self, engine: Engine, sender: WeightSender, use: Callable[[str], None]) -> None:
        self.engine, self.sender = engine, sender
        self.use = use
        """Pick the weights of the next stage: ``a`` (the engine's first) or ``b``."""
        self.version = PolicyVersion(0)
        self.workers = 1
        self.opened = False
        self.backend = TransferBackend.GLOO
        self.staged = False
        """Whether channels that are opened from now on are staged."""

    async def open(self) -> None:
        """(Re)open the channel."""
        await self.engine.close_channel()
        await self.sender.close_channel()
        spec = await self.sender.listen(self.backend, 1 + self.workers, TIMEOUT_S)
        spec = replace(spec, staged=self.staged)
        await asyncio.gather(self.engine.open_channel(spec, 1), self.sender.open_channel(spec))
        self.opened = True

    def next_update(
        self, mode: PauseMode = PauseMode.KEEP, kv: KVPolicy = KVPolicy.RECOMPUTE
    ) -> WeightUpdate:
        version = PolicyVersion(self.version + 1)
        return WeightUpdate(
            sync_id=f"sync-{next(_ids)}",
            from_version=self.version,
            version=version,
            step=version,
            backend=self.backend,
            pause_mode=mode,
            kv_policy=kv,
            staged=self.staged,
        )

    async def prefetch(self, update: WeightUpdate) -> TransferStats:
        """Bring the staged bytes to the engine, which goes on."""
        stats, _ = await asyncio.gather(self.engine.prefetch(update), self.sender.send(update))
        return stats

    async def ready(self, which: str, kv: KVPolicy = KVPolicy.RECOMPUTE) -> Prefetched:
        """The weights ``which`` staged and prefetched (the channel must be a staged one)."""
        update = self.next_update(kv=kv)
        self.use(which)
        sent = await self.sender.stage(update.version)
        return Prefetched(update, sent, await self.prefetch(update))

    async def swap_in_one(self, update: WeightUpdate) -> OneCall:
        """A whole swap to what was prefetched."""
        with operation(sync_id=update.sync_id, version=update.version):
            done = await self.engine.swap(update, PhaseTimeouts())
        self.version = update.version
        return done

    async def apply(self, update: WeightUpdate) -> TransferStats:
        """Start, receive, finish: the engine is paused before and after."""
        await self.engine.start_update(update)
        if update.at_hand:
            stats = await self.engine.receive_update(update)
        else:
            stats, _ = await asyncio.gather(
                self.engine.receive_update(update), self.sender.send(update)
            )
        await self.engine.finish_update(update)
        self.version = update.version
        return stats

    async def swap(
        self,
        which: str,
        mode: PauseMode = PauseMode.KEEP,
        kv: KVPolicy = KVPolicy.RECOMPUTE,
    ) -> Swapped:
        """A whole swap to the weights ``which``."""
        if not self.opened:
            await self.open()
        update = self.next_update(mode, kv)
        self.use(which)
        sent = await self.sender.stage(update.version)
        with operation(sync_id=update.sync_id, version=update.version):
            if update.at_hand:
                await self.prefetch(update)
            ack = await self.engine.pause(mode, kv)
            stats = await self.apply(update)
            await self.engine.resume()
        return Swapped(update, ack, sent, stats)

    async def first_tokens(self, swapped: Swapped) -> FirstTokens:
        return await self.engine.wait_first_tokens(swapped.update)

    def request(
        self, tokens: int, prompt: int = 0, *, temperature: float = 0.0, length: int = 6
    ) -> GenerationRequest:
        """A request with an id of its own; ``prompt`` chooses its prompt."""
        ids = tuple((7 * i + 13 * prompt) % 250 + 1 for i in range(length))
        return GenerationRequest(
            request_id=f"r{next(_ids)}",
            prompt=Prompt(ids),
            max_tokens=tokens,
            temperature=temperature,
            seed=prompt if temperature else None,
            ignore_eos=True,
        )

    async def generate(self, request: GenerationRequest) -> Completion:
        return await self.engine.generate(request)


def check_completion(completion: Completion, request: GenerationRequest) -> None:
    """What must hold of any completion."""
    assert completion.request_id == request.request_id
    assert len(completion.token_ids) == len(completion.logprobs) <= request.max_tokens
    assert all(logprob <= 0 for logprob in completion.logprobs)
    edges = [0, *(span.end for span in completion.spans)]
    assert [span.start for span in completion.spans] == edges[:-1]
    assert edges[-1] == len(completion.token_ids)
    versions = [span.version for span in completion.spans]
    assert versions == sorted(set(versions))
    if completion.span_texts:
        assert "".join(completion.span_texts) == completion.text
