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
    tokens = context + list(token_ids)
    whole = decode(tokens)
    start = _common(_complete(decode(context)), whole)
    cuts, cut = [start], len(context)
    for end in ends[:-1]:
        # Only what is new and a little before it: requests that go through many swaps are many
        # pieces, and the engine's other requests wait while they are cut.
        window = max(0, cut - CONTEXT_TOKENS)
        before, cut = cut, len(context) + end
        known, longer = _complete(decode(tokens[window:before])), decode(tokens[window:cut])
        new = _complete(longer)[_common(known, longer) :]
        # A window without text tells nothing: it may lie inside a character.
        if new and whole.startswith(new, cuts[-1]):
            cuts.append(cuts[-1] + len(new))
        else:
            cuts.append(max(cuts[-1], _common(_complete(decode(tokens[:cut])), whole)))
    cuts.append(len(whole))
    pieces = tuple(whole[a:b] for a, b in itertools.pairwise(cuts)) if ends else ()
    return whole[start:], pieces


def _complete(text: str) -> str:
    """``text`` without a last character that lacks bytes."""
    return text.rstrip("\ufffd")


def _common(a: str, b: str) -> int:
    """Length of the common prefix."""
    if b.startswith(a):
        return len(a)
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))
