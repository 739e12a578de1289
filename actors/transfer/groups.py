"""Tensors in groups of broadcasts, straight to where they belong.

Sender and receivers compute the same schedule. A receiver gives the final place of a tensor, or
none: then it comes through a bucket and is copied on, sliced and cast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Arrival:
    """One group at a receiver; good for every update that comes to the same places."""

    buffers: list[torch.Tensor]
    """Flat uint8, in the group's order: where each of its tensors arrives."""
    passing: list[tuple[Slot, torch.Tensor]]
    """Those that arrive in the bucket, as typed views of it."""


def arrivals(schedule: Schedule, place: Place, bucket: torch.Tensor) -> list[Arrival]:
    """Where every group of ``schedule`` arrives (TransferError for a place that does not fit).

    ``bucket``: flat uint8 of :func:`undirected_bytes`, on the link's device.
    """
    return [_arrival(group, place, bucket) for group in schedule]


def receive(link: Link, arrivals: Sequence[Arrival], landed: Landed, run: Run = call) -> None:
    """Receive what :func:`send_groups` sends (ChannelError if the link breaks).

    On return all direct tensors are there; the copies of ``landed`` are done or queued on the
    current stream.
    """
    under_way: list[Pending] = []
    try:
        for group in arrivals:
            # The link orders its device work after this thread's stream: the copies out of the
            # bucket that are queued there end before the next group fills it.
            pending = link.broadcast_many(group.buffers)
            if not group.passing or pending.order():
                under_way.append(pending)
            else:
                run(pending)
            for slot, arrived in group.passing:
                landed(slot, arrived)
        run(lambda: _drain(under_way))
    finally:
        under_way.clear()  # see GlooLink: works kept alive keep sockets open


def receive_groups(
    link: Link,
    schedule: Schedule,
    place: Place,
    bucket: torch.Tensor,
    landed: Landed,
    run: Run = call,
) -> None:
    """:func:`receive` once; what does not fit is refused before anything is received."""
    receive(link, arrivals(schedule, place, bucket), landed, run)


def _arrival(group: Sequence[Slot], place: Place, bucket: torch.Tensor) -> Arrival:
    buffers: list[torch.Tensor] = []
    passing: list[tuple[Slot, torch.Tensor]] = []
    used = 0
    for slot in group:
        direct = _direct(slot, place(slot))
        if direct is None:
            inside = Slot(slot.spec, used)
            used += padded(slot.spec.nbytes)
            if inside.end > bucket.numel():
                raise TransferError(
                    f"the bucket of {bucket.numel()} bytes has no room for tensor "
                    f"{slot.spec.name!r} up to byte {inside.end}"
                )
            direct = bucket[inside.offset : inside.end]
            passing.append((inside, view(bucket, inside)))
        buffers.append(direct)
    return Arrival(buffers, passing)


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
