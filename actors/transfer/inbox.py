"""The receiving end of a channel, one a worker. Knows tensors, not vLLM.

Bytes arrive in one flat buffer, laid out as the manifest says. Where the update is *at hand*
(staged, or the sender's memory is mapped) they are fetched while decoding goes on, on a thread
and a stream of their own; to commit them only this worker is needed. Else they are fetched when
they are applied.

A subclass for another link overrides :meth:`Inbox.connect`, :attr:`Inbox.device`,
:meth:`Inbox.check`, :meth:`Inbox.arrive` or :meth:`Inbox.deliver`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from orchestrator.errors import ChannelError, TransferError
from orchestrator.types import ChannelSpec

from . import agreement, memory
from .aside import Aside
from .channel import Channel
from .digest import Part, parts_of
from .gloo import BUCKET_BYTES
from .layout import Layout, manifest_from_wire, manifest_to_wire
from .link import GlooLink, Link
from .plan import Bound, LoadPlan
from .region import Region
from .rendezvous import Rendezvous, pattern


@dataclass
class Invitation:
    """A ChannelSpec as plain data, as it goes through vLLM's RPC, and where ranks begin."""

    backend: str
    host: str
    port: int
    world_size: int
    first_rank: int
    nonce: str
    tensors: list[list[Any]]
    timeout_s: float
    extra: dict[str, Any]
    staged: bool = False

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
            backend=spec.backend.value,
            host=spec.host,
            port=spec.port,
            world_size=spec.world_size,
            first_rank=first_rank,
            nonce=spec.nonce,
            tensors=manifest_to_wire(spec.tensors),
            timeout_s=spec.timeout_s,
            extra=extra,
            staged=spec.staged,
        )


Accept = Callable[[Layout], bool | None]
"""Raises ChannelError when the engine cannot take what the manifest announces.

Returns whether an update needs all of its bytes in a buffer of the worker's, to load it in any
order and to digest what was loaded: so it is until a load plan is proven.
"""


_COPY = "a copy of the weights (staged transfers always need one, others for their first update)"


class Inbox:
    """Joins on creation: blocks until the channel is proved, or ChannelError says why not."""

    layout: Layout
    bucket_bytes = BUCKET_BYTES
    """The sender must use the same."""

    def __init__(
        self, invitation: Invitation, rank: int, accept: Accept, device: torch.device
    ) -> None:
        self.rank = rank
        self.invitation = invitation
        self.target = device
        """Where the model lives."""
        self.fetched: str | None = None
        """Sync id of the update whose bytes are all here, while it is at hand."""
        self.keeps = False
        """Updates need all their bytes in a buffer of this worker, see ``Accept``."""
        self._buffer: torch.Tensor | None = None
        self._binding: tuple[LoadPlan, torch.Tensor, Bound] | None = None
        self.aside = Aside(device)
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
            # Not on the thread of the handshake, which may be left behind: it looks at the model.
            self._get_ready(accept)
            self.channel.run(self._handshake)
        except Exception as error:
            problem = error
            if not isinstance(error, TransferError):
                problem = ChannelError(f"joining failed: {type(error).__name__}: {error}")
            self.channel.close(f"rank {rank}: {problem}")
            raise problem from error

    # what another link changes

    @property
    def device(self) -> torch.device:
        """Where the bytes arrive."""
        return torch.device("cpu")

    @property
    def at_hand(self) -> bool:
        """Updates are fetched before they are applied."""
        return self.invitation.staged

    @property
    def holds(self) -> bool:
        """An update's bytes come into a buffer of this worker: it can be reloaded from there."""
        return True

    def check(self) -> None:
        """ChannelError, before anybody waits for this worker, if the link cannot work here."""

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

    def allocate(self, nbytes: int, what: str = _COPY) -> torch.Tensor:
        """A flat uint8 buffer (ChannelError if there is no memory for it)."""
        memory.must_have_room(nbytes, self.device, what)
        try:
            buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            raise ChannelError(f"no memory to receive {nbytes / 1e9:.2f} GB in: {error}") from error
        if self.device.type == "cuda":
            # Other threads write to it on streams of their own.
            torch.cuda.current_stream(self.device).synchronize()
        return buffer

    def arrive(self) -> Iterator[int]:
        """Fill the buffer; yields how many of its bytes have arrived (ChannelError)."""
        if self.channel.link is None:
            raise ChannelError(f"the channel was closed: {self.channel.closed}")
        buffer = self.buffer()
        ranges = list(self.layout.buckets(self.bucket_bytes))
        waits = [self.channel.link.broadcast(buffer[a:b]) for a, b in ranges]
        for wait, (_, end) in zip(waits, ranges, strict=True):
            self.channel.run(wait)
            yield end

    def deliver(self, plan: LoadPlan, sync_id: str) -> None:
        """Bring the update into the model by ``plan``; on a device, its copies are only queued."""
        self._have(sync_id)
        self.bound(plan).run()

    # receiving

    def buffer(self) -> torch.Tensor:
        """Where the bytes arrive: flat uint8, kept for the life of the channel."""
        if self._buffer is None:
            self._buffer = self.allocate(self.layout.nbytes)
        return self._buffer

    def source(self) -> torch.Tensor:
        """Where the bytes of an update are, once they are here: flat uint8."""
        return self.buffer()

    def views(self) -> dict[str, torch.Tensor]:
        """Each tensor of the update that is here."""
        return dict(self.layout.views(self.source()))

    def trust_plan(self, plan: LoadPlan) -> None:
        """From now on updates go by ``plan``, proven: make ready, and forget what others need."""
        self.keeps = False

    def fetch(self) -> None:
        """Receive all bytes; they are there, on the device too, when this returns."""
        for _ in self.arrive():
            pass

    def start_prefetch(self, sync_id: str, key: str, plan: LoadPlan | None = None) -> None:
        """Fetch on a thread while the model goes on; the outcome is published as ``key/<rank>``.

        ``plan``: by which the update will be delivered; it is bound now, not in the pause.
        """
        self.fetched = None

        def work() -> None:
            self.fetched = None  # once more: the work before this one may just have set it
            self.fetch()
            if plan is not None:
                self.bound(plan)

        def done(answer: dict[str, object]) -> None:
            if "error" not in answer:
                self.fetched = sync_id
            self._publish(key, answer)

        self.aside.start("prefetch", work, done)

    def tensors(self, sync_id: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor as soon as all of it is there, as a view into the buffer."""
        if self.at_hand:
            self._have(sync_id)
            yield from self.layout.views(self.source())
            return
        arrived = self.arrive()
        have = 0
        for slot, named in zip(self.layout.slots, self.layout.views(self.buffer()), strict=True):
            while have < slot.end:
                have = next(arrived)
            yield named
        for _ in arrived:
            pass

    def bound(self, plan: LoadPlan) -> Bound:
        """``plan`` with the update's tensors as its sources; made once a memory."""
        buffer = self.source()
        if self._binding is None or self._binding[0] is not plan or self._binding[1] is not buffer:
            self._binding = (plan, buffer, plan.bind(self.views()))
        return self._binding[2]

    def _have(self, sync_id: str) -> None:
        if not self.at_hand:
            self.fetch()
        elif self.fetched != sync_id:
            raise TransferError(f"update {sync_id} is not at hand ({self.fetched} is): prefetch it")

    # proof

    def parts(self) -> dict[str, Part]:
        """Digest of what arrived, in the buffer."""
        shapes = {slot.spec.name: slot.spec.shape for slot in self.layout.slots}
        arrived = ((n, Region.whole(shapes[n]), t) for n, t in self.views().items())
        return parts_of(arrived, shapes)

    def start_digest(
        self,
        key: str,
        parts: Callable[[], dict[str, Part]] | None = None,
        unused: Sequence[str] = (),
        how: str = "",
    ) -> None:
        """Digest on a thread (``parts``, or what arrived); published as ``key/<rank>``.

        ``unused``: tensors that this worker's model has no place for, and that are in no part.
        ``how``: updates are applied, in words.
        """
        digest = parts or self.parts

        def work() -> dict[str, object]:
            return {"parts": digest(), "unused": list(unused), "how": how}

        self.aside.start("digest", work, lambda answer: self._publish(key, answer))

    def leave(self, reason: str) -> None:
        """Close the channel for all its members. Idempotent. The inbox is of no use then: a
        wait that was left behind may still write into its buffer.
        """
        self.channel.close(reason)
        # Its memory may be given to the next channel as soon as nobody holds it.
        self.aside.finish()

    def _publish(self, key: str, answer: dict[str, object]) -> None:
        self.channel.meeting.put(f"{key}/{self.rank}", json.dumps(answer))

    def _get_ready(self, accept: Accept) -> None:
        meeting, rank = self.channel.meeting, self.rank
        try:
            self._check(accept)
        except Exception as error:
            meeting.say(f"ready/{rank}", str(error) or type(error).__name__)
            raise
        meeting.say(f"ready/{rank}")

    def _handshake(self) -> None:
        meeting, rank = self.channel.meeting, self.rank
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
        agreement.check(self.channel.meeting, self.layout, self.bucket_bytes, self.invitation.extra)
        self.check()
        self.keeps = bool(accept(self.layout))
        if self.keeps or self.invitation.staged:
            # Now, not at the first swap: what does not fit is refused while nobody waits.
            self.buffer()

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
