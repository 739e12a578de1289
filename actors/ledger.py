"""Which requests are live at a replica, when they wrote, and what each swap cost them.

Bookkeeping only: no vLLM, no Ray. One event loop; times are ``perf_counter`` seconds that the
caller passes in.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from orchestrator.protocols import FirstTokens
from orchestrator.types import GenerationRequest, Stall


@dataclass(slots=True, eq=False)
class Live:
    """One request between submission and end."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last_at: float | None = None
    """When it wrote last."""
    gaps: list[float] = field(default_factory=list)
    """Seconds a token, one entry an output, without those that span a swap."""
    stalls: list[Stall] = field(default_factory=list)
    """What each swap it went through cost it."""

    @property
    def median_gap(self) -> float | None:
        """Seconds between its tokens, usually."""
        return statistics.median(self.gaps) if self.gaps else None


class Swap:
    """One pause and what the requests that were writing saw of it."""

    def __init__(self, sync_id: str, frozen: Iterable[Live]) -> None:
        self.sync_id = sync_id
        self.frozen = [live for live in frozen if live.last_at is not None]
        self._waiting = set(self.frozen)
        medians = [m for live in self.frozen if (m := live.median_gap) is not None]
        self._usual_gap = statistics.median(medians) if medians else 0.0
        """Stands in where a request wrote too little to have a median of its own."""
        self._stalls: list[float] = []
        self._resumed_at: float | None = None
        self._first: float | None = None
        self._all_seen = asyncio.Event()
        self._check()

    @property
    def all_seen(self) -> bool:
        """Nobody is waited for."""
        return self._all_seen.is_set()

    def resumed(self, now: float) -> None:
        """The replica was told to go on. Only the first call counts."""
        if self._resumed_at is None:
            self._resumed_at = now

    def wrote(self, live: Live, now: float) -> bool:
        """``live`` wrote; True if that was its first token after the swap."""
        if self._resumed_at is None or live not in self._waiting or live.last_at is None:
            return False
        if self._first is None:
            self._first = now - self._resumed_at
        gap = live.median_gap
        seconds = now - live.last_at - (self._usual_gap if gap is None else gap)
        live.stalls.append(Stall(self.sync_id, max(0.0, seconds)))
        self._stalls.append(live.stalls[-1].seconds)
        self.ended(live)
        return True

    def ended(self, live: Live) -> None:
        """``live`` is waited for no longer."""
        self._waiting.discard(live)
        self._check()

    async def first_tokens(self) -> FirstTokens:
        """Wait until every request that was writing has written again or ended."""
        await self._all_seen.wait()
        return FirstTokens(seconds=self._first, stalls=tuple(self._stalls))

    def _check(self) -> None:
        if not self._waiting:
            self._all_seen.set()


class Ledger:
    """All live requests of a replica, and its last swap."""

    def __init__(self) -> None:
        self.live: dict[str, Live] = {}
        self.swap: Swap | None = None
        self._unseen: list[Swap] = []
        self._thresholds: list[_Threshold] = []

    def add(self, live: Live) -> None:
        """``live`` was given to the engine."""
        self.live[live.request.request_id] = live
        self._notice(live)

    def remove(self, live: Live) -> None:
        """``live`` ended. Idempotent."""
        self.live.pop(live.request.request_id, None)
        for swap in self._unseen:
            swap.ended(live)

    def wrote(self, live: Live, token_ids: list[int], logprobs: list[float], now: float) -> None:
        """``live`` wrote ``token_ids`` (one or more, received together)."""
        if live.last_at is not None:
            self._unseen = [swap for swap in self._unseen if not swap.all_seen]
            # All of them: a request may have written nothing between two swaps.
            if not any([swap.wrote(live, now) for swap in self._unseen]):
                live.gaps.append((now - live.last_at) / len(token_ids))
        live.last_at = now
        live.token_ids.extend(token_ids)
        live.logprobs.extend(logprobs)
        self._notice(live)

    def _notice(self, live: Live) -> None:
        for wait in self._thresholds:
            if wait.met(live) and not wait.reached.done():
                wait.reached.set_result(len(self.live))

    def freeze(self, sync_id: str) -> Swap:
        """The replica is idle: what is live now is frozen."""
        self.swap = Swap(sync_id, self.live.values())
        self._unseen.append(self.swap)
        return self.swap

    async def wait_for_tokens(self, threshold: int, among: Collection[str] | None = None) -> int:
        """Wait until a live request (one of ``among``) has ``threshold`` tokens; how many live."""
        wait = _Threshold(threshold, None if among is None else frozenset(among))
        if any(wait.met(live) for live in self.live.values()):
            return len(self.live)
        self._thresholds.append(wait)
        try:
            return await wait.reached
        finally:
            self._thresholds.remove(wait)


class _Threshold:
    def __init__(self, tokens: int, among: frozenset[str] | None) -> None:
        self._tokens, self._among = tokens, among
        self.reached: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def met(self, live: Live) -> bool:
        wanted = self._among is None or live.request.request_id in self._among
        return wanted and len(live.token_ids) >= self._tokens
