"""A request inside the fake engine, and the pause that froze it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from orchestrator.protocols import FirstTokens
from orchestrator.testing import policy
from orchestrator.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    PolicyVersion,
    Stall,
    TokenSpan,
)


@dataclass(slots=True, eq=False)
class Freeze:
    """One pause and the requests it froze."""

    frozen: set[Live]
    """Those that have not written a token since."""
    count: int
    resumed_at: float | None = None
    first_at: float | None = None
    stalls: list[float] = field(default_factory=list)
    sync_id: str | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def result(self) -> FirstTokens:
        """What the requests saw."""
        first = None
        if self.first_at is not None and self.resumed_at is not None:
            first = self.first_at - self.resumed_at
        return FirstTokens(first, tuple(self.stalls))

    def settle(self) -> None:
        """Wake who waits once every frozen request has moved."""
        if not self.frozen and self.resumed_at is not None:
            for future in self.waiters:
                if not future.done():
                    future.set_result(None)


@dataclass(slots=True, eq=False)
class Live:
    """A request inside the engine."""

    request: GenerationRequest
    done: asyncio.Future[FinishReason]
    cache: bytes = b""
    """What the cache of its context was computed under, when not under the weights now."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    freezes: list[Freeze] = field(default_factory=list)
    salt: int = 0
    """Of the prefixes it shares."""
    key: bytes = b""
    """Weights that wrote its last token."""

    def completion(self, engine: str, reason: FinishReason) -> Completion:
        """What the caller gets."""
        spans: list[TokenSpan] = []
        for i, version in enumerate(self.versions):
            if spans and spans[-1].version == version:
                spans[-1] = TokenSpan(version, spans[-1].start, i + 1)
            else:
                spans.append(TokenSpan(version, i, i + 1))
        return Completion(
            request_id=self.request.request_id,
            engine=engine,
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            spans=tuple(spans),
            finish_reason=reason,
            text=policy.text_of(self.tokens),
            span_texts=tuple(policy.text_of(self.tokens[s.start : s.end]) for s in spans),
            stalls=tuple(self.stalls),
        )
