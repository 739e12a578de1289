"""``python -m orchestrator`` on real Ray and real vLLM: what it proves and what it leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .command import PLUGINS, command

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

QUICK = ("--steps", "2", "--validate", "digest,canary", "--probe-tokens", "40")


def test_five_steps_prove_every_swap(tmp_path: Path) -> None:
    ended = command("-m orchestrator", ["--steps", "5"], tmp_path / "run")
    assert ended.code == 0, ended.stderr
    assert ended.left == ()
    summary = ended.summary
    assert summary["outcome"] == "completed" and summary["error"] is None
    swaps = summary["swaps"]
    assert [(s["from_version"], s["to_version"]) for s in swaps] == [(i, i + 1) for i in range(5)]
    for swap in swaps:
        assert swap["checks"]["digest"]["verdict"] == "match"
        assert swap["checks"]["digest"]["detail"]["tensors"] > 20
        assert swap["checks"]["canary"]["verdict"] == "match"
        assert swap["requests_in_flight"] >= 13
        assert swap["bytes"] == 5_380_096
        assert 0 < swap["stall_s"]["p50"] <= swap["stall_s"]["max"]
    assert summary["validation"]["control"] == "match"
    assert (summary["validation"]["passed"], summary["validation"]["prompts"]) == (13, 13)
    assert set(summary["tokens"]) == {str(v) for v in range(6)}

    rollouts = ended.lines("rollouts.jsonl")
    assert len({r["id"] for r in rollouts}) == len(rollouts)
    for rollout in rollouts:
        ends = [0, *(s["end"] for s in rollout["spans"])]
        assert [s["start"] for s in rollout["spans"]] == ends[:-1]
        assert ends[-1] == len(rollout["token_ids"]) == len(rollout["logprobs"])
    last_probes = [r for r in rollouts if r["id"].startswith("p5.")]
    cut = [r for r in last_probes if {4, 5} <= {s["version"] for s in r["spans"]}]
    assert len(last_probes) == 13 and len(cut) >= 8
    trained = [r for r in rollouts if r["reward"] is not None]
    assert len(trained) == 160 and all(r["staleness"] is not None for r in trained)
    assert "cut and continued" in ended.stdout

    events = ended.lines("events.jsonl")
    actors = {e.get("actor") for e in events}
    assert {"engine-0", "trainer"} <= actors
    assert {e["run_id"] for e in events} == {summary["run_id"]}
    # Case 35: every line of a swap says which, from the controller and from inside the actors.
    for name in ("paused", "weights sent"):
        lines = [e for e in events if e["event"] == name]
        assert len(lines) == 5
        assert [e["version"] for e in lines] == [1, 2, 3, 4, 5]
        assert all(e["sync_id"] and e["step"] and e["state"] for e in lines)


def test_a_flipped_bit_names_the_tensor_and_ends_the_run(tmp_path: Path) -> None:
    tensor = "model.layers.1.mlp.down_proj.weight"
    path = os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")])
    ended = command(
        "-m orchestrator",
        QUICK,
        tmp_path / "run",
        env={"PYTHONPATH": path, "MIDFLIGHT_TEST_FLIP_BIT": tensor},
    )
    assert ended.code == 1
    assert f"{tensor} on engine-0" in ended.stderr and "digest" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.left == ()
    assert ended.summary["outcome"] == "failed" and tensor in ended.summary["error"]


@pytest.mark.parametrize(
    "fault",
    [
        "engine.0.core:crash@GENERATING:step=2",
        "engine.0.actor:crash@SYNCING",
        "trainer:crash@SYNCING",
    ],
)
def test_a_killed_process_ends_the_run_within_ten_seconds(tmp_path: Path, fault: str) -> None:
    ended = command(
        "-m orchestrator",
        ["--inject", fault, "--recovery-attempts", "0", *QUICK],
        tmp_path / "run",
    )
    assert ended.code == 1, ended.stderr
    assert ended.after_fault is not None and ended.after_fault < 10
    assert ended.left == ()
    assert ended.summary["outcome"] == "failed"
    who = "trainer" if fault.startswith("trainer") else "engine-0"
    assert who in ended.summary["error"]
    assert "Traceback" not in ended.stderr
    # Nothing that was not committed wrote a token.
    committed = 1 if "GENERATING" in fault else 0
    assert {int(v) for v in ended.summary["tokens"]} <= set(range(committed + 1))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_keeps_what_requests_have_and_leaves_nothing(
    tmp_path: Path, name: str
) -> None:
    """To the whole process group, Ray's processes included, as terminals and ``timeout`` do."""
    # Otherwise some have ended before they can be cut, or wait for room in the buffer.
    long = ("--max-tokens", "400", "--buffer-size", "100000")
    ended = command(
        "-m tests.integration.drive",
        ["--interrupt", "GENERATING:2", "--signal", name, "--", *QUICK, *long],
        tmp_path / "run",
    )
    assert ended.after_fault is not None and ended.after_fault < 10
    assert ended.left == ()
    assert ended.summary["outcome"] == "interrupted"
    rollouts = ended.lines("rollouts.jsonl")
    assert sum(r["finish_reason"] == "length" for r in rollouts) >= 32
    if name == "SIGINT":
        # SIGTERM ends Ray's own processes too, and with them the engines and the exit code.
        assert ended.code == 130, ended.stderr
        partial = [r for r in rollouts if r["finish_reason"] == "abort"]
        assert partial and any(r["token_ids"] for r in partial)


def test_an_interrupt_while_ray_starts_leaves_nothing(tmp_path: Path) -> None:
    ended = command(
        "-m tests.integration.drive", ["--interrupt", "RAY", "--", *QUICK], tmp_path / "run"
    )
    assert ended.code == 130, ended.stderr
    assert ended.after_fault is not None and ended.after_fault < 10
    assert ended.left == ()
    assert ended.summary["outcome"] == "interrupted"


def test_two_engines_swap_as_one(tmp_path: Path) -> None:
    ended = command("-m orchestrator", [*QUICK, "--engines", "2"], tmp_path / "run")
    assert ended.code == 0, ended.stderr
    swaps = ended.summary["swaps"]
    assert [s["to_version"] for s in swaps] == [1, 2]
    for swap in swaps:
        assert swap["checks"]["digest"]["detail"]["engines"] == ["engine-0", "engine-1"]
        assert swap["checks"]["digest"]["verdict"] == "match"
        assert swap["checks"]["canary"]["verdict"] == "match"
    engines = {r["engine"] for r in ended.lines("rollouts.jsonl")}
    assert engines == {"engine-0", "engine-1"}
