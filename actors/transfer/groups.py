"""Tensors in groups of broadcasts, straight to where they belong.

Sender and receivers compute the same schedule. A receiver gives the final place of a tensor, or
none: then it comes through a bucket and is copied on, sliced and cast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from orchestrator.errors import TransferError

from .layout import Slot, dtype_of, flat_bytes, padded, view
from .link import Link, Pending, Wait

Schedule = Sequence[Sequence[Slot]]
Place = Callable[[Slot], torch.Tensor | None]
"""A contiguous tensor of the slot's dtype and size that takes all of it, or None."""
Landed = Callable[[Slot, torch.Tensor], None]
"""Copies a tensor on from the bucket: before it returns, or queued on the current stream."""
Run = Callable[[Wait], None]
"""Runs a blocking wait, as :meth:`Channel.run`."""


def call(wait: Wait) -> None:
    """The plainest :data:`Run`."""
    wait()


def send_groups(link: Link, schedule: Schedule, buffer: torch.Tensor, run: Run = call) -> None:
    """Send every slot of the flat ``buffer``; returns when it has left (ChannelError)."""
    under_way = [
        link.broadcast_many([buffer[slot.offset : slot.end] for slot in group])
        for group in schedule
    ]
    try:
        run(lambda: _drain(under_way))
    finally:
        under_way.clear()


def undirected_bytes(schedule: Schedule, place: Place) -> int:
    """The size of the bucket that :func:`receive_groups` needs; may be 0."""
    return max(
        (
            sum(padded(slot.spec.nbytes) for slot in group if place(slot) is None)
            for group in schedule
        ),
        default=0,
    )


def receive_groups(
    link: Link,
    schedule: Schedule,
    place: Place,
    bucket: torch.Tensor,
    landed: Landed,
    run: Run = call,
) -> None:
    """Receive what :func:`send_groups` sends.

    ``bucket``: flat uint8 of :func:`undirected_bytes`, on the link's device. On return all direct
    tensors are there; the copies of ``landed`` are done or queued on the current stream.
    TransferError, before anything is received, for a place that does not fit; ChannelError if the
    link breaks.
    """
    planned = [[(slot, _direct(slot, place(slot))) for slot in group] for group in schedule]
    under_way: list[Pending] = []
    try:
        for group in planned:
            passing, buffers = _buffers(group, bucket)
            # The link orders its device work after this thread's stream: the copies out of the
            # bucket that are queued there end before the next group fills it.
            pending = link.broadcast_many(buffers)
            if not passing or pending.order():
                under_way.append(pending)
            else:
                run(pending)
            for slot in passing:
                landed(slot, view(bucket, slot))
        run(lambda: _drain(under_way))
    finally:
        under_way.clear()  # see GlooLink: works kept alive keep sockets open


def _buffers(
    group: Sequence[tuple[Slot, torch.Tensor | None]], bucket: torch.Tensor
) -> tuple[list[Slot], list[torch.Tensor]]:
    """Where each tensor of the group arrives, and those (as slots of the bucket) that pass on."""
    passing: list[Slot] = []
    buffers: list[torch.Tensor] = []
    used = 0
    for slot, direct in group:
        if direct is None:
            inside = Slot(slot.spec, used)
            used += padded(slot.spec.nbytes)
            if inside.end > bucket.numel():
                raise TransferError(
                    f"the bucket of {bucket.numel()} bytes has no room for tensor "
                    f"{slot.spec.name!r} up to byte {inside.end}"
                )
            passing.append(inside)
            direct = bucket[inside.offset : inside.end]
        buffers.append(direct)
    return passing, buffers


def _direct(slot: Slot, target: torch.Tensor | None) -> torch.Tensor | None:
    if target is None:
        return None
    spec = slot.spec
    if target.dtype != dtype_of(spec.dtype) or target.nbytes != spec.nbytes:
        raise TransferError(
            f"tensor {spec.name!r} is {spec.dtype} {list(spec.shape)}, its place is "
            f"{target.dtype} {list(target.shape)}"
        )
    return flat_bytes(target)


def _drain(under_way: list[Pending]) -> None:
    while under_way:
        under_way.pop(0)()
