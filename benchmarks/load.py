"""Requests that decode all the time, so that a swap has somebody to stall."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Slot:
    """What was written in a while."""

    tokens: int
    seconds: float
    swaps: int


class Slots:
    """Tokens a second in short slots of several kinds that take turns, under one load.

    What drifts or comes and goes (prefill, the machine's other work) then meets all kinds alike.
    """

    def __init__(self, written: Callable[[], Awaitable[Sequence[tuple[float, int]]]]) -> None:
        """``written``: of each engine, its time and its tokens until then."""
        self._written = written
        self._slots: defaultdict[str, list[Slot]] = defaultdict(list)

    async def measure(self, kind: str, meanwhile: Callable[[], Awaitable[int]]) -> None:
        """One slot: as long as ``meanwhile`` runs, which says how many swaps it made."""
        before = await self._written()
        swaps = await meanwhile()
        after = await self._written()
        spans = [(t1 - t0, n1 - n0) for (t0, n0), (t1, n1) in zip(before, after, strict=True)]
        seconds, tokens = fmean(t for t, _ in spans), sum(n for _, n in spans)
        self._slots[kind].append(Slot(tokens, seconds, swaps))

    def result(self, base: str, others: Sequence[str]) -> dict[str, Any]:
        """Speeds, and the ``share`` of ``base``'s with its standard error. None: no slots.

        ``swap_costs_s``: seconds of decoding that one swap takes away, with all that belongs to it.
        """
        found: dict[str, Any] = {}
        for kind in (base, *others):
            slots = self._slots[kind]
            pairs = list(zip(slots, self._slots[base], strict=bool(slots)))
            of_kind: dict[str, Any] = {
                "samples": [slot.tokens / slot.seconds for slot in slots],
                "tokens_per_s": _speed(slots),
            }
            if kind != base:
                of_kind |= {
                    "share": _share(pairs),
                    "share_error": _error(_share, pairs),
                    "swaps": sum(slot.swaps for slot in slots),
                    "swap_costs_s": _cost(pairs),
                    "swap_costs_error_s": _error(_cost, pairs),
                }
            for name, value in of_kind.items():
                found.setdefault(name, {})[kind] = value
        return found


Pairs = Sequence[tuple[Slot, Slot]]
"""A slot, and the one of the base beside it."""


def _speed(slots: Sequence[Slot]) -> float | None:
    """Of the sums: a mean of speeds would favour short slots."""
    seconds = sum(slot.seconds for slot in slots)
    return sum(slot.tokens for slot in slots) / seconds if seconds else None


def _share(pairs: Pairs) -> float | None:
    speed, base = _speed([one for one, _ in pairs]), _speed([base for _, base in pairs])
    return speed / base if speed is not None and base else None


def _cost(pairs: Pairs) -> float | None:
    swaps, share = sum(one.swaps for one, _ in pairs), _share(pairs)
    if not swaps or share is None:
        return None
    return (1 - share) * sum(one.seconds for one, _ in pairs) / swaps


def _error(estimate: Callable[[Pairs], float | None], pairs: Pairs) -> float | None:
    """Standard error of ``estimate``, by leaving out one pair after the other (jackknife)."""
    n = len(pairs)
    without = [estimate([p for j, p in enumerate(pairs) if j != i]) for i in range(n)]
    known = [value for value in without if value is not None]
    if n < 2 or len(known) < n:
        return None
    return sqrt((n - 1) / n * sum((value - fmean(known)) ** 2 for value in known))
