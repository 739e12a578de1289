"""Memory that is free goes back to the system."""

from __future__ import annotations

import ctypes

import psutil
import pytest

from actors.transfer import heap

PIECE, PIECES = 64 << 10, 1024
"""Smaller than what glibc maps by itself: it stays in the heap."""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_free_pieces_between_used_ones_go_back_to_the_system() -> None:
    pieces = [b"x" * PIECE for _ in range(PIECES)]
    del pieces[::2]
    before = psutil.Process().memory_info().rss
    heap.give_back()
    freed = before - psutil.Process().memory_info().rss
    assert freed > PIECE * PIECES // 4
    assert len(pieces) == PIECES // 2
