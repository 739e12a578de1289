"""Where each tensor lies in the flat buffer that travels. Pure; both sides compute the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from orchestrator.errors import ChannelError, TransferError
from orchestrator.types import TensorSpec

ALIGNMENT = 64
"""Bytes. Every dtype's views are aligned, and so are vector loads."""


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without the prefix: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Inverse of :func:`dtype_name` (ChannelError for a name torch does not know)."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ChannelError(f"unknown dtype {name!r} in the manifest: torch has no such dtype")
    return dtype


@dataclass(frozen=True, slots=True)
class Slot:
    """Bytes ``[offset, offset + spec.nbytes)`` of the buffer hold ``spec``."""

    spec: TensorSpec
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.spec.nbytes


@dataclass(frozen=True, slots=True)
class Layout:
    """All slots, in the manifest's order."""

    slots: tuple[Slot, ...]
    nbytes: int
    """Size of the buffer, padding included."""

    @classmethod
    def of(cls, specs: Sequence[TensorSpec]) -> Layout:
        """Lay ``specs`` out (TransferError on a doubled name)."""
        seen: set[str] = set()
        slots: list[Slot] = []
        offset = 0
        for spec in specs:
            if spec.name in seen:
                raise TransferError(f"tensor {spec.name!r} is in the manifest twice")
            seen.add(spec.name)
            slots.append(Slot(spec, offset))
            offset += padded(spec.nbytes)
        return cls(tuple(slots), offset)

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor as a typed view into ``buffer`` (flat uint8, ``nbytes`` long)."""
        for slot in self.slots:
            yield slot.spec.name, view(buffer, slot)

    def buckets(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Half-open byte ranges of at most ``nbytes`` that cover the buffer in order."""
        for start in range(0, self.nbytes, nbytes):
            yield start, min(start + nbytes, self.nbytes)


def padded(nbytes: int) -> int:
    """Bytes that a tensor of ``nbytes`` takes in the buffer."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def view(buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
    """One tensor as a typed view into ``buffer``."""
    raw = buffer[slot.offset : slot.end]
    return raw.view(dtype_of(slot.spec.dtype)).view(slot.spec.shape)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as flat uint8, without a copy (TransferError unless contiguous)."""
    if tensor.dtype == torch.uint8 and tensor.ndim == 1 and tensor.is_contiguous():
        return tensor  # hundreds a swap come flat already
    if not tensor.is_contiguous():
        raise TransferError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has no flat "
            "bytes: only contiguous tensors are sent and received in place"
        )
    return tensor.detach().view(-1).view(torch.uint8)


def schedule(layout: Layout, bucket_bytes: int) -> list[list[Slot]]:
    """Whole tensors in the manifest's order, in groups of at most ``bucket_bytes``.

    A larger tensor is a group of its own.
    """
    groups: list[list[Slot]] = []
    left = 0
    for slot in layout.slots:
        nbytes = padded(slot.spec.nbytes)
        if not groups or nbytes > left:
            groups.append([])
            left = bucket_bytes
        groups[-1].append(slot)
        left -= nbytes
    return groups


def fingerprint(layout: Layout, bucket_bytes: int) -> str:
    """SHA-256 (hex) of all that both sides of a transfer must agree on."""
    groups = [len(group) for group in schedule(layout, bucket_bytes)]
    rows = manifest_to_wire([slot.spec for slot in layout.slots])
    return hashlib.sha256(json.dumps([bucket_bytes, groups, rows]).encode()).hexdigest()


def differences(
    sent: Sequence[TensorSpec], expected: Sequence[TensorSpec], limit: int = 8
) -> str | None:
    """Names that one side lacks or that differ in shape or dtype, in words; None if none do."""
    there, here = {spec.name: spec for spec in sent}, {spec.name: spec for spec in expected}
    unlike = [
        f"{name} ({_form(there[name])} sent, {_form(here[name])} expected)"
        for name in there
        if name in here and there[name] != here[name]
    ]
    kinds = {
        "missing": [name for name in here if name not in there],
        "unexpected": [name for name in there if name not in here],
        "misshaped": unlike,
    }
    found = [
        f"{len(names)} {kind}: {_some(names, limit)}" for kind, names in kinds.items() if names
    ]
    if not found:
        moved = [a.name for a, b in zip(sent, expected, strict=True) if a != b]
        found = [f"the order differs from {moved[0]} on"] if moved else []
    return "; ".join(found) or None


def _form(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _some(names: Sequence[str], limit: int) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def manifest_to_wire(specs: Sequence[TensorSpec]) -> list[list[object]]:
    """Plain JSON rows ``[name, dtype, shape, nbytes]``.

    ChannelError if a row does not come back from JSON as it went in: it is found out here,
    before any receiver waits for it.
    """
    rows: list[list[object]] = []
    for spec in specs:
        row: list[object] = [spec.name, spec.dtype, list(spec.shape), spec.nbytes]
        try:
            back = json.loads(json.dumps(row))
        except (TypeError, ValueError) as error:
            raise ChannelError(f"manifest entry {row!r} is not plain data: {error}") from error
        if back != row or spec_from_row(back) != spec:
            raise ChannelError(
                f"manifest entry {spec!r} changes when it is serialised (comes back as {back!r}): "
                "use str names, int sizes and torch dtype names"
            )
        rows.append(row)
    return rows


def spec_from_row(row: Sequence[object]) -> TensorSpec:
    """Inverse of one row of :func:`manifest_to_wire` (ChannelError if it is malformed)."""
    try:
        name, dtype, shape, nbytes = row
        if not (
            isinstance(name, str)
            and isinstance(dtype, str)
            and isinstance(nbytes, int)
            and isinstance(shape, list)
        ):
            raise TypeError("wrong types")
        spec = TensorSpec(name, dtype, tuple(int(n) for n in shape), nbytes)
    except (TypeError, ValueError) as error:
        raise ChannelError(f"malformed manifest entry {row!r}: {error}") from error
    numel = 1
    for n in spec.shape:
        numel *= n
    if numel * dtype_of(spec.dtype).itemsize != spec.nbytes or spec.nbytes == 0:
        raise ChannelError(f"manifest entry {spec!r}: shape and dtype do not make {nbytes} bytes")
    return spec


def manifest_from_wire(rows: Sequence[Sequence[object]]) -> tuple[TensorSpec, ...]:
    """Inverse of :func:`manifest_to_wire` (ChannelError for a malformed row or none at all)."""
    if not rows:
        raise ChannelError("the manifest is empty: the sender has nothing to send")
    return tuple(spec_from_row(row) for row in rows)


def worker_rank(first_rank: int, workers: int, data_parallel_index: int, rank: int) -> int:
    """Rank of one worker: ``workers`` is the worker count of one data-parallel copy."""
    return first_rank + data_parallel_index * workers + rank
