"""The Orchestrator: wires the parts of a run; no part knows it.

Tasks and what they wait for:

    host      the task that entered ``async with``: trains (``run``) or belongs to the embedder
    watch     one a process of the data plane: waits for its death; ends the run with the cause
    source    submits rollouts: waits for a free slot and credit; unblocked by requests ending
    requests  one a rollout or probe: waits for the engine
    swap      one at a time: waits as ``cycle`` says
    heal      see ``recovery``

A watch or the source that fails ends the run, see ``life``; a replica that died is replaced
instead, where that is wanted. Leaving the block stops everything in a fixed order, within
``timeouts.stopping``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from orchestrator.context import current_op, operation
from orchestrator.cycle import SwapCycle
from orchestrator.errors import (
    Closed,
    ConfigError,
    EngineDied,
    IllegalTransition,
    TrainerDied,
)
from orchestrator.events import (
    EngineStarted,
    Observer,
    ReplicaDied,
    RolloutConsumed,
    RolloutFinished,
    RunEnded,
    StateChanged,
    TrainerStarted,
)
from orchestrator.fleet import Fleet
from orchestrator.life import Life, outcome_of
from orchestrator.machine import Guard, SwapMachine, Transition, Trigger
from orchestrator.observers import Observers
from orchestrator.options import (
    GenerationOptions,
    RecoveryOptions,
    SwapOptions,
    ValidationOptions,
    check_strategy,
)
from orchestrator.probes import Probes
from orchestrator.protocols import (
    Engine,
    EngineFactory,
    EngineMaker,
    Scorer,
    Trainer,
    TrainerMaker,
    WeightSender,
)
from orchestrator.publishing import Publisher
from orchestrator.recovery import Recovery
from orchestrator.resume import RunKeeper
from orchestrator.rollouts import RolloutSource
from orchestrator.swaps import Swaps
from orchestrator.tasks import (
    all_or_first_error,
    deadline,
    settle,
)
from orchestrator.train_loop import TrainLoop
from orchestrator.types import (
    EngineInfo,
    OpContext,
    Outcome,
    PolicyVersion,
    Prompt,
    Rollout,
    State,
    SyncReport,
)
from orchestrator.validation import Validator

if TYPE_CHECKING:
    from orchestrator.checkpoint import Checkpoints, RunCheckpoint


def _clock() -> float:
    """The loop's time, which tests may bend; the same clock outside of a loop."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


class Orchestrator:
    """Keeps engines generating while a trainer trains, and swaps weights between them.

    ::

        async with Orchestrator(engines, trainer, prompts=prompts) as o:
            async for rollout in o.rollouts():      # you own the loop ...
                ...
                await o.sync()                      # ... or: await o.run(steps=5)

    ``trainer`` needs to be a :class:`WeightSender` for :meth:`sync` and a :class:`Trainer`
    for :meth:`run`. Entering starts everything and proves the channel; leaving releases
    everything. When a background task fails the body is cancelled and the ``async with``
    raises what failed; a body that waits in :meth:`sync` gets it raised there first.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        trainer: WeightSender,
        *,
        prompts: Sequence[Prompt],
        probes: Sequence[Prompt] = (),
        swap: SwapOptions | None = None,
        generation: GenerationOptions | None = None,
        validation: ValidationOptions | None = None,
        engine_factory: EngineFactory | None = None,
        recovery: RecoveryOptions | None = None,
        replace_engine: EngineMaker | None = None,
        replace_trainer: TrainerMaker | None = None,
        observers: Sequence[Observer] = (),
        run_id: str | None = None,
        checkpoints: Checkpoints | None = None,
        checkpoint_every: int = 0,
        resume: RunCheckpoint | None = None,
    ) -> None:
        """``checkpoint_every``: train steps of :meth:`run` between checkpoints (0: none).

        ``resume``: the run starts where that checkpoint was, under its run id.
        """
        _check_prompts("prompts", prompts)
        _check_prompts("probes", probes)
        if not prompts:
            raise ConfigError("no prompts: rollouts need at least one")
        self.run_id = run_id or (resume.run_id if resume else uuid.uuid4().hex[:12])
        self._trainer = trainer
        self._swap = swap or SwapOptions()
        self._keeper = RunKeeper(
            self.run_id,
            trainer,
            checkpoints,
            checkpoint_every,
            resume,
            self._swap.timeouts.generating,
        )
        self._generation = generation or GenerationOptions()
        self._options = validation or ValidationOptions(canary=False, fresh=False)
        self._observers = Observers(observers, self._op)
        self._life = Life(self._release, self._behind)
        if self._options.fresh and not isinstance(trainer, Trainer):
            raise ConfigError(
                f"the fresh check needs a trainer that saves checkpoints; {type(trainer).__name__} "
                "only sends weights: leave it out with ValidationOptions(fresh=False)"
            )
        check_strategy(self._swap)
        self._fleet = Fleet(engines)
        self._machine = SwapMachine(self._moved, clock=_clock)
        self._validator = Validator(
            self._options,
            self._fleet,
            scorer=trainer if isinstance(trainer, Scorer) else None,
            factory=engine_factory,
            canary_prompts=(probes or prompts)[:4],
        )
        tell = self._observers.tell
        self._source = RolloutSource(
            prompts,
            self._generation,
            self._fleet.generate,
            lambda: self._fleet.version,
            on_finished=lambda r: tell(RolloutFinished, r),
            on_consumed=lambda r, ok: tell(RolloutConsumed, r, ok),
            start=resume.source if resume else None,
        )
        self._probes = Probes(
            probes,
            self._swap.pause_after_tokens + self._generation.probe_tokens,
            self._fleet,
            on_finished=lambda r: tell(RolloutFinished, r),
            on_ended=self._life.ended,
        )
        self._cycle = SwapCycle(self._machine, self._fleet, trainer, self._validator, self._swap)
        lock = asyncio.Lock()
        self._recovery = Recovery(
            recovery or RecoveryOptions(),
            self._fleet,
            self._cycle,
            self._machine,
            lock,
            self._life,
            self._observers,
            make=replace_engine,
            starting_s=self._swap.timeouts.starting,
            up=self._up,
        )
        self._cycle.on_admitted = self._recovery.served
        self._swaps = Swaps(
            trainer,
            self._fleet,
            self._cycle,
            self._validator,
            self._recovery,
            self._probes,
            self._source,
            self._swap,
            self._observers,
        )
        self._publisher = Publisher(
            self.run_id,
            self._fleet,
            self._machine,
            self._cycle,
            self._swaps,
            self._swap,
            lock,
            self._life,
        )
        self._step = self._resumed_steps = resume.step if resume else 0
        self._replace_trainer = replace_trainer
        self._loop: TrainLoop | None = None

    # What is going on

    @property
    def state(self) -> State:
        """Where the swap machine is."""
        return self._machine.state

    @property
    def version(self) -> PolicyVersion:
        """The newest published policy version."""
        return self._fleet.version

    @property
    def history(self) -> tuple[Transition, ...]:
        """The machine's moves so far, oldest first."""
        return tuple(self._machine.history)

    def _op(self) -> OpContext:
        op = replace(current_op(), run_id=self.run_id, state=self._machine.state.value)
        return op if op.version is not None else replace(op, version=self._fleet.version)

    def _moved(self, move: Transition) -> None:
        self._observers.tell(
            StateChanged, move.source, move.target, move.trigger.value, move.reason, move.seconds
        )

    # Life

    async def __aenter__(self) -> Self:
        self._life.begin()
        try:
            with operation(run_id=self.run_id, state=State.STARTING.value, version=0):
                async with deadline(
                    State.STARTING, self._swap.timeouts.starting, self._fleet.waiting_for
                ):
                    await self._start()
            # Outside of that operation: requests belong to no phase, version or sync.
            with operation(run_id=self.run_id):
                self._recovery.begin()
                self._life.watch(self._source.run(), "source")
                self._life.watch(self._recovery.run(), "heal")
        except BaseException as error:
            await self._leave(error)
            raise AssertionError("unreachable: leaving with an error raises it") from error
        return self

    async def _start(self) -> None:
        await all_or_first_error([self._fleet.start(self._up), self._start_trainer()])
        spec = await self._fleet.open_channel(
            self._trainer,
            self._swap.backend,
            self._swap.timeouts.channel,
            staged=self._swap.staged,
        )
        self._swaps.nbytes = spec.nbytes
        await self._validator.control()
        if self._keeper.resumes:
            self._observers.emit(
                await self._keeper.bring_back(
                    self._fleet, self._trainer, self._validator, self._swap, spec.nbytes
                )
            )
            self._recovery.committed = (self._fleet.version, self._keeper.sent)
            self._recovery.staged = self._recovery.committed
        self._machine.fire(Trigger.START, Guard.CHANNEL_PROVED)

    def _up(self, engine: Engine, info: EngineInfo) -> None:
        # Watched at once: it may die while the others take their minutes to start.
        self._life.watch(self._watch_engine(engine), f"watch-{engine.name}")
        self._observers.tell(EngineStarted, info)

    async def _start_trainer(self) -> None:
        if isinstance(self._trainer, Trainer):
            info = await self._trainer.start()
            if info is not None:
                self._observers.tell(TrainerStarted, info)
        self._life.watch(self._watch_trainer(self._trainer), "watch-trainer")

    def _behind(self, error: BaseException) -> BaseException | None:
        """The swap that fenced every replica knows why; what they met then is no news."""
        swap = self._publisher.swapping
        if swap is None or self._fleet.serving:
            return error
        if not swap.done():
            return None  # it is about to say why
        return error if swap.cancelled() else swap.exception() or error

    async def _watch_engine(self, engine: Engine) -> None:
        cause = await engine.wait_dead()
        if self._life.closing:
            return
        if self._fleet.heals:
            for replica in self._fleet.named([engine.name]):
                self._fleet.lose(replica, cause)
            return
        self._observers.tell(ReplicaDied, engine.name, cause)
        raise EngineDied(engine.name, cause)

    async def _watch_trainer(self, trainer: WeightSender) -> None:
        cause = await trainer.wait_dead()
        if self._life.closing or trainer is not self._trainer:
            return
        self._observers.tell(ReplicaDied, "trainer", cause)
        if self._loop is None or not self._loop.takes(cause):
            raise TrainerDied(f"trainer: {cause}")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._leave(error)

    async def aclose(self) -> None:
        """Release everything. Idempotent; leaving the ``async with`` block calls it."""
        await self._life.release()

    def interrupt(self) -> None:
        """End the run now: the host is cancelled; what requests have is kept. Idempotent."""
        self._life.interrupt()

    async def _leave(self, error: BaseException | None) -> None:
        """Release everything, then raise the error that mattered, if any."""
        error = await self._life.leave(error)
        outcome = outcome_of(error)
        failure = error if outcome is Outcome.FAILED else None
        self._observers.tell(RunEnded, outcome, self._fleet.version, failure)
        if error is not None:
            raise error

    async def _release(self, error: BaseException | None, failed: bool) -> list[str]:
        """Requests hand over what they have, then everything goes; within ``stopping``.

        What may be left of the run."""
        budget = self._swap.timeouts.stopping
        swapping = self._publisher.swapping
        with operation(run_id=self.run_id):
            if swapping is not None:
                swapping.cancel()
                await asyncio.wait([swapping], timeout=budget / 8)
            if self._machine.state is not State.STARTING:
                self._source.stop()
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(budget / 8):
                        await self._fleet.abort_requests()
                await self._source.drain(budget / 8)
                if self._probes.running:
                    await asyncio.wait(self._probes.running, timeout=budget / 8)
            why = str(error or "") or (type(error).__name__ if error else "done")
            if failed and self._machine.state is State.GENERATING:
                self._machine.fire(Trigger.FAULT, reason=why)
            self._machine.fire(Trigger.FAIL if failed else Trigger.STOP, reason=why)
            closing = [
                asyncio.ensure_future(self._recovery.aclose()),
                asyncio.ensure_future(self._fleet.aclose()),
                asyncio.ensure_future(self._trainer.aclose()),
            ]
            # A GPU may take its time to be left, and after a good end there is time.
            seconds = 2 * budget if error is None and not failed else budget / 2
            closed, late = await asyncio.wait(closing, timeout=seconds)
            left = [
                *(str(e) for task in closed if (e := task.exception()) is not None),
                *(f"not closed within {seconds:g} s" for _ in late),
            ]
            owned: list[asyncio.Task[Any]] = [*closing, *self._probes.running]
            if swapping is not None:
                owned.append(swapping)  # its calls ended with the engines
            await settle(owned)
            return left

    # The job

    async def run(self, steps: int) -> None:
        """Train and swap ``steps`` times; needs a :class:`Trainer`. A second call counts on.

        The steps of a run that is resumed count: after a checkpoint of step 2, ``run(5)`` makes 3.
        Returns when every step is done. Raises the first failure; the caller leaves the
        ``async with`` block with it.
        """
        trainer = self._trainer
        if not isinstance(trainer, Trainer):
            raise ConfigError(
                f"run() needs a trainer that trains; {type(trainer).__name__} only sends weights: "
                "own the loop and call sync()"
            )
        await self._refuse_outside("run")
        last = self._step - self._resumed_steps + steps
        self._resumed_steps = 0
        first, self._step = self._step + 1, max(self._step, last)
        await self._loop_of(trainer).run(range(first, last + 1), self.run_id)

    def _loop_of(self, trainer: Trainer) -> TrainLoop:
        if self._loop is None:
            self._loop = TrainLoop(
                trainer,
                self._replace_trainer,
                self._source,
                self._fleet,
                self._recovery,
                self._keeper,
                self._generation,
                self._options,
                self._swap.timeouts,
                self._publisher,
                self._observers,
                adopt=self._adopt,
            )
        return self._loop

    def _adopt(self, trainer: Trainer) -> None:
        """A new trainer: from now on everybody's."""
        self._trainer = self._cycle.sender = self._swaps.trainer = trainer
        if self._validator.scorer is not None:
            self._validator.scorer = trainer
        self._life.watch(self._watch_trainer(trainer), "watch-trainer")

    # One swap

    async def sync(self, version: int | None = None, *, wait: bool = True) -> SyncReport:
        """Publish the trainer's current weights as ``version`` (default: the next one).

        Versions only go up; one that does not is refused (ConfigError) before anything moves.
        A second call while a swap runs waits its turn, or raises SyncBusy if not ``wait``.
        A cancel before weights are touched calls the swap off; while they are half-applied, or a
        call that applies them runs, the swap is finished first, since they would serve nobody;
        checks of a committed one are dropped.
        Raises SyncError or ValidationFailed, what staging failed with (no engine was touched
        then), or Closed. When the run fails meanwhile, what it failed with: the ``async with``
        raises that too, and a body that goes on is cancelled at its next wait, be it in a
        ``finally``, and again until it leaves. A call that a task of its own makes may be
        cancelled with the body instead.
        """
        with operation(run_id=self.run_id):
            fresh = self._options.fresh
            try:
                await self._life.heed()
                return await self._publisher.publish(None, fresh=fresh, wait=wait, version=version)
            except asyncio.CancelledError:
                self._life.tell()
                raise

    async def rollouts(self) -> AsyncIterator[Rollout]:
        """Finished rollouts as they come, group by group, each with its staleness.

        Waits while there is none; ends when the orchestrator is closed, and raises Closed if it
        was before. A group counts as consumed when its first rollout is handed out: take all of it.
        After a sync in the middle of a group, the rest of it is staler by a version, and left out
        beyond ``max_staleness``.
        """
        await self._refuse_outside("hand out rollouts")
        while True:
            await self._life.heed()
            try:
                group = await self._source.take(1)
            except Closed:
                return
            for rollout in group:
                if (fresh := self._source.judge_again(rollout)) is not None:
                    yield fresh

    async def _refuse_outside(self, what: str) -> None:
        """Refuse ``what`` before everything is up and after the end."""
        await self._life.heed()
        if self._life.over:
            raise Closed(f"cannot {what} any more: the orchestrator is closed or about to be")
        if self._machine.state is State.STARTING:
            raise IllegalTransition(State.STARTING, what, "enter the orchestrator first")


def _check_prompts(name: str, prompts: Sequence[Prompt]) -> None:
    for number, prompt in enumerate(prompts):
        ids = getattr(prompt, "token_ids", None)
        if not isinstance(ids, tuple) or not ids or not all(isinstance(i, Integral) for i in ids):
            raise ConfigError(
                f"{name}[{number}] is {prompt!r:.200}: it must be a Prompt whose token_ids are a "
                "tuple of integers, of one at least"
            )
