"""An in-memory transfer group that behaves like a blocking collective.

Every party enters step *k* before any of them leaves it. A party that fails, dies or leaves
tells nobody: the others stay in the step until they leave the channel themselves. That is the
hang which a controller has to end.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from orchestrator.errors import ChannelError
from orchestrator.types import ChannelSpec

Item = tuple[str, bytes]
"""Tensor name and its bytes, as the sender gave them."""


@dataclass(slots=True)
class _Step:
    arrived: dict[str, asyncio.Future[Item]] = field(default_factory=dict)
    item: Item | None = None


class FakeChannel:
    """One group; rank 0 is the sender. Seconds are virtual."""

    def __init__(self, spec: ChannelSpec, tensor_seconds: float) -> None:
        self.spec = spec
        self.members: dict[str, tuple[int, ...]] = {}
        """Ranks by party, those that left included: they are still part of the group."""
        self.left: set[str] = set()
        self._tensor_seconds = tensor_seconds
        self._joining: dict[str, asyncio.Future[None]] = {}
        self._index: dict[str, int] = {}
        self._steps: dict[int, _Step] = {}
        self._broken: set[str] = set()
        self._taken: dict[int, str] = {}

    @property
    def formed(self) -> bool:
        """Whether every rank is taken."""
        return len(self._taken) == self.spec.world_size

    def join(self, party: str, ranks: tuple[int, ...]) -> asyncio.Future[None]:
        """Take ``ranks``. The future ends when the group is whole, or fails at its timeout.

        Raises ChannelError at once when a rank is taken or outside the group.
        """
        for rank in ranks:
            if rank in self._taken:
                raise ChannelError(f"rank {rank} of {party} is already {self._taken[rank]}'s")
            if not 0 <= rank < self.spec.world_size:
                raise ChannelError(
                    f"rank {rank} of {party} is outside a group of {self.spec.world_size}"
                )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self.members[party] = ranks
        self._taken.update(dict.fromkeys(ranks, party))
        self._joining[party] = future
        timer = loop.call_later(self.spec.timeout_s, self._timed_out, party)
        future.add_done_callback(lambda _: timer.cancel())
        if self.formed and not self.left:
            for waiting in self._joining.values():
                if not waiting.done():
                    waiting.set_result(None)
        return future

    def enter(self, party: str, item: Item | None) -> asyncio.Future[Item]:
        """Enter the party's next step, the sender with ``item``, receivers with None.

        Raises ChannelError when the party has left or failed inside a transfer before.
        """
        if party in self.left or not self.formed:
            raise ChannelError(f"{party} is not in the transfer group: open the channel first")
        if party in self._broken:
            raise ChannelError(
                f"{party} failed inside a transfer, its channel is out of step: close and reopen it"
            )
        loop = asyncio.get_running_loop()
        index = self._index.get(party, 0)
        self._index[party] = index + 1
        step = self._steps.setdefault(index, _Step())
        future: asyncio.Future[Item] = loop.create_future()
        step.arrived[party] = future
        step.item = item or step.item
        if len(step.arrived) == len(self.members):
            del self._steps[index]
            loop.call_later(self._tensor_seconds, _deliver, step)
        return future

    def break_off(self, party: str) -> None:
        """``party`` failed inside a transfer; it cannot take part in another one."""
        self._broken.add(party)

    def leave(self, party: str) -> None:
        """``party`` is gone. Nobody is told."""
        self.left.add(party)

    def _timed_out(self, party: str) -> None:
        future = self._joining[party]
        if not future.done():
            missing = self.spec.world_size - len(self._taken)
            future.set_exception(
                ChannelError(
                    f"{party} waited {self.spec.timeout_s:g} s, "
                    f"{missing} of {self.spec.world_size} ranks never joined"
                )
            )


def _deliver(step: _Step) -> None:
    assert step.item is not None, "a transfer without a sender"
    for future in step.arrived.values():
        if not future.done():
            future.set_result(step.item)
