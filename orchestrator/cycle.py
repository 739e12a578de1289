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
PAUSING     zero bytes were applied: every replica that answers resumes at the old version; one that
            was late has ``LATE_S`` for it. A sender that began to send in the one call is called
            off like that too.
SYNCING     replicas that were told to start an update are fenced, never resumed.
RESUMING    the version is committed; a replica that did not resume is fenced, with recovery every
            one that is not proved to hold it.
VALIDATING  on a mismatch every replica is fenced: nothing it writes can be trusted. With recovery
            (see ``recovery``) those whose digest matched serve on, unless another check failed.

A cancel counts as a failure of the phase it arrives in. No phase outlives its deadline.

``rolling``: PAUSING, SYNCING and RESUMING pass once for each group of replicas; the version is
published with the first. Requests go on at the others, under the version before.

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

from orchestrator.context import current_op, operation
from orchestrator.errors import EngineError, PhaseTimeout, SyncError, ValidationFailed, words
from orchestrator.fleet import Fleet
from orchestrator.machine import PHASES, TERMINAL, Guard, SwapMachine, Trigger
from orchestrator.options import SwapOptions
from orchestrator.protocols import Digests, FirstTokens, WeightSender
from orchestrator.replica import Replica
from orchestrator.tasks import deadline, uninterrupted
from orchestrator.types import (
    CheckResult,
    KVPolicy,
    PauseAck,
    PauseMode,
    PhaseSeconds,
    StallStats,
    State,
    Strategy,
    SyncReport,
    TransferStats,
    Verdict,
    WeightUpdate,
)
from orchestrator.validation import Validator, explain, failure

FreshCheck = Callable[[], Awaitable[CheckResult]]

EVICT_S = 10.0
"""Seconds in which a fenced replica that lives ends its requests."""

LATE_S = 10.0
"""Seconds to resume for a replica that has just outlived a deadline; who is only slow makes it."""

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
    in_call: float = 0.0
    """Seconds of the transfer as that call saw them."""


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
        self.sender = sender
        self._validator = validator
        self._options = options
        self.on_admitted: Callable[[Replica], None] = lambda replica: None
        """Told of a replica that serves again."""
        self.committing = False
        """A call runs that pauses, commits and resumes: it must not be left half-way."""

    async def prefetch(self, update: WeightUpdate) -> float:
        """Bring the staged bytes to the engines while they decode; returns the seconds it took.

        Where they travel inside the pause it is 0. SyncError in STAGING: no engine noticed, and
        the next swap may try again.
        """
        if not update.one_call and not self._fleet.heals:
            return 0.0
        self._fleet.muster()
        budget, began = self._options.timeouts.staging, _now()
        try:
            async with deadline(STAGING, budget, self._fleet.waiting_for):
                await self._fleet.ensure_channel(
                    self.sender,
                    update.backend,
                    self._options.timeouts.channel,
                    staged=update.staged,
                )
                if not update.at_hand:
                    return 0.0
                await self._fleet.prefetch(update, self.sender)
        except Exception as error:
            if isinstance(error, PhaseTimeout):
                self._fleet.lose_waiting(error.seconds)
            raise SyncError(STAGING, words(error), self._fleet.fenced) from error
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
        again = self._fleet.heals and self._machine.state is State.RECOVERING
        begin = Trigger.RETRY if again else Trigger.PAUSE
        self._machine.fire(begin, reason=f"version {update.version}")
        progress = _Progress([], [], prefetch=prefetch_s)
        try:
            members = self._fleet.members
            if self._rolling:
                await self._roll(members, update, sent, nbytes, progress)
            else:
                await self._swap_group(update, progress)
            self._machine.fire(Trigger.VALIDATE, Guard.ALL_RESUMED)
            self._fleet.muster(members)
            self.committing = False
            await self._validate(update, sent, nbytes, fresh, progress)
        except BaseException as error:
            # Not the state: closing may have stopped the machine under this swap.
            phase = next(m.target for m in reversed(self._machine.history) if m.target in PHASES)
            await uninterrupted(self._give_up(update, phase, error))
            if isinstance(error, Exception) and not isinstance(error, ValidationFailed):
                reason = error.reason if isinstance(error, SyncError) else words(error)
                failed = SyncError(phase.value, reason, self._fleet.fenced)
                if self._fleet.version == update.version:
                    failed.report = self._report(update, progress)
                raise failed from error
            raise
        finally:
            self.committing = False
            self._fleet.judged(self._fleet.members)
            self._fleet.dismiss()
        self._machine.fire(Trigger.VERIFY, Guard.VERDICT)
        return self._report(update, progress)

    @property
    def _rolling(self) -> bool:
        return self._options.strategy is Strategy.ROLLING

    async def _roll(
        self,
        members: Sequence[Replica],
        update: WeightUpdate,
        sent: Digests,
        nbytes: int,
        p: _Progress,
    ) -> None:
        """Group after group; each is proved before the next one is paused."""
        begun = False
        for group in self._groups(members):
            here = [r for r in group if r.lost is None]
            if not here:
                continue
            if begun:
                self._machine.fire(Trigger.NEXT, Guard.ALL_RESUMED)
            begun = True
            self._fleet.muster(here)
            await self._swap_group(update, p)
            async with self._phase():
                result = await self._validator.digest(update, sent, nbytes)
            if result.verdict is Verdict.MISMATCH:
                self._require(result, update, p)
            self._admit_proved(update)
            self._fleet.judged(here)
        if not begun:
            raise EngineError(self._fleet.names, "no replica is left to swap")

    def _groups(self, members: Sequence[Replica]) -> list[list[Replica]]:
        """Who is swapped together. Who does not serve anyway goes first and takes no place."""
        serving = [r for r in members if not r.fenced]
        size = self._options.max_unavailable
        groups = [serving[i : i + size] for i in range(0, len(serving), size)]
        joining = [r for r in members if r.fenced]
        return [joining, *groups] if joining else groups

    async def _swap_group(self, update: WeightUpdate, p: _Progress) -> None:
        p.resumed = False
        if update.one_call and self._alone():
            await self._in_one_call(update, p)
        else:
            await self._pause(update, p)
            await self._sync(update, p)
        # Some have it now: to call the swap off would leave two versions.
        self.committing = self.committing or self._rolling
        await self._resume(update, p)

    async def resync(self, number: int, sent: Digests, replicas: Sequence[Replica]) -> None:
        """Bring fenced ``replicas`` to the committed version, which is what the sender has staged.

        The machine is in RECOVERING; others serve meanwhile. Who shows the digests ``sent`` is
        admitted. Raises what failed, ValidationFailed for who shows others; the channel is closed
        after it, and opened again by the next swap.
        """
        fleet, budgets = self._fleet, self._options.timeouts
        update = WeightUpdate(
            sync_id=f"{current_op().run_id}-h{number}",
            from_version=fleet.version,
            version=fleet.version,
            step=fleet.version,
            backend=self._options.backend,
            pause_mode=PauseMode.ABORT,
            kv_policy=KVPolicy.RECOMPUTE,
            staged=self._options.staged,
        )
        fleet.muster(replicas)
        try:
            with operation(
                sync_id=update.sync_id, version=update.version, state=State.RECOVERING.value
            ):
                async with deadline(STAGING, budgets.staging, fleet.waiting_for):
                    nbytes = await self._join(update)
                async with deadline(State.PAUSING, budgets.pausing, fleet.waiting_for):
                    await fleet.pause(update.pause_mode, update.kv_policy)
                async with deadline(State.SYNCING, budgets.syncing, fleet.waiting_for):
                    await self._apply(update)
                    await fleet.finish_update(update)
                async with deadline(State.SYNCING, budgets.syncing, fleet.waiting_for):
                    result = await self._validator.digest(update, sent, nbytes)
                proved = [r for r in fleet.here if r.proved == update.version]
                fleet.muster(proved)
                for replica in proved:
                    replica.dirty = False
                async with deadline(State.RESUMING, budgets.resuming, fleet.waiting_for):
                    await fleet.resume()
                for replica in fleet.here:
                    self._admit(replica)
                if result.verdict is Verdict.MISMATCH:
                    raise ValidationFailed(explain(result))
        except PhaseTimeout as error:
            fleet.lose_waiting(error.seconds)
            raise
        finally:
            fleet.dismiss()
            await uninterrupted(fleet.close_channel(self.sender))

    async def _join(self, update: WeightUpdate) -> int:
        """Have a channel with the members, and the bytes there if they come first."""
        fleet = self._fleet
        await fleet.close_channel(self.sender)
        spec = await fleet.open_channel(
            self.sender, update.backend, self._options.timeouts.channel, staged=update.staged
        )
        if update.at_hand:
            await fleet.prefetch(update, self.sender)
        return spec.nbytes

    async def _apply(self, update: WeightUpdate) -> list[TransferStats]:
        await self._fleet.start_update(update)
        if update.at_hand:
            return await self._fleet.receive_update(update)
        return await self._fleet.transfer(update, self.sender)

    def _admit_proved(self, update: WeightUpdate) -> None:
        for replica in self._fleet.here:
            if replica.fenced and replica.proved == update.version:
                self._admit(replica)

    def _admit(self, replica: Replica) -> None:
        self._fleet.admit(replica)
        self.on_admitted(replica)  # before it is given a request

    def _alone(self) -> bool:
        members = self._fleet.members
        return len(members) == 1 and not members[0].fenced

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
            p.acks += await self._fleet.pause(update.pause_mode, update.kv_policy)
            p.quiesce += _now() - began
        self._machine.fire(Trigger.SYNC, Guard.ALL_IDLE)

    async def _sync(self, update: WeightUpdate, p: _Progress) -> None:
        async with self._phase():
            began = _now()
            p.moved += await self._apply(update)
            moved = _now()
            await self._fleet.finish_update(update)
            p.transfer += moved - began
            p.finalize += _now() - moved
            self._fleet.commit(update.version, rolling=self._rolling)
        self._machine.fire(Trigger.COMMIT, Guard.ALL_APPLIED)

    async def _in_one_call(self, update: WeightUpdate, p: _Progress) -> None:
        timeouts = self._options.timeouts
        budget = timeouts.pausing + timeouts.syncing + timeouts.resuming
        p.resumed = True
        self.committing = True
        try:
            with operation(state=State.PAUSING.value):
                async with deadline(State.SYNCING, budget, self._fleet.waiting_for):
                    done = await self._fleet.swap(update, timeouts, self.sender)
        except BaseException as error:
            self._came_to(update, error.phase if isinstance(error, SyncError) else State.SYNCING)
            raise
        finally:
            self.committing = False
        p.acks.append(done.ack)
        p.moved.append(done.stats)
        p.quiesce += done.quiesce
        p.finalize += done.finalize
        p.resume += done.resume
        p.in_call = done.transfer
        # No await up to here: the fleet keeps back what the replica wrote until this is told.
        self._fleet.commit(update.version, rolling=self._rolling)
        self._machine.fire(Trigger.SYNC, Guard.ALL_IDLE, seconds=done.quiesce)
        applied = done.transfer + done.finalize
        self._machine.fire(Trigger.COMMIT, Guard.ALL_APPLIED, seconds=applied)

    def _came_to(self, update: WeightUpdate, phase: str) -> None:
        """Bring the machine to where the one call failed, if it still runs."""
        if phase == State.RESUMING:
            self._fleet.commit(update.version, rolling=self._rolling)
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
                p.resume += _now() - began
            first = await self._fleet.first_tokens(update)
            p.first = (*p.first, *first)
            if p.resumed:
                on_device = [f.transfer for f in first if f.transfer is not None]
                p.transfer += max(on_device, default=p.in_call)

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
            # What moved in SYNCING's time is read in no more: who hangs here must not hold all the
            # time that a fresh engine may take.
            budget = min(self._options.timeouts.syncing, self._options.timeouts.validating)
            async with deadline(State.SYNCING, budget, self._fleet.waiting_for):
                if self._rolling:
                    result = self._validator.proved(sent, nbytes)
                else:
                    result = await self._validator.digest(update, sent, nbytes)
            self._require(result, update, p)
            self._admit_proved(update)
            self._fleet.judged(self._fleet.members)
            self._require(await self._validator.canary(), update, p)
            skipped = CheckResult("fresh", Verdict.SKIPPED)
            self._require(await fresh() if fresh is not None else skipped, update, p)
            p.validate = _now() - began

    def _require(self, result: CheckResult, update: WeightUpdate, p: _Progress) -> None:
        p.checks = (*p.checks, result)
        if result.verdict is Verdict.MISMATCH:
            error = failure(result, update.step)
            error.report = self._report(update, p)
            raise error

    async def _give_up(self, update: WeightUpdate, phase: State, error: BaseException) -> None:
        """Leave every replica as the module says. Bounded by the budget of RESUMING.

        Who was late to pause is not lost for it: a long step may do that. It is told to go on,
        within ``LATE_S``. A cancel may mean that everything stops, so then all fits into the time
        for stopping.
        """
        seconds = self._options.timeouts.resuming
        cancelled = isinstance(error, asyncio.CancelledError)
        if cancelled:
            seconds = min(seconds, self._options.timeouts.stopping / 2)
        if self._machine.state not in TERMINAL:
            self._machine.fire(Trigger.FAULT, reason=f"{phase}: {error or type(error).__name__}")
        fleet = self._fleet
        with operation(state=State.RECOVERING.value):
            if isinstance(error, PhaseTimeout) and phase is not State.PAUSING:
                fleet.lose_waiting(error.seconds)
            committed = fleet.version == update.version
            if committed:
                # Rolling: whose turn had not come has the version before.
                fleet.fence(r for r in fleet.serving if r.applied != update.version)
            if (phase is State.VALIDATING or (committed and fleet.heals)) and not cancelled:
                self._distrust(update, error)
            fleet.fence_dirty()
            late = fleet.late if isinstance(error, PhaseTimeout) and phase is State.PAUSING else []
            await fleet.resume_clean(seconds, late, min(seconds, LATE_S))
            await fleet.evict_fenced(min(seconds, EVICT_S))
        done = bool(fleet.serving) if fleet.heals else not fleet.fenced
        if done and self._machine.state is State.RECOVERING:
            serves = f"every replica serves version {fleet.version}"
            if fleet.fenced:
                serves = f"{len(fleet.serving)} replicas serve version {fleet.version}"
            self._machine.fire(Trigger.RECOVER, Guard.ALL_SERVING, reason=serves)

    def _distrust(self, update: WeightUpdate, error: BaseException) -> None:
        """Fence whoever is not proved to hold what was sent, and drop what it wrote with it."""
        fleet = self._fleet
        if not fleet.heals:
            if isinstance(error, ValidationFailed):
                fleet.fence_all()
            return
        unproved = [r for r in fleet.serving if r.proved != update.version]
        # Digests that match prove the bytes; a check after them judges what was made of those.
        everybody = isinstance(error, ValidationFailed) and not unproved
        fleet.fence(fleet.serving if everybody else unproved, distrusted=update.version)

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
