"""One engine as the fleet sees it, and where it stands in a transfer group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.errors import ChannelError
from orchestrator.protocols import Engine
from orchestrator.types import EngineInfo, PolicyVersion


@dataclass(slots=True)
class Replica:
    """One engine and what the fleet knows of it."""

    engine: Engine
    info: EngineInfo | None = None
    fenced: bool = False
    dirty: bool = False
    applied: PolicyVersion | None = None
    """Version of the last update it finished, committed or not."""
    paused: bool = False
    swapping: asyncio.Future[None] | None = None
    """Ends when it is known what a swap in one call came to; None without one."""
    live: set[str] = field(default_factory=set)
    """Ids of the requests it was given and has not answered."""

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.engine.name


def first_ranks(workers: Sequence[int]) -> list[int]:
    """First rank of each replica in a transfer group, from their worker counts; 0 is the sender.

    ChannelError for a replica without workers.

    >>> first_ranks([2, 1, 4])
    [1, 3, 4]
    """
    ranks, next_rank = [], 1
    for count in workers:
        if count < 1:
            raise ChannelError(f"a replica has {count} workers: it needs at least one")
        ranks.append(next_rank)
        next_rank += count
    return ranks
