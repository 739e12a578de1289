"""Whose CPU time it is: the controller's, or that of the simulated data plane.

What runs inside a call of a simulated actor, in a timer that such a call has set, or in the
observer that collects, is the simulation's. All else is the controller's: its code, asyncio's
and the event loop's. Garbage collections that start in the controller's time are counted apart:
most of what they look through is the simulation's.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import time
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, ParamSpec, TypeVar, TypeVarTuple, cast

from orchestrator.testing import VirtualLoop

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Meter:
    """Counts CPU seconds of this process, and what calls took in virtual seconds."""

    def __init__(self) -> None:
        self.active = False
        """Whether the simulation runs right now."""
        self.longest: dict[str, float] = {}
        """Longest call of each method since :meth:`forget_calls`, virtual seconds."""
        self.collection_s = 0.0
        """CPU seconds of garbage collections that started in the controller's time."""
        self._collecting = 0.0
        self._inside = 0.0
        self._entered = 0.0
        self._began = time.process_time()

    def took(self, method: str, seconds: float) -> None:
        """A call of ``method`` returned after ``seconds`` of virtual time."""
        if seconds > self.longest.get(method, -1.0):
            self.longest[method] = seconds

    def forget_calls(self) -> None:
        """Count the longest calls anew."""
        self.longest.clear()

    @property
    def simulation_s(self) -> float:
        """CPU seconds of the simulated parts so far."""
        now = time.process_time()
        return self._inside + (now - self._entered if self.active else 0.0)

    @property
    def controller_s(self) -> float:
        """CPU seconds of everything else since the meter was made."""
        now = time.process_time()
        inside = self._inside + (now - self._entered if self.active else 0.0)
        return now - self._began - inside - self.collection_s

    @contextmanager
    def counting_collections(self) -> Iterator[None]:
        """Count garbage collections inside the block apart."""

        def collecting(phase: str, info: dict[str, int]) -> None:
            if self.active:
                return
            if phase == "start":
                self._collecting = time.process_time()
            else:
                self.collection_s += time.process_time() - self._collecting

        gc.callbacks.append(collecting)
        try:
            yield
        finally:
            gc.callbacks.remove(collecting)

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` on the simulation's account."""
        if self.active:
            return function(*args, **kwargs)
        self._enter()
        try:
            return function(*args, **kwargs)
        finally:
            self._leave()

    @types.coroutine
    def steps(self, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Run ``coroutine``, each of its steps on the simulation's account."""
        inner = coroutine.__await__()
        try:
            waits_for = self.run(inner.send, None)
            while True:
                try:
                    value = yield waits_for
                except BaseException as error:
                    waits_for = self.run(inner.throw, error)
                else:
                    waits_for = self.run(inner.send, value)
        except StopIteration as stop:
            return cast(T, stop.value)

    def _enter(self) -> None:
        self.active = True
        self._entered = time.process_time()

    def _leave(self) -> None:
        self._inside += time.process_time() - self._entered
        self.active = False


def metered(cls: type, *methods: str) -> None:
    """Let these coroutine methods of ``cls`` run on the account of ``self.meter``."""
    for name in methods:
        setattr(cls, name, _metered(getattr(cls, name)))


def _metered(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> T:
        if self.meter.active:  # a call inside a call
            return await method(self, *args, **kwargs)
        meter: Meter = self.meter
        return await meter.steps(method(self, *args, **kwargs))

    return call


class MeteredLoop(VirtualLoop):
    """A virtual loop that knows whose timer it runs, and whose sets of tasks keep their order.

    Tasks hash by number, not by address: what iterates over a set of them does so in the same
    order in every process.
    """

    def __init__(self, meter: Meter, horizon: float) -> None:
        super().__init__(horizon)
        self._meter = meter
        self.set_task_factory(_numbered())

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As in the base."""
        if self._meter.active:
            return super().call_at(when, self._meter.run, callback, *args, context=context)
        return super().call_at(when, callback, *args, context=context)


class _Task(asyncio.Task[Any]):
    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, **kwargs: Any) -> None:
        self._number = number  # first: the base already asks for the hash
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self._number


def _numbered() -> Callable[..., asyncio.Task[Any]]:
    numbers = itertools.count(1)

    def make(
        loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **kwargs: Any
    ) -> asyncio.Task[Any]:
        return _Task(coro, next(numbers), loop=loop, **kwargs)

    return make
