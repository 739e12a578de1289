"""The train steps of a run, and a trainer that dies in one of them.

A step: take a batch, train on it, swap, now and then a checkpoint. When the trainer's process is
gone another one is started, loads the last checkpoint, makes the steps since then again on the same
batches (they are kept until the next checkpoint), and the step goes on where it was: no rollout is
taken twice, none is lost. Without checkpoints a dead trainer ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from orchestrator.context import operation
from orchestrator.errors import (
    Closed,
    ConfigError,
    MidflightError,
    SyncError,
    TrainerDied,
    TrainerError,
    TrainingDiverged,
    ValidationFailed,
)
from orchestrator.events import TrainerStarted, TrainStepDone
from orchestrator.fleet import CLOSE_S, Fleet
from orchestrator.observers import Observers
from orchestrator.options import GenerationOptions, ValidationOptions
from orchestrator.protocols import Resumable, Trainer, TrainerMaker
from orchestrator.publishing import Publisher
from orchestrator.recovery import Recovery
from orchestrator.resume import RunKeeper
from orchestrator.rollouts import RolloutSource
from orchestrator.swaps import by_trainer
from orchestrator.tasks import close_within, deadline, uninterrupted
from orchestrator.types import (
    PhaseTimeouts,
    Rollout,
    State,
    SyncReport,
    TrainStats,
)


class TrainLoop:
    """See the module. ``adopt`` makes a new trainer everybody's."""

    def __init__(
        self,
        trainer: Trainer,
        make: TrainerMaker | None,
        source: RolloutSource,
        fleet: Fleet,
        recovery: Recovery,
        keeper: RunKeeper,
        generation: GenerationOptions,
        validation: ValidationOptions,
        timeouts: PhaseTimeouts,
        publisher: Publisher,
        observers: Observers,
        *,
        adopt: Callable[[Trainer], None],
    ) -> None:
        self._trainer, self._make = trainer, make
        self._source, self._fleet = source, fleet
        self._recovery, self._keeper = recovery, keeper
        self._generation, self._validation, self._timeouts = generation, validation, timeouts
        self._publisher, self._observers, self._adopt = publisher, observers, adopt
        self._lost: str | None = None
        self._kept: list[tuple[int, list[Rollout]]] = []
        """The batches since the last checkpoint, where they may be needed again."""
        self._trained = self._committed = 0
        """The last step that was trained, and the one whose weights are the committed version."""
        self._running = False

    @property
    def replaces(self) -> bool:
        """Whether a trainer that dies can be replaced."""
        return (
            self._make is not None
            and self._recovery.enabled
            and self._keeper.every > 0
            and isinstance(self._trainer, Resumable)
        )

    def takes(self, cause: str) -> bool:
        """The trainer died; whether the steps go on with another one."""
        self._recovery.staged = None
        if not (self._running and self.replaces):
            return False
        self._lost = self._lost or cause
        return True

    async def run(self, steps: Sequence[int], run_id: str) -> None:
        """Make ``steps``, one after the other."""
        self._running = True
        try:
            for step in steps:
                every = self._validation.fresh_every
                fresh = step == steps[-1] or (every > 0 and step % every == 0)
                fresh = fresh and self._validation.fresh
                with operation(run_id=run_id, step=step, state=State.GENERATING.value):
                    await self._step(step, fresh)
        finally:
            self._running = False

    async def _step(self, step: int, fresh: bool) -> None:
        batch: list[Rollout] | None = None
        report: SyncReport | None = None
        swapped = False
        losses = 0
        while True:
            if self._lost is not None:
                await self._replace(self._lost)
                if self._recovery.nowhere:
                    report = None  # published anew, as a version of its own
            try:
                if self._trained < step:
                    batch = batch or await self._take()
                    await self._train(batch, step)
                if not swapped:
                    if report is None:
                        await self._publisher.publish(step, fresh=fresh)
                    else:
                        await self._publisher.finish(report, fresh=fresh)
                    self._committed, swapped = step, True
                if self._keeper.due(step):
                    version = self._fleet.version
                    written = self._keeper.save(step, version, self._trainer, self._source)
                    self._observers.emit(await written)
                    self._kept.clear()
                return
            except (SyncError, ValidationFailed, TrainerError) as error:
                losses += 1
                if not self._died(error) or losses > self._recovery.tries:
                    raise
                so_far = getattr(error, "report", None)
                if isinstance(so_far, SyncReport):
                    self._committed, report = step, so_far

    def _died(self, error: BaseException) -> bool:
        """Whether the trainer's death is behind ``error``, and another one can take over."""
        if not self.replaces or self._publisher.over:
            return False
        if self._lost is None and by_trainer(error):
            self._lost = str(error)
        return self._lost is not None

    async def _take(self) -> list[Rollout]:
        seconds = self._timeouts.generating

        def waiting() -> str:
            why = None if self._fleet.serving else self._recovery.reason
            return "rollouts" if why is None else f"rollouts, since no replica serves: {why}"

        async with deadline(State.GENERATING, seconds, waiting):
            return await self._source.take(self._generation.prompts_per_step)

    async def _train(self, batch: list[Rollout], step: int) -> None:
        async with deadline(State.GENERATING, self._timeouts.generating, lambda: "the trainer"):
            stats = await self._trainer.train(batch, step)
        self._trained = step
        if self.replaces:
            self._kept.append((step, batch))
        self._observers.tell(TrainStepDone, stats, rewarded(stats, batch))

    # Another trainer

    async def _replace(self, cause: str) -> None:
        await close_within(self._trainer, 2 * CLOSE_S)
        try:
            async for attempt in self._recovery.retrying(_transient, self._recovery.tries):
                with attempt:
                    await self._start_another()
        except TrainingDiverged:
            raise
        except Exception as error:
            raise TrainerDied(f"trainer: {cause}; no other could take over: {error}") from error
        self._lost = None

    async def _start_another(self) -> None:
        assert self._make is not None
        self._go_on()
        trainer = self._make()
        adopted = False
        try:
            async with deadline(State.STARTING, self._timeouts.starting, lambda: "the trainer"):
                info = await trainer.start()
            if info is not None:
                self._observers.tell(TrainerStarted, info)
            await self._bring_back(trainer)
            adopted = True
        finally:
            if not adopted:
                await uninterrupted(close_within(trainer, 2 * CLOSE_S))

    def _go_on(self) -> None:
        if self._publisher.over:
            raise Closed("no trainer starts any more: the orchestrator is closed or about to be")

    async def _bring_back(self, trainer: Trainer) -> None:
        """To the state of the one that died: first as committed, then as trained."""
        seconds, last = self._timeouts.generating, self._keeper.last
        assert isinstance(trainer, Resumable)
        if last is not None:
            async with deadline(State.GENERATING, seconds, lambda: "the trainer's state"):
                await trainer.load_state(last.trainer_path)
        waiting = "steps since the checkpoint, made again"
        for step, batch in self._kept:
            if step <= self._committed:
                async with deadline(State.GENERATING, seconds, lambda: waiting):
                    await trainer.train(batch, step)
        async with self._publisher.lock:  # nobody swaps or resyncs with one that is half-way
            self._go_on()
            version = self._fleet.version
            # The workers are still in a group with the one that is gone.
            await self._fleet.close_channel(trainer)
            if version > 0:
                async with deadline(State.GENERATING, seconds, lambda: "staging"):
                    sent = await trainer.stage(version)
            for step, batch in self._kept:
                if step > self._committed:
                    async with deadline(State.GENERATING, seconds, lambda: waiting):
                        await trainer.train(batch, step)
            self._go_on()
            self._trainer = trainer
            self._adopt(trainer)
            if version > 0:
                self._recovery.restaged(version, sent)


def rewarded(stats: TrainStats, batch: Sequence[Rollout]) -> tuple[Rollout, ...]:
    """``batch`` with the rewards of ``stats`` (TrainerError when they are not one each)."""
    rewards = stats.rewards or (None,) * len(batch)
    if len(rewards) != len(batch):
        raise TrainerError(
            f"{len(rewards)} rewards came back for a batch of {len(batch)}: return one "
            "each, in the order of the batch, or none"
        )
    return tuple(
        replace(rollout, reward=reward) for rollout, reward in zip(batch, rewards, strict=True)
    )


def _transient(error: BaseException) -> bool:
    return isinstance(error, MidflightError) and not isinstance(
        error, ConfigError | Closed | TrainingDiverged
    )
