"""One swap with all that is around it: staging, probes, further tries, the fresh check.

The tries of a swap (see ``recovery``): one that failed before its commit is made again by who is
left and by who was fenced; after a commit only the fenced replicas are resynced, and what was not
checked yet is checked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.context import operation
from orchestrator.cycle import SwapCycle
from orchestrator.errors import (
    EngineError,
    MidflightError,
    SyncError,
    TrainerDied,
    TrainingDiverged,
    ValidationFailed,
)
from orchestrator.events import PrefetchStarted, SwapDone, SwapFailed
from orchestrator.fleet import Fleet
from orchestrator.observers import Observers
from orchestrator.options import SwapOptions
from orchestrator.probes import Probe, Probes, wrote_under
from orchestrator.protocols import Digests, Trainer, WeightSender
from orchestrator.recovery import Recovery
from orchestrator.rollouts import RolloutSource
from orchestrator.tasks import deadline
from orchestrator.types import (
    CheckResult,
    KVPolicy,
    PauseMode,
    State,
    SyncReport,
    Verdict,
    WeightUpdate,
)
from orchestrator.validation import Validator, failure


@dataclass(slots=True)
class _Swap:
    """What is known of one swap over all its tries."""

    update: WeightUpdate
    scheduled: bool
    fresh: bool
    sent: Digests = field(default_factory=dict)
    probes: list[Probe] | None = None
    tries: int = 0
    first: MidflightError | None = None
    """Why the first try failed."""
    report: SyncReport | None = None
    """As far as it came, once committed."""


class Swaps:
    """Makes swaps, one at a time; the caller serialises."""

    def __init__(
        self,
        trainer: WeightSender,
        fleet: Fleet,
        cycle: SwapCycle,
        validator: Validator,
        recovery: Recovery,
        probes: Probes,
        source: RolloutSource,
        options: SwapOptions,
        observers: Observers,
    ) -> None:
        self.trainer = trainer
        self._fleet, self._cycle = fleet, cycle
        self._validator, self._recovery = validator, recovery
        self._probes, self._source, self._options = probes, source, options
        self._observers = observers
        self.nbytes = 0
        """Bytes of one update."""
        self.applying = False
        """A try is past its waits: what it does must not be left half-way."""

    async def run(self, update: WeightUpdate, *, scheduled: bool, fresh: bool) -> SyncReport:
        """Stage, prefetch, let probes get going (``scheduled``), swap; again while that may help.

        Raises what the first try failed with, when the last one failed too.
        """
        swap = _Swap(update, scheduled, fresh)
        await self._stage(swap)
        return await self._tried(swap)

    async def _tried(self, swap: _Swap) -> SyncReport:
        try:
            tries = 1 + self._recovery.tries
            async for attempt in self._recovery.retrying(self._may_help, tries):
                with attempt:
                    report = await self._try(swap)
        except (SyncError, ValidationFailed) as error:
            self._recovery.settle_state()
            if isinstance(error, TrainingDiverged):
                self._recovery.abandon(error)
                raise
            if self._may_help(error):
                self._recovery.abandon(swap.first or error)
            if swap.first is None or error is swap.first or by_trainer(error):
                raise
            raise swap.first from swap.first.__cause__
        except BaseException:
            self._recovery.settle_state()
            raise
        self._recovery.steady()
        self._observers.tell(SwapDone, report)
        return report

    async def finish(self, committed: SyncReport, *, fresh: bool) -> SyncReport:
        """Prove a swap that was committed, then left by its trainer."""
        known = self._recovery.committed
        sent = known[1] if known is not None else {}
        swap = _Swap(committed.update, False, fresh, sent, report=committed)
        return await self._tried(swap)

    def _may_help(self, error: BaseException) -> bool:
        """A dead trainer has nothing to send, one that diverged nothing better; anything else is
        not about the swap."""
        if not isinstance(error, SyncError | ValidationFailed) or not self._fleet.heals:
            return False
        return not (by_trainer(error) or isinstance(error, TrainingDiverged))

    async def _stage(self, swap: _Swap) -> None:
        waiting = "staging"
        self._recovery.staged = None
        async with deadline(State.GENERATING, self._options.timeouts.generating, lambda: waiting):
            swap.sent = await self.trainer.stage(swap.update.version)
        self._recovery.staged = (swap.update.version, swap.sent)

    async def _try(self, swap: _Swap) -> SyncReport:
        swap.tries += 1
        try:
            with self._telling_of_failure():
                if self._fleet.version < swap.update.version:
                    return await self._once(swap)
                return await self._proved(swap)
        except (SyncError, ValidationFailed) as error:
            swap.first = swap.first or error
            if isinstance(error.report, SyncReport):
                swap.report = error.report
            self._recovery.note(error)
            raise
        finally:
            self.applying = False
            if self._fleet.version == swap.update.version:
                self._recovery.committed = (swap.update.version, swap.sent)

    async def _once(self, swap: _Swap) -> SyncReport:
        update = _of_this_try(swap)
        waiting = "the bytes to be at the engines"
        seconds = self._options.timeouts.generating
        with operation(sync_id=update.sync_id):
            await self._fleet.until_members()  # ends with the tries of recovery
            async with deadline(State.GENERATING, seconds, lambda: waiting):
                if update.at_hand:
                    self._observers.tell(PrefetchStarted, update)
                prefetch_s = await self._cycle.prefetch(update)
                if swap.scheduled and swap.probes is None:
                    tokens = self._options.pause_after_tokens
                    waiting = f"a live request with {tokens} tokens"
                    swap.probes = self._probes.launch(f"p{update.step}.")
                    await self._probes.until_long_enough(swap.probes, tokens, self._source.idle)

            async def check() -> CheckResult:
                return await self._fresh(update, swap.probes or [])

            self.applying = True
            return await self._cycle.run(
                update,
                swap.sent,
                self.nbytes,
                check if swap.fresh else None,
                prefetch_s=prefetch_s,
            )

    async def _proved(self, swap: _Swap) -> SyncReport:
        """Whatever keeps it from being proved is a failure in VALIDATING, with the report."""
        try:
            return await self._prove(swap)
        except (SyncError, ValidationFailed):
            raise
        except MidflightError as error:
            failed = SyncError(State.VALIDATING, str(error), self._fleet.fenced)
            failed.report = swap.report
            raise failed from error

    async def _prove(self, swap: _Swap) -> SyncReport:
        """It is committed: resync who was fenced for it, then run the checks that did not pass."""
        assert swap.report is not None
        fleet, update = self._fleet, _of_this_try(swap)
        await fleet.until_members()  # ends with the tries of recovery
        self.applying = True
        await self._recovery.heal()
        if not fleet.serving:
            raise swap.first or EngineError(fleet.names, "no replica serves")
        async with deadline(State.VALIDATING, self._options.timeouts.validating):
            checks = [self._validator.proved(swap.sent, swap.report.nbytes)]
            if self._recovery.staged == self._recovery.committed:
                checks.append(await self._validator.canary())
                if swap.fresh:
                    checks.append(await self._fresh(update, []))
            else:
                # A new trainer came to other bits: it is no judge of these.
                checks += [CheckResult(c, Verdict.INCONCLUSIVE) for c in ("canary", "fresh")]
        report = replace(swap.report, checks=tuple(checks))
        for result in checks:
            if result.verdict is Verdict.MISMATCH:
                fleet.fence(fleet.serving, distrusted=update.version)
                error = failure(result, update.step)
                error.report = report
                raise error
        return report

    @contextlib.contextmanager
    def _telling_of_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._observers.tell(SwapFailed, error, self._fleet.fenced)
            raise

    async def _fresh(self, update: WeightUpdate, probes: Sequence[Probe]) -> CheckResult:
        """Probes that the swap cut, or new ones where there are none that must be exact.

        ``keep`` leaves KV of the old weights in a cut request and ``wait`` cuts none; a request
        made after the swap must still equal a fresh engine's, token for token.
        """
        exact = update.pause_mode is PauseMode.ABORT or (
            update.pause_mode is PauseMode.KEEP and update.kv_policy is KVPolicy.RECOMPUTE
        )
        ended = [await probe for probe in probes] if exact else []
        if not wrote_under(ended, update.version):
            prompts = self._probes.prompts or self._source.prompts
            ended = [await p for p in self._probes.launch(f"{update.sync_id}-f", prompts)]
        trainer = self.trainer
        if not isinstance(trainer, Trainer):
            raise MidflightError("the fresh check needs a trainer that saves checkpoints")
        checkpoint = await trainer.save_checkpoint(f"v{update.version}")
        return await self._validator.fresh(checkpoint, ended, update.version)


def by_trainer(error: BaseException | None) -> bool:
    """Whether the trainer's death is behind ``error``."""
    while error is not None:
        if isinstance(error, TrainerDied):
            return True
        error = error.__cause__
    return False


def _of_this_try(swap: _Swap) -> WeightUpdate:
    """An answer that comes late must not be taken for one of this try."""
    if swap.tries == 1:
        return swap.update
    return replace(swap.update, sync_id=f"{swap.update.sync_id}.{swap.tries}")
