"""The command's own flow with one more observer, as a program for tests to start.

    python -m tests.integration.drive --interrupt PAUSING:3 --signal SIGKILL -- --steps 4 ...
    python -m tests.integration.drive --interrupt GENERATING:2 -- --steps 3 ...
    python -m tests.integration.drive --interrupt RAY --signal SIGTERM -- --steps 3 ...

It interrupts in the very transition into a state, so no test has to hit a state that lasts
three milliseconds from outside. ``STATE:N`` means the N-th time it is entered; ``RAY``: while Ray
starts. Processes are killed with ``--inject``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from actors import assembly
from orchestrator.events import Event, StateChanged
from orchestrator.flags import parse
from orchestrator.runner import execute
from orchestrator.sources import load


class Interrupter:
    """Signals its process group on entry into a state."""

    def __init__(self, state: str, signal_name: str) -> None:
        self._signal = signal.Signals[signal_name]
        self._state, _, nth = state.partition(":")
        self._left = int(nth or 1)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StateChanged) and event.target.value == self._state:
            self._left -= 1
            if self._left == 0:
                self.strike()

    def strike(self) -> None:
        """Do it now, as a terminal does it; SIGKILL only to this process."""
        print(f"interrupt in {self._state}", flush=True)
        if self._signal is signal.SIGKILL:
            os.kill(os.getpid(), self._signal)
        os.killpg(os.getpgid(0), self._signal)


def main() -> int:
    """Exit code of the run."""
    at = sys.argv.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("--interrupt", required=True)
    parser.add_argument("--signal", default="SIGINT")
    ours = parser.parse_args(sys.argv[1:at])
    settings = load(parse(sys.argv[at + 1 :]), None)
    interrupter = Interrupter(ours.interrupt, ours.signal)
    if ours.interrupt == "RAY":
        import ray

        start = ray.init

        def interrupted(*args: object, **kwargs: object) -> object:
            interrupter.strike()
            return start(*args, **kwargs)

        ray.init = interrupted
    return execute(settings, assembly.preflight, assembly.assemble, [interrupter])


if __name__ == "__main__":
    sys.exit(main())
