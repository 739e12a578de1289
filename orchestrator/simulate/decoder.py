"""The token loop of a simulated engine: tokens are counted, not computed.

As :class:`~orchestrator.testing.decoder.Decoder` in who gets a token when, with one timer for the
next thing that anybody notices (a request's end, a threshold, the first token after a pause)
instead of one a token. Every request runs until its budget; every token has the id 0.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from orchestrator.testing.decoder import Decoder, wake
from orchestrator.testing.requests import Live
from orchestrator.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    PolicyVersion,
    Stall,
    TokenSpan,
)

_NEARLY = 1e-6
"""Share of a step by which a timer may come early: the clock is rounded."""


@dataclass(slots=True, eq=False)
class CountedLive(Live):
    """A request of which only the number of tokens is known."""

    begun: int | None = None
    """Step after which it was running; None while it waits."""
    limit: int = 0
    """Tokens it ends with."""
    written: int = 0
    """Tokens it had when it left the engine."""
    spans: tuple[TokenSpan, ...] = ()
    """Who wrote them."""

    def completion(self, engine: str, reason: FinishReason) -> Completion:
        """What the caller gets."""
        return Completion(
            request_id=self.request.request_id,
            engine=engine,
            token_ids=(0,) * self.written,
            logprobs=(0.0,) * self.written,
            spans=self.spans,
            finish_reason=reason,
            stalls=tuple(self.stalls),
        )


class CountingDecoder(Decoder):
    """Steps of ``token_seconds``; each gives every running request a token."""

    def __init__(self, weights_key: bytes, **options: Any) -> None:
        super().__init__(weights_key, **options)
        self.written = 0
        """Tokens of all requests that have left, by whatever way."""
        self._steps = 0
        """Made so far."""
        self._at = 0.0
        """When the last one was made, or the engine set going."""
        self._wrote_at = 0.0
        """When the last one was made."""
        self._stopped_at = 0.0
        """When the last one before the pause was made."""
        self._versions = [PolicyVersion(0)]
        self._from_step = [0]
        """First step of each of ``_versions``."""

    def submit(self, request: GenerationRequest) -> Live:
        """As in the base."""
        room = self._max_model_len - len(request.prompt.token_ids)
        live = CountedLive(
            request,
            asyncio.get_running_loop().create_future(),
            limit=min(request.max_tokens, room),
        )
        (self.held if self.holding else self.waiting).append(live)
        self._admit()
        return live

    def threshold(self, tokens: int, among: Collection[str] | None) -> asyncio.Future[int]:
        """As in the base."""
        self._catch_up()
        future = super().threshold(tokens, among)
        self._arm()
        return future

    def stop(self) -> None:
        """As in the base."""
        self._catch_up()
        if not self.paused:
            self._stopped_at = self._wrote_at
        super().stop()

    def go(self) -> None:
        """As in the base."""
        if self.paused:
            self._at = _now()
            if self.version != self._versions[-1]:
                self._versions.append(self.version)
                self._from_step.append(self._steps)
        super().go()

    def end_all(self) -> int:
        """As in the base."""
        self._catch_up()
        return super().end_all()

    def forget(self, live: Live) -> None:
        """As in the base."""
        self._catch_up()
        super().forget(live)

    def shut(self) -> None:
        """As in the base."""
        self._catch_up()
        for live in self.running:
            self.written += self._tokens(live)
        super().shut()

    # -- the step ---------------------------------------------------------------------------

    def _tokens(self, live: Live) -> int:
        assert isinstance(live, CountedLive)
        return 0 if live.begun is None else self._steps - live.begun

    def _catch_up(self) -> None:
        """Make the steps whose time has passed."""
        if self.running and not self.paused:
            passed = int((_now() - self._at) / self._token_seconds + _NEARLY)
            if passed > 0:
                self._steps += passed
                self._wrote_at = self._at = self._at + passed * self._token_seconds

    def _admit(self) -> None:
        self._catch_up()
        while self.waiting and len(self.running) < self._slots:
            if not self.running:
                self._at = _now()
            live = self.waiting.popleft()
            assert isinstance(live, CountedLive)
            live.begun = self._steps
            self.running.append(live)
        self._check_thresholds()
        if not self.live:
            wake(self._drains, True)
        self._arm()

    def _arm(self) -> None:
        self._disarm()
        if self.running and not self.paused:
            steps = max(1, self._next() - self._steps)
            when = self._at + steps * self._token_seconds
            self._timer = asyncio.get_running_loop().call_at(when, self._step)

    def _next(self) -> int:
        """The step after which somebody has to be told something."""
        found = []
        for live in self.running:
            assert isinstance(live, CountedLive) and live.begun is not None
            found.append(self._steps + 1 if live.freezes else live.begun + live.limit)
            found += [
                live.begun + tokens
                for tokens, among, _ in self._thresholds
                if live.begun + tokens > self._steps
                and (among is None or live.request.request_id in among)
            ]
        return min(found)

    def _step(self) -> None:
        self._timer = None
        self._catch_up()
        for live in list(self.running):
            assert isinstance(live, CountedLive)
            if live.freezes:
                self._stall(live, self._at)
            if self._tokens(live) >= live.limit:
                self._finish(live, FinishReason.LENGTH)
        self._admit()

    def _stall(self, live: Live, now: float) -> None:
        for freeze in live.freezes:
            if freeze.resumed_at is None:
                continue
            before = self._tokens(live) - 1
            if before and freeze.sync_id is not None:
                seconds = now - self._stopped_at
                if before > 1:
                    seconds -= self._token_seconds  # the median gap
                freeze.stalls.append(seconds)
                live.stalls.append(Stall(freeze.sync_id, seconds))
            if freeze.first_at is None:
                freeze.first_at = now
        self._moved(live)

    def _remove(self, live: Live) -> None:
        assert isinstance(live, CountedLive)
        if live in self.running:
            live.written = self._tokens(live)
            live.spans = self._spans(live)
            self.written += live.written
        super()._remove(live)

    def _spans(self, live: CountedLive) -> tuple[TokenSpan, ...]:
        assert live.begun is not None
        spans: list[TokenSpan] = []
        index = bisect_right(self._from_step, live.begun) - 1
        start = 0
        while start < live.written:
            later = self._from_step[index + 1] if index + 1 < len(self._from_step) else None
            end = live.written if later is None else min(live.written, later - live.begun)
            if end > start:
                spans.append(TokenSpan(self._versions[index], start, end))
            start, index = max(start, end), index + 1
        return tuple(spans)

    def _check_thresholds(self) -> None:
        if not self._thresholds:
            return
        live = self.live
        for tokens, among, future in self._thresholds:
            if not future.done() and any(
                self._tokens(r) >= tokens and (among is None or r.request.request_id in among)
                for r in live
            ):
                future.set_result(len(live))
        self._thresholds = [t for t in self._thresholds if not t[2].done()]


def _now() -> float:
    return asyncio.get_running_loop().time()
