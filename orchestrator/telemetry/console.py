"""What a person sees while a run goes on, and at its end. On a pipe: the same as plain lines."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator import events as ev
from orchestrator.telemetry.jsonl import describe, dumps
from orchestrator.telemetry.schema import Summary
from orchestrator.telemetry.text import (
    TABLE_WIDTH,
    phases,
    printable,
    result_lines,
    swap_line,
    swap_table,
)
from orchestrator.types import Outcome, RequestKind, Rollout, State, SyncReport

SHOWN_PROBES = 2
"""Cut probes whose text is shown, a version."""
WINDOW_S = 15.0
"""Seconds over which tokens a second are averaged."""

_COLOURS = {"debug": "dim", "info": "", "warning": "yellow", "error": "bold red"}
_STATE_COLOURS = {State.GENERATING: "green", State.FAILED: "bold red", State.RECOVERING: "yellow"}
_QUIET_KEYS = ("timestamp", "level", "event", "run_id", "sync_id", "state", "actor", "traceback")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would end the process here, in the middle of a swap.
        self.quiet = True
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())
            os.close(nowhere)


class Printer:
    """Writes whole lines; a reader that went away must not end a run."""

    def __init__(self, stream: TextIO | None = None, *, terminal: bool | None = None) -> None:
        self.console = _Console(
            file=stream or sys.stdout,
            force_terminal=terminal,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._lock = threading.Lock()
        self._gone = False

    def __call__(self, what: RenderableType) -> None:
        """Print one renderable; text is never wrapped."""
        with self._lock:
            if self._gone:
                return
            try:
                self.console.print(what, soft_wrap=isinstance(what, str | Text))
            except (OSError, ValueError):
                self._gone = True

    def log(self, line: dict[str, Any]) -> None:
        """A finished log line, readable."""
        style = _COLOURS.get(line["level"], "bold red")
        text = Text().append(f"{line['timestamp'][11:19]} ", "dim")
        if line["level"] != "info":
            text.append(f"{line['level']}: ", style)
        if line["actor"] != "orchestrator":
            text.append(f"[{printable(str(line['actor']), 40)}] ", "cyan")
        text.append(printable(line["event"], 2000), style)
        for key, value in line.items():
            if key not in _QUIET_KEYS and value is not None:
                text.append(f"  {printable(key, 40)}=", "dim")
                shown = value if isinstance(value, str) else dumps({"": value})[4:-1]
                text.append(printable(shown, 300))
        self(text)

    def json(self, line: dict[str, Any]) -> None:
        """A finished log line as JSON."""
        self(dumps(line))


class ConsoleView:
    """Observer that shows swaps, cut probes and progress; ``live`` adds a display at the bottom.

    The display is drawn on a thread of rich's from plain attributes that the event loop sets.
    """

    def __init__(
        self, printer: Printer, run_dir: Path, steps: int, *, live: bool, quiet: bool = False
    ) -> None:
        self._print, self._dir, self._steps, self._quiet = printer, run_dir, steps, quiet
        self._state, self._since = State.STARTING, time.time()
        self._step = self._version = self._finished = 0
        self._last: SyncReport | None = None
        self._shown: dict[int, int] = {}
        self._tokens: deque[tuple[float, int]] = deque()
        self._written, self._written_since = 0, 0.0
        self._live: Live | None = None
        if live and not quiet and printer.console.is_terminal:
            self._live = Live(
                get_renderable=self._display,
                console=printer.console,
                refresh_per_second=8,
                transient=True,
            )
            self._live.start(refresh=True)

    def close(self) -> None:
        """Take the live display away. Idempotent."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def __call__(self, event: ev.Event) -> None:
        match event:
            case ev.StateChanged(target=target):
                self._state, self._since = target, event.at
                self._written_since = self._written_since or event.at
            case ev.EngineStarted(info=i):
                self._say(f"engine {i.name} is up: {i.workers} worker(s), {i.dtype}, {i.hardware}")
            case ev.RolloutFinished(rollout=rollout):
                count = len(rollout.completion.token_ids)
                self._finished += 1
                self._written += count
                self._tokens.append((event.at, count))
                self._show_cut(rollout)
            case ev.TrainStepDone(stats=s):
                self._step = s.step
                since, self._written_since = self._written_since, event.at
                written, self._written = self._written, 0
                speed = written / max(event.at - since, 1e-3)
                self._say(
                    f"step {s.step}/{self._steps}  reward {s.reward:.3f}  loss {s.loss:.4f}  "
                    f"grad norm {s.grad_norm:.3f}  {s.tokens} tokens trained in {s.seconds:.2f} s  "
                    f"{speed:.0f} tok/s written"
                )
            case ev.SwapDone(report=report):
                self._last, self._version = report, int(report.update.version)
                self._say(swap_line(report, self._steps), "green" if report.ok else "bold red")
            case ev.ReplicaDied(actor=actor, cause=cause):
                self._print(Text(f"lost {actor}: {printable(cause, 500)}", "bold red"))
            case ev.ReplicaAdmitted(engine=name, version=version, seconds=seconds):
                self._say(
                    f"{name} serves version {version}; its digest matches; out for {seconds:.1f} s",
                    "green",
                )
            case ev.SwapFailed(error=error) if isinstance(error, Exception):
                self._print(Text(f"swap failed: {printable(describe(error), 2000)}", "bold red"))
            case _:
                pass

    def rate(self) -> float:
        """Tokens a second of the requests that ended within the window."""
        now = time.time()
        while self._tokens and self._tokens[0][0] < now - WINDOW_S:
            self._tokens.popleft()
        # A copy: the event loop appends while the display's thread sums.
        window = list(self._tokens)
        if not window:
            return 0.0
        return sum(n for _, n in window) / max(now - window[0][0], 1.0)

    def _say(self, text: str, style: str = "") -> None:
        if not self._quiet:
            line = Text().append(time.strftime("%H:%M:%S ", time.gmtime()), "dim")
            self._print(line.append(printable(text, 2000), style))

    def _show_cut(self, rollout: Rollout) -> None:
        done = rollout.completion
        if self._quiet or rollout.request.kind is not RequestKind.PROBE or not rollout.cut:
            return
        version = int(rollout.max_version)
        shown = self._shown[version] = self._shown.get(version, 0) + 1
        if shown > SHOWN_PROBES:
            return
        lines = Text().append("         cut and continued: ", "dim")
        lines.append(printable(rollout.request.prompt.text or rollout.request.request_id, 100))
        last = len(done.spans) - 1
        for n, (span, text) in enumerate(zip(done.spans, done.span_texts, strict=False)):
            lines.append(f"\n           v{span.version} [{span.start},{span.end}) ", "cyan")
            lines.append("│ " + printable(text, tail=n < last))
        self._print(lines)

    def _display(self) -> RenderableType:
        head = Text(" ")
        head.append(f"{self._state.value:<11}", _STATE_COLOURS.get(self._state, "cyan"))
        head.append(f" {max(time.time() - self._since, 0):5.1f} s")
        head.append(f"   step {self._step}/{self._steps}   policy v{self._version}")
        head.append(f"   {self.rate():.0f} tok/s   {self._finished} requests ended")
        bar = Table.grid(padding=(0, 1))
        bar.add_row(" steps", ProgressBar(max(self._steps, 1), self._step, width=40))
        rows: list[RenderableType] = [head, bar]
        if self._last is not None:
            rows.append(Text(f" last swap: {phases(self._last.seconds)}", "dim"))
        return Group(*rows)

    def result(self, summary: Summary) -> None:
        """Print how the run ended: a table on a terminal, lines elsewhere."""
        self.close()
        console = self._print.console
        wide = console.is_terminal and console.width >= TABLE_WIDTH
        if summary.swaps and wide and not self._quiet:
            self._print(swap_table(summary))
        style = {Outcome.COMPLETED: "bold green", Outcome.FAILED: "bold red"}
        for n, line in enumerate(result_lines(summary, self._dir)):
            self._print(Text(line, style.get(summary.outcome, "yellow") if n == 0 else ""))
