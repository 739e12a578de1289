"""What a run leaves behind: ``rollouts.jsonl`` while it goes on, ``summary.json`` at its end."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from orchestrator import events as ev
from orchestrator.cycle import stall_stats
from orchestrator.errors import ConfigError
from orchestrator.telemetry import schema
from orchestrator.telemetry.jsonl import JsonLines, cut, describe, write_atomic
from orchestrator.telemetry.log import timestamp
from orchestrator.telemetry.records import (
    finite,
    rollout_record,
    stall_record,
    swap_record,
    validation_record,
)
from orchestrator.types import Outcome, RequestKind, Rollout, State, SyncReport, TokenSpan

if TYPE_CHECKING:
    from orchestrator.checkpoint import RunCheckpoint

HELD = 4096
"""Consumed rollouts that may wait for their reward before they are written without one."""


class RunRecorder:
    """Observer that writes a run's rollouts and summary into ``run_dir``.

    A rollout is written once: when it was trained on or discarded, a probe when it ends, and
    whatever is left at the end of the run as it is then. :meth:`finish` writes the summary; the
    event ``RunEnded`` does so too, and a later :meth:`finish` corrects it (a run may still fail
    while it is taken down).

    :meth:`state` goes into a checkpoint, and a recorder that is given one goes on from there: with
    :meth:`resumed` ``rollouts.jsonl`` loses the lines that came after it, and the summary is of
    the whole run. A run that does not come so far leaves both files as they are.
    """

    def __init__(
        self, run_dir: Path, run_id: str, steps: int = 0, *, resume: RunCheckpoint | None = None
    ) -> None:
        """ConfigError when ``resume`` is not of a run that was recorded here."""
        before = None if resume is None else _so_far(resume, run_dir / "rollouts.jsonl")
        self.summary_path = run_dir / "summary.json"
        self.hardware = ""
        self.packages: dict[str, str] = {}
        self.summary: schema.Summary | None = None
        self._run_id, self._steps, self._started = run_id, steps, time.time()
        self._began, self._seconds_before = self._started, 0.0
        self._lines = JsonLines(run_dir / "rollouts.jsonl")
        self._open: dict[str, tuple[Rollout, bool]] = {}
        self._written: set[str] = set()
        self._finished: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._tokens: Counter[int] = Counter()
        self._cuts: dict[RequestKind, Counter[int]] = defaultdict(Counter)
        self._stalls: list[float] = []
        self._swaps: dict[str, schema.SwapRecord] = {}
        self._failed: list[schema.FailedSwapRecord] = []
        self._recoveries: list[schema.RecoveryRecord] = []
        self._training: list[schema.TrainRecord] = []
        self._seconds: dict[State, float] = defaultdict(float)
        self._version: int | None = None
        self._ended = False
        self._resumed_at: list[int] = []
        self._resumes: schema.SoFar | None = before
        """Where to go on, until the run has resumed there."""
        if resume is not None and before is not None:
            self._go_on(resume, before)

    def state(self) -> dict[str, Any]:
        """What :class:`~orchestrator.checkpoint.Checkpoints` attaches to a checkpoint."""
        return schema.SoFar(
            started=self._started,
            seconds=self._elapsed(time.time()),
            rollouts_bytes=self._lines.size,
            training=self._training,
            swaps=list(self._swaps.values()),
            failed_swaps=self._failed,
            state_seconds=dict(self._seconds),
            resumed_at=self._resumed_at,
        ).model_dump(mode="json")

    def sync(self) -> None:
        """Return when ``rollouts.jsonl`` is on the disk (OSError)."""
        self._lines.sync()

    def _elapsed(self, now: float) -> float:
        return self._seconds_before + now - self._began

    def _go_on(self, resume: RunCheckpoint, before: schema.SoFar) -> None:
        self._started, self._seconds_before = before.started, before.seconds
        self._resumed_at = [*before.resumed_at, resume.step]
        self._training, self._failed = list(before.training), list(before.failed_swaps)
        self._swaps = {swap.sync_id: swap for swap in before.swaps}
        self._seconds.update(before.state_seconds)
        self._version = int(resume.version)
        with self._lines.path.open("rb") as file:
            for line in file.read(before.rollouts_bytes).splitlines():
                try:
                    record = schema.RolloutRecord.model_validate_json(line)
                except ValidationError:
                    continue  # a full disk tore it, which was told then
                self._finished.add(record.id)
                self._written.add(record.id)
                self._counts[record.status] += 1
                seconds = [s.seconds for s in record.stalls if s.seconds is not None]
                self._count(record.kind, record.spans, seconds)
        for group in resume.source.waiting:
            for rollout in group:
                self._on_finished(rollout)

    def resumed(self) -> None:
        """The run goes on from the checkpoint: what came after it is cut off (OSError)."""
        if self._resumes is not None:
            cut(self._lines.path, self._resumes.rollouts_bytes)
            self.summary_path.unlink(missing_ok=True)  # of the part that ended
            self._resumes = None

    @property
    def untouched(self) -> bool:
        """The run was to go on from a checkpoint, and has not come so far."""
        return self._resumes is not None

    def __call__(self, event: ev.Event) -> None:
        match event:
            case ev.StateChanged():
                self._seconds[event.source] += event.seconds
            case ev.EngineStarted(info=info):
                self.hardware = self.hardware or info.hardware
                self.packages = {**info.packages, **self.packages}
            case ev.RolloutFinished():
                self._on_finished(event.rollout)
            case ev.RolloutConsumed():
                self._on_consumed(event.rollout, event.accepted)
            case ev.TrainStepDone(stats=s):
                self._training.append(
                    schema.TrainRecord(
                        step=s.step,
                        loss=finite(s.loss),
                        reward=finite(s.reward),
                        grad_norm=finite(s.grad_norm),
                        tokens=s.tokens,
                        seconds=finite(s.seconds),
                    )
                )
                for rollout in event.rollouts:
                    self._write(self._merged(rollout), "trained")
            case ev.SwapDone():
                self._on_swap(event.report)
            case ev.SwapFailed():
                self._on_failed(event)
            case ev.ReplicaDied(actor=actor, cause=cause):
                self._recoveries.append(
                    schema.RecoveryRecord(
                        event="lost",
                        actor=actor,
                        version=event.op.version,
                        seconds=None,
                        cause=cause,
                    )
                )
            case ev.ReplicaAdmitted(engine=engine, seconds=seconds):
                self._recoveries.append(
                    schema.RecoveryRecord(
                        event="admitted",
                        actor=engine,
                        version=int(event.version),
                        seconds=finite(seconds),
                        cause=None,
                    )
                )
            case ev.RunEnded():
                self._version = int(event.version)
                self.finish(event.outcome, event.error)
            case _:
                pass

    def _on_finished(self, rollout: Rollout) -> None:
        name = rollout.request.request_id
        if name in self._finished:
            return
        self._finished.add(name)
        done = rollout.completion
        kind = rollout.request.kind
        seconds = [s.seconds for s in done.stalls if math.isfinite(s.seconds)]
        self._count(kind, done.spans, seconds)
        if kind is RequestKind.PROBE:
            self._write(rollout, "probe")
        elif self._ended:
            self._write(rollout, "unused")
        else:
            self._open.setdefault(name, (rollout, False))

    def _count(
        self,
        kind: RequestKind,
        spans: Sequence[TokenSpan | schema.SpanRecord],
        stalls: Sequence[float],
    ) -> None:
        self._stalls += stalls
        for span in spans:
            self._tokens[int(span.version)] += span.end - span.start
        for before, after in itertools.pairwise(spans):
            if before.version != after.version:
                self._cuts[kind][int(after.version)] += 1
        self._counts["cut"] += len({span.version for span in spans}) > 1

    def _on_consumed(self, rollout: Rollout, accepted: bool) -> None:
        if not accepted:
            self._write(replace(self._merged(rollout), staleness=rollout.staleness), "discarded")
            return
        name = rollout.request.request_id
        if name in self._written:
            return
        self._open[name] = (self._merged(rollout), True)
        if len(self._open) > HELD:
            oldest = next((k for k, (_, consumed) in self._open.items() if consumed), None)
            if oldest is not None:
                self._write(self._open[oldest][0], "consumed")

    def _merged(self, rollout: Rollout) -> Rollout:
        known = self._open.get(rollout.request.request_id)
        if known is None:
            return rollout
        reward = known[0].reward if rollout.reward is None else rollout.reward
        staleness = known[0].staleness if rollout.staleness is None else rollout.staleness
        return replace(rollout, reward=reward, staleness=staleness)

    def _on_swap(self, report: SyncReport) -> None:
        self._swaps[report.update.sync_id] = swap_record(report)
        self._version = int(report.update.version)

    def _on_failed(self, event: ev.SwapFailed) -> None:
        report = getattr(event.error, "report", None)
        if isinstance(report, SyncReport):
            self._on_swap(report)
        self._failed.append(
            schema.FailedSwapRecord(
                step=event.op.step,
                sync_id=event.op.sync_id,
                version=event.op.version,
                state=getattr(event.error, "phase", None) or event.op.state,
                error=describe(event.error),
                fenced=list(event.fenced),
            )
        )

    def _write(self, rollout: Rollout, status: schema.RolloutStatus) -> None:
        name = rollout.request.request_id
        self._open.pop(name, None)
        if name in self._written:
            return
        self._written.add(name)
        self._counts[status] += 1
        self._lines.write(rollout_record(rollout, status).model_dump(mode="json"))

    def finish(self, outcome: Outcome, error: BaseException | None = None) -> schema.Summary:
        """Write what is left and the summary (OSError if the disk refuses it)."""
        self._ended = True
        if self._resumes is not None:
            self.summary = self._summarize(outcome, error)
            return self.summary
        for rollout, consumed in list(self._open.values()):
            self._write(rollout, "consumed" if consumed else "unused")
        self.summary = self._summarize(outcome, error)
        write_atomic(self.summary_path, self.summary.model_dump_json(indent=2) + "\n")
        return self.summary

    def close(self) -> None:
        """Flush ``rollouts.jsonl`` to disk. Idempotent."""
        self._lines.close()

    def _summarize(self, outcome: Outcome, error: BaseException | None) -> schema.Summary:
        ended, count = time.time(), self._counts
        probes, rollouts = self._cuts[RequestKind.PROBE], self._cuts[RequestKind.ROLLOUT]
        return schema.Summary(
            run_id=self._run_id,
            outcome=outcome,
            error=None if error is None else describe(error),
            error_type=None if error is None else type(error).__name__,
            started_at=timestamp(self._started),
            ended_at=timestamp(ended),
            duration_s=round(self._elapsed(ended), 3),
            hardware=self.hardware,
            packages=self.packages,
            steps=self._steps or len(self._training),
            steps_done=len(self._training),
            final_version=self._version,
            reward=[t.reward for t in self._training],
            training=self._training,
            swaps=[
                swap.model_copy(
                    update={
                        "probes_cut": probes[swap.to_version],
                        "rollouts_cut": rollouts[swap.to_version],
                    }
                )
                for swap in self._swaps.values()
            ],
            failed_swaps=self._failed,
            recoveries=self._recoveries,
            stall_s=stall_record(stall_stats(self._stalls)),
            validation=validation_record(list(self._swaps.values())),
            tokens={str(v): n for v, n in sorted(self._tokens.items())},
            rollouts=schema.RolloutCounts(
                finished=len(self._finished),
                trained=count["trained"],
                consumed=count["consumed"],
                discarded=count["discarded"],
                unused=count["unused"],
                probes=count["probe"],
                cut=count["cut"],
            ),
            state_seconds={s: round(t, 6) for s, t in self._seconds.items()},
            resumed_at=self._resumed_at,
        )


def _so_far(resume: RunCheckpoint, lines: Path) -> schema.SoFar:
    """What the checkpoint kept of the summary; ConfigError if ``lines`` has less than it knew."""
    try:
        before = schema.SoFar.model_validate(resume.attached)
    except ValidationError:
        raise ConfigError(
            f"{resume.folder} says nothing of the run's files: it was written by another program; "
            "start a new run"
        ) from None
    found = lines.stat().st_size if lines.exists() else 0
    if found < before.rollouts_bytes:
        raise ConfigError(
            f"{lines} has {found} bytes, {before.rollouts_bytes} were written before the "
            "checkpoint: put the file back, or start a new run"
        )
    return before
