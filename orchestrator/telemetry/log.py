"""Log lines: structlog in front, ``events.jsonl`` and the console behind.

::

    structlog.get_logger() ─┐                        ┌─▶ events.jsonl   every line, JSON
    logging (libraries) ────┼─▶ context ─▶ time ─▶ ──┤
    EventLog (observer) ────┘                        └─▶ console        from a level up

Every line has: timestamp (UTC), level, event, run_id, sync_id, step, version, state, actor.
The context is read from :func:`orchestrator.context.current_op` for each line: structlog's own
context variables do not reach the task that called a transition, nor the next state.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog

from orchestrator.context import current_op
from orchestrator.telemetry.jsonl import JsonLines, clean, describe
from orchestrator.types import OpContext

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
CONTEXT = ("run_id", "sync_id", "step", "version", "state", "actor")

Line = dict[str, Any]


def timestamp(at: float) -> str:
    """Unix seconds as ISO 8601 in UTC with microseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Sinks:
    """Where finished lines go. ``console`` is None where a line is shown another way."""

    file: JsonLines
    console: Callable[[Line], None]
    console_level: int = LEVELS["info"]
    shown: bool = True
    """The console also shows swaps and results by itself, so those lines are kept off it."""


class LogPipeline:
    """Owns structlog's and logging's configuration from construction to :meth:`close`."""

    def __init__(self, sinks: Sinks, run_id: str) -> None:
        self._sinks, self._run_id = sinks, run_id
        self._undo = ExitStack()
        structlog.configure(
            processors=[self._emit],
            wrapper_class=structlog.make_filtering_bound_logger(LEVELS["debug"]),
            cache_logger_on_first_use=False,
        )
        self._undo.callback(structlog.reset_defaults)
        root, handler = logging.getLogger(), _Bridge(self.write)
        before = root.level
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        self._undo.callback(root.setLevel, before)
        self._undo.callback(root.removeHandler, handler)
        logging.captureWarnings(True)
        self._undo.callback(logging.captureWarnings, False)

    def close(self) -> None:
        """Put the configuration back. The sinks stay open. Idempotent."""
        self._undo.close()

    def _emit(self, logger: object, method: str, line: MutableMapping[str, Any]) -> Line:
        if exc := line.pop("exc_info", None):
            error = exc if isinstance(exc, BaseException) else _active()
            if error is not None:
                line.setdefault("error", describe(error))
                line["traceback"] = format_traceback(error)
        self.write(method, str(line.pop("event", "")), **line)
        raise structlog.DropEvent

    def write(
        self,
        level: str,
        event: str,
        /,
        *,
        op: OpContext | None = None,
        at: float | None = None,
        actor: str = "orchestrator",
        shown_elsewhere: bool = False,
        console_level: str | None = None,
        **fields: object,
    ) -> None:
        """Write one line. ``op`` and ``at`` default to the running task's and now."""
        level = {"warn": "warning", "exception": "error", "fatal": "critical"}.get(level, level)
        level = level if level in LEVELS else "info"
        op = current_op() if op is None else op
        when = datetime.now(UTC).timestamp() if at is None else at
        line: Line = {
            "timestamp": timestamp(when),
            "level": level,
            "event": event,
            "run_id": op.run_id or self._run_id,
            "sync_id": op.sync_id,
            "step": op.step,
            "version": op.version,
            "state": op.state,
            "actor": actor,
        }
        for key, value in fields.items():
            if key not in line or (key in CONTEXT and value is not None):
                line[key] = clean(value)
            elif key not in CONTEXT:
                line[f"{key}_"] = clean(value)
        self._sinks.file.write(line)
        if LEVELS[console_level or level] >= self._sinks.console_level and not (
            shown_elsewhere and self._sinks.shown
        ):
            self._sinks.console(line)


def _active() -> BaseException | None:
    return sys.exc_info()[1]


def format_traceback(error: BaseException) -> str:
    """The traceback as text; never raises."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return describe(error)


class _Bridge(logging.Handler):
    """Lines of libraries that use :mod:`logging` (asyncio's lost exceptions, warnings, Ray)."""

    def __init__(self, write: Callable[..., None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING and record.name.startswith("transitions"):
            return  # the machine's moves are events already
        try:
            message = record.getMessage()
        except Exception:
            message = f"<unprintable message {record.msg!r:.80}>"
        fields: dict[str, object] = {"logger": record.name}
        if record.exc_info and record.exc_info[1] is not None:
            fields["error"] = describe(record.exc_info[1])
            fields["traceback"] = format_traceback(record.exc_info[1])
        level = record.levelname.lower()
        quiet = "debug" if record.levelno < logging.WARNING else None
        self._write(level, message, at=record.created, console_level=quiet, **fields)
