"""Triton kernels; import this only where there is a GPU. They take tables of addresses.

Triton reads annotations, and refuses those that it does not know.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def sum_tile(  # type: ignore[no-untyped-def]
    tiles,
    sums,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One weighted sum a tile, see ``tiles.Tiles``; a row of the table is as of ``tiles.cut``."""
    tile = tl.program_id(0)
    at = tiles + tile.to(tl.int64) * 6
    address = tl.load(at)
    if WIDTH == 1:
        first = address.to(tl.pointer_type(tl.int8))
    elif WIDTH == 2:
        first = address.to(tl.pointer_type(tl.int16))
    else:
        first = address.to(tl.pointer_type(tl.int32))
    a = tl.load(at + 1).to(tl.pointer_type(tl.int64))
    b = tl.load(at + 2).to(tl.pointer_type(tl.int64))
    rows = tl.load(at + 3)
    columns = tl.load(at + 4)
    stride = tl.load(at + 5)
    if ALIGNED:
        first = tl.multiple_of(first, 16)
        stride = tl.multiple_of(stride, 16 // WIDTH)
        columns = tl.multiple_of(columns, 16 // WIDTH)
    row = tl.arange(0, ROWS)
    # factor = low + 2**32 * high: one wide and one narrow multiplication, not one of 64 bits.
    lows = tl.zeros((ROWS, STEP), dtype=tl.int64)
    highs = tl.zeros((ROWS, STEP), dtype=tl.int32)
    for left in range(0, columns, STEP):
        column = left + tl.arange(0, STEP)
        factor = tl.load(b + column, mask=column < columns, other=0)
        low = factor.to(tl.int32)
        high = ((factor - low.to(tl.int64)) >> 32).to(tl.int32)
        here = (row < rows)[:, None] & (column < columns)[None, :]
        cell = first + row[:, None] * stride + column[None, :]
        bits = tl.load(cell, mask=here, other=0).to(tl.int32)
        lows += bits.to(tl.int64) * low.to(tl.int64)[None, :]
        highs += bits * high[None, :]
    total = lows + (highs.to(tl.int64) << 32)
    weight = tl.load(a + row, mask=row < rows, other=0)
    tl.store(sums + tile, tl.sum(tl.sum(total, axis=1) * weight, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def copy_tile(tiles, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy one run of memory; a row of the table: target, source, 4-byte words.

    Both addresses are multiples of 16 bytes, and so is the run's length.
    """
    at = tiles + tl.program_id(0).to(tl.int64) * 3
    target = tl.multiple_of(tl.load(at).to(tl.pointer_type(tl.int32)), 16)
    source = tl.multiple_of(tl.load(at + 1).to(tl.pointer_type(tl.int32)), 16)
    words = tl.multiple_of(tl.load(at + 2), 4)
    for start in range(0, words, STEP):
        here = start + tl.arange(0, STEP)
        word = tl.load(source + here, mask=here < words, eviction_policy="evict_first")
        tl.store(target + here, word, mask=here < words, eviction_policy="evict_first")
