"""What an actor says about its work, queued until the control plane fetches it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from orchestrator.context import current_op, operation
from orchestrator.types import OpContext

Record = dict[str, Any]
"""``at`` (Unix time), ``level``, ``event``, ``actor``, the fields of OpContext, own fields."""


class ActorReporter:
    """Queue of records; written from any thread, read by one long-waiting call.

    Bounded: when nobody reads, the oldest records are dropped and counted.
    """

    def __init__(self, actor: str, limit: int = 2000) -> None:
        self.actor = actor
        self._limit = limit
        self._records: deque[Record] = deque()
        self._dropped = 0
        self._lock = threading.Lock()
        self._forwarded: list[tuple[str, logging.Handler]] = []
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @contextlib.contextmanager
    def op(self, ctx: OpContext) -> Iterator[OpContext]:
        """Within the block every record carries ``ctx``."""
        with operation(**asdict(ctx)) as current:
            yield current

    def info(self, event: str, **fields: object) -> None:
        """Queue a record of level info. ``fields`` must be plain data."""
        self._put("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Queue a record of level warning."""
        self._put("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Queue a record of level error."""
        self._put("error", event, fields)

    async def next_events(self) -> list[Record]:
        """Wait until there is at least one record; returns all of them, oldest first."""
        waiting = asyncio.Event()
        with self._lock:
            self._reader = (asyncio.get_running_loop(), waiting)
            ready = bool(self._records)
        if not ready:
            await waiting.wait()
        with self._lock:
            records = list(self._records)
            self._records.clear()
            dropped, self._dropped = self._dropped, 0
        if dropped:
            records.insert(0, self._record("warning", "records dropped", {"count": dropped}))
        return records

    def forward_logger(self, name: str, level: int = logging.WARNING) -> None:
        """Also queue what the standard logger ``name`` says at ``level`` or above."""
        handler = _Forward(self, level)
        logging.getLogger(name).addHandler(handler)
        self._forwarded.append((name, handler))

    def stop_forwarding(self) -> None:
        """Undo every :meth:`forward_logger`. Idempotent."""
        while self._forwarded:
            name, handler = self._forwarded.pop()
            logging.getLogger(name).removeHandler(handler)

    def _record(self, level: str, event: str, fields: dict[str, object]) -> Record:
        op = {k: v for k, v in asdict(current_op()).items() if v is not None and v != ""}
        return {
            **op,
            **fields,
            "at": time.time(),
            "level": level,
            "event": event,
            "actor": self.actor,
        }

    def _put(self, level: str, event: str, fields: dict[str, object]) -> None:
        record = self._record(level, event, fields)
        with self._lock:
            if len(self._records) >= self._limit:
                self._records.popleft()
                self._dropped += 1
            self._records.append(record)
            reader, self._reader = self._reader, None
        if reader is not None:
            loop, waiting = reader
            with contextlib.suppress(RuntimeError):  # the reader's loop was closed
                loop.call_soon_threadsafe(waiting.set)


class _Forward(logging.Handler):
    def __init__(self, reporter: ActorReporter, level: int) -> None:
        super().__init__(level)
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        level = "error" if record.levelno >= logging.ERROR else "warning"
        self._reporter._put(level, record.getMessage(), {"logger": record.name})


def redirect_output(path: str) -> None:
    """Append this process's standard output and error, and its children's, to ``path``."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
