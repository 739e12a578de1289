"""``--inject`` on real processes. What a crash leaves is in ``test_command``."""

from __future__ import annotations

from pathlib import Path

import pytest

from .command import command

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def test_a_run_gets_over_slow_processes_and_tells_of_them(tmp_path: Path) -> None:
    faults = ("engine.0:slow@SYNCING:step=2:seconds=0.5", "trainer:slow@PAUSING:step=1")
    ended = command(
        "-m orchestrator",
        ["--steps", "2", "--validate", "digest,canary", "--probe-tokens", "40"]
        + [word for fault in faults for word in ("--inject", fault)],
        tmp_path / "run",
    )
    assert ended.code == 0, ended.stderr
    assert ended.left == ()
    assert "injected slow into engine-0 at SYNCING of step 2" in ended.stdout
    events = ended.lines("events.jsonl")
    told = [e for e in events if e["event"].startswith("injected ")]
    assert [(e["target"], e["place"], e["step"], e["state"]) for e in told] == [
        ("trainer", "PAUSING", 1, "PAUSING"),
        ("engine-0", "SYNCING", 2, "SYNCING"),
    ]
    pids = {e["actor"]: e["pids"] for e in events if "pids" in e and e["actor"] != "orchestrator"}
    assert all(set(e["pids"]) <= set(pids[e["target"]]) for e in told)
    assert not any("never struck" in e["event"] for e in events)
    # It stood still in between: the bytes were not there before it went on.
    assert ended.summary["swaps"][1]["seconds"]["transfer"] > 0.45
