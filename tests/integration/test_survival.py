"""Real engines and a real trainer whose processes are killed one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from .command import Ended, command

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

CRASHES = (
    "engine.0.core:crash@GENERATING:step=2",
    "engine.1.core:crash@PAUSING:step=3",
    # By now it is chance which replacement is up first: whoever serves.
    "engine.*.actor:crash@SYNCING:step=4",
    "engine.*.core:crash@RESUMING:step=5",
    "engine.*.core:crash@VALIDATING:step=6",
    "trainer:crash@SYNCING:step=7",
)

STATES = ("GENERATING", "PAUSING", "SYNCING", "RESUMING", "VALIDATING")


def test_a_death_in_every_state_costs_no_step_and_no_rollout(tmp_path: Path) -> None:
    injected = [part for crash in CRASHES for part in ("--inject", crash)]
    ended = command(
        "-m orchestrator",
        [
            *("--engines", "2", "--steps", "7", "--validate", "digest,canary"),
            *("--checkpoint-every", "1"),
            *injected,
        ],
        tmp_path / "run",
        timeout=800,
    )
    assert ended.code == 0, ended.stderr
    assert ended.left == ()
    struck = [e for e in ended.lines("events.jsonl") if e["event"].startswith("injected")]
    assert {e["place"] for e in struck} == {*STATES}, [e["event"] for e in struck]
    assert sum(e["target"] == "trainer" for e in struck) == 1
    summary = ended.summary
    assert [s["to_version"] for s in summary["swaps"]] == [1, 2, 3, 4, 5, 6, 7]
    for swap in summary["swaps"]:
        assert swap["checks"]["digest"]["verdict"] == "match"
        assert swap["checks"]["canary"]["verdict"] == "match"
    lost = [r["actor"] for r in summary["recoveries"] if r["event"] == "lost"]
    assert sorted(lost) == sorted(e["target"] for e in struck)
    nothing_lost_nothing_twice(ended)
    only_committed_versions_served(ended)


def nothing_lost_nothing_twice(ended: Ended) -> None:
    """Every group but the newest is whole, every id there once, every token in one span."""
    rollouts = ended.lines("rollouts.jsonl")
    assert len({r["id"] for r in rollouts}) == len(rollouts)
    for rollout in rollouts:
        ends = [0, *(s["end"] for s in rollout["spans"])]
        assert [s["start"] for s in rollout["spans"]] == ends[:-1]
        assert ends[-1] == len(rollout["token_ids"]) == len(rollout["logprobs"])
    groups: dict[int, list[str]] = {}
    for rollout in rollouts:
        if rollout["kind"] == "rollout":
            groups.setdefault(int(rollout["group"][1:]), []).append(rollout["id"])
    trained = [r for r in rollouts if r["status"] == "trained"]
    assert len(trained) == 7 * 32
    assert sorted(groups) == list(range(len(groups))), "a prompt group is missing"
    *whole, newest = (len(groups[number]) for number in sorted(groups))
    assert set(whole) == {4}
    assert 1 <= newest <= 4  # it may have waited for a free request when the run was over
    # What was not at its end when the run was over ended with what it had.
    assert all(r["finish_reason"] in ("length", "stop") for r in trained)


def only_committed_versions_served(ended: Ended) -> None:
    """A replacement served nothing before it was admitted, and no span is of a later version."""
    events = ended.lines("events.jsonl")
    admitted: dict[str, int] = {}
    for event in events:
        if " again" in event["event"]:
            admitted.setdefault(event["engine"], event["version"])
    replacements = {r["engine"] for r in ended.lines("rollouts.jsonl") if ".r" in r["engine"]}
    assert replacements and replacements <= set(admitted)
    committed = {s["to_version"] for s in ended.summary["swaps"]} | {0}
    for rollout in ended.lines("rollouts.jsonl"):
        assert {s["version"] for s in rollout["spans"]} <= committed
        if rollout["engine"] in replacements and len(rollout["spans"]) == 1:
            assert rollout["spans"][0]["version"] >= admitted[rollout["engine"]]
