"""The command's own flow with one more observer, as a program for tests to start.

    python -m tests.integration.drive --kill engine_core@PAUSING -- --steps 3 ...
    python -m tests.integration.drive --kill driver@PAUSING:3 -- --steps 4 ...
    python -m tests.integration.drive --interrupt GENERATING:2 -- --steps 3 ...
    python -m tests.integration.drive --interrupt RAY --signal SIGTERM -- --steps 3 ...

The observer acts in the very transition into a state, so no test has to hit a state that lasts
three milliseconds from outside. ``STATE:N`` means the N-th time it is entered; ``RAY``: while Ray
starts.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterable

import psutil

from actors import assembly
from orchestrator.cli import main as product
from orchestrator.events import EngineStarted, Event, StateChanged
from orchestrator.flags import parse
from orchestrator.runner import execute
from orchestrator.sources import load


class Saboteur:
    """Kills or interrupts on entry into a state."""

    def __init__(self, kill: str, interrupt: str, signal_name: str) -> None:
        self._signal = signal.Signals[signal_name]
        self._victim, _, state = kill.partition("@") if kill else ("", "", interrupt)
        self._state, _, nth = state.partition(":")
        self._left = int(nth or 1)
        self._engine: tuple[int, ...] = ()

    def __call__(self, event: Event) -> None:
        if isinstance(event, EngineStarted):
            self._engine = event.info.pids
        elif isinstance(event, StateChanged) and event.target.value == self._state:
            self._left -= 1
            if self._left == 0:
                self.strike()

    def strike(self) -> None:
        """Do it now."""
        print(f"sabotage in {self._state}", flush=True)
        if self._victim:
            os.kill(self._pid(), signal.SIGKILL)
        else:
            os.killpg(os.getpgid(0), self._signal)  # as a terminal does it

    def _pid(self) -> int:
        if self._victim == "driver":
            return os.getpid()
        if self._victim == "engine_actor":
            return self._engine[0]
        # Cut as the kernel cuts a process's name: its command line can be unreadable for a moment.
        if self._victim == "engine_core":
            return self._named("EngineCor", [psutil.Process(pid) for pid in self._engine])
        return self._named("TrainerAct", psutil.Process().children(recursive=True))

    def _named(self, word: str, processes: Iterable[psutil.Process]) -> int:
        titles = {p.pid: " ".join([p.name(), *p.cmdline()]) for p in processes}
        for pid, title in titles.items():
            if word in title:
                return pid
        raise LookupError(f"none of {titles} has {word} in its name")


def main() -> int:
    """Exit code of the run."""
    at = sys.argv.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", default="")
    parser.add_argument("--interrupt", default="")
    parser.add_argument("--signal", default="SIGINT")
    ours = parser.parse_args(sys.argv[1:at])
    if not ours.kill and not ours.interrupt:
        return product(sys.argv[at + 1 :])
    settings = load(parse(sys.argv[at + 1 :]), None)
    saboteur = Saboteur(ours.kill, ours.interrupt, ours.signal)
    if ours.interrupt == "RAY":
        import ray

        start = ray.init

        def sabotaged(*args: object, **kwargs: object) -> object:
            saboteur.strike()
            return start(*args, **kwargs)

        ray.init = sabotaged
    return execute(settings, assembly.preflight, assembly.assemble, [saboteur])


if __name__ == "__main__":
    sys.exit(main())
