"""The embedding example and the benchmark, run as their readers would."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .command import ROOT

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_an_embedding_trainer_owns_the_loop() -> None:
    lines = (ROOT / "examples" / "embed_in_trainer.py").read_text().splitlines()
    assert len(lines) < 80
    out = run("examples/embed_in_trainer.py", "--steps", "2")
    assert re.findall(r"version (\d+): reward 0\.\d+", out) == ["1", "2"]
    assert out.count("digest match") == 2


def test_the_benchmark_measures_backends_side_by_side_and_the_ceiling(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    out = run(
        "benchmarks/sync_latency.py",
        *("--backends", "gloo,staged-gloo", "--swaps", "3", "--naive-swaps", "1", "--warmup", "1"),
        *("--window", "4", "--tokens", "150", "--json", str(target)),
    )
    assert "ceiling, gloo broadcast" in out
    assert "gloo is applied by layerwise reload" in out
    result = json.loads(target.read_text())
    assert result["request_tokens"] == 150
    names = ["gloo", "naive, no sleep", "naive", "staged-gloo"]
    assert [m["name"] for m in result["methods"]] == names
    assert [m["swaps"] for m in result["methods"]] == [3, 1, 1, 3]
    ours, awake, naive, staged = result["methods"]
    assert result["digests_matched"] >= 2 * (3 + 1) + 2
    for method in result["methods"]:
        assert method["stall_s"]["count"] == sum(len(s["stalls"]) for s in method["samples"]) > 0
    # The naive way sleeps: no noise of this machine makes that shorter.
    assert naive["phases"]["quiesce"]["p50"] >= 5.02
    assert awake["phases"]["quiesce"]["p50"] >= 0.02
    assert ours["phases"]["prefetch"]["p50"] == 0 < staged["phases"]["prefetch"]["p50"]
    assert ours["growth"].keys() == staged["growth"].keys() >= {"host_bytes", "descriptors"}
    ratio = naive["stall_s"]["p50"] / ours["stall_s"]["p50"]
    key = "stall p50, naive to gloo, 13 requests"
    assert result["ratio"][key] == pytest.approx(ratio)
    assert result["ceiling"]["gloo_broadcast"]["p50_s"] > 0
    assert list(result["ceiling"]["gloo_broadcast"]["by_bucket"]) == ["whole"]
    assert "peer_copy" not in result["ceiling"]
    assert result["carried_by"] == dict.fromkeys(["gloo", "staged-gloo"], "gloo over TCP")
    speeds = {row["backend"]: row["tokens_per_s"] for row in result["throughput"]}
    assert speeds["gloo"]["always_staging"] is None
    assert min(speeds["staged-gloo"].values()) > 0
    assert target.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_benchmark_of_costs_takes_a_swap_apart(tmp_path: Path) -> None:
    target = tmp_path / "costs.json"
    out = run(
        "benchmarks/swap_costs.py",
        *("--backend", "staged-gloo", "--slots", "2", "--requests", "5", "--warmup", "1"),
        *("--json", str(target)),
    )
    found = json.loads(target.read_text())
    (row,) = found["rows"]
    assert (found["backend"], row["requests"], row["slots"]) == ("staged-gloo", 5, 2)
    assert row["tokens_per_s"]["nothing"] > 0 and len(row["swap_costs_s"]) == 4
    for name, count in row["swaps"].items():
        assert count >= 2 and f"{name}: " in out and f"({count} times)" in out
