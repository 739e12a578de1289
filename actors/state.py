"""What a trainer needs to go on where it was: weights, optimizer, random number generators.

One folder of plain files; nothing in it is unpickled::

    state.json                       names the three files, says step and version
    weights-<token>.safetensors      under the checkpoint's names
    optimizer-<token>.safetensors    ``parameter.key``
    rng-<token>.safetensors          torch's generators; Python's and numpy's as numbers

``state.json`` is replaced last and at once, so that a crash leaves the state that was there.
"""

from __future__ import annotations

import json
import os
import random
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from orchestrator.errors import TrainerError
from orchestrator.files import sync_folder

if TYPE_CHECKING:
    from actors.learner import Learner

FORMAT = 1
_INDEX = "state.json"
_PARTS = ("weights", "optimizer", "rng")


@dataclass(frozen=True, slots=True)
class Position:
    """How far training has come."""

    step: int
    """The last one made; 0 before the first."""
    version: int | None
    """Staged last; None when nothing was."""


def save_state(
    folder: Path, weights: Iterable[tuple[str, Tensor]], learner: Learner, position: Position
) -> None:
    """Write it all to ``folder``, on the disk on return. A former state is replaced whole."""
    folder.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(4)
    files = {part: f"{part}-{token}.safetensors" for part in _PARTS}
    tensors, numbers = _generators()
    _save(folder / files["weights"], dict(weights))
    _save(folder / files["optimizer"], learner.optimizer_state())
    _save(folder / files["rng"], tensors)
    index = {
        "format": FORMAT,
        "files": files,
        "generators": numbers,
        "torch": torch.__version__,
        **asdict(position),
    }
    fresh = folder / f".{_INDEX}-{token}"
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(index, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
    os.replace(fresh, folder / _INDEX)
    sync_folder(folder)
    for path in folder.iterdir():
        if path.name not in (_INDEX, *files.values()):
            path.unlink()


def load_state(folder: Path, weights: Iterable[tuple[str, Tensor]], learner: Learner) -> Position:
    """Put it all back, into the tensors that are there; TrainerError when it does not fit.

    All is read and compared before anything is changed.
    """
    index = _read_index(folder)
    found = {part: _load(folder / index["files"][part]) for part in _PARTS}
    live = dict(weights)
    _check(folder, live, found["weights"])
    set_generators = _checked_generators(folder, found["rng"], index["generators"])
    learner.load_optimizer_state(found["optimizer"])
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(found["weights"][name])
    set_generators()
    return Position(index["step"], index["version"])


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise TrainerError(f"{folder} has format {index['format']}, this reads {FORMAT}")
        if not all(isinstance(index["files"][part], str) for part in _PARTS):
            raise TypeError("files are to be names")
        position = index["step"], index["version"], index["generators"]
        if not isinstance(position[0], int) or not isinstance(position[2], dict):
            raise TypeError("step is to be a number, generators an object")
    except OSError as error:
        raise TrainerError(f"no trainer state in {folder}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"{folder / _INDEX} is damaged: {error!r}") from None
    return dict(index)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise TrainerError(f"cannot read {path}: {error}") from None


def _check(folder: Path, live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    if other := sorted(live.keys() ^ saved.keys()):
        where = "saved state" if other[0] in saved else "model"
        raise TrainerError(
            f"{folder} is of another model: {len(other)} tensors are on one side only, first "
            f"{other[0]!r} of the {where}. Start with the model that the run had"
        )
    for name, tensor in live.items():
        was, now = saved[name], tensor
        if (was.shape, was.dtype) != (now.shape, now.dtype):
            raise TrainerError(
                f"{folder} is of another model: {name!r} is {was.dtype} {tuple(was.shape)} there "
                f"and {now.dtype} {tuple(now.shape)} here. Start with the model that the run had"
            )


# Random number generators


def _generators() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Those of torch as tensors, those of Python and numpy as plain data."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        for number, state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"cuda.{number}"] = state
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy = [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)]
    return tensors, {"python": random.getstate(), "numpy": numpy}


def _checked_generators(
    folder: Path, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]
) -> Callable[[], None]:
    """A function that sets them all; TrainerError here when one of them cannot be set.

    Those of GPUs that are not here are left out.
    """
    try:
        kind, keys, gauss = numbers["python"]
        python = (kind, tuple(keys), gauss)
        random.Random().setstate(python)
        name, words, *rest = numbers["numpy"]
        numpy = (name, np.array(words, dtype=np.uint32), *rest)
        np.random.RandomState().set_state(numpy)
        torch.Generator().set_state(tensors["cpu"])
    except (ValueError, TypeError, LookupError, RuntimeError) as error:
        raise TrainerError(f"the random state in {folder} is damaged: {error}") from None
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(tensors["cpu"])
        for number in range(gpus):
            if (state := tensors.get(f"cuda.{number}")) is not None:
                torch.cuda.set_rng_state(state, number)

    return put_back
