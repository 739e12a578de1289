"""The table that the digest's kernel works by, read as the kernel reads it; no GPU."""

from __future__ import annotations

import ctypes

import pytest
import torch

from actors.transfer import sums, tiles
from actors.transfer.region import Region
from actors.transfer.sums import Sums, matrix_of
from actors.transfer.tiles import Matrix

KINDS = {1: ctypes.c_int8, 2: ctypes.c_int16, 4: ctypes.c_int32}


def run_by_hand(matrix: Matrix) -> int:
    """What the kernel computes, one element at a time, from nothing but the table."""
    width, aligned = matrix.kind
    total = 0
    for address, a, b, rows, columns, stride in tiles.cut(matrix).tolist():
        assert 0 < rows <= tiles.ROWS and 0 < columns <= tiles.COLUMNS
        assert not aligned or (address % 16 == 0 and (rows == 1 or stride * width % 16 == 0))
        for r in range(rows):
            row = (KINDS[width] * columns).from_address(address + r * stride * width)
            factors = (ctypes.c_int64 * columns).from_address(b)
            inner = sum(x * f for x, f in zip(row, factors, strict=True))
            total += ctypes.c_int64.from_address(a + 8 * r).value * inner
    return total & sums.MASK


@pytest.mark.parametrize("dtype", sorted(Matrix.dtypes, key=str), ids=str)
def test_tiles_cover_every_element_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "COLUMNS", 16)
    raw = torch.randint(0, 256, (37, 40 * dtype.itemsize), dtype=torch.uint8)
    whole = raw.view(dtype)
    for held in (whole, whole[3:20, 8:39], whole[::3], whole[:1], whole[:, 5:6], whole[4]):
        region = Region(int(held.storage_offset()), tuple(held.shape), held.stride())
        matrix = matrix_of(held, region, (37, 40))
        assert matrix is not None
        assert [run_by_hand(matrix)] == Sums([(held, region, (37, 40))]).run()


def test_what_is_no_matrix_of_the_kernel_is_left_to_torch() -> None:
    wide = torch.zeros(4, 6, dtype=torch.float64)
    assert matrix_of(wide, Region.whole((4, 6)), (4, 6)) is None
    assert matrix_of(wide > 0, Region.whole((4, 6)), (4, 6)) is None
    turned = torch.zeros(6, 4).t()
    assert matrix_of(turned, Region.whole((4, 6)), (4, 6)) is None
    scattered = torch.zeros(5)
    assert matrix_of(scattered, Region(0, (5,), (5,)), (4, 7)) is None


def test_only_gpus_have_the_kernel() -> None:
    assert not tiles.usable(torch.device("cpu"))
