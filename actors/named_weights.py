"""A model's weights under the names that its checkpoint has: what an engine can load.

The engine was started from a checkpoint, so the set of names to send is exactly the
checkpoint's, tied duplicates left out. Anything else is refused at start, with a hint,
rather than found out by an engine that was half updated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from orchestrator.errors import TrainerError

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def checkpoint_names(folder: Path) -> frozenset[str] | None:
    """Names of the tensors in ``folder``'s safetensors files; None when it has none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return frozenset(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    single = folder / "model.safetensors"
    if not single.is_file():
        return None
    with single.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return frozenset(header) - {"__metadata__"}


def named_weights(
    model: nn.Module, checkpoint: frozenset[str] | None
) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """A function that yields the current weights (no copies), the same names every time.

    Parameters and persistent buffers; of tensors that share their memory only one, by the
    checkpoint's name. TrainerError when the names are not the checkpoint's, or when the
    config ties the output head to the embedding and the module does not.
    """
    _check_tie(model)
    names = _unique(model, checkpoint)
    if checkpoint is not None:
        _check_names(model, names, checkpoint)
    buffers = {name for name, _ in model.named_buffers()}
    if checkpoint is None and (extra := sorted(buffers & set(names))):
        raise TrainerError(
            f"buffer {extra[0]!r} would be sent, but whether engines load it cannot be told: "
            "the checkpoint has no safetensors; save it as safetensors"
        )

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        state = model.state_dict()
        for name in names:
            yield name, state[name]

    return weights


def _unique(model: nn.Module, checkpoint: frozenset[str] | None) -> list[str]:
    by_memory: dict[tuple[object, ...], str] = {}
    for name, tensor in model.state_dict().items():
        key: tuple[object, ...] = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() == 0 or tensor.is_meta:
            key = (name,)
        known = by_memory.get(key)
        if known is None or (checkpoint and name in checkpoint and known not in checkpoint):
            by_memory[key] = name
    return list(by_memory.values())


def _check_tie(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return
    head = model.get_output_embeddings()  # type: ignore[operator]
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    if head is None or embedding is None:
        return
    if head.weight.data_ptr() != embedding.weight.data_ptr():
        raise TrainerError(
            "the config ties the output head to the embedding, the model has two tensors: an "
            "engine would keep one of them old. Call model.tie_weights() or untie the config"
        )


def _check_names(model: nn.Module, names: list[str], checkpoint: frozenset[str]) -> None:
    state = model.state_dict()
    buffers = {name for name, _ in model.named_buffers()}
    for name in names:
        if name in checkpoint:
            continue
        if name in buffers:
            raise TrainerError(
                f"buffer {name!r} is persistent in the model but not in its checkpoint, so no "
                "engine loads it: register it with persistent=False or add it to the checkpoint"
            )
        raise TrainerError(
            f"weight {name!r} is not in the checkpoint: an engine would not know it. Models "
            "that are renamed or fused while loading are not supported; use a dense one"
        )
    sent = {state[name].data_ptr() for name in names}
    for name in sorted(checkpoint):
        if name not in names and (name not in state or state[name].data_ptr() not in sent):
            raise TrainerError(
                f"the checkpoint has {name!r} but the model would not send it: the engine's "
                "copy would stay old. Save the checkpoint again from the model class in use"
            )
