"""A request that was cut and goes on elsewhere: what is left to ask, and both answers as one."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    PolicyVersion,
    TokenSpan,
)


def rest_of(request: GenerationRequest, done: Completion) -> GenerationRequest:
    """What is left of ``request`` after ``done``: prompted with its tokens, within the budget."""
    return replace(
        request,
        request_id=f"{request.request_id}+{len(done.token_ids)}",
        prompt=replace(request.prompt, token_ids=request.prompt.token_ids + done.token_ids),
        max_tokens=request.max_tokens - len(done.token_ids),
        # The same seed would repeat the random numbers of the first part.
        seed=None if request.seed is None else request.seed + len(done.token_ids) + 1,
    )


def joined(head: Completion | None, tail: Completion) -> Completion:
    """A completion continued by another one that was prompted with its tokens."""
    if head is None:
        return tail
    offset = len(head.token_ids)
    spans = list(head.spans)
    texts = list(head.span_texts)
    for span, text in zip(tail.spans, tail.span_texts or ("",) * len(tail.spans), strict=True):
        moved = TokenSpan(span.version, span.start + offset, span.end + offset)
        if spans and spans[-1].version == moved.version and spans[-1].end == moved.start:
            spans[-1] = TokenSpan(moved.version, spans[-1].start, moved.end)
            texts[-1:] = [texts[-1] + text] if texts else [text]
        else:
            spans.append(moved)
            texts.append(text)
    return replace(
        tail,
        request_id=head.request_id,
        token_ids=head.token_ids + tail.token_ids,
        logprobs=head.logprobs + tail.logprobs,
        spans=tuple(spans),
        text=head.text + tail.text,
        span_texts=tuple(texts),
        stalls=head.stalls + tail.stalls,
    )


def newest(done: Completion) -> PolicyVersion:
    """The version of its last token; 0 without tokens."""
    return done.spans[-1].version if done.spans else PolicyVersion(0)


def published(done: Completion, version: PolicyVersion) -> Completion:
    """``done`` up to its first token of a version after ``version``; then it ends as aborted.

    A replica that resumed by itself may have written under weights that were never published.
    """
    kept = [span for span in done.spans if span.version <= version]
    if len(kept) == len(done.spans):
        return done
    tokens = kept[-1].end if kept else 0
    texts = done.span_texts[: len(kept)]
    return replace(
        done,
        token_ids=done.token_ids[:tokens],
        logprobs=done.logprobs[:tokens],
        spans=tuple(kept),
        finish_reason=FinishReason.ABORT,
        text="".join(texts),
        span_texts=texts,
    )
