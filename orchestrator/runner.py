"""One run, from settings to exit code: wires the parts, the orchestrator and the telemetry.

::

    preflight ─▶ run directory ─▶ telemetry ─▶ assemble ─▶ Orchestrator.run ─▶ summary ─▶ exit code

Whatever happens after the run directory exists, ``summary.json`` is written and every file is
closed. :func:`run` takes its parts from a provider, so that a test can bring its own.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from orchestrator.checkpoint import Checkpoints, RunCheckpoint
from orchestrator.config import Settings
from orchestrator.context import current_op, operation
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    MidflightError,
    cannot_write,
)
from orchestrator.events import Event, Observer, RunEnded
from orchestrator.injection import STAGING
from orchestrator.injector import Injector
from orchestrator.options import check_strategy
from orchestrator.protocols import Engine, EngineFactory, EngineMaker, TrainerMaker, WeightSender
from orchestrator.run_folder import CHECKPOINTS, checkpoint_of
from orchestrator.scheduler import Orchestrator
from orchestrator.shutdown import (
    FINAL_GRACE_S,
    GRACE_S,
    THREADS_GRACE_S,
    Interrupts,
    Watchdog,
)
from orchestrator.tasks import first_error
from orchestrator.telemetry import Telemetry
from orchestrator.telemetry.jsonl import describe, write_atomic
from orchestrator.telemetry.log import format_traceback
from orchestrator.types import Outcome, PolicyVersion, Prompt, TransferBackend, at_hand, route

OnActorEvent = Callable[[str, dict[str, Any]], None]


class Prepared(Protocol):
    """What preflight resolved from the settings and the hardware; the provider knows the rest."""

    @property
    def backend(self) -> TransferBackend:
        """Never ``auto``."""
        ...

    @property
    def staged(self) -> bool:
        """Whether the bytes arrive in a second copy first."""
        ...

    @property
    def min_pass_rate(self) -> float:
        """Used where the settings leave it open."""
        ...

    @property
    def canary_tolerance(self) -> float:
        """Used where the settings leave it open."""
        ...


class Parts(Protocol):
    """The data plane of one run."""

    @property
    def engines(self) -> Sequence[Engine]:
        """Not yet started."""
        ...

    @property
    def trainer(self) -> WeightSender:
        """Not yet started; a full ``Trainer``."""
        ...

    @property
    def engine_factory(self) -> EngineFactory | None:
        """For the fresh check."""
        ...

    @property
    def replace_engine(self) -> EngineMaker | None:
        """For replicas that are lost."""
        ...

    @property
    def replace_trainer(self) -> TrainerMaker | None:
        """For a trainer that died."""
        ...

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Rollouts are made of these."""
        ...

    @property
    def probes(self) -> Sequence[Prompt]:
        """These run greedily across every swap."""
        ...

    @property
    def hardware(self) -> str:
        """One line, for the summary."""
        ...

    @property
    def packages(self) -> Mapping[str, str]:
        """Name -> version, for the summary."""
        ...


Assemble = Callable[[Settings, Any, Path, OnActorEvent], AbstractAsyncContextManager[Parts]]
"""Brings the data plane up for the time of the block, and takes all of it down after it."""


def new_run_id() -> str:
    """UTC time and four random hex digits."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + secrets.token_hex(2)


def make_run_dir(settings: Settings, run_id: str) -> Path:
    """Create the run's folder; ConfigError if it holds a run already or cannot be made."""
    folder = settings.output_dir or Path("runs") / run_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [
            n
            for n in ("config.yaml", "events.jsonl", "rollouts.jsonl", "summary.json")
            if (folder / n).exists()
        ]
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(
            f"cannot make --output-dir {folder}: {reason}. Name a folder that can be written"
        ) from None
    if taken:
        raise ConfigError(
            f"--output-dir {folder} holds a run already ({taken[0]}): name another or remove it"
        )
    return folder


def write_config(settings: Settings, prepared: Prepared, run_dir: Path) -> None:
    """Write ``config.yaml``: the settings with what preflight resolved."""
    validation = settings.validation_options(min_pass_rate=prepared.min_pass_rate)
    text = settings.to_yaml(
        backend=route(prepared.backend, prepared.staged),
        min_pass_rate=validation.min_pass_rate,
    )
    try:
        write_atomic(run_dir / "config.yaml", text)
    except OSError as error:
        raise cannot_write(run_dir, error) from None


def check_injections(settings: Settings, prepared: Prepared) -> None:
    """ConfigError for one that cannot strike over the backend that was resolved."""
    for injection in settings.inject:
        if injection.place == STAGING and not at_hand(prepared.backend, prepared.staged):
            way = route(prepared.backend, prepared.staged)
            raise ConfigError(
                f"--inject {injection}: over {way} no bytes travel before the pause. Use --backend "
                "staged, or another state"
            )


def execute(
    settings: Settings,
    preflight: Callable[[Settings], Prepared],
    assemble: Assemble,
    observers: Sequence[Observer] = (),
    *,
    resume: Path | None = None,
) -> int:
    """The whole run; returns the exit code. ConfigError before anything is started.

    ``resume``: the folder of a run to go on with, from its last checkpoint.
    """
    checkpoint: RunCheckpoint | None = None
    passed_over: tuple[str, ...] = ()
    if resume is not None:
        checkpoint, passed_over = checkpoint_of(resume, settings)
    prepared = preflight(settings)
    check_injections(settings, prepared)
    check_strategy(settings.swap_options(prepared.backend, staged=prepared.staged))
    if resume is None or checkpoint is None:
        run_id = new_run_id()
        run_dir = make_run_dir(settings, run_id)
    else:
        run_id, run_dir = checkpoint.run_id, resume
    if checkpoint is None:
        write_config(settings, prepared, run_dir)
    watchdog = Watchdog()
    with asyncio.Runner() as runner:
        job = run(
            settings,
            prepared,
            assemble,
            run_dir=run_dir,
            run_id=run_id,
            observers=observers,
            resume=checkpoint,
            passed_over=passed_over,
        )
        code = runner.run(job)
        # Closing the loop waits for worker threads, and one of them may hang.
        watchdog.arm(THREADS_GRACE_S, code, f"threads did not end within {THREADS_GRACE_S:g} s")
    watchdog.disarm()
    return code


async def run(
    settings: Settings,
    prepared: Prepared,
    assemble: Assemble,
    *,
    run_dir: Path,
    run_id: str,
    observers: Sequence[Observer] = (),
    stdout: TextIO | None = None,
    resume: RunCheckpoint | None = None,
    passed_over: Sequence[str] = (),
) -> int:
    """Run to the end and report; returns the exit code, raises only a cancel of its caller.

    ``resume``: go on from there; ``passed_over``: newer ones that cannot be used, and why.
    """
    ended: list[RunEnded] = []

    def note_end(event: Event) -> None:
        if isinstance(event, RunEnded):
            ended.append(event)

    injector = Injector(settings.inject, lambda event: telemetry.emit(event))
    telemetry = Telemetry(
        run_dir,
        run_id,
        settings.steps,
        log_format=settings.log_format,
        quiet=settings.quiet,
        verbose=settings.verbose,
        stdout=stdout,
        observers=(*observers, injector, note_end),
        resume=resume,
    )
    with operation(run_id=run_id):
        for reason in passed_over:
            telemetry.log.write("warning", "checkpoint passed over", reason=reason)
        life = _Life(settings, prepared, assemble, run_dir, telemetry, injector, resume)
        outcome, error, cancelled = await life.live()
        injector.close()
        for line in injector.never_struck():
            telemetry.log.write("warning", line)
        code = _exit_code(outcome, error)
        if not ended:
            version = PolicyVersion(0)
            telemetry.emit(RunEnded(time.time(), current_op(), outcome, version, error))
        elif error is not None and error is not ended[-1].error:
            telemetry.log.write(
                "error", "run failed", error=error, traceback=format_traceback(error)
            )
        code = _report(telemetry, outcome, error, code)
    life.watchdog.disarm()
    if cancelled is not None:
        raise cancelled
    return code


class _Life:
    """The part of a run in which something is up that must come down."""

    def __init__(
        self,
        settings: Settings,
        prepared: Prepared,
        assemble: Assemble,
        run_dir: Path,
        telemetry: Telemetry,
        injector: Injector,
        resume: RunCheckpoint | None,
    ) -> None:
        self._resume = resume
        self._settings, self._prepared, self._assemble = settings, prepared, assemble
        self._dir, self._telemetry, self._injector = run_dir, telemetry, injector
        self._task = asyncio.current_task()
        self._host: Orchestrator | None = None
        self._error: BaseException | None = None
        self.watchdog = Watchdog(self._last_words)
        self._interrupts = Interrupts(self.watchdog, self._stop)

    async def live(
        self,
    ) -> tuple[Outcome, BaseException | None, asyncio.CancelledError | None]:
        """Outcome, its error, and a cancel that came from the caller and is to go on."""
        signals = self._interrupts
        signals.install()
        try:
            await self._work()
        except asyncio.CancelledError as cancelled:
            if signals.interrupted:
                if self._task is not None:
                    self._task.uncancel()
                return Outcome.INTERRUPTED, None, None
            return Outcome.INTERRUPTED, None, cancelled
        except Exception as caught:
            error = first_error(caught)
            if signals.interrupted:
                # What breaks while a run is being stopped is not why it ended.
                self._telemetry.log.write(
                    "warning", "error while stopping", error=error,
                    traceback=format_traceback(error),
                )  # fmt: skip
                return Outcome.INTERRUPTED, None, None
            return Outcome.FAILED, error, None
        finally:
            signals.remove()
        return (Outcome.INTERRUPTED if signals.interrupted else Outcome.COMPLETED), None, None

    async def _work(self) -> None:
        s, p, telemetry = self._settings, self._prepared, self._telemetry
        async with self._assemble(s, p, self._dir, telemetry.on_actor_event) as parts:
            self._interrupts.reclaim()  # Ray installs native handlers
            telemetry.recorder.hardware = parts.hardware
            telemetry.recorder.packages = dict(parts.packages)
            orchestrator = Orchestrator(
                parts.engines,
                parts.trainer,
                prompts=parts.prompts,
                probes=parts.probes,
                swap=s.swap_options(p.backend, staged=p.staged),
                generation=s.generation_options(),
                validation=s.validation_options(
                    min_pass_rate=p.min_pass_rate, canary_tolerance=p.canary_tolerance
                ),
                engine_factory=parts.engine_factory,
                recovery=s.recovery_options(),
                replace_engine=parts.replace_engine,
                replace_trainer=parts.replace_trainer,
                observers=[telemetry.emit],
                run_id=current_op().run_id,
                checkpoints=Checkpoints(self._dir / CHECKPOINTS, self),
                checkpoint_every=s.checkpoint_every,
                resume=self._resume,
            )
            self._host = orchestrator
            try:
                async with orchestrator:
                    try:
                        await orchestrator.run(s.steps)
                    except BaseException as error:
                        self._end(GRACE_S, error)
                        raise
                    self._end(FINAL_GRACE_S)
            except BaseException as error:
                self._end(GRACE_S, error)
                raise
            finally:
                self._host = None

    # what a checkpoint attaches

    def state(self) -> Mapping[str, Any]:
        """See :class:`~orchestrator.checkpoint.Attachment`."""
        return self._telemetry.recorder.state()

    def sync(self) -> None:
        """See the protocol."""
        self._telemetry.recorder.sync()

    def resumed(self) -> None:
        """See the protocol."""
        # Not before: settings that cannot be run must not take the place of those that can.
        write_config(self._settings, self._prepared, self._dir)
        try:
            self._telemetry.recorder.resumed()
        except OSError as error:
            raise cannot_write(self._dir, error) from None

    # its end

    def _end(self, grace: float, error: BaseException | None = None) -> None:
        self._interrupts.ending = True
        if isinstance(error, Exception):
            self._error = first_error(error)
        # A run whose clean-up hangs has failed, whatever it did before. A cancel that no signal
        # asked for stands for the failure of something in the background.
        asked = self._interrupts.interrupted or not isinstance(error, asyncio.CancelledError)
        code = _exit_code(Outcome.FAILED, error if asked else None)
        self.watchdog.arm(grace, code, f"clean-up took longer than {grace:g} s")

    def _stop(self) -> None:
        # At once: a signal to the whole process group takes Ray down, and Ray then us.
        with suppress(OSError):
            self._telemetry.recorder.finish(Outcome.INTERRUPTED)
        if self._host is not None:
            self._host.interrupt()
        elif self._task is not None:
            self._task.cancel()

    def _last_words(self) -> None:
        self._injector.close()  # in a cluster that stays, nobody would ever let them go on
        if self._interrupts.interrupted:
            self._telemetry.recorder.finish(Outcome.INTERRUPTED)
            return
        error = self._error or MidflightError("clean-up did not end in time")
        self._telemetry.recorder.finish(Outcome.FAILED, error)
        print(f"midflight: error: {explain(error, self._dir)}", file=sys.stderr, flush=True)


def _exit_code(outcome: Outcome, error: BaseException | None) -> int:
    if outcome is Outcome.COMPLETED:
        return EXIT_OK
    if outcome is Outcome.INTERRUPTED or isinstance(error, asyncio.CancelledError):
        return EXIT_INTERRUPTED
    return error.exit_code if isinstance(error, MidflightError) else EXIT_FAILED


def _report(telemetry: Telemetry, outcome: Outcome, error: BaseException | None, code: int) -> int:
    try:
        telemetry.finish(outcome, error)
    except OSError as refused:
        print(f"midflight: error: cannot write the summary: {refused}", file=sys.stderr)
        code = code or EXIT_FAILED
    finally:
        telemetry.close()
        if error is not None:
            print(f"midflight: error: {explain(error, telemetry.run_dir)}", file=sys.stderr)
    return code


def explain(error: BaseException, run_dir: Path | None = None) -> str:
    """One line for a person: our own errors speak for themselves, others name their kind."""
    if isinstance(error, MidflightError):
        return " ".join(str(error).split())
    where = f" (traceback in {run_dir}/events.jsonl)" if run_dir is not None else ""
    return f"unexpected {describe(error)}{where}"
