"""A virtual clock: an event loop whose time costs nothing and whose hangs are failures.

Time stands still while a callback is ready; when none is, it jumps to the next deadline.
``asyncio.sleep``, ``timeout``, ``wait_for`` and ``call_later`` work unchanged. When nothing
is ready and nothing is scheduled no future event can wake a task, and :class:`Deadlock` is
raised out of the loop at once, naming each waiting task and its line.

Calls in threads (``run_in_executor``, ``asyncio.to_thread``) are waited for in real time while
virtual time stands still. A wake-up from any other thread, or from a socket, is not foreseen:
the loop reports a deadlock instead of waiting for it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

HORIZON = 14_400.0
"""Virtual seconds after which a run counts as hung: a heartbeat can tick for ever."""
_THREAD_LIMIT = 60.0
"""Real seconds a call in a thread may take."""


class Deadlock(AssertionError):
    """Nothing can ever happen any more. ``waiting`` has a line for each task."""

    def __init__(self, reason: str, waiting: tuple[str, ...]) -> None:
        super().__init__("\n  ".join((f"{reason}; {len(waiting)} tasks wait:", *waiting)))
        self.waiting = waiting


class _Selector(selectors.DefaultSelector):
    """Polls, and tells its loop how long it would have slept."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if self.loop.wake_idle():
            return events
        if self.loop.threads:
            events = super().select(_THREAD_LIMIT)
            if not events:
                self.loop.fail(f"a call in a thread took longer than {_THREAD_LIMIT:g} s")
            return events
        if timeout is None:
            self.loop.fail(f"deadlock at {self.loop.time():g} s")
        else:
            self.loop.advance(timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop over virtual time, starting at 0 s. Use as ``loop_factory``."""

    def __init__(self, horizon: float = HORIZON) -> None:
        self._now = 0.0
        self._horizon = horizon
        self.threads = 0
        """Calls in threads that have not answered yet."""
        self._idle: list[asyncio.Future[None]] = []
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock (the loop's own business). Raises Deadlock beyond the horizon."""
        # Rounded to the loop's resolution, so that 0.1 + 0.2 does not drift away from 0.3.
        self._now = round(self._now + seconds, 9)
        if self._now > self._horizon:
            self.fail(f"virtual time passed {self._horizon:g} s")

    def idle(self) -> asyncio.Future[None]:
        """Ends when nothing else can run without the clock moving."""
        future: asyncio.Future[None] = self.create_future()
        self._idle.append(future)
        return future

    def wake_idle(self) -> bool:
        """Whether somebody waited for :meth:`idle` (the loop's own business)."""
        waiting = [f for f in self._idle if not f.done()]
        self._idle.clear()
        for future in waiting:
            future.set_result(None)
        return bool(waiting)

    def fail(self, reason: str) -> None:
        """Raise Deadlock with every task that is not done."""
        raise Deadlock(reason, waiting_tasks(self))

    def run_in_executor(
        self, executor: Any, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """As in the base; virtual time stands still until the thread answers."""
        future = super().run_in_executor(executor, func, *args)
        self.threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        """As in the base, which uses a thread of its own to wait for the others."""
        self.threads += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self.threads -= 1

    def _thread_done(self, _future: asyncio.Future[Any]) -> None:
        self.threads -= 1


def waiting_tasks(loop: asyncio.AbstractEventLoop) -> tuple[str, ...]:
    """A line for each unfinished task: its name, and where it waits, outermost call first."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    return tuple(f"{task.get_name()}: {_where(task)}" for task in tasks)


def _where(task: asyncio.Task[Any]) -> str:
    places: list[str] = []
    coro: object = task.get_coro()
    while coro is not None:
        frame: FrameType | None = getattr(coro, "cr_frame", None) or getattr(coro, "gi_frame", None)
        if frame is not None:
            code = frame.f_code
            file = "/".join(code.co_filename.replace("\\", "/").split("/")[-2:])
            places.append(f"{code.co_qualname} ({file}:{frame.f_lineno})")
        coro = getattr(coro, "cr_await", None) or getattr(coro, "gi_yieldfrom", None)
    return " > ".join(places) or "finished its coroutine"


def assert_no_leaked_tasks() -> None:
    """Fail if the running loop has an unfinished task besides the current one."""
    loop = asyncio.get_running_loop()
    current = asyncio.current_task()
    leaked = [t for t in asyncio.all_tasks(loop) if t is not current and not t.done()]
    if leaked:
        lines = "\n  ".join(f"{t.get_name()}: {_where(t)}" for t in leaked)
        raise AssertionError(f"{len(leaked)} tasks have no owner any more:\n  {lines}")


async def all_blocked() -> None:
    """Return when every other task waits for something; virtual time does not move.

    Replaces the sleep with which a test lets others go first.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise RuntimeError("all_blocked() needs a VirtualLoop")
    await loop.idle()


def run(coro: Coroutine[Any, Any, T], horizon: float = HORIZON) -> T:
    """Run ``coro`` over virtual time and return its result; a leaked task is an error."""

    async def checked() -> T:
        result = await coro
        assert_no_leaked_tasks()
        return result

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(horizon)) as runner:
        return runner.run(checked())
