"""A run whose process is killed goes on from its last checkpoint: real Ray, vLLM and trainer."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from .command import command

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

RUN = (
    "--steps", "4", "--checkpoint-every", "1",
    "--validate", "digest,canary", "--probe-tokens", "40",
)  # fmt: skip


def test_a_killed_run_goes_on_with_versions_and_rollouts_that_count_on(tmp_path: Path) -> None:
    """Case 24. Killed in the third swap, so that the third step is made again."""
    folder = tmp_path / "run"
    killed = command(
        "-m tests.integration.drive",
        ["--interrupt", "PAUSING:3", "--signal", "SIGKILL", "--", *RUN],
        folder,
    )
    assert killed.code == -signal.SIGKILL, killed.stderr
    assert killed.after_fault is not None
    assert not (folder / "summary.json").exists()
    states = folder / "checkpoints"
    assert sorted(p.name for p in states.iterdir()) == ["state-000001", "state-000002"]
    point = json.loads((states / "state-000002/run.json").read_text())
    assert (point["step"], point["version"]) == (2, 2)
    before = killed.lines("rollouts.jsonl")
    known = before[
        : (folder / "rollouts.jsonl")
        .read_bytes()[: point["attached"]["rollouts_bytes"]]
        .count(b"\n")
    ]
    saved = load_file(next((states / "state-000002/trainer").glob("weights-*")))

    ended = command("-m orchestrator", ["--resume", str(folder)], folder)
    assert ended.code == 0, ended.stderr
    assert ended.left == ()
    summary = ended.summary
    assert (summary["outcome"], summary["steps_done"], summary["final_version"]) == (
        "completed",
        4,
        4,
    )
    assert summary["resumed_at"] == [2]
    assert [t["step"] for t in summary["training"]] == [1, 2, 3, 4]
    assert [(s["from_version"], s["to_version"]) for s in summary["swaps"]] == [
        (0, 1), (1, 2), (2, 3), (3, 4),
    ]  # fmt: skip
    for swap in summary["swaps"]:
        assert swap["checks"]["digest"]["verdict"] == "match"
        assert swap["checks"]["canary"]["verdict"] == "match"

    rollouts = ended.lines("rollouts.jsonl")
    ids = [r["id"] for r in rollouts]
    assert len(ids) == len(set(ids))
    assert ids[: len(known)] == [r["id"] for r in known]
    trained = [r for r in rollouts if r["status"] == "trained"]
    assert len(trained) == 4 * 32
    numbers = {int(r["group"][1:]) for r in rollouts if r["kind"] == "rollout"}
    assert numbers == set(range(max(numbers) + 1))
    # Nothing that was made after the resume has a token of the weights the engines started with.
    waited = {r["request"]["request_id"] for g in point["source"]["waiting"] for r in g}
    for rollout in rollouts[len(known) :]:
        if rollout["id"] not in waited:
            assert all(s["version"] >= 2 for s in rollout["spans"])

    events = ended.lines("events.jsonl")
    assert {e["run_id"] for e in events} == {summary["run_id"]}
    (resumed,) = [e for e in events if e["event"] == "run resumed"]
    assert (resumed["step"], resumed["version"]) == (2, 2)
    written = [e["version"] for e in events if e["event"] == "checkpoint written"]
    assert written == [1, 2, 3, 4]
    assert sorted(p.name for p in states.iterdir()) == ["state-000003", "state-000004"]
    after = load_file(next((states / "state-000004/trainer").glob("weights-*")))
    assert after.keys() == saved.keys()
