"""One engine as the fleet sees it, and where it stands in a transfer group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.errors import ChannelError
from orchestrator.protocols import Digests, Engine
from orchestrator.types import EngineInfo, PolicyVersion


@dataclass(slots=True, eq=False)
class Replica:
    """One engine and what the fleet knows of it."""

    engine: Engine
    info: EngineInfo | None = None
    fenced: bool = False
    dirty: bool = False
    lost: str | None = None
    """Why it takes part in nothing any more: it is dead, hangs, or failed too often."""
    applied: PolicyVersion | None = None
    """Version of the last update it finished, committed or not."""
    proved: PolicyVersion | None = None
    """Newest version whose digest it showed; None once it is fenced."""
    shown: Digests = field(default_factory=dict)
    """The digests it showed for that version."""
    awaiting: PolicyVersion | None = None
    """Answers with tokens of this version wait for its verdict; None once that is known."""
    epoch: int = 0
    """How often it was fenced for what it wrote."""
    distrust: dict[int, PolicyVersion] = field(default_factory=dict)
    """Epoch -> requests begun in it keep no token of this version or a later one."""
    paused: bool = False
    swapping: asyncio.Future[None] | None = None
    """Ends when it is known what a swap in one call came to; None without one."""
    since: float | None = None
    """Loop time at which it, or the one it replaces, was fenced; None while it serves."""
    place: int = 0
    """Among the replicas of the fleet."""
    live: set[str] = field(default_factory=set)
    """Ids of the requests it was given and has not answered."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nobody is to wait for an answer of it any more."""

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
