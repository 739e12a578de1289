"""What the fake engine and the fake trainer have in common: calls, faults, death.

All waits are on futures the actor keeps, so that its death, its closing and the end of its
channel reach every call that is pending.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from orchestrator.errors import ChannelError, EngineDied, MidflightError, TrainerDied
from orchestrator.testing.channel import FakeChannel
from orchestrator.testing.faults import Block, Delay, Die, Fail, Hook, When
from orchestrator.testing.world import Call, FakeWorld
from orchestrator.types import WeightUpdate

T = TypeVar("T")

_ON_CHANNEL = frozenset({"open_channel", "prefetch", "receive_update", "send"})
_TELLS = frozenset({"prefetch", "receive_update", "swap"})


class FakeActor(ABC):
    """A process that may die. Methods of the protocols run inside :meth:`_call`."""

    def __init__(self, name: str, world: FakeWorld) -> None:
        self.world = world
        self.death: str | None = None
        """Why the process is gone; None while it lives."""
        self.pids: tuple[int, ...] = ()
        """What it says its processes are."""
        self.channel: FakeChannel | None = None
        """The transfer group it is in."""
        self._name = name
        self._closed = False
        self._core_only = False
        self._pending: dict[asyncio.Future[Any], bool] = {}
        self._death_watch: set[asyncio.Future[str]] = set()

    @property
    def name(self) -> str:
        """Unique in the world."""
        return self._name

    @property
    def closed(self) -> bool:
        """Whether :meth:`aclose` did its work."""
        return self._closed

    @property
    def log(self) -> list[Call]:
        """Calls at this actor, in the order they began."""
        return self.world.calls(actor=self._name)

    def kill(self, reason: str = "killed", *, core: bool = False) -> None:
        """The process is gone at this very moment (for tests). Idempotent.

        ``core``: of an engine, its core alone: its actor still says what requests had
        (``EngineDied.partial``).
        """
        if self.death is None:
            self._core_only = core
            self._gone(reason)

    async def wait_dead(self) -> str:
        """Why the process is gone; ``closed`` after :meth:`aclose`."""
        if self.death is not None:
            return self.death
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._death_watch.add(future)
        try:
            return await future
        finally:
            self._death_watch.discard(future)

    async def close_channel(self) -> None:
        """Leave the channel: transfers pending here fail, the other side is not told.

        Idempotent; on a dead actor there is nothing to leave.
        """
        call = self._begin("close_channel", ())
        try:
            if self.death is None:
                await self._strike(call, When.BEFORE)
                self._leave()
                await self._strike(call, When.AFTER)
        except BaseException as error:
            call.error = error
            raise
        finally:
            self._end(call)

    async def aclose(self) -> None:
        """End every pending call and the process. Idempotent; works on a dead actor."""
        call = self._begin("aclose", ())
        try:
            if not self._closed:
                with suppress(EngineDied, TrainerDied):
                    await self._strike(call, When.BEFORE)
                self._closed = True
                self.kill("closed")
        except BaseException as error:
            call.error = error
            raise
        finally:
            self._end(call)

    # -- for the subclasses -----------------------------------------------------------------

    @abstractmethod
    def _error(self, message: str) -> MidflightError: ...

    @abstractmethod
    def _died(self, message: str) -> MidflightError: ...

    def _on_gone(self) -> None:  # noqa: B027  (optional)
        """Nothing may run on in a dead process."""

    def _violate(self, message: str) -> MidflightError:
        """Record a breach of the protocol by the caller; returns the error to raise."""
        self.world.violations.append(f"{self._name}: {message}")
        return self._error(message)

    @asynccontextmanager
    async def _call(self, method: str, *args: object) -> AsyncIterator[Call]:
        call = self._begin(method, args)
        try:
            self._alive()
            await self._strike(call, When.BEFORE)
            yield call
            await self._strike(call, When.AFTER)
        except BaseException as error:
            call.error = error
            raise
        finally:
            self._end(call)

    async def _wait(self, future: asyncio.Future[T], *, on_channel: bool = False) -> T:
        """Wait for ``future``, or for the end of the actor or of its channel."""
        self._alive()
        self._pending[future] = on_channel
        try:
            return await future
        finally:
            del self._pending[future]
            if future.done() and not future.cancelled():
                future.exception()  # marks it as seen when a cancel came in the same turn

    async def _sleep(self, seconds: float, *, on_channel: bool = False) -> None:
        """Like asyncio.sleep, ended by the actor's death."""
        if seconds <= 0:
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _resolve, future)
        try:
            await self._wait(future, on_channel=on_channel)
        finally:
            timer.cancel()

    def _leave(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.leave(self._name)
        for future, on_channel in list(self._pending.items()):
            if on_channel and not future.done():
                future.set_exception(ChannelError(f"{self._name} left its transfer channel"))

    def _alive(self) -> None:
        if self.death is not None:
            raise self._died(self.death)

    # -- inside -----------------------------------------------------------------------------

    def _begin(self, method: str, args: tuple[object, ...]) -> Call:
        world = self.world
        nth = world.faults.count(self._name, method)
        call = Call(world.tick(), _now(), self._name, method, args, nth)
        if world.keep_log:
            world.log.append(call)
        if method in _TELLS and args and isinstance(args[0], WeightUpdate):
            world.told.setdefault(args[0].sync_id, set()).add(self._name)
        return call

    def _end(self, call: Call) -> None:
        call.ended, call.ended_seq = _now(), self.world.tick()

    async def _strike(self, call: Call, when: When) -> None:
        on_channel = call.method in _ON_CHANNEL
        for action in self.world.faults.actions(self._name, call.method, call.nth, when):
            match action:
                case Hook(function):
                    function()
                case Delay(seconds):
                    await self._sleep(seconds, on_channel=on_channel)
                case Block(gate):
                    await self._wait(gate.hold(), on_channel=on_channel)
                case Fail(error):
                    raise error or self._error(f"injected fault in {call.method}")
                case Die(reason, core):
                    self.kill(reason, core=core)
                    self._alive()

    def _gone(self, reason: str) -> None:
        self.death = reason
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.leave(self._name)
        self._on_gone()
        for pending in list(self._pending):
            if not pending.done():
                pending.set_exception(self._died(reason))
        for watcher in self._death_watch:
            if not watcher.done():
                watcher.set_result(reason)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
