"""Copying much memory on a device that is decoding meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .waiting import mark

PIECE = 256 << 20
"""Bytes that are copied at once: at an H200's 2 TB/s for such a copy, 0.14 ms."""
REST_S = 0.015
"""Between pieces, so that a step of decoding seldom meets more than one."""


def copy_beside(target: torch.Tensor, source: torch.Tensor, rest: Callable[[float], None]) -> None:
    """Copy flat uint8 ``source``; done on return. On a GPU with ``rest(seconds)`` between pieces,
    which may raise to end the copy.

    Each piece at full speed: steps are slower as long as anything runs beside them
    (docs/measured.md).
    """
    if target.device.type != "cuda":
        target.copy_(source)
        return
    try:
        in_pieces(target, source, rest)
    finally:
        mark(target.device).synchronize()


def in_pieces(target: torch.Tensor, source: torch.Tensor, rest: Callable[[float], None]) -> None:
    """Likewise, with rests on any device; on a GPU the copies are only queued."""
    pieces = zip(torch.split(target, PIECE), torch.split(source, PIECE), strict=True)
    for index, (into, piece) in enumerate(pieces):
        if index:
            rest(REST_S)
        into.copy_(piece, non_blocking=True)
