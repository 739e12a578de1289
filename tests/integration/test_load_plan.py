"""Load plans recorded and replayed against vLLM's own loader: tiny models, no engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.transfer.digest import Part, whole
from orchestrator.errors import TransferError
from tests.integration.load_plans import MODELS, write_checkpoints

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

DEADLINE_S = 300.0
ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
Found = dict[str, Any]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load-plans")
    write_checkpoints(folder)
    return folder


def run(folder: Path, world: int) -> list[Found]:
    """What each rank saw, in processes of their own: vLLM's state is the process's."""
    ranks = []
    for rank in range(world):
        command = [sys.executable, "-m", "tests.integration.load_plans", str(folder)]
        with open(folder / f"log-{rank}-of-{world}", "w") as log:
            ranks.append(
                subprocess.Popen(
                    [*command, str(rank), str(world)],
                    env={**os.environ, **ENV},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        for rank, process in enumerate(ranks):
            code = process.wait(DEADLINE_S)
            log_text = (folder / f"log-{rank}-of-{world}").read_text()
            assert code == 0, f"rank {rank}: {log_text[-4000:]}"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [
        json.loads((folder / f"rank-{rank}-of-{world}.json").read_text()) for rank in range(world)
    ]


@pytest.fixture(scope="module")
def alone(checkpoints: Path) -> Found:
    return run(checkpoints, 1)[0]


@pytest.fixture(scope="module")
def sharded(checkpoints: Path) -> list[Found]:
    return run(checkpoints, 2)


def check_replay(found: Found) -> None:
    assert not found["touched"], "recording changed the live model"
    assert found["changed"] == found["parameters"] > 0
    assert found["differing"] == []


def held(ranks: list[Found]) -> dict[str, str]:
    answers = {
        rank: {name: Part.of_wire(part) for name, part in found["parts"].items()}
        for rank, found in enumerate(ranks, start=1)
    }
    return whole("e", {n: tuple(s) for n, s in ranks[0]["shapes"].items()}, answers)


@pytest.mark.parametrize("model", MODELS)
def test_replay_equals_vllms_own_loader(alone: Found, model: str) -> None:
    found = alone[f"{model} bfloat16"]
    check_replay(found)
    assert held([found]) == found["digests"], "read back from fused parameters"
    assert found["unused"] == [] and found["lossy"] == 0
    assert found["copies"] == len(found["shapes"])


@pytest.mark.parametrize("model", MODELS)
def test_casts_are_the_loaders(alone: Found, model: str) -> None:
    rounded, widened = alone[f"{model} float32"], alone[f"{model} bfloat16 widened"]
    check_replay(rounded)
    assert rounded["lossy"] == rounded["copies"] and rounded["parts"] == {}
    check_replay(widened)
    assert held([widened]) == widened["digests"]


@pytest.mark.parametrize("model", MODELS)
def test_each_rank_has_its_own_slices(sharded: list[Found], model: str) -> None:
    ranks = [found[f"{model} bfloat16"] for found in sharded]
    for found in ranks:
        check_replay(found)
        assert found["sliced"] > 0
    assert held(ranks) == ranks[0]["digests"]
    assert ranks[0]["parts"] != ranks[1]["parts"]
    with pytest.raises(TransferError, match="not wholly held by the ranks 1 of engine e"):
        held(ranks[:1])
    for found in sharded:
        check_replay(found[f"{model} float32"])


@pytest.mark.parametrize("model", MODELS)
def test_names_that_do_not_fit_the_engine_are_named(alone: Found, model: str) -> None:
    found = alone[f"{model} bfloat16"]
    assert "layers.1.self_attn.qkv_proj.weight gets" in found["incomplete"]
    assert "model.layers.0.nonsense.weight: load_weights raised ValueError" in found["unexpected"]


@pytest.mark.parametrize("model", MODELS)
def test_what_a_cpu_engine_re_packs_is_reported(alone: Found, model: str) -> None:
    found = alone[f"{model} processed"]
    assert any("re-packed" in reason for reason in found["derived"])
    assert "is empty: its weight was re-packed" in found["reason"]


@pytest.mark.parametrize("when", ["foretold", "foretold after a reload"])
@pytest.mark.parametrize("model", MODELS)
def test_names_that_do_not_fit_a_re_packed_model_are_named_before_it_loads(
    alone: Found, model: str, when: str
) -> None:
    said = alone[f"{model} processed"][when]
    assert said["touched"] == "" and said["the same"] == ""
    assert "1 parameters get nothing: model.norm.weight" in said["missing"]
    assert "layers.1.self_attn.qkv_proj.weight gets" in said["partly missing"]
    assert "model.layers.1.self_attn.k_proj.weight" in said["misshaped"]
    assert "'module' in names is a wrapper's" in said["wrapped"]


def test_plain_layers_derive_nothing_and_experts_of_a_cpu_do(alone: Found) -> None:
    assert alone["llama bfloat16"]["derived before"] == []
    assert alone["qwen3 bfloat16"]["derived before"] == []
    (first, _) = alone["qwen3_moe bfloat16"]["derived before"]
    assert "experts" in first and first.endswith("experts are re-packed for the CPU kernel")
