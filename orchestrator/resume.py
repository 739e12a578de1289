"""Writes the checkpoints of a run, and brings a started run to where one of them was.

A checkpoint is written after the step's swap was committed and proved, so the trainer's weights
are the published version. Decoding goes on meanwhile: only the next train step waits.

Going on from one: the trainer loads its state and stages its weights, and every replica gets them
whole, as the checkpoint's version, before the first request. Until then the replicas hold what
they were started with, which is version 0.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.context import current_op
from orchestrator.errors import ConfigError
from orchestrator.events import CheckpointWritten, RunResumed
from orchestrator.options import SwapOptions
from orchestrator.protocols import Digests, Resumable, WeightSender
from orchestrator.rollouts import RolloutSource
from orchestrator.tasks import deadline
from orchestrator.types import PolicyVersion, State, Verdict, WeightUpdate
from orchestrator.validation import failure

if TYPE_CHECKING:
    from orchestrator.checkpoint import Checkpoints, RunCheckpoint
    from orchestrator.fleet import Fleet
    from orchestrator.validation import Validator


class RunKeeper:
    """Keeps one run: ``checkpoints`` are written every ``every`` steps (0: never).

    ConfigError where what is asked for needs a trainer that saves its state, or a place.
    """

    def __init__(
        self,
        run_id: str,
        trainer: WeightSender,
        checkpoints: Checkpoints | None,
        every: int,
        resume: RunCheckpoint | None,
        budget_s: float,
    ) -> None:
        """``budget_s``: seconds that saving or loading the trainer's state may take."""
        if every < 0:
            raise ConfigError(f"checkpoint_every is {every}: give 0 (never) or a number of steps")
        if every and checkpoints is None:
            raise ConfigError(f"checkpoint_every {every} needs checkpoints: a folder to write to")
        if (every or resume) and not isinstance(trainer, Resumable):
            raise ConfigError(
                f"checkpoints need a trainer that saves its state; {type(trainer).__name__} has "
                "no save_state and load_state: leave them out"
            )
        if resume is not None and (resume.step < 1 or resume.version < 1):
            raise ConfigError(
                f"a checkpoint of step {resume.step} and version {resume.version} is none to go "
                "on from: start a new run"
            )
        self.sent: Digests = {}
        """Digests of what the replicas were brought back to."""
        self._run_id, self._budget = run_id, budget_s
        self._checkpoints, self._resume = checkpoints, resume
        self.every = every
        self.last = resume
        """The newest checkpoint of the run."""

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after ``step``."""
        return self.every > 0 and step % self.every == 0

    async def save(
        self, step: int, version: PolicyVersion, trainer: WeightSender, source: RolloutSource
    ) -> CheckpointWritten:
        """Write a checkpoint with ``source`` as it is now."""
        from orchestrator.checkpoint import RunCheckpoint

        assert isinstance(trainer, Resumable) and self._checkpoints is not None
        now = asyncio.get_running_loop().time
        began = now()
        async with deadline(State.GENERATING, self._budget, lambda: "the checkpoint"):
            written = await self._checkpoints.write(
                RunCheckpoint(self._run_id, step, version, source.state()), trainer.save_state
            )
        self.last = written
        op = replace(current_op(), version=version)
        return CheckpointWritten(time.time(), op, step, version, str(written.folder), now() - began)

    @property
    def resumes(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self._resume is not None

    async def bring_back(
        self,
        fleet: Fleet,
        trainer: WeightSender,
        validator: Validator,
        swap: SwapOptions,
        nbytes: int,
    ) -> RunResumed:
        """Trainer and replicas to the checkpoint that the run goes on from.

        Nothing may be generating. ValidationFailed when a replica does not hold what was sent.
        """
        point = self._resume
        assert point is not None and isinstance(trainer, Resumable)
        async with deadline(State.GENERATING, self._budget, lambda: "the trainer's state"):
            await trainer.load_state(point.trainer_path)
        update = WeightUpdate(
            sync_id=f"{self._run_id}-r{point.version}",
            from_version=fleet.version,
            version=point.version,
            step=point.step,
            backend=swap.backend,
            pause_mode=swap.pause_mode,
            kv_policy=swap.kv_policy,
            staged=swap.staged,
        )
        self.sent = await sync_whole(update, fleet, trainer, validator, swap, nbytes)
        if self._checkpoints is not None:
            self._checkpoints.resumed()
        op = replace(current_op(), step=point.step, version=point.version)
        return RunResumed(time.time(), op, point.step, point.version, str(point.folder))


async def sync_whole(
    update: WeightUpdate,
    fleet: Fleet,
    sender: WeightSender,
    validator: Validator,
    swap: SwapOptions,
    nbytes: int,
) -> Digests:
    """Stage the trainer's weights and give every replica all of them, before any request.

    Digests (and the canary) are compared; every phase has its own deadline.
    """
    budget, who = swap.timeouts, fleet.waiting_for
    async with deadline(State.GENERATING, budget.generating, lambda: "staging"):
        sent = await sender.stage(update.version)
    if update.at_hand:
        async with deadline("STAGING", budget.staging, who):
            await fleet.prefetch(update, sender)
    async with deadline(State.PAUSING, budget.pausing, who):
        await fleet.pause(update.pause_mode, update.kv_policy)
    async with deadline(State.SYNCING, budget.syncing, who):
        await fleet.start_update(update)
        if update.at_hand:
            await fleet.receive_update(update)
        else:
            await fleet.transfer(update, sender)
        await fleet.finish_update(update)
        fleet.commit(update.version)
    async with deadline(State.RESUMING, budget.resuming, who):
        await fleet.resume()
    async with deadline(State.VALIDATING, budget.validating, who):
        for check in (await validator.digest(update, sent, nbytes), await validator.canary()):
            if check.verdict is Verdict.MISMATCH:
                raise failure(check, update.step)
    fleet.judged(fleet.members)  # answers under this version are handed over
    return sent
