"""What a run tells: log lines, the console, ``rollouts.jsonl`` and ``summary.json``.

:class:`Telemetry` opens all of it for one run. Each part is an observer of its own and may be
used alone by a trainer that embeds the orchestrator.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from orchestrator.errors import ConfigError, cannot_write
from orchestrator.events import Event, Observer
from orchestrator.telemetry.console import ConsoleView, Printer
from orchestrator.telemetry.eventlog import EventLog, actor_event
from orchestrator.telemetry.jsonl import JsonLines, cut
from orchestrator.telemetry.log import LEVELS, LogPipeline, Sinks
from orchestrator.telemetry.report import RunRecorder
from orchestrator.telemetry.schema import Summary
from orchestrator.types import Outcome

if TYPE_CHECKING:
    from orchestrator.checkpoint import RunCheckpoint

__all__ = ["ConsoleView", "EventLog", "Printer", "RunRecorder", "Summary", "Telemetry"]


class Telemetry:
    """Everything that watches one run, opened together and closed in order.

    ``log_format``: auto (live display on a terminal), console (lines only) or json. Files go
    to ``run_dir``, which exists; with ``resume`` those that are there go on (ConfigError when
    they are not what the checkpoint knew, or another process writes there). ConfigError also where
    nothing can be written.
    """

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        steps: int,
        *,
        log_format: str = "auto",
        quiet: bool = False,
        verbose: bool = False,
        stdout: TextIO | None = None,
        observers: Sequence[Observer] = (),
        resume: RunCheckpoint | None = None,
    ) -> None:
        self.run_dir = run_dir
        self._json = log_format == "json"
        self._printer = Printer(stdout)
        try:
            self._file = JsonLines(run_dir / "events.jsonl")
        except OSError as error:
            raise cannot_write(run_dir, error) from None
        try:
            if not self._file.claim():
                raise ConfigError(f"a run writes to {run_dir} now: wait for its end, or end it")
            if resume is not None:
                cut(self._file.path)
            self.recorder = RunRecorder(run_dir, run_id, steps, resume=resume)
        except BaseException:
            self._file.close()
            raise
        level = "warning" if quiet else "debug" if verbose else "info"
        self.log = LogPipeline(
            Sinks(
                self._file,
                self._printer.json if self._json else self._printer.log,
                LEVELS[level],
                shown=not self._json,
            ),
            run_id,
        )
        self._view: ConsoleView | None = None
        if not self._json:
            live = log_format == "auto"
            self._view = ConsoleView(self._printer, run_dir, steps, live=live, quiet=quiet)
        views = (self._view,) if self._view else ()
        self.observers: tuple[Observer, ...] = (
            EventLog(self.log),
            self.recorder,
            *views,
            *observers,
        )

    def emit(self, event: Event) -> None:
        """Tell every observer; one that fails is logged and does not keep it from the others."""
        for observer in self.observers:
            try:
                observer(event)
            except Exception as error:
                self.log.write("error", f"observer {observer!r} failed", error=error)

    def on_actor_event(self, actor: str, data: dict[str, Any]) -> None:
        """Take a line from inside an actor, with its own time and context."""
        self.emit(actor_event(actor, data))

    def finish(self, outcome: Outcome, error: BaseException | None = None) -> Summary:
        """Write the summary and show the result (OSError if it cannot be written)."""
        summary = self.recorder.finish(outcome, error)
        if self.recorder.untouched:
            self.log.write(
                "warning", "the run did not go on: its summary and rollouts are as they were"
            )
            return summary
        self.log.write(
            "info",
            "run summary",
            # With --quiet too the result is told.
            console_level="warning" if self._json else "debug",
            outcome=outcome,
            summary=self.recorder.summary_path,
        )
        if self._view is not None:
            self._view.result(summary)
        return summary

    def close(self) -> None:
        """Flush and close every file, put logging back. Idempotent."""
        if self._view is not None:
            self._view.close()
        self.log.close()
        self.recorder.close()
        self._file.close()
