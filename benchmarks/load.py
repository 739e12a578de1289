"""Requests that decode all the time, so that a swap has somebody to stall."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from orchestrator.protocols import Engine
from orchestrator.tasks import settle
from orchestrator.types import GenerationRequest, Prompt


class Load:
    """Keeps ``count`` requests decoding: one that ends is replaced at once."""

    def __init__(
        self, engines: Sequence[Engine], prompts: Sequence[Prompt], count: int, tokens: int
    ) -> None:
        self._engines, self._prompts, self._tokens = engines, prompts, tokens
        self._ending = False
        self.written = 0
        """Tokens of ended requests."""
        self._tasks = [asyncio.create_task(self._lane(i)) for i in range(count)]

    async def _lane(self, lane: int) -> None:
        turn = 0
        while not self._ending:
            request = GenerationRequest(
                f"load-{id(self)}-{lane}-{turn}",
                self._prompts[lane % len(self._prompts)],
                # Staggered ends: a fleet whose requests all end together is not under load.
                max_tokens=self._tokens - 7 * (lane % 5),
                temperature=1.0,
                seed=1000 * lane + turn,
                ignore_eos=True,
            )
            done = await self._engines[lane % len(self._engines)].generate(request)
            self.written += len(done.token_ids)
            turn += 1

    def check(self) -> None:
        """Raise what a lane failed with."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def end(self) -> int:
        """End every request with what it has; tokens written since the beginning."""
        self._ending = True
        try:
            for engine in self._engines:
                await engine.abort_requests()
            await asyncio.gather(*self._tasks)
        finally:
            await self.stop()
        return self.written

    async def stop(self) -> None:
        """Drop every request."""
        await settle(self._tasks)


async def tokens_per_s(
    load: Callable[[], Load], seconds: float, meanwhile: Callable[[], Awaitable[None]]
) -> float:
    """Tokens a second that a new load writes in ``seconds`` while ``meanwhile`` runs over and over.

    Two windows of one length compare: both begin with the load's first prefill.
    """
    began = time.perf_counter()
    work = load()
    try:
        while time.perf_counter() - began < seconds:
            await meanwhile()
            work.check()
        elapsed = time.perf_counter() - began
        return await work.end() / elapsed
    finally:
        await work.stop()
