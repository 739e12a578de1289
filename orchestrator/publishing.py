"""Publishing versions, one at a time: numbers, turns, and what a cancelled caller leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import operator

from orchestrator.context import operation
from orchestrator.cycle import SwapCycle
from orchestrator.errors import Closed, ConfigError, IllegalTransition, SyncBusy
from orchestrator.fleet import Fleet
from orchestrator.life import Life
from orchestrator.machine import SwapMachine, Trigger
from orchestrator.options import SwapOptions
from orchestrator.swaps import Swaps
from orchestrator.types import PolicyVersion, State, SyncReport, WeightUpdate


class Publisher:
    """See the module. ``lock`` is held by whoever swaps or resyncs."""

    def __init__(
        self,
        run_id: str,
        fleet: Fleet,
        machine: SwapMachine,
        cycle: SwapCycle,
        swaps: Swaps,
        options: SwapOptions,
        lock: asyncio.Lock,
        life: Life,
    ) -> None:
        self._run_id, self._fleet, self._machine = run_id, fleet, machine
        self._cycle, self._swaps, self._options = cycle, swaps, options
        self._life = life
        self.lock = lock
        self.swapping: asyncio.Task[SyncReport] | None = None
        """The swap that runs, or ran last."""
        self._asked = 0, 0
        """The last version that was to be published, and how often: ids must differ."""

    @property
    def over(self) -> bool:
        """Nothing is published any more."""
        return self._life.over

    async def publish(
        self, step: int | None, *, fresh: bool, wait: bool = True, version: int | None = None
    ) -> SyncReport:
        """See :meth:`Orchestrator.sync`. ``step``: of the train loop, whose swaps are scheduled."""
        self._refuse_when_over()
        if self.lock.locked() and not wait:
            raise SyncBusy(f"a swap to version {self._fleet.version + 1} is running: wait for it")
        async with self.lock:
            self._life.raise_fatal()
            self._refuse_when_over()  # it may have ended while this waited
            update = self._next(step, version)
            with operation(sync_id=update.sync_id, version=update.version, step=update.step):
                swap = self.swapping = asyncio.create_task(
                    self._swaps.run(update, scheduled=step is not None, fresh=fresh),
                    name=update.sync_id,
                )
                return await self._followed(swap, update.version)

    async def finish(self, committed: SyncReport, *, fresh: bool) -> SyncReport:
        """See :meth:`Swaps.finish`."""
        async with self.lock:
            return await self._swaps.finish(committed, fresh=fresh)

    def _next(self, step: int | None, version: int | None) -> WeightUpdate:
        state = self._machine.state
        healing = state is State.RECOVERING and self._fleet.heals
        if state is not State.GENERATING and not healing:
            fenced = ", ".join(self._fleet.fenced)
            why = f"{fenced} must not serve" if fenced else "enter the orchestrator first"
            raise IllegalTransition(state, Trigger.PAUSE, why)
        current = self._fleet.version
        try:
            target = PolicyVersion(current + 1 if version is None else operator.index(version))
        except TypeError:
            raise ConfigError(
                f"version {version!r}: it must be a whole number above {current}"
            ) from None
        if target <= current:
            raise ConfigError(
                f"version {target} is not newer than {current}, which is published: versions "
                "only go up"
            )
        nth = self._asked[1] + 1 if self._asked[0] == target else 1
        self._asked = target, nth
        again = f"~{nth}" if nth > 1 else ""
        return WeightUpdate(
            sync_id=f"{self._run_id}-s{target}{again}",
            from_version=current,
            version=target,
            step=step or target,
            backend=self._options.backend,
            pause_mode=self._options.pause_mode,
            kv_policy=self._options.kv_policy,
            staged=self._options.staged,
        )

    async def _followed(self, swap: asyncio.Task[SyncReport], target: int) -> SyncReport:
        """Its report; a cancel calls the swap off, or waits for its end where it must go on."""
        try:
            return await asyncio.shield(swap)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if swap.cancelled() and caller is not None and not caller.cancelling():
                self._life.raise_fatal()
                raise Closed(f"closed during the swap to version {target}") from None
            state = self._machine.state
            calling_off = (State.GENERATING, State.PAUSING, State.VALIDATING)
            waits = state is State.RECOVERING and not self._swaps.applying
            if waits or (state in calling_off and not self._cycle.committing):
                swap.cancel()
            # An impatient second cancel must not let the next swap in. When all is over, the
            # release ends the swap.
            while not (swap.done() or self.over):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([swap])
            if swap.done() and not swap.cancelled():
                swap.exception()  # retrieved: SwapFailed has told it
            raise

    def _refuse_when_over(self) -> None:
        if self.over:
            raise Closed("no swap starts any more: the orchestrator is closed or about to be")
