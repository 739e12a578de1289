"""Checkpoints on the disk: whole or not there, the newest two kept, a damaged one passed over."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import checkpoint as module
from orchestrator.checkpoint import Checkpoints, RunCheckpoint
from orchestrator.errors import ConfigError, MidflightError, TrainerError
from orchestrator.rollouts import SourceState
from orchestrator.testing import run
from orchestrator.types import PolicyVersion
from tests.unit.hand_made import rollout

WAITING = ((rollout("r4.0"), rollout("r4.1", reward=0.5, staleness=1)), (rollout("r2.0"),))


def at(step: int, source: SourceState | None = None) -> RunCheckpoint:
    state = source or SourceState(9, (5, 7), WAITING, 2, 0)
    return RunCheckpoint("run-1", step, PolicyVersion(step + 1), state)


async def save(path: str) -> None:
    _save(Path(path))


def _save(folder: Path) -> None:
    folder.mkdir()
    (folder / "state.json").write_text("weights")


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


class Notes:
    """An attachment that counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = self.synced = 0

    def state(self) -> Mapping[str, Any]:
        self.asked += 1
        return {"asked": self.asked}

    def sync(self) -> None:
        self.synced += 1


async def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    notes = Notes()
    written = await Checkpoints(tmp_path / "c", notes).write(at(3), save)
    read = Checkpoints(tmp_path / "c").latest()
    assert read == written
    assert replace(read, folder=None, attached={}) == at(3)
    assert (read.attached, notes.synced) == ({"asked": 1}, 1)
    assert names(tmp_path / "c") == ["state-000003"]
    assert names(tmp_path / "c/state-000003") == ["run.json", "trainer"]
    assert read.trainer_path == str(tmp_path / "c/state-000003/trainer")


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(allow_nan=False), min_size=1, max_size=5),
    st.text(st.characters(exclude_categories=["Cs"])),
)
def test_every_number_and_text_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[float], text: str
) -> None:
    done = replace(WAITING[0][0].completion, logprobs=tuple(numbers), text=text)
    group = (replace(WAITING[0][0], completion=done, reward=numbers[0]),)
    point = at(1, SourceState(3, (), (group,)))
    folder = tmp_path_factory.mktemp("c")
    run(Checkpoints(folder).write(point, save))
    assert Checkpoints(folder).latest().source == point.source


async def test_not_a_number_comes_back_too(tmp_path: Path) -> None:
    done = replace(WAITING[0][0].completion, logprobs=(math.nan, -math.inf))
    group = (replace(WAITING[0][0], completion=done),)
    await Checkpoints(tmp_path).write(at(1, SourceState(3, (), (group,))), save)
    back = Checkpoints(tmp_path).latest().source.waiting[0][0].completion.logprobs
    assert math.isnan(back[0]) and back[1] == -math.inf


async def test_the_newest_two_whole_ones_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2, 3, 4):
        await checkpoints.write(at(step), save)
    assert names(tmp_path) == ["state-000003", "state-000004"]
    (tmp_path / "state-000004/run.json").write_text("{")
    await checkpoints.write(at(5), save)
    assert names(tmp_path) == ["state-000003", "state-000005"], "a damaged one counts for nothing"


async def test_what_lies_behind_the_resumed_step_is_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (4, 6):
        await checkpoints.write(at(step), save)
    (tmp_path / "state-000006/trainer/state.json").unlink()
    assert checkpoints.latest().step == 4
    await checkpoints.write(at(5), save)
    assert names(tmp_path) == ["state-000004", "state-000005"]


async def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "v3").mkdir()
    (tmp_path / "state-none").mkdir()
    await Checkpoints(tmp_path).write(at(1), save)
    assert names(tmp_path) == ["state-000001", "state-none", "v3"]


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_no_checkpoint_is_said_with_the_folder_and_what_to_do(tmp_path: Path, folder: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"no whole checkpoint in {tmp_path}.*--checkpoint-every"
    ):
        Checkpoints(tmp_path / folder).latest()


def cut_run(folder: Path) -> None:
    path = folder / "run.json"
    path.write_text(path.read_text()[:50])


def other_schema(folder: Path) -> None:
    path = folder / "run.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 7'))


def wrong_field(folder: Path) -> None:
    path = folder / "run.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": "two"'))


def no_run(folder: Path) -> None:
    (folder / "run.json").unlink()


def short_trainer(folder: Path) -> None:
    (folder / "trainer/state.json").write_text("s")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (cut_run, "Unterminated string|Expecting|delimiter"),
        (other_schema, "run.json has schema_version 7, this reads 1"),
        (wrong_field, "run.json is damaged at step: "),
        (no_run, "No such file"),
        (short_trainer, "trainer/state.json has 1 bytes, "),
    ],
)
async def test_a_damaged_one_is_passed_over_with_its_reason(
    tmp_path: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        await checkpoints.write(at(step), save)
    spoil(tmp_path / "state-000002")
    assert checkpoints.latest().step == 1
    (why,) = checkpoints.skipped
    assert why.startswith(str(tmp_path / "state-000002: "))
    assert re.search(reason, why)
    no_run(tmp_path / "state-000001")
    with pytest.raises(ConfigError, match=r"state-000002.*state-000001"):
        checkpoints.latest()


class Crash(BaseException):
    """The process is gone."""


OPERATIONS = ("_make", "_write", "sync_folder", "_rename", "_remove")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("nth", range(1, 16))
async def test_a_crash_at_any_write_leaves_a_usable_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, after: bool
) -> None:
    """Also the clean-up that a living process would do does not happen."""
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        await checkpoints.write(at(step), save)
    (tmp_path / ".state-000003-left").mkdir()
    done: list[str] = []
    dead = False

    def strike(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def struck(*args: Any) -> None:
            nonlocal dead
            done.append(name)
            if dead:
                raise Crash
            dead = len(done) == nth
            if not dead or after:
                real(*args)
            if dead:
                raise Crash

        return struck

    async def saving(path: str) -> None:
        struck = strike("save", lambda: None)
        struck()
        await save(path)

    crashed = False
    with monkeypatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(module, name, strike(name, getattr(module, name)))
        try:
            await checkpoints.write(at(3), saving)
        except Crash:
            crashed = True
    assert crashed == (nth <= len(done)), "raise the range: there are more operations"
    found = Checkpoints(tmp_path).latest()
    in_place = "_rename" in done[: nth if after else nth - 1]
    assert found.step == (3 if in_place else 2)
    assert (Path(found.trainer_path) / "state.json").exists()
    await checkpoints.write(at(4), save)
    assert Checkpoints(tmp_path).latest().step == 4
    assert all(name.startswith("state-") for name in names(tmp_path))
    assert len(names(tmp_path)) == 2


async def test_a_disk_that_refuses_is_said_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    await checkpoints.write(at(1), save)

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write", full)
    with pytest.raises(MidflightError, match=r"checkpoint of step 2 .*No space left.*--resume"):
        await checkpoints.write(at(2), save)
    assert checkpoints.latest().step == 1


async def test_a_trainer_that_cannot_save_is_heard_and_the_one_before_stays(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    await checkpoints.write(at(1), save)

    async def refuse(path: str) -> None:
        raise TrainerError("trainer: the disk is full")

    async def elsewhere(path: str) -> None:
        """On another machine's disk."""

    with pytest.raises(TrainerError, match="disk is full"):
        await checkpoints.write(at(2), refuse)
    with pytest.raises(MidflightError, match="must be on a disk that both share"):
        await checkpoints.write(at(2), elsewhere)
    assert checkpoints.latest().step == 1
