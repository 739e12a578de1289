"""What carries flat byte buffers from rank 0 to all others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from actors.nodes import is_loopback
from orchestrator.errors import ChannelError

from .layout import flat_bytes
from .rendezvous import Rendezvous, local_address
from .store import TorchStore

c10d: Any = torch.distributed
"""Its groups are not in torch's type stubs."""

Wait = Callable[[], None]
"""Returns when the broadcast it belongs to is complete here; ChannelError if it broke."""


class Pending:
    """Broadcasts under way. Call it to wait for them, as any :data:`Wait`."""

    def __init__(self, wait: Wait, order: Callable[[], None] | None = None) -> None:
        self._wait, self._order = wait, order

    def __call__(self) -> None:
        self._wait()

    def order(self) -> bool:
        """Let what this thread queues on its device stream come after them, without waiting.

        False, and nothing done, where there is no stream: then only the wait orders.
        """
        if self._order is None:
            return False
        self._order()
        return True


class Link(ABC):
    """One rank's end. Not thread-safe, but :meth:`close` may come from another thread."""

    description: str
    """What carries the bytes, with its version if it has one."""

    @abstractmethod
    def broadcast(self, buffer: torch.Tensor) -> Wait:
        """Start to send ``buffer`` (rank 0) or to receive into it: flat, contiguous uint8."""

    def broadcast_many(self, buffers: Sequence[torch.Tensor]) -> Pending:
        """Broadcast each of ``buffers``, contiguous and of any dtype, in this order.

        Every rank gives as many, of the same sizes (TransferError for one that has strides).
        """
        flat = [flat_bytes(buffer) for buffer in buffers]
        waits = [self.broadcast(buffer) for buffer in flat]

        def wait() -> None:
            try:
                while waits:
                    waits.pop(0)()
            finally:
                waits.clear()  # what is still under way must not outlive a failure, see GlooLink

        return Pending(wait)

    @abstractmethod
    def close(self) -> None:
        """Leave. The other ranks' pending broadcasts fail. Idempotent."""


class GlooLink(Link):
    """Gloo over TCP. Each broadcast ends within the group's timeout, also if a peer hangs."""

    description = "gloo over TCP"

    def __init__(
        self, meeting: Rendezvous, rank: int, world_size: int, timeout_s: float, host: str
    ) -> None:
        """Blocks until all ``world_size`` ranks are connected (ChannelError after timeout)."""
        own = "127.0.0.1" if is_loopback(host) else local_address(host, meeting.port)
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own)]
        self._store = TorchStore(meeting.client)  # the group does not keep it alive
        try:
            self._group: Any = c10d.ProcessGroupGloo(self._store, rank, world_size, options)
        except RuntimeError as error:
            raise ChannelError(
                f"rank {rank} of {world_size} could not connect over gloo: {error}"
            ) from error

    def broadcast(self, buffer: torch.Tensor) -> Wait:
        group = self._group
        if group is None:
            raise BrokenLink("the gloo channel was closed")
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.asyncOp = True
        try:
            works = [group.broadcast([buffer], options)]
        except RuntimeError as error:
            raise _broken(error) from error

        def wait() -> None:
            problem: BrokenLink | None = None
            try:
                # Popped: a traceback that kept the work alive would keep its sockets open too,
                # and with them every peer that waits for this rank.
                works.pop().wait()
            except RuntimeError as error:
                problem = _broken(error)
            if problem is not None:
                raise problem

        return wait

    def close(self) -> None:
        # Gloo has no abort: its sockets close when the last reference goes.
        self._group = None


class BrokenLink(ChannelError):
    """The link failed under an operation; why is better known to the peer that left."""


def _broken(error: RuntimeError) -> BrokenLink:
    text = str(error)
    line = text.splitlines()[0] if text else repr(error)
    return BrokenLink(f"the gloo channel broke, a peer died, hung or left: {line}")
