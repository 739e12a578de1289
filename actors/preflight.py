"""Everything that can be wrong with what was asked for, found before Ray is started.

Blocks while a model is made or downloaded. Imports neither torch, vLLM nor Ray.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors import hardware, models
from actors.hardware import Hardware
from actors.prompts import load_prompts
from actors.rewards import check_reward, default_reward, get_reward
from orchestrator.errors import ConfigError
from orchestrator.types import Prompt, TransferBackend

DEFAULT_CONTEXT = 1024
"""Context asked of the engine when none is set (or the model's own, if shorter)."""

_DTYPES = ("float32", "bfloat16", "float16")
_MUST_AGREE = (
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that can be started."""

    engine_path: Path
    trainer_path: Path
    prompts: tuple[Prompt, ...]
    backend: TransferBackend
    staged: bool
    """The bytes arrive in a second copy first; its memory must fit beside the engine's."""
    gpus: int
    """GPUs that the run may use."""
    rocm: bool
    max_model_len: int
    """Tokens of context the engine is started with."""
    vocab_size: int
    eos_ids: tuple[int, ...]
    """Ids that end a generation; empty when the model names none."""
    dtype: str
    """The engine's, and that of the weights on the wire."""
    trainer_dtype: str
    """What the optimizer updates; float32, so that small steps are not rounded away."""
    wire_dtype: str | None
    """The declared cast on the way to the engine; None when both sides agree."""
    learning_rate: float
    reward: str
    hardware: str
    packages: dict[str, str]


def preflight(
    *,
    model: str = "tiny",
    trainer_model: str | None = None,
    prompts_file: Path | None = None,
    new_tokens: int,
    backend: TransferBackend | str | None = None,
    max_model_len: int | None = None,
    tensor_parallel_size: int = 1,
    dtype: str | None = None,
    reward: str | None = None,
    learning_rate: float | None = None,
    cache_dir: Path | None = None,
    seed: int = 0,
    found: Hardware | None = None,
) -> Prepared:
    """Check and resolve it all; every problem is a ConfigError of one line.

    ``new_tokens``: the longest continuation any prompt will be given. ``seed`` is that of the
    made models, not of the run. ``found``: what the run will have, if that is not this machine.
    """
    found = hardware.detect() if found is None else found
    n_gpus = len(found.gpus)
    invariant = os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")
    link, staged = hardware.split_backend(backend)
    chosen = hardware.choose_backend(link, n_gpus, rocm=found.rocm, batch_invariant=invariant)
    if reward is None:
        reward = default_reward(trainer_model or model)
    get_reward(reward)
    if dtype not in (None, "auto", *_DTYPES):
        raise ConfigError(f"unknown dtype {dtype!r}: choose auto or one of {', '.join(_DTYPES)}")
    if prompts_file is not None and not prompts_file.is_file():
        raise ConfigError(f"no prompts file {prompts_file}: give a text file, one prompt a line")
    cache = cache_dir or models.default_cache_dir()
    engine_path = models.resolve(model, "engine", cache, seed=seed)
    trainer_path = models.resolve(trainer_model or model, "trainer", cache, seed=seed)
    config = models.read_config(engine_path)
    check_same_shape(engine_path, config, trainer_path, models.read_config(trainer_path))
    if config.get("quantization_config"):
        raise ConfigError(
            f"{engine_path} is quantised; weights are swapped as they are trained: give an "
            "unquantised checkpoint"
        )
    check_workers(config, tensor_parallel_size)
    vocab_size = _integer(config, "vocab_size", engine_path)
    context = _context(config, engine_path, max_model_len)
    prompts = load_prompts(
        prompts_file,
        engine_path / "tokenizer.json",
        vocab_size=vocab_size,
        context=context,
        new_tokens=new_tokens,
    )
    check_reward(reward, prompts)
    engine_dtype = dtype if dtype in _DTYPES else ("bfloat16" if n_gpus else "float32")
    trainer_dtype = "float32"
    return Prepared(
        engine_path=engine_path,
        trainer_path=trainer_path,
        prompts=prompts,
        backend=chosen,
        staged=staged,
        gpus=n_gpus,
        rocm=found.rocm,
        max_model_len=context,
        vocab_size=vocab_size,
        eos_ids=_eos_ids(config),
        dtype=engine_dtype,
        trainer_dtype=trainer_dtype,
        wire_dtype=None if engine_dtype == trainer_dtype else engine_dtype,
        learning_rate=(
            models.default_learning_rate(trainer_model or model)
            if learning_rate is None
            else learning_rate
        ),
        reward=reward,
        hardware=found.describe(),
        packages=hardware.packages(),
    )


def check_same_shape(
    engine_path: Path, engine: dict[str, Any], trainer_path: Path, trainer: dict[str, Any]
) -> None:
    """ConfigError unless weights of the one fit the other. Keys one leaves out are skipped."""
    for key in _MUST_AGREE:
        left, right = engine.get(key), trainer.get(key)
        if left is not None and right is not None and left != right:
            raise ConfigError(
                f"engine and trainer models do not fit: {key} is {left} in {engine_path} and "
                f"{right} in {trainer_path}; give two checkpoints of one architecture"
            )


def check_workers(config: dict[str, Any], workers: int) -> None:
    """ConfigError where vLLM could not split the model's attention heads among ``workers``.

    Key and value heads are split, or each is given to as many workers (vLLM's models, llama.py).
    """
    heads = config.get("num_attention_heads")
    pairs = config.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(pairs, int) or min(heads, pairs) < 1:
        return

    def fits(n: int) -> bool:
        return heads % n == 0 and (pairs % n == 0 if pairs >= n else n % pairs == 0)

    if not fits(workers):
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if fits(n))
        raise ConfigError(
            f"--tensor-parallel-size {workers}: the model's {heads} attention heads and {pairs} "
            f"key-value heads cannot be shared by so many workers: use one of {fitting}"
        )


def _context(config: dict[str, Any], path: Path, asked: int | None) -> int:
    limit = _integer(config, "max_position_embeddings", path)
    if asked is None:
        return min(limit, DEFAULT_CONTEXT)
    if not 1 <= asked <= limit:
        raise ConfigError(f"context of {asked} tokens asked for, the model allows 1 to {limit}")
    return asked


def _integer(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path}/config.json: {key} is {value!r}, must be a positive integer")
    return value


def _eos_ids(config: dict[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if isinstance(value, int):
        return (value,)
    return tuple(value) if isinstance(value, list) else ()
