"""Cutting generated text at token positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

CONTEXT_TOKENS = 6
"""Prompt tokens decoded along: some tokenizers drop a leading space otherwise."""


def cut_text(
    decode: Callable[[list[int]], str],
    prompt: Sequence[int],
    token_ids: Sequence[int],
    ends: Sequence[int],
) -> tuple[str, tuple[str, ...]]:
    """Text of ``token_ids``, and the same text in pieces that end at the offsets ``ends``.

    The pieces joined are the text. A character whose bytes lie on both sides of a cut belongs
    to the later piece.
    """
    context = list(prompt[-CONTEXT_TOKENS:])
    before = decode(context)
    whole = decode(context + list(token_ids))
    start = _common(before.rstrip("\ufffd"), whole)
    cuts = [start]
    for end in ends[:-1]:
        partial = decode(context + list(token_ids[:end])).rstrip("\ufffd")
        cuts.append(max(cuts[-1], _common(partial, whole)))
    cuts.append(len(whole))
    pieces = tuple(whole[a:b] for a, b in itertools.pairwise(cuts)) if ends else ()
    return whole[start:], pieces


def _common(a: str, b: str) -> int:
    """Length of the common prefix."""
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))
