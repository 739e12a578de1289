"""Write a checkpoint an engine can be started from. Atomic: it is there whole or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from orchestrator.errors import TrainerError

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


def write_checkpoint(
    target: Path,
    weights: Iterable[tuple[str, Tensor]],
    source: Path,
    *,
    metadata: dict[str, str] | None = None,
) -> Path:
    """Write ``weights`` to ``target`` with config and tokenizer from ``source``.

    The config's dtype becomes the weights' own. An older ``target`` is replaced, in a moment
    during which there is none. TrainerError when there is no weight.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    if not tensors:
        raise TrainerError(f"there are no weights to save in {target}: stage them first")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fresh = temporary / "new"
        fresh.mkdir()
        save_file(
            tensors, fresh / "model.safetensors", metadata={**(metadata or {}), "format": "pt"}
        )
        for path in source.iterdir():
            if path.is_file() and not _is_weights(path):
                shutil.copyfile(path, fresh / path.name)
        _set_dtype(fresh / "config.json", tensors)
        if target.exists():
            target.rename(temporary / "old")
        fresh.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")


def _set_dtype(config_file: Path, tensors: dict[str, Tensor]) -> None:
    floats = {
        str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()
    }
    if len(floats) != 1:
        return
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = floats.pop()
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
