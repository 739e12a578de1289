"""The receiving end of a channel, one a worker. Knows tensors, not vLLM.

A subclass for another link overrides :meth:`Inbox.connect`, :attr:`Inbox.device` or
:meth:`Inbox.arrive`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from orchestrator.errors import ChannelError, TransferError
from orchestrator.types import ChannelSpec

from .channel import Channel
from .digest import digest_all
from .gloo import BUCKET_BYTES
from .layout import Layout, manifest_from_wire, manifest_to_wire
from .link import GlooLink, Link
from .rendezvous import Rendezvous, pattern


@dataclass
class Invitation:
    """A ChannelSpec as plain data, as it goes through vLLM's RPC, and where ranks begin."""

    host: str
    port: int
    world_size: int
    first_rank: int
    nonce: str
    tensors: list[list[Any]]
    timeout_s: float
    extra: dict[str, Any]

    @classmethod
    def of(cls, spec: ChannelSpec, first_rank: int) -> Invitation:
        """ChannelError unless all of it survives JSON: found out before anybody waits."""
        extra = dict(spec.extra)
        try:
            same = json.loads(json.dumps(extra)) == extra
        except (TypeError, ValueError):
            same = False
        if not same:
            raise ChannelError(f"the channel's extra data is not plain data: {extra!r}")
        return cls(
            host=spec.host,
            port=spec.port,
            world_size=spec.world_size,
            first_rank=first_rank,
            nonce=spec.nonce,
            tensors=manifest_to_wire(spec.tensors),
            timeout_s=spec.timeout_s,
            extra=extra,
        )


Accept = Callable[[Layout], None]
"""Raises ChannelError when the engine cannot take what the manifest announces."""


class Inbox:
    """Joins on creation: blocks until the channel is proved, or ChannelError says why not."""

    def __init__(
        self, invitation: Invitation, rank: int, accept: Accept, device: torch.device
    ) -> None:
        self.rank = rank
        self.invitation = invitation
        self.target = device
        """Where the model lives."""
        self._digesting: threading.Thread | None = None
        asked = invitation
        self.channel = Channel(
            Rendezvous.join(
                asked.host,
                asked.port,
                asked.nonce,
                asked.timeout_s,
                str(asked.extra.get("node", "")),
            )
        )
        try:
            self.channel.run(lambda: self._handshake(accept))
        except TransferError as error:
            self.channel.close(f"rank {rank}: {error}")
            raise

    layout: Layout
    staging: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Where the bytes arrive."""
        return torch.device("cpu")

    def connect(self) -> Link | None:
        """Build the link; blocks until all ranks are there. None: memory is shared."""
        asked = self.invitation
        return GlooLink(
            self.channel.meeting, self.rank, asked.world_size, asked.timeout_s, asked.host
        )

    def receive_pattern(self) -> torch.Tensor:
        """The known pattern as it arrived here, on the host."""
        assert self.channel.link is not None
        arrived = torch.zeros_like(pattern(self.invitation.nonce)).to(self.device)
        self.channel.link.broadcast(arrived)()
        return arrived.cpu()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """The staging buffer, flat uint8, kept for the life of the channel."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def arrive(self) -> Iterator[int]:
        """Fill the staging buffer; yields how many of its bytes have arrived (ChannelError)."""
        if self.channel.link is None:
            raise ChannelError(f"the channel was closed: {self.channel.closed}")
        ranges = list(self.layout.buckets(BUCKET_BYTES))
        waits = [self.channel.link.broadcast(self.staging[a:b]) for a, b in ranges]
        for wait, (_, end) in zip(waits, ranges, strict=True):
            self.channel.run(wait)
            yield end

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor as soon as all of it is there, as a view into the staging buffer."""
        arrived = self.arrive()
        have = 0
        for slot, named in zip(self.layout.slots, self.layout.views(self.staging), strict=True):
            while have < slot.end:
                have = next(arrived)
            yield named
        for _ in arrived:
            pass

    def start_digest(self, key: str) -> None:
        """Digest what arrived, on a thread; publishes ``{name: digest}`` as ``key/<rank>``."""
        self.finish_digest()
        self._digesting = threading.Thread(
            target=self._digest, args=(key,), name="digest", daemon=True
        )
        self._digesting.start()

    def finish_digest(self) -> None:
        """Wait until no thread reads the staging buffer any more."""
        if self._digesting is not None:
            self._digesting.join()
            self._digesting = None

    def leave(self, reason: str) -> None:
        """Close the channel for all its members. Idempotent. The inbox is of no use then: a
        wait that was left behind may still write into its staging buffer.
        """
        self.channel.close(reason)

    def _digest(self, key: str) -> None:
        try:
            answer: dict[str, object] = {"digests": digest_all(self.layout.views(self.staging))}
        except Exception as error:
            answer = {"error": str(error)}
        with contextlib.suppress(ChannelError):  # closed: whoever asked is told so
            self.channel.meeting.put(f"{key}/{self.rank}", json.dumps(answer))

    def _handshake(self, accept: Accept) -> None:
        meeting, rank = self.channel.meeting, self.rank
        try:
            self._check(accept)
        except TransferError as error:
            meeting.say(f"ready/{rank}", str(error))
            raise
        meeting.say(f"ready/{rank}")
        meeting.hear(["go"], patience=2)
        self.channel.link = self.connect()
        problem = self._prove()
        meeting.say(f"proof/{rank}", problem)
        if problem is not None:
            raise ChannelError(problem)
        meeting.hear(["open"], patience=2)

    def _check(self, accept: Accept) -> None:
        world, first = self.invitation.world_size, self.invitation.first_rank
        if not 0 < self.rank < world:
            raise ChannelError(
                f"rank {self.rank} is outside the group of {world}: the replica that begins at "
                f"rank {first} has more workers than it was given ranks"
            )
        self.layout = Layout.of(manifest_from_wire(self.invitation.tensors))
        accept(self.layout)
        self.staging = self.allocate(self.layout.nbytes)

    def _prove(self) -> str | None:
        arrived, expected = self.receive_pattern(), pattern(self.invitation.nonce)
        wrong = int((arrived != expected).sum())
        if not wrong:
            return None
        return (
            f"{wrong} of {expected.numel()} bytes of the known pattern arrived wrong: this link "
            "does not carry data, nothing may be sent over it"
        )


def accept_dtypes(
    parameters: dict[str, str], main: str, declared: str | None, layout: Layout
) -> None:
    """ChannelError if a tensor's dtype on the wire is neither the engine's nor a declared cast.

    ``parameters``: dtype of each of the engine's parameters; ``main``: of those whose names
    differ from the checkpoint's; ``declared``: the trainer's declared cast.
    """
    if declared is not None and declared != main:
        raise ChannelError(
            f"the trainer declared a cast to {declared}, the engine holds {main}: declare "
            f"wire_dtype={main!r} or start the engine with dtype={declared!r}"
        )
    for slot in layout.slots:
        name, wire = slot.spec.name, slot.spec.dtype
        holds = parameters.get(name, main)
        if not getattr(torch, wire).is_floating_point or wire in (holds, declared):
            continue
        raise ChannelError(
            f"tensor {name!r} is {wire} on the wire, the engine holds {holds}: give both sides "
            f"one dtype or declare the cast with wire_dtype={holds!r}"
        )
