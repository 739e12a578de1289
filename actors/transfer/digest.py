"""Digests of tensors, computed where they live and summed over the parts that workers hold.

A tensor is a matrix of rows x L, L its last dimension, of the bits of its elements as signed
integers ``x``::

    digest = sum over r of A[r] * (sum over c of B[c] * x[r, c])      modulo 2**64

``A`` and ``B`` are fixed pseudo-random odd numbers. A sum can be taken in any order and over any
parts: a worker digests its slices of fused parameters as they are, and the sums of all workers
add up to the digest that the trainer computed of the whole checkpoint tensor.

An integrity check, no cryptographic hash: who knows the tables can forge a tensor. A change of
one element (of one 32-bit word, if it is wider) is always found: odd factors have inverses. Any
other change that was not made against the tables (swapped rows, columns or tensors, a slice at
the wrong place, zeroes) is missed with a probability of about ``2**(k - 63)`` if it changes bits
from bit ``k`` of the elements up only. Flipped signs are the worst case: of whole float32 tensors
about 2**-26, since rows and columns may cancel separately, of bfloat16 about 2**-42.

Not SHA-256, because that runs on the host: the weights would cross PCIe for it, 3.44 GB for
1.7 B parameters, and a worker that holds slices of fused weights has no bytes to compare.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from orchestrator.errors import TransferError
from orchestrator.types import UNUSED

from .region import Grid, Region, Shape, grid, row_length

_MASK = (1 << 64) - 1
_ROWS, _COLUMNS = 0x6D69645F726F7773, 0x6D69645F636F6C73
"""Seeds of A and B."""
_CACHED = 1 << 20
"""Table entries that are kept on each device (8 MiB a table)."""
_HOST_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 23
"""Elements at a time: the products are 8 bytes each, and a CPU's should stay in its cache."""
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_HOST = torch.device("cpu")


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raise TransferError, naming the tensor, if its bytes cannot be sent or digested."""
    if tensor.is_meta:
        raise TransferError(
            f"tensor {name!r} is on the meta device: it has no bytes. Load or materialise the "
            "model first (a sleeping or offloaded model must be woken up)"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TransferError(
            f"tensor {name!r} is {tensor.layout}, quantized={tensor.is_quantized}: only plain "
            "strided tensors travel. Dequantise it on the trainer's side"
        )
    if tensor.numel() == 0:
        raise TransferError(
            f"tensor {name!r} is empty (shape {tuple(tensor.shape)}): nothing would be sent and "
            "its digest would prove nothing. Leave it out, or gather its shards first"
        )


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker holds of one tensor. Parts of a tensor add up to the whole."""

    value: int
    """The digest's sum over the part, modulo 2**64."""
    elements: int
    coverage: int
    """The same sum with every element 1: says which elements these are."""

    def __add__(self, other: Part) -> Part:
        return Part(
            (self.value + other.value) & _MASK,
            self.elements + other.elements,
            (self.coverage + other.coverage) & _MASK,
        )

    def to_wire(self) -> list[str | int]:
        """Plain JSON: ``[value, elements, coverage]``, the sums as 16 hex digits."""
        return [_hex(self.value), self.elements, _hex(self.coverage)]

    @classmethod
    def from_wire(cls, row: Sequence[Any]) -> Part:
        """Inverse of :meth:`to_wire` (TransferError for anything else)."""
        try:
            value, elements, coverage = row
            return cls(int(value, 16), int(elements), int(coverage, 16))
        except (TypeError, ValueError) as error:
            raise TransferError(f"malformed part of a digest {row!r}: {error}") from error


def digest(name: str, tensor: torch.Tensor) -> str:
    """16 hex digits; any strides (TransferError for a tensor without plain bytes)."""
    return digest_all([(name, tensor)])[name]


def digest_all(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Digest of each tensor by name, in order. A GPU is waited for once, at the end."""
    items = list(tensors)
    for name, tensor in items:
        check_tensor(name, tensor)
    sums = _sums(
        (tensor, Region.whole(tuple(tensor.shape)), tuple(tensor.shape)) for _, tensor in items
    )
    return {name: _hex(value) for (name, _), value in zip(items, sums, strict=True)}


def part(tensor: torch.Tensor, region: Region, shape: Shape) -> Part:
    """The part that ``tensor`` is: the elements ``region`` of a tensor of ``shape``."""
    (value,) = _sums([(tensor, region, shape)])
    return Part(value, region.elements, coverage(region, shape))


def parts_of(
    live: Iterable[tuple[str, Region, torch.Tensor]], shapes: Mapping[str, Shape]
) -> dict[str, Part]:
    """The part of each tensor that is held here, by checkpoint name.

    ``live`` are the regions held, with the memory that holds them; ``shapes`` those of the whole
    tensors. A region held twice counts once, and TransferError says so if the two differ. A GPU
    is waited for once, at the end.
    """
    regions: list[tuple[str, Region]] = []

    def noted() -> Iterator[tuple[torch.Tensor, Region, Shape]]:
        for name, region, tensor in live:
            check_tensor(name, tensor)
            regions.append((name, region))
            yield tensor, region, shapes[name]

    values = _sums(noted())
    found: dict[str, dict[tuple[int, int], Part]] = {}
    for (name, region), value in zip(regions, values, strict=True):
        held = Part(value, region.elements, coverage(region, shapes[name]))
        known = found.setdefault(name, {}).setdefault((held.elements, held.coverage), held)
        if known.value != held.value:
            raise TransferError(f"tensor {name!r} is held twice, and the two are not equal")
    return {name: _total(parts.values()) for name, parts in found.items()}


def whole(
    engine: str,
    shapes: Mapping[str, Shape],
    answers: Mapping[int, Mapping[str, Part]],
    unused: Collection[str] = (),
) -> dict[str, str]:
    """Digests of the tensors that the ranks of ``engine`` hold together.

    ``unused``: what no rank has a place for; its digest is :data:`orchestrator.types.UNUSED`.

    Ranks with the same part are replicas. TransferError, naming ranks and tensors, if replicas
    are not equal or a tensor of ``shapes`` is not wholly held.
    """
    digests: dict[str, str] = {}
    partial: list[str] = []
    for name, shape in shapes.items():
        if name in unused:
            digests[name] = UNUSED
            continue
        parts: dict[tuple[int, int], tuple[int, Part]] = {}
        for rank, answer in answers.items():
            held = answer.get(name)
            if held is None:
                continue
            first, known = parts.setdefault((held.elements, held.coverage), (rank, held))
            if known.value != held.value:
                raise TransferError(
                    f"ranks {first} and {rank} of engine {engine} hold different weights: "
                    f"{_some(_unequal(answers[first], answer))}"
                )
        total = _total(part for _, part in parts.values())
        region = Region.whole(shape)
        if (total.elements, total.coverage) != (region.elements, coverage(region, shape)):
            partial.append(f"{name} ({total.elements} of {region.elements} elements)")
        digests[name] = _hex(total.value)
    if partial:
        raise TransferError(
            f"{len(partial)} tensors are not wholly held by the ranks "
            f"{', '.join(map(str, sorted(answers)))} of engine {engine}: {_some(partial)}"
        )
    return digests


@lru_cache(maxsize=1 << 16)
def coverage(region: Region, shape: Shape) -> int:
    """The digest's sum over ``region`` of a tensor of ``shape`` whose elements are all 1."""
    cells = grid(region, shape)
    if cells is not None:
        rows = _row_factors(cells, _HOST).sum()
        columns = _factors(_COLUMNS, cells.first_column, cells.columns, _HOST).sum()
        return int(rows) * int(columns) & _MASK
    total = 0
    for row, column in _scattered(region, shape, _HOST):
        total += int((_mixed(_ROWS, row) * _mixed(_COLUMNS, column)).sum())
    return total & _MASK


def _sums(held: Iterable[tuple[torch.Tensor, Region, Shape]]) -> list[int]:
    """The digest's sum over each region, modulo 2**64; fetched from each device at once."""
    places: list[tuple[torch.device, int]] = []
    sums: dict[torch.device, list[torch.Tensor]] = {}
    scratch: dict[torch.device, torch.Tensor] = {}
    with torch.no_grad():
        for tensor, region, shape in held:
            device = tensor.device
            products = scratch.get(device)
            if products is None:
                chunk = _HOST_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
                products = torch.empty(chunk, dtype=torch.int64, device=device)
                scratch[device] = products
            here = sums.setdefault(device, [])
            places.append((device, len(here)))
            here.append(_sum(tensor.detach(), region, shape, products))
        fetched = {device: torch.stack(here).tolist() for device, here in sums.items()}
    return [fetched[device][i] & _MASK for device, i in places]


def _sum(
    tensor: torch.Tensor, region: Region, shape: Shape, products: torch.Tensor
) -> torch.Tensor:
    """int64 scalar on the tensor's device. ``products``: scratch, int64."""
    if tuple(tensor.shape) != region.size:
        raise TransferError(f"{tuple(tensor.shape)} elements are not those of {region}")
    device, words = tensor.device, max(1, tensor.element_size() // 4)
    total = torch.zeros((), dtype=torch.int64, device=device)
    cells = grid(region, shape)
    if cells is None:
        flat, start = tensor.reshape(-1), 0
        for row, column in _scattered(region, shape, device):
            bits = _bits(flat[start : start + len(row)].unsqueeze(1))
            start += len(row)
            word = torch.arange(words, device=device)
            b = _mixed(_COLUMNS, column.unsqueeze(1) * words + word)
            total += (_mixed(_ROWS, row) * (b * bits).sum(1)).sum()
        return total
    matrix = tensor.permute(cells.order).reshape(cells.rows, cells.columns)
    a = _row_factors(cells, device)
    wide = max(1, min(cells.columns, products.numel() // words))
    high = max(1, products.numel() // (wide * words))
    for left in range(0, cells.columns, wide):
        columns = min(wide, cells.columns - left)
        first = (cells.first_column + left) * words
        b = _factors(_COLUMNS, first, columns * words, device)
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


def _row_factors(cells: Grid, device: torch.device) -> torch.Tensor:
    """``A`` of each row of the grid, in its order."""
    if len(cells.row_sizes) == 1 and cells.row_steps == (1,):
        return _factors(_ROWS, cells.first_row, cells.rows, device)
    rows = torch.full((1,), cells.first_row, device=device)
    for n, step in zip(cells.row_sizes, cells.row_steps, strict=True):
        rows = (rows.unsqueeze(1) + torch.arange(n, device=device) * step).reshape(-1)
    return _mixed(_ROWS, rows)


def _factors(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Entries ``[start, start + count)`` of the table with ``seed``."""
    if start + count <= _CACHED:
        return _table(seed, device)[start : start + count]
    return _mixed(seed, torch.arange(start, start + count, device=device))


@lru_cache(maxsize=64)
def _table(seed: int, device: torch.device) -> torch.Tensor:
    # Made on the host: the copy is over when it returns, whichever streams use the table then.
    return _mixed(seed, torch.arange(_CACHED, device=_HOST)).to(device)


def _mixed(seed: int, index: torch.Tensor) -> torch.Tensor:
    """Splitmix64 of each index, made odd. int64, wrapping."""
    z = index * _signed(0x9E3779B97F4A7C15) + seed
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """``z >> bits`` as of an unsigned number."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _hex(value: int) -> str:
    return f"{value:016x}"


def _total(parts: Iterable[Part]) -> Part:
    return sum(parts, Part(0, 0, 0))


def _unequal(one: Mapping[str, Part], other: Mapping[str, Part]) -> list[str]:
    """Names of the same parts with other values."""
    return [
        name
        for name, a in one.items()
        if (b := other.get(name)) is not None
        and (a.elements, a.coverage) == (b.elements, b.coverage)
        and a.value != b.value
    ]


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
