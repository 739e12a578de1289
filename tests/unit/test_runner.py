"""The command's flow over the public fakes: what it leaves behind however a run ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from orchestrator import runner
from orchestrator.config import Settings
from orchestrator.errors import ConfigError
from orchestrator.events import Event, RunEnded
from orchestrator.runner import execute, make_run_dir, write_config
from orchestrator.telemetry.log import CONTEXT
from orchestrator.telemetry.schema import RolloutRecord, Summary
from orchestrator.testing import FakeWorld
from orchestrator.types import Outcome, TransferBackend
from tests.unit.fake_run import FakeAssembly, FakePrepared


class Result:
    def __init__(self, code: int, folder: Path, out: str) -> None:
        self.code, self.folder, self.out = code, folder, out

    @property
    def summary(self) -> Summary:
        return Summary.model_validate_json((self.folder / "summary.json").read_text())

    @property
    def events(self) -> list[dict[str, Any]]:
        text = (self.folder / "events.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    @property
    def rollouts(self) -> list[RolloutRecord]:
        text = (self.folder / "rollouts.jsonl").read_text()
        return [RolloutRecord.model_validate_json(line) for line in text.splitlines()]


async def go(
    folder: Path,
    assembly: FakeAssembly,
    seen: list[Event] | None = None,
    prepared: FakePrepared | None = None,
    **changes: Any,
) -> Result:
    out = io.StringIO()
    code = await runner.run(
        Settings(**{"steps": 3, **changes}),
        prepared or FakePrepared(),
        assembly.assemble,
        run_dir=folder,
        run_id="run-1",
        stdout=out,
        observers=() if seen is None else (seen.append,),
    )
    assert assembly.closed == 1 and not assembly.up
    return Result(code, folder, out.getvalue())


async def test_a_whole_run(tmp_path: Path, world: FakeWorld) -> None:
    seen: list[Event] = []
    result = await go(tmp_path, FakeAssembly(world), seen)
    assert result.code == 0
    s = result.summary
    assert (s.outcome, s.error, s.steps_done, s.final_version) == ("completed", None, 3, 3)
    assert [(w.from_version, w.to_version) for w in s.swaps] == [(0, 1), (1, 2), (2, 3)]
    # Its own five, and those of the step before that still run.
    assert all(w.probes_cut >= 5 for w in s.swaps)
    assert s.validation.prompts == s.validation.passed == 5
    assert (s.hardware, s.packages) == ("fake", {"fake": "1"})
    assert len(s.reward) == 3
    assert [type(e) for e in seen].count(RunEnded) == 1
    assert "completed: 3/3 steps" in result.out
    assert not world.violations


async def test_every_rollout_is_on_disk_once_and_covered_by_its_spans(
    tmp_path: Path, world: FakeWorld
) -> None:
    result = await go(tmp_path, FakeAssembly(world))
    lines = result.rollouts
    assert len({line.id for line in lines}) == len(lines) == result.summary.rollouts.finished
    assert sum(line.status == "trained" for line in lines) == 3 * 32
    for line in lines:
        edges = [0, *(span.end for span in line.spans)]
        assert [span.start for span in line.spans] == edges[:-1]
        assert edges[-1] == len(line.token_ids) == len(line.logprobs)
        if line.status == "trained":
            assert line.reward is not None and line.staleness is not None
    written: dict[str, int] = {}
    for line in lines:
        for span in line.spans:
            written[str(span.version)] = written.get(str(span.version), 0) + span.end - span.start
    assert written == result.summary.tokens


async def test_every_line_of_a_swap_has_its_ids(tmp_path: Path, world: FakeWorld) -> None:
    def from_an_actor(on_event: runner.OnActorEvent) -> None:
        on_event("engine-0", {"at": 5.0, "event": "hello", "sync_id": "run-1-s2", "version": 2})

    result = await go(tmp_path, FakeAssembly(world, before=from_an_actor), verbose=True)
    for line in result.events:
        assert line.keys() >= {"timestamp", "level", "event", *CONTEXT}
        assert line["run_id"] == "run-1"
        # Requests belong to no swap, though some end during one.
        during = line["state"] in ("SYNCING", "RESUMING", "VALIDATING")
        if during and not line["event"].startswith("rollout"):
            assert line["sync_id"] == f"run-1-s{line['version']}"
            assert line["step"] == line["version"]
    assert {line["sync_id"] for line in result.events} >= {f"run-1-s{n}" for n in (1, 2, 3)}
    (hello,) = [line for line in result.events if line["event"] == "hello"]
    assert (hello["timestamp"], hello["actor"]) == ("1970-01-01T00:00:05.000000Z", "engine-0")


async def test_json_on_stdout(tmp_path: Path, world: FakeWorld) -> None:
    result = await go(tmp_path, FakeAssembly(world), log_format="json")
    lines = [json.loads(line) for line in result.out.splitlines()]
    names = [line["event"] for line in lines]
    assert names.count("swap done") == 3
    assert names[-1] == "run summary"
    assert lines[-1]["outcome"] == "completed"


@pytest.mark.parametrize("log_format", ["json", "auto"])
async def test_quiet_is_warnings_and_the_result(
    tmp_path: Path, world: FakeWorld, log_format: str
) -> None:
    result = await go(tmp_path, FakeAssembly(world), log_format=log_format, quiet=True)
    if log_format == "json":
        (line,) = result.out.splitlines()
        assert json.loads(line)["event"] == "run summary"
    else:
        assert result.out.startswith("completed: 3/3 steps")


async def test_a_flipped_bit_ends_the_run_by_name(
    tmp_path: Path, world: FakeWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    world.faults.flip_bit("head")
    result = await go(tmp_path, FakeAssembly(world))
    assert result.code == 1
    s = result.summary
    assert (s.outcome, s.error_type) == ("failed", "ValidationFailed")
    assert s.error is not None and "head on engine-0" in s.error
    assert s.failed_swaps[0].fenced == ["engine-0"]
    err = capsys.readouterr().err
    assert err.startswith("midflight: error: ") and err.count("\n") == 1
    assert "head on engine-0" in err
    assert any("Traceback" in line.get("traceback", "") for line in result.events)


async def test_a_dead_engine_ends_the_run(tmp_path: Path, world: FakeWorld) -> None:
    world.faults.die("engine-0", "receive_update")
    result = await go(tmp_path, FakeAssembly(world))
    assert result.code == 1
    assert result.summary.error_type in ("EngineDied", "SyncError")
    assert "process died" in [line["event"] for line in result.events]


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (ConfigError("no cluster at 10.0.0.1: start one"), 2, "ConfigError"),
        (ExceptionGroup("several", [ConfigError("inner")]), 2, "ConfigError"),
        (ZeroDivisionError("odd\nthing"), 1, "ZeroDivisionError"),
    ],
)
async def test_a_failed_start_is_reported_too(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    kind: str,
) -> None:
    def fail(on_event: runner.OnActorEvent) -> None:
        try:
            raise error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        except Exception as inner:
            if isinstance(error, ExceptionGroup):
                raise error from inner
            raise

    seen: list[Event] = []
    result = await go(tmp_path, FakeAssembly(before=fail), seen)
    assert result.code == code
    s = result.summary
    assert (s.outcome, s.error_type, s.steps_done) == ("failed", kind, 0)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "Traceback" not in err + result.out
    if code == 1:
        assert f"traceback in {tmp_path}/events.jsonl" in err
    (end,) = [line for line in result.events if line["event"] == "run ended"]
    assert "Traceback" in end["traceback"]
    assert [e.outcome for e in seen if isinstance(e, RunEnded)] == [Outcome.FAILED]


async def test_a_failing_clean_up_fails_a_completed_run(tmp_path: Path, world: FakeWorld) -> None:
    async def fail() -> None:
        raise OSError("port still taken")

    result = await go(tmp_path, FakeAssembly(world, after=fail))
    assert result.code == 1
    assert (result.summary.outcome, result.summary.error) == ("failed", "OSError: port still taken")
    assert len(result.summary.swaps) == 3
    assert "run failed" in [line["event"] for line in result.events]


async def test_a_failing_observer_disturbs_nothing(tmp_path: Path, world: FakeWorld) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("dashboard is down")

    out = io.StringIO()
    code = await runner.run(
        Settings(steps=1),
        FakePrepared(),
        FakeAssembly(world).assemble,
        run_dir=tmp_path,
        run_id="run-1",
        stdout=out,
        observers=[broken],
    )
    result = Result(code, tmp_path, out.getvalue())
    assert (code, result.summary.outcome) == (0, "completed")
    assert "RuntimeError: dashboard is down" in [line.get("error") for line in result.events]


async def test_a_summary_that_cannot_be_written_fails_the_run(
    tmp_path: Path,
    world: FakeWorld,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("orchestrator.telemetry.report.write_atomic", refuse)
    result = await go(tmp_path, FakeAssembly(world), steps=1)
    assert result.code == 1
    assert "cannot write the summary: no space left" in capsys.readouterr().err


def test_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_run_dir(Settings(), "id-1") == Path("runs/id-1")
    named = tmp_path / "a" / "b"
    assert make_run_dir(Settings(output_dir=named), "id-2") == named
    (named / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a run already"):
        make_run_dir(Settings(output_dir=named), "id-3")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make --output-dir"):
        make_run_dir(Settings(output_dir=tmp_path / "file" / "x"), "id-4")


def test_rolling_over_a_backend_that_cannot_is_refused_before_anything(tmp_path: Path) -> None:
    fake, folder = FakeAssembly(), tmp_path / "run"
    with pytest.raises(ConfigError, match="rolling swaps need the bytes at the engines before"):
        execute(Settings(strategy="rolling", output_dir=folder), fake.preflight, fake.assemble)
    assert not folder.exists()


def test_config_is_written_as_resolved(tmp_path: Path) -> None:
    prepared = FakePrepared(TransferBackend.IPC, 0.9, 0.05)
    write_config(Settings(steps=2, canary_tolerance=0.5), prepared, tmp_path)
    data = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (data["steps"], data["backend"]) == (2, "ipc")
    assert (data["min_pass_rate"], data["canary_tolerance"]) == (0.9, 0.5)
    write_config(Settings(), prepared, tmp_path)
    data = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert data["canary_tolerance"] is None, "fed back it would be a limit that was asked for"


async def test_a_staged_run_says_so_in_its_config_and_summary(
    tmp_path: Path, world: FakeWorld
) -> None:
    prepared = FakePrepared(staged=True)
    write_config(Settings(), prepared, tmp_path)
    assert Settings(**yaml.safe_load((tmp_path / "config.yaml").read_text())).backend == (
        "staged-gloo"
    )
    result = await go(tmp_path, FakeAssembly(world), prepared=prepared, steps=1)
    assert result.code == 0
    (swap,) = result.summary.swaps
    assert swap.backend == "staged-gloo"
    assert swap.seconds.prefetch is not None
    assert len(world.calls("swap")) == 1


def start(folder: Path, *words: str) -> tuple[subprocess.Popen[str], int]:
    """Start ``fake_run``; returns it, in the wanted state, and the pid of its helper."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.fake_run", str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"at {words[0]} "):
            return process, int(line.split()[2])
    raise AssertionError(process.communicate(timeout=10)[1])


def alive(pid: int) -> bool:
    """Whether it is still there; a killed process may take a moment to go."""
    try:
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            process.wait(timeout=5)
    except psutil.NoSuchProcess:
        return False
    except psutil.TimeoutExpired:
        return True
    return False


@pytest.mark.parametrize(
    "state",
    ["ASSEMBLING", "STARTING", "GENERATING", "PAUSING", "SYNCING", "RESUMING", "VALIDATING"],
)
def test_ctrl_c_in_any_state(tmp_path: Path, state: str) -> None:
    process, helper = start(tmp_path, state)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - began < 10
    assert process.returncode == 130, err
    assert not alive(helper)
    assert "Traceback" not in out + err
    result = Result(130, tmp_path, out)
    assert result.summary.outcome == "interrupted"
    assert result.summary.error is None
    assert "interrupted: " in out
    if state not in ("ASSEMBLING", "STARTING"):
        assert any(line.finish_reason == "abort" for line in result.rollouts)


def test_sigterm_is_the_same(tmp_path: Path) -> None:
    process, helper = start(tmp_path, "GENERATING")
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert not alive(helper)
    assert Result(130, tmp_path, "").summary.outcome == "interrupted"


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    process, helper = start(tmp_path, "GENERATING", "hang")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert any(line == "hangs\n" for line in process.stdout)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - began < 2
    assert process.returncode == 130
    assert "interrupted again" in err
    assert not alive(helper)
    assert Result(130, tmp_path, "").summary.outcome == "interrupted"


def test_a_clean_up_that_hangs_is_cut_short(tmp_path: Path) -> None:
    process, helper = start(tmp_path, "PAUSING", "hang", "quick")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "not stopped within 1 s" in err
    assert not alive(helper)
    assert Result(130, tmp_path, "").summary.outcome == "interrupted"


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ("FAILED", "head on engine-0"),
        ("STOPPED", "clean-up did not end"),
        ("DIED", "engine-0"),
    ],
)
def test_a_clean_up_that_hangs_by_itself_is_a_failure(
    tmp_path: Path, state: str, error: str
) -> None:
    process, helper = start(tmp_path, state, "hang", "quick")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert not alive(helper)
    summary = Result(1, tmp_path, "").summary
    assert summary.outcome == "failed"
    assert summary.error is not None and error in summary.error
    assert error in err and "clean-up took longer than 1 s" in err
