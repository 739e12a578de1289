"""The sums that digests are made of, see ``digest``: one a region, modulo 2**64.

On a GPU one kernel takes all regions that lie there as plain matrices (``tiles``); torch's own
operations, some ten a region and eight bytes of products an element, take the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from orchestrator.errors import TransferError

from .factors import COLUMNS, ROWS, factors, mixed, row_factors
from .region import Region, Shape, grid, row_length
from .tiles import Matrix, Tiles, usable
from .waiting import to_host

Held = tuple[torch.Tensor, Region, Shape]
"""The elements of a region of a tensor of a shape, in memory of any strides."""

MASK = (1 << 64) - 1
_HOST_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 23
"""Elements at a time: the products are 8 bytes each, and a CPU's should stay in its cache."""
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_HOST = torch.device("cpu")


class Sums:
    """Over the same memory as often as asked for. Not for two threads at once."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._count = len(held)
        self._slow: dict[torch.device, list[tuple[int, Held]]] = {}
        matrices: dict[torch.device, list[tuple[int, Matrix]]] = {}
        for place, (tensor, region, shape) in enumerate(held):
            if tuple(tensor.shape) != region.size:
                raise TransferError(f"{tuple(tensor.shape)} elements are not those of {region}")
            tensor = tensor.detach()
            matrix = matrix_of(tensor, region, shape) if usable(tensor.device) else None
            if matrix is None:
                self._slow.setdefault(tensor.device, []).append((place, (tensor, region, shape)))
            else:
                matrices.setdefault(tensor.device, []).append((place, matrix))
        self._fast = {
            device: ([place for place, _ in found], Tiles([matrix for _, matrix in found]))
            for device, found in matrices.items()
        }

    @torch.no_grad()
    def run(self) -> list[int]:
        """The sums as they are now, in the order of the regions. A GPU is waited for once."""
        queued: list[tuple[list[int], torch.Tensor]] = [
            (places, tiles.run()) for places, tiles in self._fast.values()
        ]
        for device, found in self._slow.items():
            chunk = _HOST_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
            products = torch.empty(chunk, dtype=torch.int64, device=device)
            sums = [_sum(*held, products) for _, held in found]
            queued.append(([place for place, _ in found], torch.stack(sums)))
        values = [0] * self._count
        for places, on_device in queued:
            for place, value in zip(places, to_host(on_device).tolist(), strict=True):
                values[place] = value & MASK
        return values


@lru_cache(maxsize=1 << 16)
def coverage(region: Region, shape: Shape) -> int:
    """The digest's sum over ``region`` of a tensor of ``shape`` whose elements are all 1."""
    cells = grid(region, shape)
    if cells is not None:
        rows = row_factors(cells, _HOST).sum()
        columns = factors(COLUMNS, cells.first_column, cells.columns, _HOST).sum()
        return int(rows) * int(columns) & MASK
    total = 0
    for row, column in _scattered(region, shape, _HOST):
        total += int((mixed(ROWS, row) * mixed(COLUMNS, column)).sum())
    return total & MASK


def _sum(
    tensor: torch.Tensor, region: Region, shape: Shape, products: torch.Tensor
) -> torch.Tensor:
    """int64 scalar on the tensor's device. ``products``: scratch, int64."""
    device, words = tensor.device, max(1, tensor.element_size() // 4)
    total = torch.zeros((), dtype=torch.int64, device=device)
    cells = grid(region, shape)
    if cells is None:
        flat, start = tensor.reshape(-1), 0
        for row, column in _scattered(region, shape, device):
            bits = _bits(flat[start : start + len(row)].unsqueeze(1))
            start += len(row)
            word = torch.arange(words, device=device)
            b = mixed(COLUMNS, column.unsqueeze(1) * words + word)
            total += (mixed(ROWS, row) * (b * bits).sum(1)).sum()
        return total
    matrix = tensor.permute(cells.order).reshape(cells.rows, cells.columns)
    a = row_factors(cells, device)
    wide = max(1, min(cells.columns, products.numel() // words))
    high = max(1, products.numel() // (wide * words))
    for left in range(0, cells.columns, wide):
        columns = min(wide, cells.columns - left)
        first = (cells.first_column + left) * words
        b = factors(COLUMNS, first, columns * words, device)
        for top in range(0, cells.rows, high):
            bits = _bits(matrix[top : top + high, left : left + columns])
            # In one scratch tensor: fresh ones of this size cost a CPU more than the sum does.
            product = torch.mul(bits, b, out=products[: bits.numel()].view(bits.shape))
            total += (product.sum(1) * a[top : top + high]).sum()
    return total


def _bits(block: torch.Tensor) -> torch.Tensor:
    """Elements of a matrix as signed integers, wide ones as several along the last axis."""
    block = block.resolve_conj().resolve_neg()
    if block.dtype == torch.bool:
        return block.view(torch.uint8)
    width = block.element_size()
    if width <= 4:
        return block.view(_SIGNED[width])
    if block.stride(-1) != 1:  # also that of one single column, which counts as contiguous
        block = block.clone(memory_format=torch.contiguous_format)
    return block.view(torch.int32)


def _scattered(
    region: Region, shape: Shape, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Row and column of each element of any region, in row-major order, in chunks. Slow."""
    length = row_length(shape)
    for start in range(0, region.elements, _HOST_CHUNK):
        rest = torch.arange(start, min(start + _HOST_CHUNK, region.elements), device=device)
        at = torch.full_like(rest, region.offset)
        for n, stride in zip(reversed(region.size), reversed(region.stride), strict=True):
            at += rest % n * stride
            rest = rest // n
        yield at // length, at % length


def matrix_of(tensor: torch.Tensor, region: Region, shape: Shape) -> Matrix | None:
    """The region as the kernel takes it (``tiles``); None where it does not."""
    cells = grid(region, shape)
    if cells is None or tensor.dtype not in Matrix.dtypes:
        return None
    ordered = tensor.permute(cells.order)
    try:
        bits = ordered.view(cells.rows, cells.columns)
    except RuntimeError:  # its rows do not lie at one distance
        return None
    if cells.columns > 1 and bits.stride(1) != 1:
        return None
    device = tensor.device
    return Matrix(
        bits,
        row_factors(cells, device),
        factors(COLUMNS, cells.first_column, cells.columns, device),
    )
