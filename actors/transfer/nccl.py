"""NCCL between GPUs: tensors go from the trainer's staging buffer into vLLM's weights.

One group of broadcasts carries many tensors at the link's speed without a packing copy. Importing
this needs no GPU; using it does.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from orchestrator.errors import ChannelError
from orchestrator.types import ChannelSpec, TransferBackend, WeightUpdate

from . import nccl_check, vllm_nccl
from .channel import Channel
from .gloo import LinkSender
from .groups import Schedule, arrivals, receive, send_groups, undirected_bytes
from .inbox import Inbox
from .layout import Slot, flat_bytes, schedule, view
from .link import BrokenLink, Link, Pending
from .memory import gpu_id
from .plan import Copy, LoadPlan
from .rendezvous import Rendezvous, pattern

BUCKET_BYTES = 256 << 20
"""One group carries at most this. Larger ones are hardly faster (two H200s: 356 of 363 GB/s)."""
_LEAVE_S = 2.0
"""How long :meth:`NcclLink.close` lets a thread leave NCCL's calls before it aborts them."""


class NcclLink(Link):
    """vLLM's NCCL communicator on a stream of its own. Each wait ends within ``timeout_s``."""

    def __init__(
        self,
        meeting: Rendezvous,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Blocks until all ranks are there. ChannelError for an NCCL that vLLM cannot use."""
        self.description = nccl_check.description()
        self.device = device
        self._timeout_s = timeout_s
        self._calls, self._ending = threading.Lock(), threading.Lock()
        self._ended: str | None = None
        try:
            if rank == 0:
                unique = vllm_nccl.nccl_unique_id()
                meeting.put("nccl", base64.b64encode(unique).decode())
            else:
                unique = base64.b64decode(meeting.read("nccl"))
            self.communicator = vllm_nccl.nccl_communicator(unique, rank, world_size, device)
        except ChannelError:
            raise
        except Exception as error:
            raise ChannelError(
                f"rank {rank} cannot join over {self.description}: {type(error).__name__}: {error}"
            ) from error
        nccl_check.must_be_enabled(self.communicator, rank)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def broadcast(self, buffer: torch.Tensor) -> Pending:
        return self.broadcast_many([buffer])

    def broadcast_many(self, buffers: Sequence[torch.Tensor]) -> Pending:
        flat = [flat_bytes(buffer) for buffer in buffers]
        with self._calls, torch.cuda.device(self.device):
            self._must_be_open()
            # What wrote (or last read) the buffers may still run on the caller's stream.
            self._stream.wait_stream(torch.cuda.current_stream())
            self.communicator.group_start()
            try:
                for buffer in flat:
                    self.communicator.broadcast(buffer, src=0, stream=self._stream)
            finally:
                self.communicator.group_end()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)

        def wait() -> None:
            watch = threading.Timer(self._timeout_s, self._expire)
            watch.daemon = True
            watch.start()
            try:
                with torch.cuda.device(self.device):
                    done.synchronize()
            finally:
                watch.cancel()
            # An aborted broadcast also completes; its data is garbage.
            self._must_be_open()

        def order() -> None:
            with torch.cuda.device(self.device):
                torch.cuda.current_stream().wait_event(done)

        return Pending(wait, order)

    def close(self) -> None:
        """Abort what is under way. Idempotent, from any thread."""
        self._end("was closed")

    def _expire(self) -> None:
        self._end(f"did not finish a broadcast within {self._timeout_s:g} s, a peer hangs")

    def _end(self, why: str) -> None:
        # Held to the end: who comes second may free memory that an abort still stops writes to.
        with self._ending:
            if self._ended is not None:
                return
            self._ended = why
            # A call that is being queued ends in a moment, unless it waits for a dead peer: then
            # only the abort ends it.
            held = self._calls.acquire(timeout=_LEAVE_S)
            try:
                self.communicator.destroy()
            finally:
                if held:
                    self._calls.release()

    def _must_be_open(self) -> None:
        if self._ended is not None:
            raise BrokenLink(f"the NCCL communicator {self._ended}")


class NcclSender(LinkSender):
    """Rank 0 of an NCCL group; each engine worker on a GPU of its own."""

    backend = TransferBackend.NCCL
    bucket_bytes = BUCKET_BYTES

    def listen(self, world_size: int, timeout_s: float, host: str = "127.0.0.1") -> ChannelSpec:
        nccl_check.description()
        return super().listen(world_size, timeout_s, host)

    def _device(self) -> torch.device:
        self._layout_once()
        if self._home.type == "cuda":
            return self._home
        return torch.device("cuda", torch.cuda.current_device())

    def _extra(self, nonce: str, world_size: int) -> dict[str, object]:
        return {"gpu": gpu_id(self._device()), "nccl": nccl_check.settings()}

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device())

    def _settle(self) -> None:
        torch.cuda.synchronize(self._device())

    def _pattern(self, nonce: str) -> torch.Tensor:
        return pattern(nonce).to(self._device())

    def _connect(self, channel: Channel, spec: ChannelSpec) -> Link:
        return NcclLink(channel.meeting, 0, spec.world_size, self._device(), spec.timeout_s)

    def _transmit(
        self, channel: Channel, link: Link, buffer: torch.Tensor, update: WeightUpdate
    ) -> None:
        groups = schedule(self._layout_once(), self.bucket_bytes)
        # All of it on the thread that may be left behind: also the calls that queue can block.
        channel.run(lambda: send_groups(link, groups, buffer))


class NcclInbox(Inbox):
    """Receives on the model's GPU: by a load plan right into the weights, else into a buffer."""

    bucket_bytes = BUCKET_BYTES
    _bucket: torch.Tensor | None = None
    _way: _Way | None = None

    @property
    def device(self) -> torch.device:
        return self.target

    def connect(self) -> Link:
        asked = self.invitation
        return NcclLink(
            self.channel.meeting, self.rank, asked.world_size, self.target, asked.timeout_s
        )

    def check(self) -> None:
        """ChannelError for an NCCL that is unusable or set up unlike the trainer's, or if trainer
        and worker share a GPU.
        """
        nccl_check.description()
        theirs = self.invitation.extra.get("nccl")
        nccl_check.must_agree(theirs if isinstance(theirs, dict) else {})
        if self.invitation.extra.get("gpu") == gpu_id(self.target):
            raise ChannelError(
                f"trainer and worker are both on GPU {gpu_id(self.target)}, and NCCL refuses two "
                "ranks on one: use backend ipc"
            )

    def arrive(self) -> Iterator[int]:
        link, buffer = self._open_link(), self.buffer()
        groups = self._groups()
        waits = [link.broadcast_many([view(buffer, slot) for slot in group]) for group in groups]
        for group in groups:
            self.channel.run(waits.pop(0))
            yield group[-1].end

    def trust_plan(self, plan: LoadPlan) -> None:
        super().trust_plan(plan)
        if not self.invitation.staged:
            self._buffer = self._binding = None
            self._way = self._way_of(plan)  # now: its bucket is not to be made in a later pause

    def deliver(self, plan: LoadPlan, sync_id: str) -> None:
        if self.at_hand:
            super().deliver(plan, sync_id)
            return
        link = self._open_link()
        way = self._way = self._way_of(plan)
        with torch.no_grad():
            receive(link, way.arrivals, way.landed, self.channel.run)

    def _way_of(self, plan: LoadPlan) -> _Way:
        known = self._way
        if known is not None and known.plan is plan:
            return known
        return _Way(plan, self._groups(), self._room)

    def _room(self, nbytes: int) -> torch.Tensor:
        if self._bucket is None or self._bucket.numel() < nbytes:
            self._bucket = self.allocate(nbytes, "the bucket for tensors that are sliced or cast")
        return self._bucket

    def _groups(self) -> list[list[Slot]]:
        return schedule(self.layout, self.bucket_bytes)

    def _open_link(self) -> Link:
        link = self.channel.link
        if link is None or self.channel.closed is not None:
            raise ChannelError(f"the channel was closed: {self.channel.closed}")
        return link


class _Way:
    """How an update gets right into the model: worked out once a plan, not in every pause."""

    def __init__(
        self, plan: LoadPlan, groups: Schedule, room: Callable[[int], torch.Tensor]
    ) -> None:
        """``room``: gives flat uint8 of at least so many bytes, on the model's device."""
        self.plan = plan
        self._copies: dict[str, list[Copy]] = {}
        for copy in plan.copies:
            self._copies.setdefault(copy.name, []).append(copy)
        bucket = room(undirected_bytes(groups, self._place))
        self.arrivals = arrivals(groups, self._place, bucket)

    def landed(self, slot: Slot, arrived: torch.Tensor) -> None:
        """See :data:`groups.Landed`."""
        for copy in self._copies.get(slot.spec.name, ()):
            copy.target.copy_(copy.source.of(arrived))

    def _place(self, slot: Slot) -> torch.Tensor | None:
        return _place(slot, self._copies.get(slot.spec.name, ()))


def _place(slot: Slot, copies: Sequence[Copy]) -> torch.Tensor | None:
    """Where all of a tensor goes unchanged; None if it is sliced, cast or not wanted here."""
    if len(copies) != 1:
        return None
    copy = copies[0]
    direct = copy.whole and copy.dtype == copy.target.dtype and copy.target.is_contiguous()
    return copy.target if direct else None
