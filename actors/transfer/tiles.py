"""The digest's sums of many matrices by one kernel launch on a GPU: each byte is read once.

    sum over r of a[r] * (sum over c of b[c] * x[r, c])      modulo 2**64

The matrices are cut into tiles, once; a table on the device tells the kernel where each lies.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from .factors import COLUMNS as COLUMN_FACTORS
from .factors import ROWS as ROW_FACTORS
from .factors import factors
from .probe import runs_right

ROWS = 8
"""Of one tile."""
COLUMNS = 8192
"""Of one tile, at most; the kernel takes them in steps of _STEP."""
_STEP = 128
_ALIGNED = 16
"""Bytes that one load takes where all rows allow it."""


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Elements and their factors, all on one device."""

    bits: torch.Tensor
    """rows x columns, of a dtype in ``dtypes``; the columns of a row lie side by side."""
    a: torch.Tensor
    """int64, one a row."""
    b: torch.Tensor
    """int64, one a column."""

    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset(
        {
            torch.bfloat16,
            torch.float16,
            torch.float32,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.uint8,
        }
    )
    """Real ones of at most 4 bytes: their bits are one signed integer an element."""

    @property
    def kind(self) -> tuple[int, bool]:
        """Bytes of an element, and whether rows begin and end on multiples of 16 bytes: what one
        launch has in common."""
        width = self.bits.element_size()
        rows, columns = self.bits.shape
        stride = self.bits.stride(0) if rows > 1 else columns
        edges = (self.bits.data_ptr(), columns * width, stride * width)
        return width, not any(edge % _ALIGNED for edge in edges)


class Tiles:
    """A table of tiles, made once. Holds the matrices: nobody else may need their memory."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._matrices = tuple(matrices)
        self._device = matrices[0].bits.device
        kinds: dict[tuple[int, bool], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for place, matrix in enumerate(matrices):
            tiles = cut(matrix)
            kinds.setdefault(matrix.kind, []).append((tiles, torch.full((len(tiles),), place)))
        self._launches = [
            (
                width,
                aligned,
                torch.cat([tiles for tiles, _ in found]).to(self._device),
                torch.cat([places for _, places in found]).to(self._device),
            )
            for (width, aligned), found in kinds.items()
        ]

    def run(self) -> torch.Tensor:
        """int64, one sum a matrix, on the device. Queued on the current stream, not waited for."""
        from . import kernels

        sums = torch.zeros(len(self._matrices), dtype=torch.int64, device=self._device)
        with torch.cuda.device(self._device):
            for width, aligned, tiles, places in self._launches:
                partial = torch.empty(len(tiles), dtype=torch.int64, device=self._device)
                kernels.sum_tile[(len(tiles),)](
                    tiles, partial, WIDTH=width, ALIGNED=aligned, ROWS=ROWS, STEP=_STEP
                )
                sums.index_add_(0, places, partial)
        return sums


def cut(matrix: Matrix) -> torch.Tensor:
    """int64 on the host, a row for each tile:

    addresses of its first element and of the factors of its first row and column, its rows and
    columns, and the distance of rows in elements.
    """
    bits = matrix.bits
    rows, columns = bits.shape
    stride = bits.stride(0) if rows > 1 else columns
    top, left = torch.meshgrid(
        torch.arange(0, rows, ROWS), torch.arange(0, columns, COLUMNS), indexing="ij"
    )
    top, left = top.reshape(-1), left.reshape(-1)
    return torch.stack(
        [
            bits.data_ptr() + (top * stride + left) * bits.element_size(),
            matrix.a.data_ptr() + top * 8,
            matrix.b.data_ptr() + left * 8,
            torch.clamp(rows - top, max=ROWS),
            torch.clamp(columns - left, max=COLUMNS),
            torch.full_like(top, stride),
        ],
        dim=1,
    )


@functools.lru_cache(maxsize=8)
def usable(device: torch.device) -> bool:
    """Whether the kernel runs there and adds right; asked once."""

    def attempt() -> bool:
        bits = torch.arange(-3000, 3000, dtype=torch.int16, device=device).view(20, 300)
        a = factors(ROW_FACTORS, 0, 20, device)
        b = factors(COLUMN_FACTORS, 0, 300, device)
        expected = (a * (bits * b).sum(1)).sum()
        return bool(Tiles([Matrix(bits, a, b)]).run()[0] == expected)

    return runs_right(device, "digests are computed", attempt)
