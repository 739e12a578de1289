"""One swap, from a running fleet to a running fleet under new weights.

::

    GENERATING ─▶ PAUSING ─▶ SYNCING ─▶ RESUMING ─▶ VALIDATING ─▶ GENERATING
                     │          │           │            │
                     └──────────┴───────────┴────────────┴─▶ RECOVERING ─▶ GENERATING
                                                                  └──────▶ FAILED

GENERATING  (``prefetch``) waits for the bytes that can be at the engines before the pause;
            unblocked by the sender's last byte. Decoding goes on.
PAUSING     waits for every serving replica to be idle; unblocked by their acknowledgements.
SYNCING     waits for start, transfer and finish on every replica; unblocked by the sender's
            last byte and each replica's load.
RESUMING    waits for each frozen request's first new token; unblocked by the engines.
VALIDATING  waits for the checks while generation goes on.

What a failure leaves behind:

Requests of a fenced replica are continued on a serving one, or end with what they have.

GENERATING  nothing was paused; the channel is closed, and opened again by the next swap.
PAUSING     zero bytes were applied: every replica that answers resumes at the old version. A sender
            that began to send in the one call is called off like that too.
SYNCING     replicas that were told to start an update are fenced, never resumed.
RESUMING    the version is committed; a replica that did not resume is fenced.
VALIDATING  on a mismatch every replica is fenced: nothing it writes can be trusted.

A cancel counts as a failure of the phase it arrives in. No phase outlives its deadline.

A single replica that has the bytes, or gets them from device to device, is paused, committed and
resumed in one call, since nothing is to be decided in between; the machine goes through the phases
with the seconds each took. While that call runs the state is PAUSING and
:attr:`SwapCycle.committing` is set. An answer that does not say how far it came counts as SYNCING.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from orchestrator.context import operation
from orchestrator.errors import SyncError, ValidationFailed
from orchestrator.fleet import Fleet
from orchestrator.machine import PHASES, TERMINAL, Guard, SwapMachine, Trigger
from orchestrator.options import SwapOptions
from orchestrator.protocols import Digests, FirstTokens, WeightSender
from orchestrator.tasks import deadline, uninterrupted
from orchestrator.types import (
    CheckResult,
    PauseAck,
    PhaseSeconds,
    StallStats,
    State,
    SyncReport,
    TransferStats,
    Verdict,
    WeightUpdate,
)
from orchestrator.validation import Validator, explain

FreshCheck = Callable[[], Awaitable[CheckResult]]

STAGING = "STAGING"
"""What an error calls the time in which bytes come before the pause; the state is GENERATING."""


def stall_stats(values: Sequence[float]) -> StallStats:
    """Percentiles by the nearest-rank method; None where there is no value."""
    if not values:
        return StallStats(0, None, None, None)
    ordered = sorted(values)

    def rank(q: float) -> float:
        return ordered[max(0, math.ceil(q * len(ordered)) - 1)]

    return StallStats(len(ordered), rank(0.50), rank(0.95), ordered[-1])


@dataclass(slots=True)
class _Progress:
    """What a swap has measured so far."""

    acks: list[PauseAck]
    moved: list[TransferStats]
    quiesce: float = 0.0
    transfer: float = 0.0
    finalize: float = 0.0
    resume: float = 0.0
    prefetch: float = 0.0
    first: tuple[FirstTokens, ...] = ()
    checks: tuple[CheckResult, ...] = ()
    validate: float = 0.0
    resumed: bool = False
    """Where the call that committed also resumes."""


class SwapCycle:
    """Runs swaps, one at a time; the caller serialises."""

    def __init__(
        self,
        machine: SwapMachine,
        fleet: Fleet,
        sender: WeightSender,
        validator: Validator,
        options: SwapOptions,
    ) -> None:
        self._machine = machine
        self._fleet = fleet
        self._sender = sender
        self._validator = validator
        self._options = options
        self.committing = False
        """A call runs that pauses, commits and resumes: it must not be left half-way."""

    async def prefetch(self, update: WeightUpdate) -> float:
        """Bring the staged bytes to the engines while they decode; returns the seconds it took.

        Where they travel inside the pause it is 0. SyncError in STAGING: no engine noticed, and
        the next swap may try again.
        """
        if not update.one_call:
            return 0.0
        budget, began = self._options.timeouts.staging, _now()
        try:
            async with deadline(STAGING, budget, self._fleet.waiting_for):
                await self._fleet.ensure_channel(
                    self._sender,
                    update.backend,
                    self._options.timeouts.channel,
                    staged=update.staged,
                )
                if not update.at_hand:
                    return 0.0
                await self._fleet.prefetch(update, self._sender)
        except Exception as error:
            raise SyncError(STAGING, str(error), self._fleet.fenced) from error
        return _now() - began

    async def run(
        self,
        update: WeightUpdate,
        sent: Digests,
        nbytes: int,
        fresh: FreshCheck | None = None,
        *,
        prefetch_s: float = 0.0,
    ) -> SyncReport:
        """Swap to ``update.version``, whose staged bytes digest to ``sent``.

        An update that is ``at_hand`` must have been prefetched, in ``prefetch_s``.
        Raises SyncError (what failed, where, who is fenced) or ValidationFailed; what the
        replicas are left with is described in the module. ``fresh`` runs in VALIDATING.
        """
        self._machine.fire(Trigger.PAUSE, reason=f"version {update.version}")
        progress = _Progress([], [], prefetch=prefetch_s)
        try:
            if update.one_call and len(self._fleet.serving) == 1:
                await self._in_one_call(update, progress)
            else:
                await self._pause(update, progress)
                await self._sync(update, progress)
            await self._resume(update, progress)
            await self._validate(update, sent, nbytes, fresh, progress)
        except BaseException as error:
            # Not the state: closing may have stopped the machine under this swap.
            phase = next(m.target for m in reversed(self._machine.history) if m.target in PHASES)
            await uninterrupted(self._give_up(phase, error))
            if isinstance(error, Exception) and not isinstance(error, ValidationFailed):
                reason = error.reason if isinstance(error, SyncError) else str(error)
                raise SyncError(phase.value, reason, self._fleet.fenced) from error
            raise
        self._machine.fire(Trigger.VERIFY, Guard.VERDICT)
        return self._report(update, progress)

    @asynccontextmanager
    async def _phase(self) -> AsyncIterator[None]:
        state = self._machine.state
        budget = self._options.timeouts.of(state)
        with operation(state=state.value):
            async with deadline(state, budget, self._fleet.waiting_for):
                yield

    async def _pause(self, update: WeightUpdate, p: _Progress) -> None:
        async with self._phase():
            began = _now()
            p.acks = await self._fleet.pause(update.pause_mode, update.kv_policy)
            p.quiesce = _now() - began
        self._machine.fire(Trigger.SYNC, Guard.ALL_IDLE)

    async def _sync(self, update: WeightUpdate, p: _Progress) -> None:
        async with self._phase():
            began = _now()
            await self._fleet.start_update(update)
            if update.at_hand:
                p.moved = await self._fleet.receive_update(update)
            else:
                p.moved = await self._fleet.transfer(update, self._sender)
            moved = _now()
            await self._fleet.finish_update(update)
            p.transfer, p.finalize = moved - began, _now() - moved
            self._fleet.commit(update.version)
        self._machine.fire(Trigger.COMMIT, Guard.ALL_APPLIED)

    async def _in_one_call(self, update: WeightUpdate, p: _Progress) -> None:
        timeouts = self._options.timeouts
        budget = timeouts.pausing + timeouts.syncing + timeouts.resuming
        p.resumed = True
        self.committing = True
        try:
            with operation(state=State.PAUSING.value):
                async with deadline(State.SYNCING, budget, self._fleet.waiting_for):
                    done = await self._fleet.swap(update, timeouts, self._sender)
        except BaseException as error:
            self._came_to(update, error.phase if isinstance(error, SyncError) else State.SYNCING)
            raise
        finally:
            self.committing = False
        p.acks, p.moved = [done.ack], [done.stats]
        p.quiesce, p.transfer, p.finalize = done.quiesce, done.transfer, done.finalize
        p.resume = done.resume
        # No await up to here: the fleet keeps back what the replica wrote until this is told.
        self._fleet.commit(update.version)
        self._machine.fire(Trigger.SYNC, Guard.ALL_IDLE, seconds=p.quiesce)
        applied = p.transfer + p.finalize
        self._machine.fire(Trigger.COMMIT, Guard.ALL_APPLIED, seconds=applied)

    def _came_to(self, update: WeightUpdate, phase: str) -> None:
        """Bring the machine to where the one call failed, if it still runs."""
        if phase == State.RESUMING:
            self._fleet.commit(update.version)
        if self._machine.state is not State.PAUSING:
            return
        if phase != State.PAUSING:
            self._machine.fire(Trigger.SYNC, Guard.ALL_IDLE)
        if phase == State.RESUMING:
            self._machine.fire(Trigger.COMMIT, Guard.ALL_APPLIED)

    async def _resume(self, update: WeightUpdate, p: _Progress) -> None:
        async with self._phase():
            if not p.resumed:
                began = _now()
                await self._fleet.resume()
                p.resume = _now() - began
            p.first = tuple(await self._fleet.first_tokens(update))
            if p.resumed:
                on_device = [f.transfer for f in p.first if f.transfer is not None]
                p.transfer = max(on_device, default=p.transfer)
        self._machine.fire(Trigger.VALIDATE, Guard.ALL_RESUMED)

    async def _validate(
        self,
        update: WeightUpdate,
        sent: Digests,
        nbytes: int,
        fresh: FreshCheck | None,
        p: _Progress,
    ) -> None:
        async with self._phase():
            began = _now()
            self._require(await self._validator.digest(update, sent, nbytes), update, p)
            self._require(await self._validator.canary(), update, p)
            skipped = CheckResult("fresh", Verdict.SKIPPED)
            self._require(await fresh() if fresh is not None else skipped, update, p)
            p.validate = _now() - began

    def _require(self, result: CheckResult, update: WeightUpdate, p: _Progress) -> None:
        p.checks = (*p.checks, result)
        if result.verdict is Verdict.MISMATCH:
            error = ValidationFailed(explain(result))
            error.report = self._report(update, p)
            raise error

    async def _give_up(self, phase: State, error: BaseException) -> None:
        """Leave every replica as the module says. Bounded by the budget of RESUMING.

        A cancel may mean that everything stops, so then it fits into the time for stopping.
        """
        seconds = self._options.timeouts.resuming
        if isinstance(error, asyncio.CancelledError):
            seconds = min(seconds, self._options.timeouts.stopping / 2)
        if self._machine.state not in TERMINAL:
            self._machine.fire(Trigger.FAULT, reason=f"{phase}: {error or type(error).__name__}")
        with operation(state=State.RECOVERING.value):
            if phase is State.VALIDATING and isinstance(error, ValidationFailed):
                self._fleet.fence_all()
            self._fleet.fence_dirty()
            await self._fleet.resume_clean(seconds)
            await self._fleet.evict_fenced(seconds)
        if not self._fleet.fenced and self._machine.state is State.RECOVERING:
            serves = f"every replica serves version {self._fleet.version}"
            self._machine.fire(Trigger.RECOVER, Guard.ALL_SERVING, reason=serves)

    def _report(self, update: WeightUpdate, p: _Progress) -> SyncReport:
        firsts = [f.seconds for f in p.first if f.seconds is not None]
        stalls = tuple(s for f in p.first for s in f.stalls)
        return SyncReport(
            update=update,
            nbytes=sum(m.nbytes for m in p.moved),
            requests_in_flight=sum(a.requests_in_flight for a in p.acks),
            seconds=PhaseSeconds(
                p.quiesce,
                p.transfer,
                p.finalize,
                p.resume,
                min(firsts, default=None),
                p.prefetch,
            ),
            stall_s=stall_stats(stalls),
            checks=p.checks,
            validate_s=p.validate,
            stalls=stalls,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
