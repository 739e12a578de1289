"""Requests that decode all the time, so that a swap has somebody to stall."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from math import sqrt
from statistics import fmean
from typing import Any

from orchestrator.protocols import Engine
from orchestrator.tasks import settle
from orchestrator.types import GenerationRequest, Prompt


class Load:
    """Keeps ``count`` requests decoding: one that ends is replaced at once."""

    def __init__(
        self, engines: Sequence[Engine], prompts: Sequence[Prompt], count: int, tokens: int
    ) -> None:
        self._engines, self._prompts, self._tokens = engines, prompts, tokens
        self._count = count
        self._tasks = [asyncio.create_task(self._lane(i)) for i in range(count)]

    async def _lane(self, lane: int) -> None:
        # Ends spread over time: requests that all end together are no load at all, then a burst.
        first = max(1, self._tokens * (lane + 1) // self._count)
        turn = 0
        while True:
            request = GenerationRequest(
                f"load-{id(self)}-{lane}-{turn}",
                self._prompts[lane % len(self._prompts)],
                max_tokens=first if turn == 0 else self._tokens,
                temperature=1.0,
                # No seed: vLLM samples seeded requests one by one, on the step's critical path.
                ignore_eos=True,
            )
            await self._engines[lane % len(self._engines)].generate(request)
            turn += 1

    def check(self) -> None:
        """Raise what a lane failed with."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """Drop every request."""
        await settle(self._tasks)


class Slots:
    """Tokens a second in short slots of several kinds that take turns, under one load.

    What drifts or comes and goes (prefill, the machine's other work) then meets all kinds alike.
    """

    def __init__(self, written: Callable[[], Awaitable[Sequence[tuple[float, int]]]]) -> None:
        """``written``: of each engine, its time and its tokens until then."""
        self._written = written
        self._speeds: defaultdict[str, list[float]] = defaultdict(list)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._swaps: Counter[str] = Counter()

    async def measure(self, kind: str, meanwhile: Callable[[], Awaitable[int]]) -> None:
        """One slot: as long as ``meanwhile`` runs, which says how many swaps it made."""
        before = await self._written()
        swaps = await meanwhile()
        after = await self._written()
        spans = [(t1 - t0, n1 - n0) for (t0, n0), (t1, n1) in zip(before, after, strict=True)]
        self._speeds[kind].append(sum(tokens / seconds for seconds, tokens in spans))
        self._seconds[kind] += fmean(seconds for seconds, _ in spans)
        self._swaps[kind] += swaps

    def result(self, base: str, others: Sequence[str]) -> dict[str, Any]:
        """Means, and their ``share`` of ``base``'s with its standard error. None: no slots.

        ``swap_costs_s``: seconds of decoding that one swap takes away, with all that belongs to it.
        """
        found: dict[str, Any] = {
            "tokens_per_s": {base: fmean(self._speeds[base])},
            "samples": {base: self._speeds[base]},
        }
        for kind in others:
            speeds, swaps = self._speeds[kind], self._swaps[kind]
            pairs = list(zip(speeds, self._speeds[base], strict=bool(speeds)))
            share, error = _ratio(pairs), _error(pairs)
            cost = None
            if swaps and share is not None:
                cost = (1 - share) * self._seconds[kind] / swaps
            of_kind = {
                "samples": speeds,
                "tokens_per_s": fmean(speeds) if speeds else None,
                "share": share,
                "share_error": error,
                "swaps": swaps,
                "swap_costs_s": cost,
                "swap_costs_error_s": error * self._seconds[kind] / swaps
                if swaps and error is not None
                else None,
            }
            for name, value in of_kind.items():
                found.setdefault(name, {})[kind] = value
        return found


Pairs = Sequence[tuple[float, float]]


def _ratio(pairs: Pairs) -> float | None:
    """Of the sums: a mean of ratios would favour what is compared with noisy slots."""
    below = sum(b for _, b in pairs)
    return sum(a for a, _ in pairs) / below if below else None


def _error(pairs: Pairs) -> float | None:
    """Standard error of :func:`_ratio`, by leaving out one pair after the other (jackknife)."""
    n = len(pairs)
    without = [_ratio([p for j, p in enumerate(pairs) if j != i]) for i in range(n)]
    known = [ratio for ratio in without if ratio is not None]
    if n < 2 or len(known) < n:
        return None
    return sqrt((n - 1) / n * sum((ratio - fmean(known)) ** 2 for ratio in known))
