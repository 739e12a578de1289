"""Log lines: complete, in context, and written whatever they are given (case 35)."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog

from orchestrator import events as ev
from orchestrator.context import operation
from orchestrator.errors import SyncError
from orchestrator.telemetry.console import Printer
from orchestrator.telemetry.eventlog import EventLog, actor_event
from orchestrator.telemetry.jsonl import JsonLines, clean, dumps, write_atomic
from orchestrator.telemetry.log import CONTEXT, LEVELS, LogPipeline, Sinks
from orchestrator.types import OpContext, Outcome, PolicyVersion, State
from tests.unit.hand_made import AT, OP, changed, probe, report, rollout, started, stats

ALWAYS = {"timestamp", "level", "event", *CONTEXT}


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class HostileError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no str")


@dataclass
class Logs:
    pipeline: LogPipeline
    path: Path
    out: io.StringIO

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def make(tmp_path: Path, level: str = "info", *, as_json: bool = False) -> Logs:
    out = io.StringIO()
    printer = Printer(out)
    file = JsonLines(tmp_path / "events.jsonl")
    console = printer.json if as_json else printer.log
    sinks = Sinks(file, console, LEVELS[level], shown=not as_json)
    return Logs(LogPipeline(sinks, "run-1"), file.path, out)


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    made = make(tmp_path)
    yield made
    made.pipeline.close()


EVENTS: list[ev.Event] = [
    changed(State.GENERATING, State.PAUSING),
    started(),
    ev.RolloutFinished(AT, OP, rollout()),
    ev.RolloutFinished(AT, OP, probe()),
    ev.RolloutConsumed(AT, OP, rollout(staleness=1)),
    ev.RolloutConsumed(AT, OP, rollout(staleness=9), accepted=False),
    ev.TrainStepDone(AT, OP, stats(), (rollout(),)),
    ev.SwapDone(AT, OP, report()),
    ev.SwapFailed(AT, OP, SyncError("SYNCING", "tensor 2", ("engine-0",)), ("engine-0",)),
    ev.SwapFailed(AT, OP, asyncio.CancelledError()),
    ev.ReplicaDied(AT, OP, "engine-0", "killed by signal 9"),
    ev.ActorLogged(AT, OP, "engine-0", "info", "hello", {"a": 1}),
    ev.RunEnded(AT, OP, Outcome.FAILED, PolicyVersion(1), ValueError("why")),
    ev.Event(AT, OP),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_every_event_becomes_one_complete_line(logs: Logs, event: ev.Event) -> None:
    EventLog(logs.pipeline)(event)
    (line,) = logs.lines()
    assert line.keys() >= ALWAYS
    assert line["timestamp"] == "2026-09-21T14:13:20.250000Z"
    assert (line["run_id"], line["sync_id"], line["step"], line["version"]) == (
        "run-1",
        "run-1-s1",
        1,
        1,
    )
    assert line["level"] in LEVELS
    assert line["event"] and line["state"] and line["actor"]


def test_lines_say_what_happened(logs: Logs) -> None:
    write = EventLog(logs.pipeline)
    for event in EVENTS:
        write(event)
    by = {line["event"]: line for line in logs.lines()}
    assert by["state changed"]["state"] == "PAUSING"
    assert by["engine started"]["actor"] == "engine-0"
    assert by["swap done"]["seconds"]["transfer"] == 0.14
    assert by["swap done"]["checks"][0]["verdict"] == "match"
    assert by["swap failed"]["fenced"] == ["engine-0"]
    assert "tensor 2" in by["swap failed"]["error"]
    assert by["swap called off"]["level"] == "info"
    assert by["process died"]["cause"] == "killed by signal 9"
    assert by["run ended"]["level"] == "error"
    assert "ValueError: why" in by["run ended"]["traceback"]
    assert by["train step done"]["reward"] == 0.25


async def test_context_is_that_of_the_running_task(logs: Logs) -> None:
    log = structlog.get_logger()

    async def one(version: int) -> None:
        with operation(sync_id=f"s{version}", version=version, step=version):
            for state in ("PAUSING", "SYNCING"):
                with operation(state=state):
                    await asyncio.sleep(0.01 * version)
                    log.info("phase", n=version)
            log.info("after")

    await asyncio.gather(*(one(v) for v in range(1, 6)))
    log.info("outside")
    lines = logs.lines()
    assert len(lines) == 16
    for line in lines[:-1]:
        assert line["sync_id"] == f"s{line['version']}"
        assert line["step"] == line["version"]
        if line["event"] == "phase":
            assert line["n"] == line["version"]
            assert line["state"] in ("PAUSING", "SYNCING")
        else:
            assert line["state"] is None
    assert lines[-1]["sync_id"] is None
    assert lines[-1]["run_id"] == "run-1"


def test_lines_of_actors_keep_their_own_time_and_ids(logs: Logs) -> None:
    data = {
        "at": AT - 10,
        "level": "warning",
        "event": "cache reset",
        "sync_id": "run-1-s3",
        "step": 3,
        "version": 3,
        "state": "SYNCING",
        "run_id": "run-1",
        "seconds": 0.5,
        "op": "clash",
        "shown_elsewhere": True,
        "timestamp": "clash",
    }
    with operation(sync_id="run-1-s4", version=4):
        EventLog(logs.pipeline)(actor_event("engine-1", data))
    (line,) = logs.lines()
    assert line["timestamp"] == "2026-09-21T14:13:10.250000Z"
    assert (line["sync_id"], line["version"], line["actor"]) == ("run-1-s3", 3, "engine-1")
    assert (line["level"], line["event"], line["seconds"]) == ("warning", "cache reset", 0.5)
    assert line["timestamp_"] == "clash"
    assert "cache reset" in logs.out.getvalue()


@pytest.mark.parametrize("data", [{}, {"at": None, "level": 3, "event": None}, {"step": "x"}])
def test_a_malformed_actor_line_is_still_a_line(logs: Logs, data: dict[str, Any]) -> None:
    EventLog(logs.pipeline)(actor_event("engine-0", data))
    (line,) = logs.lines()
    assert line.keys() >= ALWAYS
    assert line["actor"] == "engine-0"


def test_nothing_that_is_logged_breaks_logging(logs: Logs) -> None:
    loop: list[Any] = []
    loop.append(loop)
    structlog.get_logger().warning(
        "odd \x1b[2J\ud800",
        keys={(1, "a"): 1, State.SYNCING: 2, Hostile(): 3},
        value=Hostile(),
        error=HostileError(),
        nan=[float("nan"), float("inf")],
        data=b"\x00\x01",
        loop=loop,
        path=Path("/x"),
        many={3, 1, 2},
        op_context=OP,
    )
    (line,) = logs.lines()
    assert line["keys"] == {"1,a": 1, "SYNCING": 2, "<unprintable Hostile>": 3}
    assert line["value"] == "<unprintable Hostile>"
    assert line["error"] == "HostileError: <unprintable message>"
    assert line["nan"] == [None, None]
    assert line["data"] == "<2 bytes>"
    assert line["many"] == [1, 2, 3]
    assert line["op_context"]["sync_id"] == "run-1-s1"
    assert "\x1b" not in logs.out.getvalue()


def test_a_line_is_one_line_whatever_the_model_wrote(tmp_path: Path) -> None:
    text = "a\nb\r\u2028c\u2029d\x85e\x1cf"
    file = JsonLines(tmp_path / "x.jsonl")
    file.write({"text": text})
    file.close()
    (line,) = file.path.read_text().splitlines()
    assert json.loads(line) == {"text": text}


def test_an_exception_is_logged_with_its_traceback(logs: Logs) -> None:
    log = structlog.get_logger()
    try:
        raise ValueError("deep")
    except ValueError:
        log.exception("it failed")
    (line,) = logs.lines()
    assert (line["level"], line["error"]) == ("error", "ValueError: deep")
    assert "test_log.py" in line["traceback"]
    assert "Traceback" not in logs.out.getvalue()


def test_libraries_are_heard_from_warning_up(logs: Logs) -> None:
    logging.getLogger("some.library").warning("careful %s", "now")
    logging.getLogger("some.library").info("chatter")
    bad = logging.LogRecord("some.library", logging.WARNING, "", 1, "bad %d", ("format",), None)
    (bridge,) = [h for h in logging.getLogger().handlers if type(h).__name__ == "_Bridge"]
    bridge.handle(bad)
    warnings.warn("old call", DeprecationWarning, stacklevel=1)
    lines = logs.lines()
    assert [line["event"] for line in lines[:2]] == ["careful now", "chatter"]
    assert lines[0]["logger"] == "some.library"
    assert "unprintable" in lines[2]["event"]
    shown = logs.out.getvalue()
    assert "careful now" in shown
    assert "chatter" not in shown


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", ["d", "i", "w", "e"]),
        ("info", ["i", "w", "e"]),
        ("warning", ["w", "e"]),
    ],
)
def test_console_level_does_not_touch_the_file(
    tmp_path: Path, level: str, expected: list[str]
) -> None:
    logs = make(tmp_path, level, as_json=True)
    try:
        log = structlog.get_logger()
        log.debug("d"), log.info("i"), log.warning("w"), log.error("e")
    finally:
        logs.pipeline.close()
    shown = [json.loads(line) for line in logs.out.getvalue().splitlines()]
    assert [line["event"] for line in shown] == expected
    assert [line["event"] for line in logs.lines()] == ["d", "i", "w", "e"]
    assert all(line.keys() >= ALWAYS for line in shown)


def test_json_format_shows_what_the_view_would(tmp_path: Path) -> None:
    for as_json in (True, False):
        folder = tmp_path / str(as_json)
        folder.mkdir()
        logs = make(folder, as_json=as_json)
        EventLog(logs.pipeline)(ev.SwapDone(AT, OP, report()))
        logs.pipeline.close()
        assert ("swap done" in logs.out.getvalue()) is as_json


def test_closing_puts_everything_back(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers), structlog.is_configured())
    logs = make(tmp_path)
    assert structlog.is_configured()
    logs.pipeline.close()
    logs.pipeline.close()
    assert (root.level, list(root.handlers), structlog.is_configured()) == before


def test_a_full_disk_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    file = JsonLines(Path("/dev/full"))
    for n in range(3):
        file.write({"n": n})
    assert file.lost == 3
    file.close()
    assert capsys.readouterr().err.count("cannot write") == 1


def test_a_reader_that_went_away_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    printer = Printer(Gone())
    printer("one")
    printer("two")


def test_clean_gives_plain_data() -> None:
    data = clean({"a": (1, 2.5, None, True), "b": OpContext("r"), "c": PolicyVersion(3)})
    assert data == {
        "a": [1, 2.5, None, True],
        "b": {"run_id": "r", "sync_id": None, "step": None, "version": None, "state": None},
        "c": 3,
    }
    assert dumps({"é": "ü"}) == '{"\\u00e9":"\\u00fc"}'


def test_write_atomic_leaves_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "summary.json"
    write_atomic(path, "old")

    def refuse(fd: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError, match="no space"):
        write_atomic(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    write_atomic(path, "new")
    assert path.read_text() == "new"
