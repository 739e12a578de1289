"""Mapped memory: trainer and engine share one device, and nothing travels.

The sender keeps one flat snapshot of the weights; each worker maps it once and copies from there.
On a machine without a GPU the same works over host memory.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator

import torch

from orchestrator.errors import ChannelError
from orchestrator.types import ChannelSpec, TransferBackend, WeightUpdate

from . import memory
from .base import NamedTensors
from .beside import copy_beside
from .channel import Channel
from .gloo import LinkSender
from .inbox import Accept, Inbox, Invitation
from .link import Link, Wait
from .plan import LoadPlan
from .rendezvous import pattern


class SharedMemory(Link):
    """No link: the receivers map the sender's buffer, which is complete when it is staged."""

    description = "mapped memory"

    def broadcast(self, buffer: torch.Tensor) -> Wait:
        return lambda: None

    def close(self) -> None:
        pass


class IpcSender(LinkSender):
    """Shares its staging buffer with engines on the device where the weights live.

    The store's ``memory`` says which buffer is current: ``generation`` and one handle a worker,
    none while nothing was staged or after :meth:`release`. A buffer that was released takes its
    memory until every worker has dropped it, see :meth:`IpcInbox.refresh`.
    """

    backend = TransferBackend.IPC

    def __init__(self, weights: Callable[[], NamedTensors], *, wire_dtype: str | None = None):
        super().__init__(weights, wire_dtype=wire_dtype)
        self._generation = 0
        self._shared: torch.Tensor | None = None
        self._shared_pattern: torch.Tensor | None = None

    def listen(self, world_size: int, timeout_s: float, host: str = "127.0.0.1") -> ChannelSpec:
        spec = super().listen(world_size, timeout_s, host)
        self._publish()
        return spec

    def stage(self) -> dict[str, str]:
        digests = super().stage()
        if self._shared is not self._buffer:
            self._generation += 1
            self._shared = self._buffer
            self._publish()
        return digests

    def release(self) -> None:
        super().release()
        if self._shared is None:
            return
        self._generation += 1
        self._shared = None
        self._publish()
        if self._home.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def _publish(self) -> None:
        """Say where the snapshot is now. A closed channel is said so by its next use."""
        channel, opened = self._channel, self._opened
        if channel is None or opened is None or channel.closed is not None:
            return
        shared = self._shared
        ranks = range(1, opened.world_size)
        handles = [] if shared is None else [memory.export(shared) for _ in ranks]
        with contextlib.suppress(ChannelError):
            channel.meeting.put(
                "memory", json.dumps({"generation": self._generation, "handles": handles})
            )

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return memory.allocate(nbytes, self._home)

    def _settle(self) -> None:
        if self._home.type == "cuda":
            torch.cuda.synchronize(self._home)

    def _extra(self, nonce: str, world_size: int) -> dict[str, object]:
        known = pattern(nonce)
        shared = memory.allocate(known.numel(), self._home)
        shared.copy_(known)
        self._settle()
        self._shared_pattern = shared
        return {"patterns": [memory.export(shared) for _ in range(1, world_size)]}

    def _connect(self, channel: Channel, spec: ChannelSpec) -> Link:
        return SharedMemory()

    def _transmit(
        self, channel: Channel, link: Link, buffer: torch.Tensor, update: WeightUpdate
    ) -> None:
        """Nothing: what is staged is at every worker."""


class IpcInbox(Inbox):
    """Reads the sender's memory, mapped into this process; staged, from its own copy of it."""

    def __init__(
        self, invitation: Invitation, rank: int, accept: Accept, device: torch.device
    ) -> None:
        self._mapped: torch.Tensor | None = None
        self._identity: tuple[object, str] | None = None
        self._pattern: torch.Tensor | None = None
        super().__init__(invitation, rank, accept, device)

    @property
    def device(self) -> torch.device:
        return self.target

    @property
    def at_hand(self) -> bool:
        return True

    def check(self) -> None:
        """ChannelError unless the sender's memory can be mapped here."""
        handles = self.invitation.extra.get("patterns")
        if not isinstance(handles, list) or len(handles) < self.rank:
            raise ChannelError(f"the invitation has no memory handle for rank {self.rank}")
        handle = handles[self.rank - 1]
        if not isinstance(handle, dict):
            raise ChannelError(f"a malformed memory handle: {handle!r}")
        self._pattern = memory.attach(handle, self.target)

    def connect(self) -> Link | None:
        return None

    def receive_pattern(self) -> torch.Tensor:
        mapped, self._pattern = self._pattern, None
        assert mapped is not None
        return mapped.cpu().clone()

    def source(self) -> torch.Tensor:
        """The sender's memory, empty until it was mapped; or a copy of it in this worker's."""
        if self.holds:
            return self.buffer()
        return torch.empty(0, dtype=torch.uint8) if self._mapped is None else self._mapped

    def trust_plan(self, plan: LoadPlan) -> None:
        super().trust_plan(plan)
        if not self.invitation.staged:
            self._buffer = self._binding = None

    @property
    def holds(self) -> bool:
        """Staged; or loaded otherwise than by a plan: there a digest of the sender's own memory
        would prove nothing."""
        return self.keeps or self.invitation.staged

    def arrive(self) -> Iterator[int]:
        if self.channel.closed is not None:
            raise ChannelError(f"the channel was closed: {self.channel.closed}")
        mapped = self.refresh()
        if self.holds:
            copy_beside(self.buffer(), mapped, self.channel.rest)
        yield self.layout.nbytes

    def refresh(self) -> torch.Tensor:
        """Map the sender's memory, unless it is mapped; one that was released is dropped.

        ChannelError if the sender shares nothing now, or what it shares cannot be mapped.
        """
        generation, handles = self._current()
        if not handles:
            self._drop()
            raise ChannelError("the trainer shares no memory now: stage the weights first")
        if len(handles) < self.rank:
            raise ChannelError(f"the trainer shares no memory with rank {self.rank}")
        handle = handles[self.rank - 1]
        identity = (generation, memory.identity(handle))
        if self._mapped is not None and identity == self._identity:
            return self._mapped
        self._drop()
        mapped = memory.attach(handle, self.target)
        if mapped.numel() != self.layout.nbytes:
            raise ChannelError(
                f"the mapped memory has {mapped.numel()} bytes, not {self.layout.nbytes}"
            )
        self._mapped, self._identity = mapped, identity
        return mapped

    def _drop(self) -> None:
        self._mapped = self._identity = None
        if not self.holds:
            self._binding = None  # it holds views

    def _current(self) -> tuple[object, list[memory.Handle]]:
        text = self.channel.meeting.read("memory")
        try:
            record = json.loads(text)
            generation, handles = record["generation"], record["handles"]
            if not all(isinstance(handle, dict) for handle in handles):
                raise TypeError("a handle is no mapping")
        except (ValueError, KeyError, TypeError) as error:
            raise ChannelError(f"malformed word about the trainer's memory: {error}") from error
        return generation, list(handles)
