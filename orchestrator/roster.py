"""Who the replicas are, and how each stands.

=========  ==============================================================================
serving    takes requests; holds the committed version
fenced     takes none and is not resumed on its own word; may be resynced whole
lost       dead, hangs, or failed too often: nobody waits for it, it is only closed
=========  ==============================================================================

A replica is *dirty* from the moment it is told to start an update until the fleet commits that
version: a dirty replica holds no committed version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence

from orchestrator.errors import EngineError
from orchestrator.protocols import Engine
from orchestrator.replica import Replica
from orchestrator.types import EngineInfo, PolicyVersion


class Roster:
    """The replicas of a policy. ``heals``: who is fenced may serve again, so it is waited for.

    ``on_lost`` is told of each replica that is lost, once.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        names = [e.name for e in engines]
        if not engines or len(set(names)) != len(names):
            raise ValueError(f"a fleet needs replicas with different names, got {names}")
        self._replicas = [Replica(e) for e in engines]
        self._mustered: list[Replica] | None = None
        self._changed = asyncio.Event()
        self.heals = False
        self.patience = 3
        """Replicas that may die under one request before it is held to be the cause."""
        self.on_lost: Callable[[Replica], None] = lambda replica: None
        self.version = PolicyVersion(0)
        """Newest committed version; what every serving replica holds."""

    @property
    def serving(self) -> list[Replica]:
        """Replicas that take requests."""
        return [r for r in self._replicas if not r.fenced]

    @property
    def joining(self) -> list[Replica]:
        """Fenced replicas that the next update may bring back."""
        if not self.heals:
            return []
        return [r for r in self._replicas if r.fenced and r.lost is None and r.info is not None]

    @property
    def fenced(self) -> tuple[str, ...]:
        """Names of the replicas that must not serve."""
        return tuple(r.name for r in self._replicas if r.fenced)

    @property
    def members(self) -> list[Replica]:
        """Who takes part in the update: as mustered, else who serves."""
        return self.serving if self._mustered is None else list(self._mustered)

    @property
    def here(self) -> list[Replica]:
        """Members that were not lost meanwhile."""
        return [r for r in self.members if r.lost is None]

    @property
    def infos(self) -> list[EngineInfo]:
        """What the started replicas said about themselves."""
        return [r.info for r in self._replicas if r.info is not None]

    @property
    def names(self) -> str:
        """All replicas, for a message."""
        return ", ".join(r.name for r in self._replicas)

    def named(self, names: Collection[str]) -> list[Replica]:
        """The replicas of these names."""
        return [r for r in self._replicas if r.name in names]

    def muster(self, replicas: Iterable[Replica] | None = None) -> None:
        """Fix who takes part in updates, until :meth:`dismiss`; by default who serves or may."""
        chosen = [*self.serving, *self.joining] if replicas is None else list(replicas)
        self._mustered = chosen if self.heals or replicas is not None else None

    def dismiss(self) -> None:
        """The update is over: members are who serves."""
        self._mustered = None

    def add(self, engine: Engine, info: EngineInfo) -> Replica:
        """A replacement that is up: fenced until it is admitted."""
        base = PolicyVersion(0)
        replica = Replica(engine, info, fenced=True, applied=base, proved=base)
        self._replicas.append(replica)
        self.change()
        return replica

    def lose(self, replica: Replica, cause: str) -> None:
        """Nobody waits for ``replica`` from now on; its requests go on elsewhere."""
        if replica.lost is None:
            replica.lost, replica.fenced = cause, True
            replica.since = _now() if replica.since is None else replica.since
            replica.gone.set()
            self.on_lost(replica)
            self.change()

    def forget(self, replica: Replica) -> None:
        """``replica`` was closed and replaced, or given up."""
        if replica in self._replicas:
            self._replicas.remove(replica)
        self.change()

    def admit(self, replica: Replica) -> None:
        """``replica`` takes requests: it holds the committed version, and showed its digest.

        EngineError if it does not.
        """
        version = self.version
        if replica.lost is not None or (version, version) != (replica.applied, replica.proved):
            raise EngineError(
                replica.name,
                f"cannot serve version {version}: it holds {replica.applied}, proved "
                f"{replica.proved}{f', lost: {replica.lost}' if replica.lost else ''}",
            )
        replica.fenced = replica.dirty = False
        replica.awaiting = None
        self.change()

    def fence(self, replicas: Iterable[Replica], distrusted: PolicyVersion | None = None) -> None:
        """These take no request from now on; what they wrote under ``distrusted`` is dropped."""
        for replica in replicas:
            replica.fenced, replica.proved = True, None
            replica.since = _now() if replica.since is None else replica.since
            if distrusted is not None:
                replica.distrust[replica.epoch] = distrusted
                replica.epoch += 1
        self.change()

    def judged(self, replicas: Iterable[Replica]) -> None:
        """It is known what the version that they last took is worth."""
        for replica in replicas:
            replica.awaiting = None
        self.change()

    def fence_dirty(self) -> None:
        """No dirty replica takes a request or is resumed from now on."""
        self.fence(r for r in self._replicas if r.dirty)

    def change(self) -> None:
        """Wake who waits for another standing."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Wait until the standing of a replica changes."""
        await self._changed.wait()

    async def until_members(self) -> None:
        """Wait until somebody could take part in an update."""
        while self.heals and not self.serving and not self.joining:
            await self.changed()


def _now() -> float:
    return asyncio.get_running_loop().time()
