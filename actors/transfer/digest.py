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

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from orchestrator.errors import TransferError
from orchestrator.types import UNUSED

from .region import Region, Shape
from .sums import MASK, Held, Sums, coverage

Live = Iterable[tuple[str, Region, torch.Tensor]]
"""Regions of tensors that are held somewhere, and the memory that holds their elements."""


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


class Part(NamedTuple):
    """What one worker holds of one tensor. As JSON it is a list of three integers."""

    value: int
    """The digest's sum over the part, modulo 2**64. Those of parts add up to the whole's."""
    elements: int
    coverage: int
    """The same sum with every element 1: says which elements these are."""

    @classmethod
    def of_wire(cls, row: Any) -> Part:
        """From JSON (TransferError for anything else)."""
        if not isinstance(row, list) or [type(number) for number in row] != [int, int, int]:
            raise TransferError(f"malformed part of a digest: {row!r}")
        return cls(*row)


class Digester:
    """Digests of the same memory, as often as asked for; nobody may move it meanwhile.

    All that does not depend on the elements is done once: on an engine, the interpreter that adds
    up here is the one that decodes.
    """

    def __init__(self, live: Live, shapes: Mapping[str, Shape]) -> None:
        """``shapes``: those of the whole tensors. TransferError names one without plain bytes."""
        held: list[Held] = []
        firsts: dict[str, dict[tuple[int, int], int]] = {}
        self._again: list[tuple[str, int, int]] = []
        for place, (name, region, tensor) in enumerate(live):
            check_tensor(name, tensor)
            key = (region.elements, coverage(region, shapes[name]))
            first = firsts.setdefault(name, {}).setdefault(key, place)
            if first != place:
                self._again.append((name, first, place))
            held.append((tensor, region, shapes[name]))
        self._tensors = [
            (
                name,
                tuple(regions.values()),
                sum(elements for elements, _ in regions),
                sum(covered for _, covered in regions) & MASK,
            )
            for name, regions in firsts.items()
        ]
        self._sums = Sums(held)

    def parts(self) -> dict[str, Part]:
        """The part of each tensor that is held, by name. A GPU is waited for once, at the end.

        A region held twice counts once, and TransferError says so if the two differ.
        """
        values = self._sums.run()
        for name, first, again in self._again:
            if values[first] != values[again]:
                raise TransferError(f"tensor {name!r} is held twice, and the two are not equal")
        return {
            name: Part(sum(values[place] for place in places) & MASK, elements, covered)
            for name, places, elements, covered in self._tensors
        }

    def digests(self) -> dict[str, str]:
        """16 hex digits each: digests, where whole tensors are held."""
        return {name: _hex(part.value) for name, part in self.parts().items()}


def digester(tensors: Iterable[tuple[str, torch.Tensor]]) -> Digester:
    """Of whole tensors with any strides, by name."""
    items = list(tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in items}
    return Digester(((n, Region.whole(shapes[n]), tensor) for n, tensor in items), shapes)


def digest(name: str, tensor: torch.Tensor) -> str:
    """16 hex digits; any strides (TransferError for a tensor without plain bytes)."""
    return digest_all([(name, tensor)])[name]


def digest_all(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Digest of each whole tensor by name, in order."""
    return digester(tensors).digests()


def parts_of(live: Live, shapes: Mapping[str, Shape]) -> dict[str, Part]:
    """See :meth:`Digester.parts`."""
    return Digester(live, shapes).parts()


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
        held_parts = [part for _, part in parts.values()]
        elements = sum(part.elements for part in held_parts)
        covered = sum(part.coverage for part in held_parts) & MASK
        region = Region.whole(shape)
        if (elements, covered) != (region.elements, coverage(region, shape)):
            partial.append(f"{name} ({elements} of {region.elements} elements)")
        digests[name] = _hex(sum(part.value for part in held_parts) & MASK)
    if partial:
        raise TransferError(
            f"{len(partial)} tensors are not wholly held by the ranks "
            f"{', '.join(map(str, sorted(answers)))} of engine {engine}: {_some(partial)}"
        )
    return digests


def _hex(value: int) -> str:
    return f"{value:016x}"


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
