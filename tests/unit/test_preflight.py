"""What was asked for is checked whole before any actor starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from actors.hardware import Hardware
from actors.preflight import DEFAULT_CONTEXT, check_workers, preflight
from orchestrator.errors import ConfigError
from orchestrator.types import TransferBackend

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from actors import tiny

    folder = tmp_path_factory.mktemp("tiny")
    tiny.build(folder, steps=(1, 2))
    return folder


NO_GPU = Hardware("a CPU", 2, 24.0)
TWO_GPUS = Hardware("a CPU", 2, 24.0, ("H200", "H200"))


def edited(folder: Path, target: Path, **changes: object) -> str:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


def test_a_run_on_cpus_is_prepared(built: Path) -> None:
    run = preflight(
        model=str(built / "base"), trainer_model=str(built / "tuned"), new_tokens=110, found=NO_GPU
    )
    assert (run.engine_path, run.trainer_path) == (built / "base", built / "tuned")
    assert run.backend is TransferBackend.GLOO
    assert (run.dtype, run.wire_dtype, run.trainer_dtype) == ("float32", None, "float32")
    assert (run.max_model_len, run.vocab_size, run.eos_ids) == (DEFAULT_CONTEXT, 320, (256,))
    assert len(run.prompts) == 13
    assert bytes(run.prompts[0].token_ids).decode() == run.prompts[0].text


def test_a_cast_on_the_wire_is_declared(built: Path) -> None:
    """Case 10: trainer float32, engine bfloat16."""
    run = preflight(model=str(built / "base"), new_tokens=1, found=TWO_GPUS)
    assert run.backend is TransferBackend.NCCL
    assert (run.dtype, run.wire_dtype, run.trainer_dtype) == ("bfloat16", "bfloat16", "float32")
    assert run.trainer_path == run.engine_path
    assert run.learning_rate == 1e-6


def test_nothing_heavy_is_imported(built: Path) -> None:
    code = (
        "import sys; from actors.preflight import preflight\n"
        f"preflight(model={str(built / 'base')!r}, new_tokens=9)\n"
        "assert not {'torch', 'transformers', 'vllm', 'ray'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "missing/../nope"}, "no model"),
        ({"reward": "best"}, "unknown reward"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"backend": "nccl"}, "none is visible"),
        ({"backend": "carrier-pigeon"}, "unknown backend"),
        ({"prompts_file": Path("/no/such/prompts")}, "no prompts file"),
        ({"max_model_len": 4096}, "4096 tokens asked for, the model allows 1 to 2048"),
        ({"max_model_len": 120}, r"built-in prompt 2: 47 prompt .* the context is 120"),
    ],
)
def test_a_wrong_setting_is_refused(built: Path, settings: dict[str, object], words: str) -> None:
    arguments = {"model": str(built / "base"), "new_tokens": 80, "found": NO_GPU, **settings}
    with pytest.raises(ConfigError, match=words) as caught:
        preflight(**arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_two_models_of_different_shape_are_refused(built: Path, tmp_path: Path) -> None:
    other = edited(built / "tuned", tmp_path / "other", hidden_size=512)
    with pytest.raises(ConfigError, match=r"do not fit: hidden_size is 256 .* and 512 "):
        preflight(model=str(built / "base"), trainer_model=other, new_tokens=1, found=NO_GPU)


def test_an_untied_copy_of_a_tied_model_is_refused(built: Path, tmp_path: Path) -> None:
    """Case 9."""
    other = edited(built / "tuned", tmp_path / "other", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="do not fit: tie_word_embeddings"):
        preflight(model=str(built / "base"), trainer_model=other, new_tokens=1, found=NO_GPU)


def test_a_quantised_model_is_refused(built: Path, tmp_path: Path) -> None:
    """Case 14."""
    other = edited(built / "base", tmp_path / "q", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="is quantised"):
        preflight(model=other, new_tokens=1, found=NO_GPU)


def test_batch_invariance_without_a_gpu_is_refused(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 34."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT=1 needs an NVIDIA GPU"):
        preflight(model=str(built / "base"), new_tokens=1, found=NO_GPU)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_that_can_share_the_heads(built: Path, workers: int) -> None:
    preflight(model=str(built / "base"), new_tokens=1, tensor_parallel_size=workers, found=NO_GPU)


@pytest.mark.parametrize("workers", [3, 8])
def test_workers_that_cannot_share_the_heads_are_refused(built: Path, workers: int) -> None:
    """vLLM says so too, after a start, in many lines."""
    with pytest.raises(ConfigError, match=f"size {workers}: the model's 4 .* use one of 1, 2, 4"):
        preflight(
            model=str(built / "base"), new_tokens=1, tensor_parallel_size=workers, found=NO_GPU
        )


@pytest.mark.parametrize(
    ("heads", "pairs", "fitting"),
    [(14, 2, [1, 2, 14]), (12, 2, [1, 2, 4, 6, 12]), (28, 4, [1, 2, 4, 28]), (32, 8, [1, 2, 4, 8])],
)
def test_key_value_heads_are_shared_too(heads: int, pairs: int, fitting: list[int]) -> None:
    """As Qwen2.5-0.5B has them: 7 workers share its 14 heads, but not its 2 pairs."""
    config = {"num_attention_heads": heads, "num_key_value_heads": pairs}
    for workers in range(1, 17):
        if workers in fitting or (heads == 32 and workers in (16, 32)):
            check_workers(config, workers)
        elif workers <= heads:
            with pytest.raises(ConfigError, match="key-value heads cannot be shared"):
                check_workers(config, workers)
