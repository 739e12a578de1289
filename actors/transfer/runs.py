"""Many copies on one GPU by one kernel launch, at the speed of a single large copy.

``torch._foreach_copy_`` reaches about 65 % of that with two-byte elements (H200), and takes a
launch for every hundred tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .probe import runs_right

TILE = 32 << 10
"""Bytes that one program of the kernel copies, at most."""
_STEP = 4096
"""Words of 4 bytes at a time."""
UNIT = 16
"""Bytes: addresses and lengths must be multiples of it."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Target and source."""


class Runs:
    """A table of runs of memory, made once. Holds the tensors: nobody else may need them."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        """All on one device, and each as :func:`fits` says."""
        self._pairs = tuple(pairs)
        self._device = pairs[0][0].device
        self._tiles = cut(pairs).to(self._device)

    def run(self) -> None:
        """Copy. Queued on the current stream, not waited for."""
        from . import kernels

        with torch.cuda.device(self._device):
            kernels.copy_tile[(len(self._tiles),)](self._tiles, STEP=_STEP, num_warps=8)


def fits(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the copy is of one run of bytes, as the kernel takes them."""
    return (
        target.dtype == source.dtype
        and target.device == source.device
        and target.is_contiguous()
        and source.is_contiguous()
        and not target.numel() * target.element_size() % UNIT
        and not target.data_ptr() % UNIT
        and not source.data_ptr() % UNIT
    )


def cut(pairs: Sequence[Pair]) -> torch.Tensor:
    """int64 on the host, a row for each tile: target and source address, words of 4 bytes."""
    rows = []
    for target, source in pairs:
        nbytes = target.numel() * target.element_size()
        start = torch.arange(0, nbytes, TILE)
        length = torch.clamp(nbytes - start, max=TILE)
        rows.append(
            torch.stack([target.data_ptr() + start, source.data_ptr() + start, length // 4], dim=1)
        )
    return torch.cat(rows)


@functools.lru_cache(maxsize=8)
def usable(device: torch.device) -> bool:
    """Whether the kernel runs there and copies right; asked once."""

    def attempt() -> bool:
        source = torch.arange(40_000, dtype=torch.int32, device=device)
        target = torch.zeros_like(source)
        Runs([(target, source)]).run()
        return bool(torch.equal(target, source))

    return runs_right(device, "weights are copied", attempt)
