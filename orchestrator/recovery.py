"""Brings replicas back: replaces what was lost, resyncs what was fenced.

::

    lost ───▶ closed ─▶ a new engine starts ─▶ fenced ─▶ resynced whole, digest equal ─▶ serving
                          (tries, backoff)      ▲  │       (tries, backoff)
    update failed, digest differs ──────────────┘  └─▶ or it takes part in the next swap

An engine starts in the background while the others serve. A resync happens between swaps, over a
channel of its own, from the bytes that the sender has staged, if these are the committed version;
if not (a swap staged newer ones and failed), the next swap brings its replicas along.

When its tries are out a replica is given up; when fewer than ``min_engines`` are left that serve or
may again, the run is, with the first reason.

Tasks and what they wait for:

    heal     for a fenced replica and the sync lock; unblocked by changes of the fleet
    replace  one a lost replica: for its end, for the new engine's start, within STARTING
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential

from orchestrator.cycle import SwapCycle
from orchestrator.errors import ConfigError, EngineDied, MidflightError, TrainerError
from orchestrator.events import ReplicaAdmitted, ReplicaDied
from orchestrator.fleet import CLOSE_S, Fleet
from orchestrator.life import Life
from orchestrator.machine import Guard, SwapMachine, Trigger
from orchestrator.observers import Observers
from orchestrator.options import RecoveryOptions
from orchestrator.protocols import Digests, Engine, EngineMaker
from orchestrator.replica import Replica
from orchestrator.tasks import close_within, deadline, settle
from orchestrator.types import EngineInfo, PolicyVersion, State


@dataclass(slots=True)
class _Place:
    """A place in the fleet: engines follow each other in it."""

    name: str
    losses: int = 0
    """Engines lost in a row, none of which served in between."""
    made: int = 0
    reason: BaseException | None = None
    """The first of what went wrong since it served."""
    given_up: bool = False


class Recovery:
    """See the module. ``lock`` is held by whoever swaps or resyncs."""

    def __init__(
        self,
        options: RecoveryOptions,
        fleet: Fleet,
        cycle: SwapCycle,
        machine: SwapMachine,
        lock: asyncio.Lock,
        life: Life,
        observers: Observers,
        *,
        make: EngineMaker | None,
        starting_s: float,
        up: Callable[[Engine, EngineInfo], None],
    ) -> None:
        self._options, self._fleet, self._cycle, self._machine = options, fleet, cycle, machine
        self._lock, self._make, self._starting_s = lock, make, starting_s
        self._up, self._life, self._observers = up, life, observers
        self._places: dict[str, _Place] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: set[Engine] = set()
        self._resyncs = 0
        self._closing = False
        self._staged: tuple[PolicyVersion, Digests] | None = None
        self.committed: tuple[PolicyVersion, Digests] | None = None
        """The committed version and the digests of what was sent for it; None: as started."""
        fleet.patience = options.attempts

    @property
    def enabled(self) -> bool:
        """Whether anything is tried at all."""
        return self._options.attempts > 0

    @property
    def staged(self) -> tuple[PolicyVersion, Digests] | None:
        """What the sender would send, and its digests; None while that changes."""
        return self._staged

    @staged.setter
    def staged(self, now: tuple[PolicyVersion, Digests] | None) -> None:
        self._staged = now
        self._fleet.change()

    @property
    def tries(self) -> int:
        """How often something that failed is tried again."""
        return self._options.attempts

    @property
    def nowhere(self) -> bool:
        """No replica serves the committed version any more, and no trainer has it."""
        return not self._fleet.serving and self.staged != self.committed

    def restaged(self, version: PolicyVersion, sent: Digests) -> None:
        """A new trainer staged what should be ``version``: usable if it is what was committed.

        Training again need not give the same bits everywhere; then the next swap brings who waits.
        """
        self.staged = (version, sent) if self.committed == (version, sent) else None

    def begin(self) -> None:
        """The fleet is up: from now on it heals."""
        self._fleet.heals = self.enabled
        self._fleet.on_lost = self._lost

    def retrying(self, retryable: Callable[[BaseException], bool], tries: int) -> AsyncRetrying:
        """``tries`` times, with the backoff that was asked for; the last error is raised."""
        o = self._options
        return AsyncRetrying(
            retry=retry_if_exception(retryable),
            stop=stop_after_attempt(tries),
            wait=wait_exponential(multiplier=o.backoff_s, max=o.backoff_max_s),
            sleep=asyncio.sleep,
            reraise=True,
        )

    # What was lost

    def _lost(self, replica: Replica) -> None:
        place = self._place(replica)
        cause = replica.lost or "it is gone"
        place.losses += 1
        place.reason = place.reason or EngineDied(replica.name, cause)
        self._observers.tell(ReplicaDied, replica.name, cause)
        if self._closing:
            return
        if place.losses > self._options.attempts or self._make is None:
            place.given_up = True
        self._own(self._follow(place, replica), f"replace-{replica.name}")
        if not self._fleet.serving and self._machine.state is State.GENERATING:
            self._machine.fire(Trigger.FAULT, reason=f"no replica serves: {cause}")
        self._is_there_hope()

    def _place(self, replica: Replica) -> _Place:
        return self._places.setdefault(replica.name, _Place(replica.name))

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._life.fail(error)

    async def _follow(self, place: _Place, replica: Replica) -> None:
        """Close what was lost, so that its memory and devices are free, and start another."""
        await close_within(replica.engine, 2 * CLOSE_S)
        if not place.given_up:
            try:
                tries = self._options.attempts
                async for attempt in self.retrying(_ours, tries):
                    with attempt:
                        await self._start_another(place, replica)
            except Exception as error:  # whatever the maker raises: the others serve on
                place.given_up = True
                place.reason = place.reason or error
        self._fleet.forget(replica)
        if replica.name != place.name:
            self._places.pop(replica.name, None)
        self._is_there_hope()

    async def _start_another(self, place: _Place, replica: Replica) -> None:
        assert self._make is not None
        place.made += 1
        engine = self._make(f"{place.name}.r{place.made}")
        self._places[engine.name] = place
        self._starting.add(engine)
        started = False
        try:
            async with deadline(State.STARTING, self._starting_s, lambda: engine.name):
                info = await engine.start()
            started = True
        finally:
            if not started and not self._closing:
                await close_within(engine, 2 * CLOSE_S)
            if started or not self._closing:
                self._starting.discard(engine)
        joined = self._fleet.add(engine, info)
        joined.since = replica.since
        self._up(engine, info)

    def _give_up(self, replica: Replica, error: BaseException) -> None:
        place = self._place(replica)
        place.given_up = True
        place.reason = place.reason or error
        self._fleet.lose(replica, f"it could not be resynced: {error}")

    def abandon(self, error: BaseException) -> None:
        """A swap is out of tries: when it left nobody that serves, nobody will."""
        if self._fleet.heals and not self._fleet.serving:
            self._fleet.heals = False
            self._fleet.change()
            self._life.fail(error)

    def steady(self) -> None:
        """A swap is through: what went wrong before with whom it found serving counts no more."""
        for replica in self._fleet.serving:
            place = self._place(replica)
            place.losses, place.reason = 0, None

    @property
    def reason(self) -> BaseException | None:
        """The first of what keeps replicas from serving."""
        return next((p.reason for p in self._places.values() if p.reason is not None), None)

    def _is_there_hope(self) -> None:
        """Tell when it is out of the question that enough replicas serve again."""
        fleet = self._fleet
        coming = {p.name for p in self._places.values() if p.losses and not p.given_up}
        here = {self._place(r).name for r in (*fleet.serving, *fleet.joining)}
        if len(here | coming) >= self._options.min_engines:
            return
        fleet.heals = False
        fleet.change()
        reasons = [p.reason for p in self._places.values() if p.given_up and p.reason]
        self._life.fail(reasons[0] if reasons else MidflightError("no replica is left"))

    # What was fenced

    def note(self, error: BaseException) -> None:
        """Why the replicas that are fenced now are, if nothing was known yet."""
        for replica in self._fleet.joining:
            place = self._place(replica)
            place.reason = place.reason or error

    def due(self) -> bool:
        """Whether a fenced replica can be brought back now."""
        if self._life.over:
            return False  # a swap that is being ended has let go of the lock already
        joining, version = self._fleet.joining, self._fleet.version
        known = self.staged is not None and self.staged == self.committed
        known = known and self.staged is not None and self.staged[0] == version
        return bool(joining) and (known or any(self._whole(r) for r in joining))

    def _whole(self, replica: Replica) -> bool:
        """It holds the committed version: a new engine, before the first swap."""
        version = self._fleet.version
        return not replica.dirty and (replica.applied, replica.proved) == (version, version)

    async def run(self) -> None:
        """Resync whenever something is due, until cancelled."""
        while True:
            if not self.due():
                await self._fleet.changed()
                continue
            async with self._lock:
                if self.due():
                    await self.heal()
            if self.due():  # nobody's fault but the trainer's, who may be able to send later
                await asyncio.sleep(self._options.backoff_max_s)

    async def heal(self) -> None:
        """Bring back every fenced replica that can be, or give it up; the caller has the lock."""
        if not self.due():
            return
        names = ", ".join(r.name for r in self._fleet.joining)
        if self._machine.state is State.GENERATING:
            self._machine.fire(Trigger.FAULT, reason=f"{names} to be resynced")
        try:
            with contextlib.suppress(MidflightError):
                await self._resync(self._fleet.joining)
            # One that cannot be healed must not keep the others from it.
            for replica in self._fleet.joining:
                await self._heal_one(replica)
        finally:
            self.settle_state()

    async def _heal_one(self, replica: Replica) -> None:
        try:
            async for attempt in self.retrying(_of_a_replica, self._options.attempts):
                with attempt:
                    if replica in self._fleet.joining and self.due():
                        await self._resync([replica])
        except MidflightError as error:
            if _of_a_replica(error) and replica in self._fleet.joining:
                self._give_up(replica, error)

    def settle_state(self) -> None:
        """Back to GENERATING when somebody serves."""
        fleet = self._fleet
        healthy = bool(fleet.serving) and (fleet.heals or not fleet.fenced)
        if self._machine.state is State.RECOVERING and healthy:
            self._machine.fire(
                Trigger.RECOVER,
                Guard.ALL_SERVING,
                reason=f"{len(fleet.serving)} replicas serve version {fleet.version}",
            )

    async def _resync(self, replicas: Sequence[Replica]) -> None:
        fleet = self._fleet
        for replica in replicas:
            if self._whole(replica):
                fleet.admit(replica)
                self.served(replica)
        left = [r for r in replicas if r.fenced and r.lost is None]
        if not left or self.staged is None or self.staged[0] != fleet.version:
            return
        self._resyncs += 1
        try:
            await self._cycle.resync(self._resyncs, self.staged[1], left)
        except BaseException as error:
            self.note(error)
            raise

    def served(self, replica: Replica) -> None:
        """``replica`` was admitted."""
        now = asyncio.get_running_loop().time()
        seconds = now - (now if replica.since is None else replica.since)
        self._observers.tell(ReplicaAdmitted, replica.name, self._fleet.version, seconds)
        replica.since = None

    # The end

    async def aclose(self) -> None:
        """Stop everything; engines that were starting are closed."""
        self._closing = True
        self._fleet.heals = False
        self._fleet.change()
        closing = [asyncio.ensure_future(close_within(e, 2 * CLOSE_S)) for e in self._starting]
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await settle([*closing], cancel=False)
        await settle(tasks)


def _ours(error: BaseException) -> bool:
    return isinstance(error, MidflightError) and not isinstance(error, ConfigError)


def _of_a_replica(error: BaseException) -> bool:
    """Not of the trainer, who has nothing to send then."""
    return _ours(error) and not isinstance(error, TrainerError)
