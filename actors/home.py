"""One event loop on its own thread, where an actor's whole state lives.

Ray runs each concurrency group of an async actor in an event loop of its own, on a thread of
its own. State shared between groups would race, and an asyncio object made in one loop cannot
be awaited in another, so every call hops here first.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class HomeLoop:
    """Starts at once; ends with the process (or :meth:`stop`)."""

    def __init__(self, name: str = "home") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def run(self, coro: Coroutine[Any, Any, R]) -> R:
        """Run ``coro`` at home. Cancelling the caller cancels it there."""
        if asyncio.get_running_loop() is self.loop:
            return await coro
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coro, self.loop))

    def stop(self) -> None:
        """End the loop and its thread. Idempotent; not from the loop itself."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout=5)


class AtHome(Protocol):
    """An object whose state lives in a home loop."""

    @property
    def home(self) -> HomeLoop: ...


S = TypeVar("S", bound=AtHome)


def at_home(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Decorator: the method's body runs in the object's home loop."""

    async def hop(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.home.run(method(self, *args, **kwargs))

    functools.update_wrapper(hop, method)
    return hop
