"""Which requests are live at a replica, when they wrote, and what each swap cost them.

Bookkeeping only: no vLLM, no Ray. One event loop; times are ``perf_counter`` seconds that the
caller passes in.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from orchestrator.protocols import FirstTokens
from orchestrator.types import GenerationRequest, PolicyVersion, Stall

RECENT = 63
"""Outputs of a request that its usual gap is the median of: taken of all requests in a stall."""


@dataclass(slots=True, eq=False)
class Live:
    """One request between submission and end."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last_at: float | None = None
    """When it wrote last."""
    version: PolicyVersion | None = None
    """Of what it wrote last, where that is known."""
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds a token, one entry an output, without those that span a swap; the latest ones."""
    stalls: list[Stall] = field(default_factory=list)
    """What each swap it went through cost it."""

    @property
    def median_gap(self) -> float | None:
        """Seconds between its tokens, usually."""
        return statistics.median(self.gaps) if self.gaps else None


class Swap:
    """One pause and what the requests that were writing saw of it.

    Where the engine core swaps by itself (``version``) nobody knows when it pauses: until the swap
    is :meth:`settle`-d, a request's first token of that version shows that it has gone through.
    """

    def __init__(
        self,
        sync_id: str,
        frozen: Iterable[Live],
        version: PolicyVersion | None = None,
        asked_at: float | None = None,
    ) -> None:
        """``frozen``: requests that the pause found, as far as that is known. ``asked_at``: no
        token that came before was late because of it."""
        self.sync_id = sync_id
        self.version = version
        self._settled = version is None
        self._asked_at = asked_at
        self._through: set[Live] = set()
        self._stalls: list[float] = []
        self._usual: dict[Live, float] = {}
        """Gap of each that is usual, from before it was late."""
        self._late: dict[Live, float] = {}
        """What each has waited longer than usual so far, at most."""
        self._resumed_at: float | None = None
        self._first_at: float | None = None
        self._all_seen = asyncio.Event()
        self._freeze(frozen)

    @property
    def all_seen(self) -> bool:
        """Nobody is waited for."""
        return self._all_seen.is_set()

    @property
    def settled(self) -> bool:
        """It is known which requests it found."""
        return self._settled

    def resumed(self, now: float) -> None:
        """The replica was told to go on. Only the first call counts."""
        if self._resumed_at is None:
            self._resumed_at = now

    def settle(self, live: Iterable[Live], resumed_at: float) -> None:
        """The engine core has swapped; ``live``: all requests there are now."""
        self._settled = True
        self.resumed(resumed_at)
        self._freeze(one for one in live if one not in self._through and self._before(one.version))

    def wrote(self, live: Live, now: float, version: PolicyVersion | None) -> bool:
        """``live`` wrote; True if that was its first token after the swap."""
        if live.last_at is None or live in self._through:
            return False
        first = self._is_first(live, version)
        if not (first or self._is_under_way(live, version)):
            return False
        median = live.median_gap
        usual = self._usual.setdefault(live, self._usual_gap if median is None else median)
        late = now - live.last_at - usual
        if self._asked_at is not None:
            late = min(late, now - self._asked_at)
        self._late[live] = max(late, self._late.get(live, 0.0))
        if not first:
            return False
        if self._first_at is None:
            self._first_at = now
        live.stalls.append(Stall(self.sync_id, self._late[live]))
        self._stalls.append(self._late[live])
        self._through.add(live)
        self.ended(live)
        return True

    def _is_first(self, live: Live, version: PolicyVersion | None) -> bool:
        """Whether ``live``, which writes under ``version``, has gone through by that."""
        if self.version is not None:
            return not self._before(version) and self._before(live.version)
        return self._resumed_at is not None and live in self._waiting

    def _is_under_way(self, live: Live, version: PolicyVersion | None) -> bool:
        """Whether it has not, and is late by what the swap does: tokens of the step that was under
        way may come behind the word that all is done."""
        return self.version is not None and self._before(version)

    def ended(self, live: Live) -> None:
        """``live`` is waited for no longer."""
        self._waiting.discard(live)
        self._check()

    async def first_tokens(self) -> FirstTokens:
        """Wait until every request that was writing has written again or ended."""
        await self._all_seen.wait()
        first = None
        if self._first_at is not None and self._resumed_at is not None:
            first = max(0.0, self._first_at - self._resumed_at)
        return FirstTokens(seconds=first, stalls=tuple(self._stalls))

    def _before(self, version: PolicyVersion | None) -> bool:
        return self.version is not None and (version is None or version < self.version)

    def _freeze(self, live: Iterable[Live]) -> None:
        self.frozen = [one for one in live if one.last_at is not None]
        self._waiting = set(self.frozen)
        medians = [m for one in self.frozen if (m := one.median_gap) is not None]
        self._usual_gap = statistics.median(medians) if medians else 0.0
        """Stands in where a request wrote too little to have a median of its own."""
        self._check()

    def _check(self) -> None:
        if self._settled and not self._waiting:
            self._all_seen.set()


class Ledger:
    """All live requests of a replica, and its last swap."""

    def __init__(self) -> None:
        self.live: dict[str, Live] = {}
        self.swap: Swap | None = None
        self.written = 0
        """Tokens of all requests so far."""
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

    def wrote(
        self,
        live: Live,
        token_ids: list[int],
        logprobs: list[float],
        now: float,
        version: PolicyVersion | None = None,
    ) -> None:
        """``live`` wrote ``token_ids`` (one or more, received together) under ``version``."""
        if live.last_at is not None:
            if self._unseen:
                self._unseen = [swap for swap in self._unseen if not swap.all_seen]
            # All of them: a request may have written nothing between two swaps.
            if not any([swap.wrote(live, now, version) for swap in self._unseen]):
                live.gaps.append((now - live.last_at) / len(token_ids))
        live.last_at = now
        live.version = version
        self.written += len(token_ids)
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
        self.follow(self.swap)
        return self.swap

    def resumed(self, now: float) -> None:
        """The replica was told to go on after its last pause."""
        if self.swap is None:
            return
        if not self.swap.settled:
            self.swap.settle(self.live.values(), now)
        self.swap.resumed(now)

    def expect(self, sync_id: str, version: PolicyVersion, now: float) -> Swap:
        """The engine core is about to swap to ``version`` by itself."""
        self.swap = Swap(sync_id, self.live.values(), version, now)
        self.follow(self.swap)
        return self.swap

    def follow(self, swap: Swap) -> None:
        """Let ``swap`` hear who writes, until it has seen all."""
        self._unseen.append(swap)

    def forget(self, swap: Swap) -> None:
        """It did not come to it."""
        self._unseen.remove(swap)
        if self.swap is swap:
            self.swap = None

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
