"""The command line. Parses first; what is heavy is imported only when a run is certain."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from orchestrator.config import Settings
from orchestrator.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, ConfigError, MidflightError
from orchestrator.flags import make_parser, parse
from orchestrator.run_folder import config_of
from orchestrator.sources import load


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Never raises, never prints a traceback."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            # A terminal that cannot show a character must not end a run.
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except MidflightError as error:
        return _fail(" ".join(str(error).split()), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except Exception as error:
        return _fail(f"unexpected {type(error).__name__}: {error}", EXIT_FAILED)


def _main(argv: Sequence[str]) -> int:
    if argv and argv[0] == "simulate":
        from orchestrator.simulate.cli import main as simulate

        return simulate(argv[1:])
    if "-h" in argv or "--help" in argv:
        make_parser().print_help()
        return EXIT_OK
    given = parse(argv)
    if given.pop("version", False):
        from importlib.metadata import version

        print(f"midflight {version('midflight')}")
        return EXIT_OK
    if given.pop("show_machine", False):
        from orchestrator.machine import mermaid

        print(mermaid())
        return EXIT_OK
    config, resume = given.pop("config", None), given.pop("resume", None)
    if resume is None:
        return _run(load(given, Path(config) if config else None))
    if config is not None:
        raise ConfigError("--resume takes the run's own config.yaml: leave --config out")
    folder = Path(resume).expanduser()
    return _run(load(given, config_of(folder)), folder)


def _run(settings: Settings, resume: Path | None = None) -> int:
    # Until the loop takes the signals over, SIGTERM must end models being made as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        import actors.assembly as assembly
        from orchestrator.runner import execute

        return execute(settings, assembly.preflight, assembly.assemble, resume=resume)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _fail(message: str, code: int) -> int:
    print(f"midflight: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def entrypoint() -> NoReturn:
    """What the ``midflight`` command calls."""
    sys.exit(main())
