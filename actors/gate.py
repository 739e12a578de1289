"""The way into a replica: requests wait before it while it is shut.

Asyncio only: no vLLM, no Ray. One event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Gate:
    """Open at first. Who is half-way through when it shuts is waited for."""

    def __init__(self) -> None:
        self._shut = False
        self._held: dict[str, asyncio.Future[bool]] = {}
        self._entering = 0
        self._through: asyncio.Future[None] | None = None

    @property
    def is_shut(self) -> bool:
        """Whether requests have to wait."""
        return self._shut

    @property
    def held(self) -> int:
        """How many requests wait."""
        return len(self._held)

    async def shut(self) -> None:
        """Let no further request in; returns when nobody is half-way through."""
        self._shut = True
        while self._entering:
            self._through = asyncio.get_running_loop().create_future()
            await self._through

    def open(self) -> None:
        """Let everybody in. Idempotent."""
        self._shut = False
        self._answer(True)

    def send_away(self) -> int:
        """Tell every waiting request that it will not get in; how many there were."""
        self._answer(False)
        return len(self._held)

    @contextlib.contextmanager
    def holding(self, request_id: str) -> Iterator[asyncio.Future[bool]]:
        """Hold a request: the future says whether the gate opened, or it was sent away.

        The gate may be shut again by the time that is read: ask :attr:`is_shut` once more.
        """
        # Counted from here on, not from the first await: it could open in between.
        go = self._held[request_id] = asyncio.get_running_loop().create_future()
        try:
            yield go
        finally:
            self._held.pop(request_id, None)

    @contextlib.contextmanager
    def entering(self) -> Iterator[None]:
        """Around the way through. No await between seeing the gate open and this."""
        self._entering += 1
        try:
            yield
        finally:
            self._entering -= 1
            if not self._entering and self._through is not None:
                if not self._through.done():
                    self._through.set_result(None)
                self._through = None

    def _answer(self, enter: bool) -> None:
        for go in self._held.values():
            if not go.done():
                go.set_result(enter)
