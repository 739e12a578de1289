"""What a person sees: on a terminal, on a pipe, quietly."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path

import pytest

from orchestrator import events as ev
from orchestrator.errors import SyncError
from orchestrator.telemetry import RunRecorder
from orchestrator.telemetry.console import SHOWN_PROBES, ConsoleView, Printer
from orchestrator.telemetry.schema import Summary
from orchestrator.telemetry.text import TABLE_WIDTH, milliseconds, printable
from orchestrator.types import Outcome, PolicyVersion, State, Verdict
from tests.unit.hand_made import AT, OP, changed, probe, report, rollout, started, stats

RUN: list[ev.Event] = [
    started(),
    changed(State.STARTING, State.GENERATING),
    ev.RolloutFinished(AT, OP, rollout()),
    ev.TrainStepDone(AT, OP, stats(), ()),
    changed(State.GENERATING, State.PAUSING),
    ev.RolloutFinished(AT, OP, probe(texts=("The capital is", " Paris, of course"))),
    ev.SwapDone(AT, OP, report()),
]


def make(
    tmp_path: Path, *, terminal: bool = False, live: bool = True, quiet: bool = False
) -> tuple[ConsoleView, io.StringIO]:
    out = io.StringIO()
    printer = Printer(out, terminal=terminal)
    return ConsoleView(printer, tmp_path, 5, live=live, quiet=quiet), out


def summary(tmp_path: Path, outcome: Outcome = Outcome.COMPLETED) -> Summary:
    recorder = RunRecorder(tmp_path, "run-1", 5)
    for event in RUN:
        recorder(event)
    recorder.hardware = "2 cores"
    made = recorder.finish(outcome, None if outcome is Outcome.COMPLETED else ValueError("why"))
    recorder.close()
    return made


def test_a_pipe_gets_plain_lines_with_every_fact(tmp_path: Path) -> None:
    view, out = make(tmp_path)
    for event in RUN:
        view(event)
    view.result(summary(tmp_path))
    text = out.getvalue()
    assert "\x1b" not in text
    for fact in (
        "engine engine-0 is up",
        "step 1/5  reward 0.250  loss 0.1250",
        "swap 1/5  v0 -> v1  13.6 MB over gloo  12 in flight",
        "quiesce 5.0 ms, transfer 140 ms, finalize 10.0 ms, resume 1.5 ms, first token 40.0 ms",
        "stall p50 180 ms, p95 200 ms, max 210 ms",
        "digest match, canary match, fresh match",
        "cut and continued: prompt of p1.0",
        "v0 [0,2) │ The capital is",
        "v1 [2,5) │  Paris, of course",
        "completed: 1/5 steps, 1 swaps",
        "reward by step: 0.250",
        "checks: digest 1 match, canary 1 match, fresh 1 match",
        "fresh engine: 13 of 13 probes equal; the canary's control: match",
        f"files: {tmp_path}/",
    ):
        assert fact in text


def test_a_step_tells_the_speed_since_the_one_before(tmp_path: Path) -> None:
    """Not of a window at its end: requests may have waited for room in the buffer by then."""
    view, out = make(tmp_path)
    view(changed(State.STARTING, State.GENERATING))
    count = len(rollout().completion.token_ids)
    for nth, (ended, step) in enumerate(((1.0, 100.0), (101.0, 104.0), (None, 105.0))):
        for _ in range(100 if ended else 0):
            view(ev.RolloutFinished(AT + (ended or 0), OP, rollout()))
        view(changed(State.GENERATING, State.PAUSING))
        view(ev.TrainStepDone(AT + step, OP, stats(), ()))
        line = out.getvalue().splitlines()[-1]
        speed = (count, 25 * count, 0)[nth]
        assert line.endswith(f" {speed} tok/s written"), line


def test_a_terminal_gets_a_live_display_and_a_table(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    view, out = make(tmp_path, terminal=True)
    # What the display is drawn on, by name: threads of other tests come and go meanwhile.
    drawing = [t for t in threading.enumerate() if t not in before and "Refresh" in repr(t)]
    assert len(drawing) == 1
    view._print.console.width = TABLE_WIDTH
    assert "STARTING" in out.getvalue()
    for event in RUN:
        view(event)
    assert view._live is not None
    view._live.refresh()
    shown = out.getvalue()
    assert "PAUSING" in shown and "step 1/5" in shown and "tok/s" in shown
    assert "last swap: quiesce 5.0 ms" in shown
    view.result(summary(tmp_path))
    view.close()
    table = [line for line in out.getvalue().splitlines() if "v0>v1" in line]
    (row,) = table
    shown = " ".join(row.split())
    assert shown == "1 v0>v1 0.250 2 5.0 140 10.0 1.5 40.0 180/200/210 ok ok 13/13"
    drawing[0].join(5.0)  # rich tells it to end and does not wait
    assert not drawing[0].is_alive()
    assert out.getvalue().endswith("config.yaml)\n")
    # Each permanent line starts on a line of its own, above the display.
    for line in out.getvalue().replace("\r", "\n").split("\n"):
        assert line.count("swap 1/5") <= 1
        if "swap 1/5" in line:
            assert "STARTING" not in line and "PAUSING" not in line


@pytest.mark.parametrize(("terminal", "live"), [(True, False), (False, True), (False, False)])
def test_no_display_without_a_terminal_or_when_not_asked(
    tmp_path: Path, terminal: bool, live: bool
) -> None:
    view, out = make(tmp_path, terminal=terminal, live=live)
    view(RUN[1])
    assert out.getvalue() == ""
    view.close()


def test_quiet_shows_the_result_alone(tmp_path: Path) -> None:
    view, out = make(tmp_path, terminal=True, quiet=True)
    for event in RUN:
        view(event)
    assert out.getvalue() == ""
    view.result(summary(tmp_path))
    assert "completed: 1/5 steps" in out.getvalue()


def test_a_failed_swap_is_shown_and_a_cancelled_one_is_not(tmp_path: Path) -> None:
    view, out = make(tmp_path, quiet=True)
    view(ev.SwapFailed(AT, OP, asyncio.CancelledError()))
    assert out.getvalue() == ""
    view(ev.SwapFailed(AT, OP, SyncError("SYNCING", "tensor\nlm_head")))
    assert out.getvalue() == ("swap failed: SyncError: sync failed in SYNCING: tensor lm_head\n")


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    view, out = make(tmp_path)
    view.result(summary(tmp_path, Outcome.INTERRUPTED))
    assert out.getvalue().startswith("interrupted: 1/5 steps")


def test_only_some_cut_probes_are_shown_a_version(tmp_path: Path) -> None:
    view, out = make(tmp_path)
    for n in range(SHOWN_PROBES + 3):
        view(ev.RolloutFinished(AT, OP, probe(f"p1.{n}")))
    view(ev.RolloutFinished(AT, OP, probe("p9", spans=((1, 0, 5),))))
    view(ev.RolloutFinished(AT, OP, rollout()))
    assert out.getvalue().count("cut and continued") == SHOWN_PROBES
    view(ev.RolloutFinished(AT, OP, probe("p2.0", spans=((1, 0, 2), (2, 2, 4)))))
    assert out.getvalue().count("cut and continued") == SHOWN_PROBES + 1


def test_text_of_a_model_cannot_control_the_terminal(tmp_path: Path) -> None:
    view, out = make(tmp_path)
    evil = "\x1b[2J\x1b]0;title\x07\r\nnext [bold]x[/bold] \ud800"
    view(ev.RolloutFinished(AT, OP, probe(texts=(evil, evil))))
    text = out.getvalue()
    assert not set(text) & {"\x1b", "\x07", "\r", "\ud800"}
    assert "[bold]x[/bold]" in text
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "tail", "expected"),
    [
        ("abcdef", False, "abcdef"),
        ("abcdefg", False, "abcde…"),
        ("abcdefg", True, "…cdefg"),
        ("a\nb", False, "a\\nb"),
        ("é漢", False, "é漢"),
    ],
)
def test_printable(text: str, tail: bool, expected: str) -> None:
    assert printable(text, 6, tail=tail) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, "-"),
        (0.0, "0.0 ms"),
        (0.01234, "12.3 ms"),
        (0.1234, "123 ms"),
        (12.34, "12.3 s"),
        (-0.001, "-1.0 ms"),
    ],
)
def test_milliseconds(seconds: float | None, expected: str) -> None:
    assert milliseconds(seconds) == expected


def test_result_names_a_mismatch(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, "run-1", 5)
    recorder(ev.SwapDone(AT, OP, report(1, Verdict.MISMATCH)))
    recorder(ev.RunEnded(AT, OP, Outcome.FAILED, PolicyVersion(1), ValueError("why")))
    recorder.close()
    assert recorder.summary is not None
    view, out = make(tmp_path, terminal=True, live=False)
    view._print.console.width = 200
    view.result(recorder.summary)
    assert "13/13 MISMATCH" in out.getvalue()
    assert "fresh 1 mismatch" in out.getvalue()
