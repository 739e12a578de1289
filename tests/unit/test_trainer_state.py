"""What a trainer saves is all it needs: going on from it is going on."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from actors.learner import Learner
from actors.state import Position, load_state, save_state
from orchestrator.errors import TrainerError
from tests.unit.test_learner import batch_of, learner, small_model

REWARDS = [0.0, 1.0, 0.5, 0.1]


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.state_dict().items()


def train(own: Learner, step: int) -> None:
    own.step(batch_of(own.model), REWARDS, step)


def save(folder: Path, own: Learner, step: int = 1, version: int | None = 1) -> None:
    save_state(folder, weights(own.model), own, Position(step, version))


def load(folder: Path, own: Learner) -> Position:
    return load_state(folder, weights(own.model), own)


def everything(own: Learner) -> dict[str, Tensor]:
    state = {**own.model.state_dict(), **own.optimizer_state()}
    return {name: tensor.clone() for name, tensor in state.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_step_after_loading_is_bit_for_bit_the_step_it_would_have_been(tmp_path: Path) -> None:
    through = learner(small_model(1))
    train(through, 1)
    save(tmp_path, through)
    train(through, 2)

    other = learner(small_model(2))
    train(other, 1)  # another past, which must leave nothing
    assert load(tmp_path, other) == Position(1, 1)
    train(other, 2)
    assert same(everything(other), everything(through))


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    own = learner(small_model())

    def draw() -> tuple[float, list[float], list[float], float]:
        gauss = random.gauss(0, 1)
        return gauss, np.random.normal(size=3).tolist(), torch.rand(3).tolist(), random.random()

    draw()
    save(tmp_path, own)
    expected = draw()
    draw()
    load(tmp_path, own)
    assert draw() == expected


def test_a_trainer_that_made_no_step_is_saved_too(tmp_path: Path) -> None:
    fresh = learner(small_model(1))
    save(tmp_path, fresh, step=0, version=None)
    other = learner(small_model(2))
    assert load(tmp_path, other) == Position(0, None)
    assert same(everything(other), everything(fresh))


def test_loading_keeps_the_tensors_where_they_are(tmp_path: Path) -> None:
    """A sender may have given their addresses away."""
    saved = learner(small_model(1))
    save(tmp_path, saved)
    other = learner(small_model(2))
    before = {n: t.data_ptr() for n, t in weights(other.model)}
    load(tmp_path, other)
    assert {n: t.data_ptr() for n, t in weights(other.model)} == before


def test_the_learning_rate_is_that_of_the_settings(tmp_path: Path) -> None:
    saved = learner(small_model(1), learning_rate=1e-2)
    train(saved, 1)
    save(tmp_path, saved)
    other = learner(small_model(2), learning_rate=1e-5)
    load(tmp_path, other)
    before = everything(other)
    train(other, 2)
    moved = max((a - before[n]).abs().max().item() for n, a in weights(other.model))
    assert 0 < moved < 1e-4


def test_a_newer_state_replaces_the_older_whole_and_leaves_no_file_of_it(tmp_path: Path) -> None:
    own = learner(small_model())
    save(tmp_path, own, step=1)
    first = {p.name for p in tmp_path.iterdir()}
    train(own, 2)
    save(tmp_path, own, step=2)
    second = {p.name for p in tmp_path.iterdir()}
    assert len(first) == len(second) == 4 and first & second == {"state.json"}
    other = learner(small_model(3))
    assert load(tmp_path, other).step == 2
    assert same(everything(other), everything(own))


class Crash(BaseException):
    """The process is gone: nothing it would do afterwards happens."""


@pytest.mark.parametrize("at", range(9))
def test_a_crash_at_any_write_leaves_the_state_that_was_there(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = learner(small_model())
    save(tmp_path, own, step=1)
    before = everything(own)
    train(own, 2)
    left = at

    def strike(real: Callable[..., object]) -> Callable[..., object]:
        def struck(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return real(*args, **kwargs)

        return struck

    with monkeypatch.context() as patch:
        patch.setattr("actors.state.save_file", strike(__import__("actors.state").state.save_file))
        patch.setattr(os, "fsync", strike(os.fsync))
        patch.setattr(os, "replace", strike(os.replace))
        with pytest.raises(Crash):
            save(tmp_path, own, step=2)
    other = learner(small_model(3))
    # Of 3 x (write, fsync), the index and the folder synced, the index put in place.
    assert load(tmp_path, other).step == 1
    assert same(everything(other), before)


def damage_index(folder: Path) -> None:
    (folder / "state.json").write_text('{"format": 1')


def newer_format(folder: Path) -> None:
    data = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**data, "format": 2}))


def half_the_weights(folder: Path) -> None:
    (path,) = folder.glob("weights-*")
    path.write_bytes(path.read_bytes()[:1000])


def no_optimizer(folder: Path) -> None:
    (path,) = folder.glob("optimizer-*")
    path.unlink()


def bad_generator(folder: Path) -> None:
    data = json.loads((folder / "state.json").read_text())
    data["generators"]["numpy"][1] = [1, 2]
    (folder / "state.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (damage_index, "state.json is damaged"),
        (newer_format, "has format 2, this reads 1"),
        (half_the_weights, "cannot read .*weights-"),
        (no_optimizer, "cannot read .*optimizer-"),
        (bad_generator, "the random state in .* is damaged"),
        (lambda folder: (folder / "state.json").unlink(), "no trainer state in"),
    ],
)
def test_a_state_that_is_not_whole_changes_nothing(
    tmp_path: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    saved = learner(small_model(1))
    train(saved, 1)
    save(tmp_path, saved)
    spoil(tmp_path)
    other = learner(small_model(2))
    before, drawn = everything(other), torch.get_rng_state()
    with pytest.raises(TrainerError, match=reason):
        load(tmp_path, other)
    assert same(everything(other), before)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_state_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, learner(small_model()))
    other = small_model()
    other.lm_head = nn.Linear(32, 33, bias=False)
    with pytest.raises(TrainerError, match=r"another model: 'lm_head.weight' is .*\(31, 32\)"):
        load(tmp_path, learner(other))
    del other.lm_head
    with pytest.raises(TrainerError, match=r"1 tensors are on one side only, first 'lm_head"):
        load(tmp_path, learner(other))


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    own = learner(small_model())
    train(own, 1)
    state = own.optimizer_state()
    fresh = learner(copy.deepcopy(own.model))
    with pytest.raises(TrainerError, match="is of no parameter here"):
        fresh.load_optimizer_state({"nobody.exp_avg": torch.zeros(1)})
    name = next(n for n in state if n.endswith("exp_avg"))
    with pytest.raises(TrainerError, match="has shape"):
        fresh.load_optimizer_state({**state, name: torch.zeros(1)})
    with pytest.raises(TrainerError, match="it is not whole"):
        fresh.load_optimizer_state({n: t for n, t in state.items() if n != name})
    assert fresh.optimizer_state() == {}
