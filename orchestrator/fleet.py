"""Engine replicas as one: fan-out, routing, fencing.

A replica is *serving* (takes requests), or *fenced* (takes none, is never resumed). It is
*dirty* from the moment it is told to start an update until the fleet commits that version: a
dirty replica holds no committed version and can only be fenced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from orchestrator.continuation import joined, newest, published, rest_of
from orchestrator.errors import EngineError, SyncError
from orchestrator.protocols import Digests, Engine, FirstTokens, WeightSender
from orchestrator.replica import Replica, first_ranks
from orchestrator.tasks import all_or_first_error, first_error, settle, uninterrupted
from orchestrator.types import (
    ChannelSpec,
    Completion,
    EngineInfo,
    FinishReason,
    GenerationRequest,
    KVPolicy,
    PauseAck,
    PauseMode,
    PhaseTimeouts,
    PolicyVersion,
    State,
    Swapped,
    TransferBackend,
    TransferStats,
    WeightUpdate,
)

T = TypeVar("T")

CLOSE_S = 5.0
"""Seconds for a side of the channel, or for a fresh engine, to close."""


class Fleet:
    """All replicas of a policy. Fan-out raises the first error and cancels the rest."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        names = [e.name for e in engines]
        if not engines or len(set(names)) != len(names):
            raise ValueError(f"a fleet needs replicas with different names, got {names}")
        self._replicas = [Replica(e) for e in engines]
        self._waiting: list[str] = []
        self._ending = False
        self._channel_open = False
        self.version = PolicyVersion(0)
        """Newest committed version; what every serving replica holds."""

    @property
    def serving(self) -> list[Replica]:
        """Replicas that take requests."""
        return [r for r in self._replicas if not r.fenced]

    @property
    def fenced(self) -> tuple[str, ...]:
        """Names of the replicas that must not serve."""
        return tuple(r.name for r in self._replicas if r.fenced)

    @property
    def infos(self) -> list[EngineInfo]:
        """What the started replicas said about themselves."""
        return [r.info for r in self._replicas if r.info is not None]

    def waiting_for(self) -> str:
        """Who has not answered the running fan-out yet (for the error of a deadline)."""
        return ", ".join(self._waiting)

    async def _fan_out(
        self,
        operation: str,
        call: Callable[[Replica], Coroutine[Any, Any, T]],
        replicas: Sequence[Replica] | None = None,
    ) -> list[T]:
        chosen = self.serving if replicas is None else list(replicas)
        waiting = self._waiting = [f"{operation} of {r.name}" for r in chosen]

        async def one(replica: Replica) -> T:
            result = await call(replica)
            waiting.remove(f"{operation} of {replica.name}")
            return result

        return await all_or_first_error([one(r) for r in chosen])

    # Life

    async def start(
        self, started: Callable[[Engine, EngineInfo], None] = lambda engine, info: None
    ) -> list[EngineInfo]:
        """Bring every replica up, side by side; ``started`` is told of each as it is up."""

        async def start(replica: Replica) -> EngineInfo:
            replica.info = await replica.engine.start()
            started(replica.engine, replica.info)
            return replica.info

        return await self._fan_out("start", start)

    async def open_channel(
        self,
        sender: WeightSender,
        backend: TransferBackend,
        timeout_s: float,
        *,
        staged: bool = False,
    ) -> ChannelSpec:
        """Put the sender and every worker into one group and prove it with a known pattern.

        ``staged``: workers make room for a second copy of the weights as they join. If it fails,
        every side is closed: a worker that waits for another one decodes nothing.
        """
        workers = [r.info.workers for r in self.serving if r.info is not None]
        spec = await sender.listen(backend, 1 + sum(workers), timeout_s)
        spec = replace(spec, staged=staged)
        rank = dict(zip([r.name for r in self.serving], first_ranks(workers), strict=True))

        async def engines() -> None:
            await self._fan_out("open_channel", lambda r: r.engine.open_channel(spec, rank[r.name]))

        try:
            await all_or_first_error([engines(), sender.open_channel(spec)])
        except BaseException:
            await uninterrupted(self.close_channel(sender))
            raise
        self._channel_open = True
        return spec

    async def ensure_channel(
        self,
        sender: WeightSender,
        backend: TransferBackend,
        timeout_s: float,
        *,
        staged: bool = False,
    ) -> None:
        """Open the channel again if a transfer that failed has closed it."""
        if not self._channel_open:
            await self.open_channel(sender, backend, timeout_s, staged=staged)

    async def close_channel(self, sender: WeightSender) -> None:
        """Close every side; what hangs in a transfer fails.

        A side that is dead or does not answer within ``CLOSE_S`` is left to its end.
        """
        self._channel_open = False
        sides = [sender.close_channel(), *(r.engine.close_channel() for r in self._replicas)]
        tasks = [asyncio.ensure_future(side) for side in sides]
        try:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        finally:
            await settle(tasks)

    async def aclose(self) -> None:
        """Release every replica. The first error is raised after all were tried."""
        results = await asyncio.gather(
            *(r.engine.aclose() for r in self._replicas), return_exceptions=True
        )
        errors = [r for r in results if isinstance(r, BaseException)]
        if errors:
            raise first_error(BaseExceptionGroup("closing engines", errors))

    # Requests

    async def generate(self, request: GenerationRequest) -> Completion:
        """Run ``request`` on the least loaded replica.

        What a pause in mode ``abort`` or a fence cut is continued from prompt + tokens so far,
        within the request's own budget; :meth:`abort_requests` ends it for good, and so does
        the lack of a replica that serves.
        """
        done: Completion | None = None
        part = request
        while True:
            replica = self._route()
            replica.live.add(part.request_id)
            try:
                answer = await replica.engine.generate(part)
            finally:
                replica.live.discard(part.request_id)
            if replica.swapping is not None and newest(answer) > self.version:
                # The replica goes on by itself before its swap is published.
                await asyncio.shield(replica.swapping)
            done = joined(done, published(answer, self.version))
            left = request.max_tokens - len(done.token_ids)
            if done.finish_reason is not FinishReason.ABORT or self._ending or not self.serving:
                return done
            if left <= 0:
                return replace(done, finish_reason=FinishReason.LENGTH)
            part = rest_of(request, done)

    def _must_serve(self) -> list[Replica]:
        serving = self.serving
        if not serving:
            raise EngineError(
                ", ".join(r.name for r in self._replicas), "no replica serves; all are fenced"
            )
        return serving

    def _route(self) -> Replica:
        return min(self._must_serve(), key=lambda r: len(r.live))

    async def wait_for_tokens(self, threshold: int, among: Collection[str] | None = None) -> None:
        """Wait until a live request has ``threshold`` tokens.

        With ``among`` (request ids): one of them on every replica that runs any of them.
        """
        serving = self._must_serve()
        if among is not None:
            # Not a fan-out: it goes on beside those of a swap, whose deadlines name who is missing.
            wanted = frozenset(among)
            await all_or_first_error(
                r.engine.wait_for_tokens(threshold, wanted & r.live)
                for r in serving
                if wanted & r.live
            )
            return
        waits = [asyncio.create_task(r.engine.wait_for_tokens(threshold)) for r in serving]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await settle(waits)

    async def abort_requests(self) -> int:
        """End every request for good, each with what it has; returns how many.

        Fenced replicas too: what they had written before the swap is theirs to hand over. One
        that fails does not keep the others from it.
        """
        self._ending = True
        ended = await asyncio.gather(
            *(r.engine.abort_requests() for r in self._replicas), return_exceptions=True
        )
        return sum(count for count in ended if isinstance(count, int))

    # One swap

    async def prefetch(self, update: WeightUpdate, sender: WeightSender) -> list[TransferStats]:
        """Move the staged weights to where :meth:`receive_update` finds them; decoding goes on.

        When it fails nothing was touched that serves, and the channel is closed: it may be out
        of step, or have somebody in it who waits for ever.
        """
        try:
            return await self._exchange(
                "prefetch", lambda r: r.engine.prefetch(update), update, sender
            )
        except BaseException:
            if self._channel_open:
                await uninterrupted(self.close_channel(sender))
            raise

    async def pause(self, mode: PauseMode, kv: KVPolicy) -> list[PauseAck]:
        """Every serving replica is idle when this returns."""

        async def pause(replica: Replica) -> PauseAck:
            replica.paused = True
            return await replica.engine.pause(mode, kv)

        return await self._fan_out("pause", pause)

    async def start_update(self, update: WeightUpdate) -> None:
        """From here on the replicas are dirty."""

        async def start(replica: Replica) -> None:
            replica.dirty = True
            await replica.engine.start_update(update)

        await self._fan_out("start_update", start)

    async def transfer(self, update: WeightUpdate, sender: WeightSender) -> list[TransferStats]:
        """Move the staged weights; receivers are told first, else the sender could wait alone.

        When one side fails the channel is closed at once: the others sit in a collective that
        nothing else would end. Returns the receivers' statistics.
        """
        return await self._exchange(
            "receive_update", lambda r: r.engine.receive_update(update), update, sender
        )

    async def _exchange(
        self,
        operation: str,
        receive: Callable[[Replica], Coroutine[Any, Any, TransferStats]],
        update: WeightUpdate,
        sender: WeightSender,
    ) -> list[TransferStats]:
        replicas = self.serving
        parties = [*(f"{operation} of {r.name}" for r in replicas), "send"]
        self._waiting = parties
        receives = [asyncio.create_task(receive(r)) for r in replicas]
        send = asyncio.create_task(sender.send(update))
        tasks = [*receives, send]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            ended = [t for t in tasks if t.done() and not t.cancelled()]
            failed = [e for t in ended if (e := t.exception()) is not None]
            if failed:
                raise first_error(BaseExceptionGroup(operation, failed))
            self._waiting = []
            return [t.result() for t in receives]
        except BaseException:
            self._waiting = [p for p, t in zip(parties, tasks, strict=True) if not t.done()]
            raise
        finally:
            if any(not t.done() for t in tasks):
                # A second cancel must not leave anybody in the collective; CLOSE_S bounds it.
                await uninterrupted(self._end_transfer(sender, tasks))

    async def _end_transfer(self, sender: WeightSender, tasks: Sequence[asyncio.Task[Any]]) -> None:
        await self.close_channel(sender)
        await settle(tasks)

    async def receive_update(self, update: WeightUpdate) -> list[TransferStats]:
        """The replicas apply what was prefetched; nobody else is needed."""
        return await self._fan_out("receive_update", lambda r: r.engine.receive_update(update))

    async def finish_update(self, update: WeightUpdate) -> None:
        """The replicas hold ``update.version`` when this returns; :meth:`commit` publishes it."""

        async def finish(replica: Replica) -> None:
            await replica.engine.finish_update(update)
            replica.applied = update.version

        await self._fan_out("finish_update", finish)

    def commit(self, version: PolicyVersion) -> None:
        """Publish ``version``: only when every serving replica has it, and only forwards."""
        without = [r.name for r in self.serving if r.applied != version]
        if without or version <= self.version:
            raise EngineError(
                ", ".join(without) or "fleet", f"cannot commit {version} over {self.version}"
            )
        for replica in self.serving:
            replica.dirty = False
        self.version = version

    async def swap(
        self, update: WeightUpdate, timeouts: PhaseTimeouts, sender: WeightSender
    ) -> Swapped:
        """Pause, apply, set the version and resume the only serving replica, in one call.

        Where the bytes are not at hand ``sender`` sends them meanwhile; if either fails the
        channel is closed, since the other one sits in a collective.
        It holds ``update.version`` when this returns; :meth:`commit` publishes it, before
        anybody else gets to run. Until then what it wrote is kept back. SyncError in PAUSING: it
        is as it was; in RESUMING: it may be committed; any other error leaves it dirty.
        """
        (replica,) = self.serving
        self._waiting = [f"swap of {replica.name}"]
        replica.paused = replica.dirty = True
        replica.swapping = asyncio.get_running_loop().create_future()
        try:
            if update.at_hand:
                done = await replica.engine.swap(update, timeouts)
            else:
                done = await self._swap_and_send(replica, update, timeouts, sender)
        except BaseException as error:
            phase = error.phase if isinstance(error, SyncError) else ""
            if phase == State.PAUSING:
                replica.dirty = False
            elif phase == State.RESUMING:
                replica.applied = update.version
            else:
                replica.fenced = True
            raise
        finally:
            # Whoever waits for it runs after our caller, who must not await before it commits.
            replica.swapping.set_result(None)
            replica.swapping = None
        self._waiting = []
        replica.applied = update.version
        replica.paused = False
        return done

    async def _swap_and_send(
        self,
        replica: Replica,
        update: WeightUpdate,
        timeouts: PhaseTimeouts,
        sender: WeightSender,
    ) -> Swapped:
        swap = asyncio.create_task(replica.engine.swap(update, timeouts))
        send = asyncio.create_task(sender.send(update))
        self._waiting.append("send")
        try:
            await asyncio.wait([swap, send], return_when=asyncio.FIRST_EXCEPTION)
            # The replica's word goes first: it says what it is left with.
            for task in (swap, send):
                if task.done():
                    task.result()
            return swap.result()
        except BaseException:
            # Also where all was sent: what nobody took would be taken for the next update.
            await uninterrupted(self._end_transfer(sender, [swap, send]))
            raise

    async def resume(self) -> None:
        """Let the serving replicas go on; a dirty one is refused."""

        async def resume(replica: Replica) -> None:
            if replica.dirty:
                raise EngineError(replica.name, "holds half-applied weights and is not resumed")
            await replica.engine.resume()
            replica.paused = False

        await self._fan_out("resume", resume)

    async def first_tokens(self, update: WeightUpdate) -> list[FirstTokens]:
        """Wait until every request that the pause froze has gone on."""
        return await self._fan_out("first token", lambda r: r.engine.wait_first_tokens(update))

    async def digests(self, update: WeightUpdate) -> dict[str, Digests]:
        """Digest of what each serving replica received, by replica name."""
        replicas = self.serving
        found = await self._fan_out("digests", lambda r: r.engine.digests(update), replicas)
        return dict(zip([r.name for r in replicas], found, strict=True))

    async def prompt_logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> dict[str, tuple[tuple[float, ...], ...]]:
        """Log-probabilities of fixed prompts on each serving replica, by replica name."""
        replicas = self.serving
        found = await self._fan_out(
            "prompt_logprobs", lambda r: r.engine.prompt_logprobs(prompts), replicas
        )
        return dict(zip([r.name for r in replicas], found, strict=True))

    # After a failure

    def fence_dirty(self) -> None:
        """No dirty replica takes a request or is resumed from now on."""
        for replica in self._replicas:
            replica.fenced = replica.fenced or replica.dirty

    def fence_all(self) -> None:
        """No replica takes a request from now on."""
        for replica in self._replicas:
            replica.fenced = True

    async def evict_fenced(self, seconds: float) -> None:
        """End the requests of fenced replicas there, so that :meth:`generate` moves them on.

        A replica that does not answer within ``seconds`` is gone or hangs: its death says so.
        """
        fenced = [r for r in self._replicas if r.fenced and r.live]
        evictions = [asyncio.ensure_future(r.engine.abort_requests()) for r in fenced]
        if evictions:
            await asyncio.wait(evictions, timeout=seconds)
            await settle(evictions)

    async def resume_clean(self, seconds: float) -> None:
        """Resume every serving paused replica; one that does not within ``seconds`` is fenced."""

        async def resume(replica: Replica) -> None:
            try:
                async with asyncio.timeout(seconds):
                    await replica.engine.resume()
                replica.paused = False
            except Exception:
                replica.fenced = True

        await asyncio.gather(*(resume(r) for r in self.serving if r.paused))
