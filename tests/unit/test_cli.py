"""The command line as a person meets it: exit codes and one-line mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from orchestrator import cli
from orchestrator.config import Settings
from orchestrator.errors import ConfigError
from orchestrator.machine import mermaid
from orchestrator.telemetry.schema import Summary
from tests.unit.fake_run import FakeAssembly


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.upper().startswith("MIDFLIGHT_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def assembly(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAssembly]:
    """In the place of ``actors.assembly``; the one thing here that is not the real command."""
    import actors

    fake, module = FakeAssembly(), ModuleType("actors.assembly")
    module.preflight = fake.preflight  # type: ignore[attr-defined]
    module.assemble = fake.assemble  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "actors.assembly", module)
    monkeypatch.setattr(actors, "assembly", module, raising=False)
    yield fake


def test_a_run_from_the_command_line(
    assembly: FakeAssembly, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    # Real time: a virtual loop cannot be asked for on the command line.
    assert cli.main(["--steps", "1", "--output-dir", str(folder), "--max-tokens", "16"]) == 0
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.yaml",
        "events.jsonl",
        "rollouts.jsonl",
        "summary.json",
    ]
    summary = Summary.model_validate_json((folder / "summary.json").read_text())
    assert (summary.outcome, summary.steps_done) == ("completed", 1)
    assert "completed: 1/1 steps" in capsys.readouterr().out
    assert cli.main(["--config", str(folder / "config.yaml"), "--output-dir", str(folder)]) == 2
    assert "holds a run already" in capsys.readouterr().err
    again = ["--config", str(folder / "config.yaml"), "--output-dir", str(tmp_path / "again")]
    assert cli.main(again) == 0
    assert (tmp_path / "again/config.yaml").read_text() == (folder / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stpes", "3"], "unknown flag '--stpes': did you mean '--steps'?"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--config", "/nowhere/conf.yaml"], "cannot read --config /nowhere/conf.yaml"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: list[str], message: str, assembly: FakeAssembly, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("midflight: error: ") and message in err
    assert assembly.closed == 0


def test_preflight_refuses_before_anything_is_made(
    assembly: FakeAssembly,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(settings: Settings) -> Any:
        raise ConfigError("--backend nccl needs two GPUs, 0 found: use gloo")

    monkeypatch.setattr(sys.modules["actors.assembly"], "preflight", refuse)
    monkeypatch.chdir(tmp_path)
    assert cli.main([]) == 2
    assert capsys.readouterr().err == (
        "midflight: error: --backend nccl needs two GPUs, 0 found: use gloo\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("a\nb"), 1, "unexpected RuntimeError: a b"),
    ],
)
def test_no_traceback_reaches_the_user(
    error: BaseException,
    code: int,
    message: str,
    assembly: FakeAssembly,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(settings: Settings) -> Any:
        raise error

    monkeypatch.setattr(sys.modules["actors.assembly"], "preflight", fail)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main([]) == code
    assert capsys.readouterr().err == f"midflight: error: {message}\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_ends_preflight_too(
    assembly: FakeAssembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(settings: Settings) -> Any:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("not ended")

    monkeypatch.setattr(sys.modules["actors.assembly"], "preflight", slow)
    assert cli.main([]) == 130


def test_show_machine_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--show-machine"]) == 0
    assert capsys.readouterr().out == mermaid() + "\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("midflight 0.")


def test_help_wins_over_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--stpes", "3", "--help"]) == 0
    out = capsys.readouterr().out
    assert "weight swap:" in out and "--pause-after-tokens" in out


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "--steps", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == "midflight: error: --steps 0: must be at least 1\n"
    assert done.stdout == ""


def test_a_closed_pipe_ends_help_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", "--help"],
            stdout=gone,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert "Traceback" not in done.stderr
