"""Where actors run: placement groups, reserved before an actor starts and released after it.

::

    a group of its own (trainer, replica, fresh engine)    one group for several (ipc)
    ┌──────────────────────────────────────┐               ┌──────────────────────────────┐
    │ bundle 0     the actor               │               │ bundle 0   one whole GPU:    │
    │ bundle 1..n  vLLM's Ray workers, a   │               │ trainer, engines, fresh      │
    │              GPU each                │               │ engine, each with a share    │
    └──────────────────────────────────────┘               └──────────────────────────────┘

A group is made for its first tenant and removed after its last, whatever happens in between.
Should this process be killed, Ray removes its groups and actors with its job: nothing here is
detached or has a name, so a later run finds nothing to reuse.

Ray reserves GPUs only. What an actor computes with on a CPU is not reserved: on a machine of two
cores trainer, engine and fresh engine would wait for each other for ever. The small CPU share of
a bundle ties it to a node that takes work (a head that was started with no CPUs gets none).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.errors import ConfigError, MidflightError
from orchestrator.tasks import settle, uninterrupted

Bundle = Mapping[str, float]

CPU_SHARE = 0.01
"""CPUs of a bundle, see the module."""
PLACE_S = 60.0
"""What a busy cluster may take to have room for a group."""
AVOID_S = 3.0
"""What it may take on a node that no other replica is on, before any node will do."""
REMOVE_S = 2.0
"""What Ray may take to remove a group; what is left then goes with the job."""
_NODE_LABEL = "ray.io/node-id"


class NoRoom(Exception):
    """The cluster is too busy; the message says what was asked for and what there is."""


class Spread:
    """Keeps the actors of one run on different nodes, as far as there are nodes.

    A wish: where the others leave no room, any node will do.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """One group is placed at a time: each must see where the others are."""
        self._held: dict[Group, frozenset[str]] = {}

    def crowded(self, alive: Sequence[str]) -> list[str]:
        """Those of the nodes that hold more of our groups than the emptiest one."""
        count = {node: sum(node in held for held in self._held.values()) for node in alive}
        fewest = min(count.values(), default=0)
        return sorted(node for node, groups in count.items() if groups > fewest)

    def note(self, group: Group, nodes: frozenset[str]) -> None:
        """``group`` is on ``nodes`` now; on none: it is gone."""
        self._held[group] = nodes
        if not nodes:
            del self._held[group]


class Group:
    """One placement group and who is in it. Lives in one event loop."""

    def __init__(
        self,
        bundles: Sequence[Bundle],
        *,
        spread: Spread | None = None,
        deadline_s: float = PLACE_S,
    ) -> None:
        """Actors run in bundle 0; bundles are packed on as few nodes as there is room on.

        ``spread``: the groups whose nodes to avoid. Nothing is reserved yet.
        """
        self.bundles = tuple(dict(bundle) for bundle in bundles)
        self._spread, self._deadline_s = spread, deadline_s
        self._tenants = 0
        self._making: asyncio.Task[PlacementGroup] | None = None

    @property
    def inhabited(self) -> bool:
        """Whether an actor is in it, or about to be."""
        return self._tenants > 0

    async def enter(self) -> PlacementGroupSchedulingStrategy:
        """Reserve it, unless that was done; how Ray is to schedule the tenant.

        ConfigError when the cluster can never hold it, NoRoom when it cannot in time. Whoever
        entered must :meth:`leave`; an ``enter`` that raises, also when cancelled, has left.
        """
        self._tenants += 1
        if self._making is None:
            self._making = asyncio.create_task(self._make())
        try:
            group = await asyncio.shield(self._making)
        except BaseException:
            await self.leave()
            raise
        # What vLLM's Ray executor starts in the actor belongs to the group too.
        several = len(self.bundles) > 1
        return PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=0, placement_group_capture_child_tasks=several
        )

    async def leave(self) -> None:
        """One tenant is gone; after the last the group is removed, with all that runs in it."""
        self._tenants -= 1
        if self._tenants == 0 and self._making is not None:
            making, self._making = self._making, None
            await uninterrupted(self._unmake(making))

    async def _make(self) -> PlacementGroup:
        asking = asyncio.get_running_loop().time()
        until = asking + self._deadline_s
        try:
            async with asyncio.timeout_at(until):
                nodes = await asyncio.to_thread(_alive_nodes)
                self._refuse_impossible(nodes)
                if self._spread is None:
                    return await self._reserve(until, ())
                async with self._spread.turn:
                    return await self._reserve_apart(until, nodes)
        except TimeoutError:
            raise NoRoom(await self._no_room()) from None

    def _refuse_impossible(self, nodes: Mapping[str, Bundle]) -> None:
        total = sum_of(nodes.values())
        fits = all(any(_holds(node, bundle) for node in nodes.values()) for bundle in self.bundles)
        if not fits or not _holds(total, sum_of(self.bundles)):
            raise ConfigError(
                f"the Ray cluster can never hold {describe(self.bundles)}: it has "
                f"{amounts(total)} on {len(nodes)} node(s). Ask for less, or add nodes before "
                "the run starts"
            )

    async def _no_room(self) -> str:
        free: Bundle = {}
        with contextlib.suppress(Exception):
            async with asyncio.timeout(REMOVE_S):
                free = await asyncio.to_thread(ray.available_resources)
        return (
            f"no room for {describe(self.bundles)} in the Ray cluster within "
            f"{self._deadline_s:g} s: {amounts(free)} free. See `ray status` for who has the rest"
        )

    async def _reserve_apart(self, until: float, nodes: Mapping[str, Bundle]) -> PlacementGroup:
        assert self._spread is not None
        crowded = self._spread.crowded(
            [name for name, node in nodes.items() if all(_holds(node, b) for b in self.bundles)]
        )
        group: PlacementGroup | None = None
        if crowded:
            soon = min(until, asyncio.get_running_loop().time() + AVOID_S)
            with contextlib.suppress(TimeoutError):
                group = await self._reserve(soon, crowded)
        if group is None:
            group = await self._reserve(until, ())
        try:
            self._spread.note(self, await asyncio.to_thread(nodes_of, group))
        except BaseException:
            await uninterrupted(_remove(group))
            raise
        return group

    async def _reserve(self, until: float, avoid: Sequence[str]) -> PlacementGroup:
        """TimeoutError when it is not there by ``until`` (the loop's time)."""
        asked: dict[str, Any] = {"bundles": list(self.bundles), "strategy": "PACK"}
        if avoid:
            label = {_NODE_LABEL: f"!in({','.join(avoid)})"}
            asked["bundle_label_selector"] = [label] * len(self.bundles)
        creating = asyncio.create_task(asyncio.to_thread(placement_group, **asked))
        try:
            async with asyncio.timeout_at(until):
                group: PlacementGroup = await asyncio.shield(creating)
                await group.ready()
        except BaseException:
            await uninterrupted(_undo(creating))
            raise
        return group

    async def _unmake(self, making: asyncio.Task[PlacementGroup]) -> None:
        await settle([making])
        if self._spread is not None:
            self._spread.note(self, frozenset())
        if not making.cancelled() and making.exception() is None:
            await _remove(making.result())


class Seat:
    """What one actor gets of a group."""

    def __init__(self, group: Group, gpus: float = 0.0, worker_gpus: float = 1.0) -> None:
        """``gpus`` of the actor; ``worker_gpus`` of each worker of vLLM's Ray executor in it."""
        self.group, self.gpus, self.worker_gpus = group, gpus, worker_gpus
        self._taken = self._left = False

    async def take(self, failed: Callable[[str], MidflightError]) -> dict[str, Any]:
        """Ray's actor options for it; once. ConfigError, or ``failed`` when there is no room."""
        assert not self._taken
        try:
            strategy = await self.group.enter()
        except NoRoom as none:
            raise failed(str(none)) from None
        self._taken = True
        return {"num_gpus": self.gpus, "scheduling_strategy": strategy}

    async def leave(self) -> None:
        """Give it back. Idempotent; nothing if it was not taken."""
        if self._taken and not self._left:
            self._left = True
            await self.group.leave()


class Seating:
    """Makes the seats of one run.

    ``shares``: GPUs of each actor, or of each of its workers if vLLM's Ray executor starts them
    (:func:`actors.assembly.gpu_shares`).

    ``together``: all in one bundle of one GPU. Groups of their own with a share each would not
    do: Ray may take the shares of two groups from two GPUs, and mapped memory must be on one.

    ``ray_workers``: for so many workers a replica there is a bundle each, of one GPU. The fresh
    engine's workers share them with those of a running replica: with shares in groups of their
    own two of them could get one GPU, and with whole GPUs the cluster would need as many again.

    ``spread``: on different nodes, see :class:`Spread`.
    """

    def __init__(
        self,
        shares: Mapping[str, float],
        *,
        together: bool = False,
        ray_workers: int = 0,
        spread: bool = False,
        deadline_s: float = PLACE_S,
    ) -> None:
        self._shares, self._workers, self._deadline_s = shares, ray_workers, deadline_s
        self._spread = Spread() if spread else None
        self._together = self._group({"GPU": 1}) if together else None
        self._engines: list[Group] = []

    def trainer(self) -> Seat:
        """For the trainer, or another one in its place."""
        share = self._shares["trainer"]
        return Seat(self._together or self._group({"GPU": share}), share)

    def engine(self) -> Seat:
        """For a replica; another one in place of a dead one needs another seat."""
        if not self._workers or self._together:
            return self._one("engine")
        group = self._group({}, *[{"GPU": 1}] * self._workers)
        self._engines.append(group)
        return Seat(group, worker_gpus=self._shares["engine"])

    def fresh(self) -> Seat:
        """For the fresh check's engine."""
        if not self._workers or self._together:
            return self._one("fresh")
        running = next((group for group in self._engines if group.inhabited), None)
        group = running or self._group({}, *[{"GPU": 1}] * self._workers)
        return Seat(group, worker_gpus=self._shares["fresh"])

    def _one(self, kind: str) -> Seat:
        share = self._shares[kind]
        group = self._together or self._group({"GPU": share})
        return Seat(group, 0, share) if self._workers else Seat(group, share)

    def _group(self, own: Bundle, *workers: Bundle) -> Group:
        mine = {"CPU": CPU_SHARE, **{name: amount for name, amount in own.items() if amount}}
        return Group([mine, *workers], spread=self._spread, deadline_s=self._deadline_s)


def describe(bundles: Sequence[Bundle]) -> str:
    """Bundles in words, equal ones counted.

    >>> describe([{"CPU": 0.01}, {"GPU": 1}, {"GPU": 1}])
    'a bundle of 0.01 CPU and 2 bundles of 1 GPU'
    """
    counted: dict[str, int] = {}
    for bundle in bundles:
        text = amounts(bundle)
        counted[text] = counted.get(text, 0) + 1
    return " and ".join(
        f"a bundle of {text}" if count == 1 else f"{count} bundles of {text}"
        for text, count in counted.items()
    )


def amounts(resources: Bundle) -> str:
    """CPUs and GPUs in words.

    >>> amounts({"CPU": 2.0, "memory": 1e9})
    '2 CPU, 0 GPU'
    >>> amounts({"GPU": 1})
    '1 GPU'
    """
    named = {name: resources.get(name, 0) for name in ("CPU", "GPU")}
    if set(resources) <= set(named) and resources:
        named = {name: amount for name, amount in named.items() if amount}
    return ", ".join(f"{amount:g} {name}" for name, amount in named.items())


def sum_of(resources: Any) -> dict[str, float]:
    """What there is in all."""
    total: dict[str, float] = {}
    for each in resources:
        for name, amount in each.items():
            total[name] = total.get(name, 0) + amount
    return total


def nodes_of(group: PlacementGroup) -> frozenset[str]:
    """Ray's ids of the nodes that a group is on. Blocks."""
    return frozenset(placement_group_table(group)["bundles_to_node_id"].values())


def _alive_nodes() -> dict[str, Bundle]:
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _holds(there: Bundle, asked: Bundle) -> bool:
    return all(there.get(name, 0) >= amount - 1e-6 for name, amount in asked.items())


async def _undo(creating: asyncio.Task[PlacementGroup]) -> None:
    await asyncio.wait([creating], timeout=REMOVE_S)
    if creating.done() and creating.exception() is None:
        await _remove(creating.result())


async def _remove(group: PlacementGroup) -> None:
    """What fails here is gone, or goes with the job: Ray itself does not answer."""
    if ray.is_initialized():
        with contextlib.suppress(Exception):
            async with asyncio.timeout(REMOVE_S):
                await asyncio.to_thread(remove_placement_group, group)
