"""The token loop of the fake engine: continuous batching on virtual time.

Requests are *running* (one token each a step), *waiting* for a slot, or *held* because they
came while the engine was paused. The cache remembers under which weights a context was
computed; a token written over a cache of other weights is another token.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from statistics import median

from orchestrator.testing import policy
from orchestrator.testing.requests import Freeze, Live
from orchestrator.types import (
    FinishReason,
    GenerationRequest,
    PolicyVersion,
    Stall,
)


class Decoder:
    """Writes tokens while it is not stopped. Callbacks only: it owns no task."""

    def __init__(
        self,
        weights_key: bytes,
        *,
        token_seconds: float,
        slots: int,
        max_model_len: int,
        eos_token_id: int | None,
        prefix_caching: bool,
    ) -> None:
        self.key = weights_key
        self.version = PolicyVersion(0)
        self.running: list[Live] = []
        self.waiting: deque[Live] = deque()
        self.held: deque[Live] = deque()
        self.paused = False
        self.holding = False
        """New requests are held back (paused, or draining towards it)."""
        self.freeze: Freeze | None = None
        self._token_seconds = token_seconds
        self._slots = slots
        self._max_model_len = max_model_len
        self._eos = eos_token_id
        self._prefixes: dict[tuple[int, tuple[int, ...]], tuple[bytes, bytes]] = {}
        self._salt = 0
        """Prefixes are shared between requests that started under the same one."""
        """Cached contexts: what they were computed under (``Live.cache``, ``Live.key``)."""
        self._prefix_caching = prefix_caching
        self._thresholds: list[tuple[int, Collection[str] | None, asyncio.Future[int]]] = []
        self._drains: list[asyncio.Future[bool]] = []
        self._resumes: list[asyncio.Future[bool]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def live(self) -> list[Live]:
        """Requests the scheduler has (held ones aside)."""
        return [*self.running, *self.waiting]

    def submit(self, request: GenerationRequest) -> Live:
        """Take a request in, or hold it back."""
        live = Live(request, asyncio.get_running_loop().create_future())
        (self.held if self.holding else self.waiting).append(live)
        self._admit()
        return live

    def forget(self, live: Live) -> None:
        """Drop a request wherever it is; idempotent."""
        self._remove(live)
        self._admit()

    def threshold(self, tokens: int, among: Collection[str] | None) -> asyncio.Future[int]:
        """Ends when a live request (one of ``among``) has ``tokens``; how many are live then."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._thresholds.append((tokens, among, future))
        self._check_thresholds()
        return future

    def stop(self) -> None:
        """Write no token from now on; a step under way is dropped. Idempotent."""
        self.holding = True
        if not self.paused:
            self.paused = True
            self.freeze = Freeze(set(self.live), len(self.live))
            for live in self.live:
                live.freezes.append(self.freeze)
        self._disarm()
        wake(self._drains, True)

    def drain(self) -> asyncio.Future[bool]:
        """Hold new requests back; True when none runs or it was stopped, False when resumed."""
        self.holding = True
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._drains.append(future)
        if not self.live:
            wake(self._drains, True)
        return future

    def resumed(self) -> asyncio.Future[bool]:
        """Ends at the next :meth:`go`."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resumes.append(future)
        return future

    def go(self) -> None:
        """Write tokens again and let held requests in. Idempotent."""
        if self.freeze is not None:
            self.freeze.resumed_at = _now()
            self.freeze.settle()
            self.freeze = None
        self.paused = self.holding = False
        self.waiting.extend(self.held)
        self.held.clear()
        wake(self._drains, False)
        wake(self._resumes, True)
        self._admit()

    def end_all(self) -> int:
        """End every live request with what it has; returns how many."""
        ended = self.live
        for live in ended:
            self._finish(live, FinishReason.ABORT)
        self._admit()
        return len(ended)

    def new_salt(self) -> None:
        """Requests that start from now on share no prefix with earlier ones."""
        self._salt += 1

    def drop_cache(self) -> None:
        """Contexts are computed again, under the weights of then."""
        for live in self.live:
            live.key, live.cache = b"", b""
        self._prefixes.clear()

    def shut(self) -> None:
        """The process is gone: nothing runs, nobody is answered."""
        self._disarm()
        for queue in (self.running, self.waiting, self.held):
            queue.clear()

    # -- the step ---------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._slots:
            self.running.append(self.waiting.popleft())
        self._check_thresholds()
        if not self.live:
            wake(self._drains, True)
        if self.running and not self.paused and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._token_seconds, self._step)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step(self) -> None:
        self._timer = None
        for live in list(self.running):
            self._write(live)
        self._admit()

    def _write(self, live: Live) -> None:
        request, now = live.request, _now()
        prompt = request.prompt.token_ids
        context = (*prompt, *live.tokens)
        if not live.key:
            self._look_up(live, context)
        if live.key and live.key != self.key:
            live.cache += live.key + len(context).to_bytes(8, "little")
        live.key = self.key
        if not live.tokens:
            self._keep_context(live)
        token = policy.next_token(self.key, context, live.cache + _noise(live))
        self._stall(live, now)
        live.tokens.append(token)
        live.logprobs.append(policy.logprob(self.key, context, token))
        live.versions.append(self.version)
        live.times.append(now)
        if token == self._eos and not request.ignore_eos:
            self._finish(live, FinishReason.STOP)
        elif len(live.tokens) >= request.max_tokens or len(context) + 1 >= self._max_model_len:
            self._finish(live, FinishReason.LENGTH)

    def _look_up(self, live: Live, context: tuple[int, ...]) -> None:
        """Start from the longest context that is cached, as a prefix cache does."""
        live.salt = self._salt
        for length in range(len(context), 0, -1):
            found = self._prefixes.get((self._salt, context[:length]))
            if found is not None:
                live.cache, live.key = found
                return

    def _keep_context(self, live: Live) -> None:
        if self._prefix_caching and live.key:
            context = (*live.request.prompt.token_ids, *live.tokens)
            self._prefixes[live.salt, context] = (live.cache, live.key)

    def _stall(self, live: Live, now: float) -> None:
        for freeze in live.freezes:
            if live.times and freeze.sync_id is not None:
                gaps = [b - a for a, b in zip(live.times, live.times[1:], strict=False)]
                seconds = now - live.times[-1] - (median(gaps) if gaps else 0.0)
                freeze.stalls.append(seconds)
                live.stalls.append(Stall(freeze.sync_id, seconds))
            if freeze.first_at is None:
                freeze.first_at = now
        self._moved(live)

    def _moved(self, live: Live) -> None:
        for freeze in live.freezes:
            freeze.frozen.discard(live)
            freeze.settle()
        live.freezes.clear()

    def _remove(self, live: Live) -> None:
        for queue in (self.running, self.waiting, self.held):
            if live in queue:
                queue.remove(live)
                self._keep_context(live)
        self._moved(live)

    def _finish(self, live: Live, reason: FinishReason) -> None:
        self._remove(live)
        if not live.done.done():
            live.done.set_result(reason)

    def _check_thresholds(self) -> None:
        live = self.live
        for tokens, among, future in self._thresholds:
            if not future.done() and any(
                len(r.tokens) >= tokens and (among is None or r.request.request_id in among)
                for r in live
            ):
                future.set_result(len(live))
        self._thresholds = [t for t in self._thresholds if not t[2].done()]


def _noise(live: Live) -> bytes:
    """Sampling: depends on where the request started, so its middle cannot be replayed."""
    request = live.request
    if request.temperature == 0.0:
        return b""
    seed = request.request_id if request.seed is None else request.seed
    return f"{seed}/{len(live.tokens)}/{request.temperature}".encode()


def wake(futures: list[asyncio.Future[bool]], value: bool) -> None:
    """End every future of the list with ``value`` and empty it."""
    for future in futures:
        if not future.done():
            future.set_result(value)
    futures.clear()


def _now() -> float:
    return asyncio.get_running_loop().time()
