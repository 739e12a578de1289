"""The fixed pseudo-random odd numbers that a digest weighs rows (A) and columns (B) with."""

from __future__ import annotations

from functools import lru_cache

import torch

from .region import Grid

ROWS, COLUMNS = 0x6D69645F726F7773, 0x6D69645F636F6C73
"""Seeds of A and B."""
_CACHED = 1 << 20
"""Table entries that are kept on each device (8 MiB a table)."""
_HOST = torch.device("cpu")


def row_factors(cells: Grid, device: torch.device) -> torch.Tensor:
    """``A`` of each row of the grid, in its order: int64, on ``device``."""
    if len(cells.row_sizes) == 1 and cells.row_steps == (1,):
        return factors(ROWS, cells.first_row, cells.rows, device)
    rows = torch.full((1,), cells.first_row, device=device)
    for n, step in zip(cells.row_sizes, cells.row_steps, strict=True):
        rows = (rows.unsqueeze(1) + torch.arange(n, device=device) * step).reshape(-1)
    return mixed(ROWS, rows)


def factors(seed: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Entries ``[start, start + count)`` of the table with ``seed``."""
    if start + count <= _CACHED:
        return _table(seed, device)[start : start + count]
    return mixed(seed, torch.arange(start, start + count, device=device))


@lru_cache(maxsize=64)
def _table(seed: int, device: torch.device) -> torch.Tensor:
    # Made on the host: the copy is over when it returns, whichever streams use the table then.
    return mixed(seed, torch.arange(_CACHED, device=_HOST)).to(device)


def mixed(seed: int, index: torch.Tensor) -> torch.Tensor:
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
