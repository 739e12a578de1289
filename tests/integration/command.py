"""Starting the command as a user does, and looking at what it leaves behind."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "tests" / "plugins"
_MARK = "MIDFLIGHT_TEST_MARK"


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str
    folder: Path
    seconds: float
    after_fault: float | None
    """Seconds from the line of an injection or an interrupt to the end of the process."""
    left: tuple[str, ...]
    """Processes of it that were still there when it had ended."""

    @property
    def summary(self) -> dict[str, Any]:
        """What it wrote."""
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A JSON lines file of the run."""
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


def command(
    module: str,
    arguments: Sequence[str],
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 280.0,
) -> Ended:
    """``python -m module arguments --output-dir folder``, in a process group of its own."""
    mark = secrets.token_hex(8)
    words = module.split()
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *words, *arguments, "--output-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, _MARK: mark, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    fault: float | None = None
    out: list[str] = []
    killer = _Killer(process, timeout)
    with process, killer:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            out.append(line)
            if " injected " in line or line.startswith("interrupt in "):
                fault = time.monotonic()
        errors = process.stderr.read()
        code = process.wait()
    ended = time.monotonic()
    left = tuple(describe(p) for p in marked(mark))
    for survivor in marked(mark):
        survivor.kill()
    return Ended(
        code,
        "".join(out),
        errors,
        folder,
        ended - began,
        None if fault is None else ended - fault,
        left,
    )


class _Killer:
    """Ends the command's whole group when it takes too long: a hang fails, it does not hang."""

    def __init__(self, process: subprocess.Popen[str], seconds: float) -> None:
        import threading

        self._process = process
        self._timer = threading.Timer(seconds, self._kill)

    def _kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *args: object) -> None:
        self._timer.cancel()


def marked(mark: str) -> list[psutil.Process]:
    """Running processes that inherited the mark, whoever their parent is by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(_MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def describe(process: psutil.Process) -> str:
    """For the message of a failed test."""
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return str(process.pid)
