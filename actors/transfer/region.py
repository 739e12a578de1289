"""Parts of tensors, and how the elements of a part lie in rows and columns of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """Part of a contiguous row-major tensor, in elements, as ``as_strided`` takes it."""

    offset: int
    size: Shape
    stride: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Region:
        """All of a tensor of ``shape``."""
        return cls(0, shape, row_major(shape))

    @property
    def elements(self) -> int:
        return math.prod(self.size)

    @property
    def contiguous(self) -> bool:
        """One run of elements, in order. Dimensions of size 1 may have any stride."""
        pairs = zip(self.size, self.stride, row_major(self.size), strict=True)
        return all(n == 1 or stride == dense for n, stride, dense in pairs)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a contiguous ``tensor``, as a view."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


def row_major(shape: Shape) -> Shape:
    """Strides of a contiguous tensor of ``shape``."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True, slots=True)
class Grid:
    """A region whose elements are the cells of some rows and one range of columns.

    Rows are ``first_row + i0 * row_steps[0] + i1 * row_steps[1] ...``, the last index fastest.
    """

    order: tuple[int, ...]
    """Permutation of the region's dimensions after which its elements are in the grid's order."""
    row_sizes: Shape
    row_steps: Shape
    first_row: int
    first_column: int
    columns: int

    @property
    def rows(self) -> int:
        return math.prod(self.row_sizes)


def row_length(shape: Shape) -> int:
    """Columns of a tensor of ``shape`` as a matrix: its last dimension."""
    return shape[-1] if shape else 1


@lru_cache(maxsize=1 << 16)
def grid(region: Region, shape: Shape) -> Grid | None:
    """``region`` of a contiguous tensor of ``shape`` as a grid; None if it is none."""
    length = row_length(shape)
    order = tuple(sorted(range(len(region.size)), key=lambda i: -region.stride[i]))
    dims: list[tuple[int, int]] = []
    for i in order:
        n, stride = region.size[i], region.stride[i]
        if n == 1:
            continue
        if dims and dims[-1][1] == n * stride:
            dims[-1] = (dims[-1][0] * n, stride)
        else:
            dims.append((n, stride))
    if not dims or dims[-1][1] != 1:
        dims.append((1, 1))
    row, column = divmod(region.offset, length)
    columns = dims.pop()[0]
    if column + columns > length:
        if column or columns % length:
            return None
        dims.append((columns // length, length))
        columns = length
    if any(stride % length or stride == 0 for _, stride in dims):
        return None
    return Grid(
        order,
        tuple(n for n, _ in dims),
        tuple(stride // length for _, stride in dims),
        row,
        column,
        columns,
    )
