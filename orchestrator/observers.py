"""Telling observers what happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec

from orchestrator.events import Event, Observer
from orchestrator.types import OpContext

P = ParamSpec("P")


class Observers:
    """Everybody who is told of a run's events, in order."""

    def __init__(self, observers: Sequence[Observer], op: Callable[[], OpContext]) -> None:
        """``op``: the operation that what happens now belongs to."""
        self._observers = tuple(observers)
        self._op = op

    def tell(
        self,
        event: Callable[Concatenate[float, OpContext, P], Event],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Tell of an ``event`` with these fields: it happens now, in the operation of now."""
        self.emit(event(time.time(), self._op(), *args, **kwargs))

    def emit(self, event: Event) -> None:
        """Tell of ``event``."""
        for observer in self._observers:
            try:
                observer(event)
            except Exception as error:
                # Told through the loop, not raised: a broken dashboard must not stop a swap.
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"observer {observer!r} failed", "exception": error}
                )
