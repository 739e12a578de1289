"""Signals and the last resort: a run ends in time, whatever hangs.

first signal    the host is asked to end; a watchdog is armed
second signal   children are killed and the process exits at once
watchdog        the same, when an orderly end takes longer than its grace
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from orchestrator.errors import EXIT_INTERRUPTED

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE_S = 9.0
"""An orderly end after a signal or a failure may take this long."""
THREADS_GRACE_S = 1.0
"""... and the threads that are left after that, this long."""
FINAL_GRACE_S = 30.0
"""... after a run that was completed."""


def kill_children() -> int:
    """SIGKILL every descendant of this process; returns how many."""
    import psutil

    killed = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
            killed += 1
    return killed


def exit_now(code: int, why: str) -> None:
    """Kill every descendant and leave without any clean-up. Does not return."""
    killed = kill_children()
    with contextlib.suppress(Exception):
        print(f"midflight: {why}: killed {killed} processes and left", file=sys.stderr, flush=True)
    os._exit(code)


class Watchdog:
    """Ends the process when it is not disarmed in time.

    A thread, not a loop timer: what hangs may be the loop.
    """

    def __init__(self, last_words: Callable[[], None] = lambda: None) -> None:
        self._last_words = last_words
        self._timer: threading.Timer | None = None

    def arm(self, seconds: float, code: int, why: str) -> None:
        """Start the countdown; the first one stands."""
        if self._timer is None:
            self._timer = threading.Timer(seconds, self.bite, (code, why))
            self._timer.daemon = True
            self._timer.start()

    def bite(self, code: int, why: str) -> None:
        """Save what can be saved, then :func:`exit_now`."""
        with contextlib.suppress(BaseException):
            self._last_words()
        exit_now(code, why)

    def disarm(self) -> None:
        """Stop the countdown. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Interrupts:
    """SIGINT and SIGTERM of the running loop, from :meth:`install` to :meth:`remove`.

    ``stop`` is called once, in the loop, by the first signal that comes while the run is not
    ending by itself.
    """

    def __init__(self, watchdog: Watchdog, stop: Callable[[], None]) -> None:
        self._watchdog, self._stop = watchdog, stop
        self._loop = asyncio.get_running_loop()
        self._before: dict[signal.Signals, Any] = {}
        self.interrupted = False
        """Whether a signal ended the run."""
        self.ending = False
        """Set by the owner once the run ends by itself; a signal then changes nothing."""

    def install(self) -> None:
        """Take the signals over (only the main thread can; elsewhere nothing happens)."""
        if threading.current_thread() is not threading.main_thread():
            return
        for sig in SIGNALS:
            self._before[sig] = signal.getsignal(sig)
            self._loop.add_signal_handler(sig, self._first)

    def reclaim(self) -> None:
        """Take them again: a native library may have put its own handlers over ours."""
        if not self.ending:
            for sig in self._before:
                self._loop.add_signal_handler(sig, self._first)

    def remove(self) -> None:
        """Give the signals back. Idempotent."""
        for sig, handler in self._before.items():
            self._loop.remove_signal_handler(sig)
            signal.signal(sig, handler)
        self._before.clear()

    def _first(self) -> None:
        for sig in self._before:
            # Not through the loop: the second signal must work while the loop is stuck.
            self._loop.remove_signal_handler(sig)
            signal.signal(sig, self._second)
        self._watchdog.arm(GRACE_S, EXIT_INTERRUPTED, f"not stopped within {GRACE_S:g} s")
        if not self.ending:
            self.interrupted = self.ending = True
            self._stop()

    def _second(self, number: int, frame: FrameType | None) -> None:
        self._watchdog.bite(EXIT_INTERRUPTED, "interrupted again")
