"""Engine replicas as one: the channel, the fan-out of each phase, the commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from orchestrator.errors import ChannelError, EngineDied, EngineError, SyncError
from orchestrator.operations import RETRY, Retry
from orchestrator.protocols import Digests, Engine, FirstTokens, WeightSender
from orchestrator.replica import Replica, first_ranks
from orchestrator.routing import Router
from orchestrator.tasks import all_or_first_error, first_error, settle, uninterrupted
from orchestrator.types import (
    ChannelSpec,
    EngineInfo,
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


class _Side(Protocol):
    async def close_channel(self) -> None: ...


class Fleet(Router):
    """All replicas of a policy. Fan-out raises the first error and cancels the rest."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(engines)
        self._waiting: dict[str, Replica | None] = {}
        self._channel: frozenset[str] | None = None
        """Who is in the channel that is open, by name."""
        self._unclosed: dict[Replica | None, _Side] = {}
        """Who did not leave the last one; None: the sender."""

    def waiting_for(self) -> str:
        """Who has not answered the running fan-out yet (for the error of a deadline)."""
        return ", ".join(self._waiting)

    async def _fan_out(
        self,
        operation: str,
        call: Callable[[Replica], Coroutine[Any, Any, T]],
        replicas: Sequence[Replica] | None = None,
        *,
        collective: bool = False,
    ) -> list[T]:
        """``collective``: everybody waits for everybody, the sender too."""
        chosen = self.members if replicas is None else list(replicas)
        waiting: dict[str, Replica | None] = {f"{operation} of {r.name}": r for r in chosen}
        if collective:
            waiting[f"{operation} of the trainer"] = None
        self._waiting = waiting

        async def one(replica: Replica) -> T:
            try:
                result = await call(replica)
            except EngineError as error:
                safe = RETRY.get(operation) is Retry.SAFE and not isinstance(error, EngineDied)
                if not (safe and self.heals):
                    raise
                result = await call(replica)
            del waiting[f"{operation} of {replica.name}"]
            return result

        try:
            return await all_or_first_error([one(r) for r in chosen])
        except Exception:
            # A deadline comes as a cancel; anything else must not leave names for a later one.
            self._waiting = {}
            raise

    async def _each(
        self,
        operation: str,
        call: Callable[[Replica], Coroutine[Any, Any, T]],
        replicas: Sequence[Replica],
    ) -> dict[str, T]:
        """As a fan-out over what is committed already: who dies in it is lost, the rest goes on."""

        async def one(replica: Replica) -> T | EngineDied:
            try:
                return await call(replica)
            except EngineDied as error:
                if not self.heals:
                    raise
                self.lose(replica, str(error))
                return error

        found = await self._fan_out(operation, one, replicas)
        died = [f for f in found if isinstance(f, EngineDied)]
        if died and len(died) == len(found):
            raise died[0]
        return {
            r.name: f for r, f in zip(replicas, found, strict=True) if not isinstance(f, EngineDied)
        }

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
        if self.heals:
            await self._close_again()
        members = [r for r in self.here if r.info is not None]
        if not members:
            raise EngineError(self.names, "no replica is left to open a channel with")
        workers = [r.info.workers for r in members if r.info is not None]
        rank = dict(zip([r.name for r in members], first_ranks(workers), strict=True))
        self._waiting = {"listen of the trainer": None}
        try:
            spec = await sender.listen(backend, 1 + sum(workers), timeout_s)
            spec = replace(spec, staged=staged)

            async def engines() -> None:
                await self._fan_out(
                    "open_channel",
                    lambda r: r.engine.open_channel(spec, rank[r.name]),
                    members,
                    collective=True,
                )

            await all_or_first_error([engines(), sender.open_channel(spec)])
        except BaseException:
            await uninterrupted(self.close_channel(sender))
            raise
        self._waiting = {}
        self._channel = frozenset(rank)
        return spec

    async def ensure_channel(
        self,
        sender: WeightSender,
        backend: TransferBackend,
        timeout_s: float,
        *,
        staged: bool = False,
    ) -> None:
        """Open the channel again if a failed transfer closed it, or others are to be in it."""
        self._waiting = {}
        if self._channel == frozenset(r.name for r in self.members):
            return
        if self._channel is not None:
            await self.close_channel(sender)
        await self.open_channel(sender, backend, timeout_s, staged=staged)

    async def close_channel(self, sender: WeightSender) -> None:
        """Close every side; what hangs in a transfer fails.

        A side that is dead or does not answer within ``CLOSE_S`` is left to its end.
        """
        self._channel = None
        here = [r for r in self._replicas if r.lost is None]
        self._unclosed = await self._close_sides({None: sender, **{r: r.engine for r in here}})

    async def _close_sides(
        self, sides: Mapping[Replica | None, _Side]
    ) -> dict[Replica | None, _Side]:
        """Those that failed to, or did not answer within ``CLOSE_S``."""
        tasks = {who: asyncio.ensure_future(side.close_channel()) for who, side in sides.items()}
        try:
            await asyncio.wait(tasks.values(), timeout=CLOSE_S)
        finally:
            await settle(tasks.values())
        return {w: sides[w] for w, t in tasks.items() if t.cancelled() or t.exception()}

    async def _close_again(self) -> None:
        """Sides that may still be in a former channel can be in no other: a second try is due."""
        again, self._unclosed = self._unclosed, {}
        if again:
            stuck = self._unclosed = await self._close_sides(again)
            for who in stuck:
                if who is not None:
                    self.lose(who, f"it does not leave its transfer group within {CLOSE_S:g} s")
            if None in stuck:
                raise ChannelError("the trainer does not leave its former transfer group")

    async def aclose(self) -> None:
        """Release every replica. The first error is raised after all were tried."""
        results = await asyncio.gather(
            *(r.engine.aclose() for r in self._replicas), return_exceptions=True
        )
        errors = [r for r in results if isinstance(r, BaseException)]
        if errors:
            raise first_error(BaseExceptionGroup("closing engines", errors))

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
            if self._channel is not None:
                await uninterrupted(self.close_channel(sender))
            raise

    async def pause(self, mode: PauseMode, kv: KVPolicy) -> list[PauseAck]:
        """Every member is idle when this returns."""

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
        replicas = self.members
        parties = [*(f"{operation} of {r.name}" for r in replicas), "send"]
        whose: list[Replica | None] = [*replicas, None]
        self._waiting = dict(zip(parties, whose, strict=True))
        receives = [asyncio.create_task(receive(r)) for r in replicas]
        send = asyncio.create_task(sender.send(update))
        tasks = [*receives, send]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            ended = [t for t in tasks if t.done() and not t.cancelled()]
            failed = [e for t in ended if (e := t.exception()) is not None]
            if failed:
                raise first_error(BaseExceptionGroup(operation, failed))
            self._waiting = {}
            return [t.result() for t in receives]
        except BaseException:
            left = zip(parties, whose, tasks, strict=True)
            self._waiting = {party: who for party, who, task in left if not task.done()}
            raise
        finally:
            if any(not t.done() for t in tasks):
                # A second cancel must not leave anybody in the collective; CLOSE_S bounds it.
                await uninterrupted(self._end_transfer(sender, tasks))
            else:
                await settle(tasks)  # several may have failed at once

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

    def commit(self, version: PolicyVersion, *, rolling: bool = False) -> None:
        """Publish ``version``: only when every member and every serving replica has it, and only
        forwards. ``rolling``: members are enough, and they may follow those that had it first.
        """
        members = self.members
        having = {r.name for r in members if r.applied == version}
        needed = members if rolling else [*members, *self.serving]
        without = [r.name for r in needed if r.name not in having]
        if without or version < self.version + (not rolling):
            raise EngineError(
                ", ".join(dict.fromkeys(without)) or "fleet",
                f"cannot commit {version} over {self.version}",
            )
        for replica in members:
            replica.dirty = False
            replica.awaiting = version
        self.version = version
        self.change()

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
        (replica,) = self.members
        self._waiting = {f"swap of {replica.name}": replica}
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
                self.fence([replica])
            raise
        finally:
            # Whoever waits for it runs after our caller, who must not await before it commits.
            replica.swapping.set_result(None)
            replica.swapping = None
        self._waiting = {}
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
        self._waiting["send"] = None
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
        """Let the members go on; a dirty one is refused."""

        async def resume(replica: Replica) -> None:
            if replica.dirty:
                raise EngineError(replica.name, "holds half-applied weights and is not resumed")
            await replica.engine.resume()
            replica.paused = False

        await self._each("resume", resume, self.here)

    async def first_tokens(self, update: WeightUpdate) -> list[FirstTokens]:
        """Wait until every request that the pause froze has gone on."""
        writing = [r for r in self.members if not r.fenced]
        found = await self._each(
            "first token", lambda r: r.engine.wait_first_tokens(update), writing
        )
        return list(found.values())

    async def digests(self, update: WeightUpdate) -> dict[str, Digests]:
        """Digest of what each member received, by replica name."""
        if not self.here:
            raise EngineError(self.names, "no replica is left that could show its digests")
        return await self._each("digests", lambda r: r.engine.digests(update), self.here)

    async def prompt_logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> dict[str, tuple[tuple[float, ...], ...]]:
        """Log-probabilities of fixed prompts on each serving replica, by replica name."""
        return await self._each(
            "prompt_logprobs", lambda r: r.engine.prompt_logprobs(prompts), self.serving
        )

    # After a failure

    @property
    def late(self) -> list[Replica]:
        """Whoever the fan-out that ran out of time still waits for.

        Nobody in a transfer, where everybody waits for everybody.
        """
        late = list(self._waiting.values())
        return [] if None in late else [r for r in late if r is not None]

    def lose_waiting(self, seconds: float) -> None:
        """Whoever is late hangs: it is lost."""
        if self.heals:
            for replica in self.late:
                self.lose(replica, f"it did not answer within {seconds:g} s")

    def fence_all(self) -> None:
        """No replica takes a request from now on."""
        self.fence(self._replicas)

    async def resume_clean(
        self, seconds: float, late: Collection[Replica] = (), late_seconds: float = 0.0
    ) -> None:
        """Resume every serving paused replica; one that does not in time is fenced.

        ``seconds`` each, ``late_seconds`` for those that are ``late``.
        """

        async def resume(replica: Replica) -> None:
            try:
                async with asyncio.timeout(late_seconds if replica in late else seconds):
                    await replica.engine.resume()
                replica.paused = False
            except Exception as error:
                self.fence([replica])
                if self.heals:
                    self.lose(replica, f"it did not resume: {str(error) or type(error).__name__}")

        await asyncio.gather(*(resume(r) for r in self.serving if r.paused))
