"""The command on one GPU: trainer and engine colocated, weights over CUDA IPC."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors import hardware
from tests.integration.command import command

GPUS = len(hardware.detect().gpus)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(GPUS < 1, reason="needs an NVIDIA GPU of compute capability 9.0 or later"),
]


def test_three_steps_colocated_are_proved(tmp_path: Path) -> None:
    arguments = ["--model", "random:qwen3-0.6b", "--steps", "3", "--backend", "ipc"]
    ended = command("-m orchestrator", arguments, tmp_path / "run", timeout=580)
    assert ended.code == 0, ended.stderr
    assert ended.left == ()
    summary = ended.summary
    assert [s["to_version"] for s in summary["swaps"]] == [1, 2, 3]
    for swap in summary["swaps"]:
        assert swap["backend"] == "ipc" and swap["requests_in_flight"] >= 13
        assert swap["checks"]["digest"]["verdict"] == "match"
        assert swap["checks"]["canary"]["verdict"] == "match"
    assert (summary["validation"]["passed"], summary["validation"]["prompts"]) == (13, 13)
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    warmed_up = [e["actor"] for e in map(json.loads, lines) if e["event"] == "engine warmed up"]
    assert warmed_up == ["engine-0"]
