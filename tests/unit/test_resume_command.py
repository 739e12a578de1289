"""``--resume RUN_DIR`` over the public fakes: its files go on, and what it refuses.

A kill of the process leaves what is on the disk at that moment: a copy of the folder.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from orchestrator import cli, runner
from orchestrator.checkpoint import Checkpoints, RunCheckpoint
from orchestrator.config import Settings
from orchestrator.errors import ConfigError
from orchestrator.events import CheckpointWritten, Event, RolloutFinished, TrainStepDone
from orchestrator.run_folder import CHECKPOINTS, checkpoint_of
from orchestrator.runner import write_config
from orchestrator.telemetry import Telemetry
from orchestrator.telemetry.schema import RolloutRecord, Summary
from orchestrator.testing import FakeWorld
from tests.unit.fake_run import FakeAssembly, FakePrepared

ROLLOUTS = 32
"""A batch."""


async def go(folder: Path, *, observe: Callable[[Event], None], **changes: Any) -> int:
    """A run in ``folder``, which goes on where it was if it has a checkpoint."""
    settings = Settings(**{"steps": 4, "checkpoint_every": 1, **changes})
    point = prepare(folder, settings)
    return await runner.run(
        settings,
        FakePrepared(),
        FakeAssembly(FakeWorld()).assemble,
        run_dir=folder,
        run_id="run-1" if point is None else point.run_id,
        stdout=io.StringIO(),
        observers=[observe],
        resume=point,
    )


def prepare(folder: Path, settings: Settings) -> RunCheckpoint | None:
    """As the command does."""
    folder.mkdir(exist_ok=True)
    write_config(settings, FakePrepared(), folder)
    return checkpoint_of(folder, settings)[0] if (folder / CHECKPOINTS).exists() else None


class Killer:
    """Keeps what a kill would leave, when ``when`` says so for the first time."""

    def __init__(self, folder: Path, copy: Path, when: Callable[[Event], bool]) -> None:
        self._folder, self._copy, self._when = folder, copy, when

    def __call__(self, event: Event) -> None:
        if not self._copy.exists() and self._when(event):
            shutil.copytree(self._folder, self._copy)


def rollouts(folder: Path) -> list[RolloutRecord]:
    text = (folder / "rollouts.jsonl").read_text()
    return [RolloutRecord.model_validate_json(line) for line in text.splitlines()]


def summary(folder: Path) -> Summary:
    return Summary.model_validate_json((folder / "summary.json").read_text())


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def nothing(event: Event) -> None:
    """Nobody watches."""


def trained_step(number: int) -> Callable[[Event], bool]:
    return lambda e: isinstance(e, TrainStepDone) and e.stats.step == number


def written(number: int) -> Callable[[Event], bool]:
    return lambda e: isinstance(e, CheckpointWritten) and e.step == number


class Nth:
    """The n-th rollout that ended: in the middle of anything."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, event: Event) -> bool:
        self._left -= isinstance(event, RolloutFinished)
        return self._left == 0


def assert_whole(folder: Path, steps: int) -> None:
    """As if the run had never been cut."""
    lines, s = rollouts(folder), summary(folder)
    ids = [line.id for line in lines]
    assert len(ids) == len(set(ids)), "a rollout is there twice"
    trained = [line for line in lines if line.status == "trained"]
    assert len(trained) == steps * ROLLOUTS and all(line.reward is not None for line in trained)
    numbers = {int(line.group[1:]) for line in lines if line.kind == "rollout"}
    assert numbers == set(range(max(numbers) + 1)), "a group is missing"
    assert (s.outcome, s.steps_done, s.final_version) == ("completed", steps, steps)
    assert [t.step for t in s.training] == list(range(1, steps + 1)) and len(s.reward) == steps
    assert [(w.from_version, w.to_version) for w in s.swaps] == [(n, n + 1) for n in range(steps)]
    counts = s.rollouts
    assert counts.finished == len(lines) and counts.trained == len(trained)
    assert counts.cut == sum(len({p.version for p in line.spans}) > 1 for line in lines)
    tokens: dict[str, int] = {}
    for line in lines:
        for span in line.spans:
            tokens[str(span.version)] = tokens.get(str(span.version), 0) + span.end - span.start
    assert s.tokens == tokens
    assert s.stall_s.count == sum(len(line.stalls) for line in lines)
    for swap in s.swaps:
        cuts = [
            line.kind
            for line in lines
            for a, b in zip(line.spans, line.spans[1:], strict=False)
            if a.version != b.version == swap.to_version
        ]
        assert swap.probes_cut == cuts.count("probe") and swap.rollouts_cut == cuts.count("rollout")


@pytest.mark.parametrize(
    ("when", "step"),
    [
        (trained_step(2), 1),
        (written(2), 2),
        (trained_step(3), 2),
        (trained_step(4), 3),
        (Nth(70), 2),
        (Nth(120), 3),
    ],
    ids=["trained-2", "written-2", "trained-3", "trained-4", "rollout-70", "rollout-120"],
)
async def test_a_killed_run_goes_on_in_its_files(
    tmp_path: Path, when: Callable[[Event], bool], step: int
) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    assert await go(folder, observe=Killer(folder, copy, when)) == 0
    assert not (copy / "summary.json").exists()
    point = Checkpoints(copy / CHECKPOINTS).latest()
    known = {line.id for line in rollouts(copy)[: lines_known(copy, point.attached)]}
    assert await go(copy, observe=nothing) == 0
    assert_whole(copy, 4)
    assert summary(copy).resumed_at == [point.step]
    assert point.step == step
    assert known <= {line.id for line in rollouts(copy)}
    lines = events(copy)
    assert {line["run_id"] for line in lines} == {"run-1"}
    (resumed,) = [line for line in lines if line["event"] == "run resumed"]
    assert (resumed["step"], resumed["version"]) == (point.step, point.version)
    assert summary(copy).duration_s >= point.attached["seconds"]


def lines_known(folder: Path, attached: Any) -> int:
    data = (folder / "rollouts.jsonl").read_bytes()[: attached["rollouts_bytes"]]
    assert data.endswith(b"\n") or not data
    return data.count(b"\n")


async def test_a_run_that_is_cut_twice_is_still_whole(tmp_path: Path) -> None:
    one, two, three = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    assert await go(one, observe=Killer(one, two, trained_step(3))) == 0
    assert await go(two, observe=Killer(two, three, trained_step(4))) == 0
    assert await go(three, observe=nothing) == 0
    assert_whole(three, 4)
    assert summary(three).resumed_at == [2, 3]


async def test_a_torn_line_at_the_end_is_cut_off(tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    await go(folder, observe=Killer(folder, copy, trained_step(2)))
    for name in ("events.jsonl", "rollouts.jsonl"):
        with (copy / name).open("a") as file:
            file.write('{"half": ')
    assert await go(copy, observe=nothing) == 0
    assert_whole(copy, 4)
    events(copy)


async def test_a_failed_run_is_resumed_and_its_summary_is_of_the_whole(tmp_path: Path) -> None:
    world = FakeWorld()
    world.faults.fail("trainer", "stage", call=3)
    folder = tmp_path / "run"
    settings = Settings(steps=4, checkpoint_every=1)
    prepare(folder, settings)
    code = await runner.run(
        settings,
        FakePrepared(),
        FakeAssembly(world).assemble,
        run_dir=folder,
        run_id="run-1",
        stdout=io.StringIO(),
    )
    assert code == 1 and summary(folder).outcome == "failed"
    assert any(line.status == "unused" for line in rollouts(folder))
    assert await go(folder, observe=nothing) == 0
    assert_whole(folder, 4)
    assert summary(folder).failed_swaps == [], "that step was made again"


@pytest.mark.parametrize("which", ["cut", "config"])
async def test_files_that_cannot_go_on_end_the_run(
    tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise rollouts would be there twice, or the next resume would read old settings."""
    folder, copy = tmp_path / "run", tmp_path / "copy"
    await go(folder, observe=Killer(folder, copy, trained_step(3)))
    before = (copy / "rollouts.jsonl").read_bytes()
    point = Checkpoints(copy / CHECKPOINTS).latest()

    def refuse(path: Path, *rest: object) -> None:
        raise OSError(28, "No space left on device")

    if which == "cut":
        monkeypatch.setattr("orchestrator.telemetry.report.cut", refuse)
    else:
        monkeypatch.setattr("orchestrator.runner.write_atomic", refuse)
    code = await runner.run(
        Settings(steps=4, checkpoint_every=1),
        FakePrepared(),
        FakeAssembly(FakeWorld()).assemble,
        run_dir=copy,
        run_id=point.run_id,
        stdout=io.StringIO(),
        resume=point,
    )
    assert code == 2
    assert (copy / "rollouts.jsonl").read_bytes() == before
    monkeypatch.undo()
    assert await go(copy, observe=nothing) == 0
    assert_whole(copy, 4)


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("orchestrator.telemetry.JsonLines", refuse)
    with pytest.raises(ConfigError, match=r"cannot write to .*: Permission denied. Name a folder"):
        Telemetry(tmp_path, "run-1", 1, stdout=io.StringIO())


async def test_two_writers_of_one_folder_are_refused(tmp_path: Path) -> None:
    first = Telemetry(tmp_path, "run-1", 1, stdout=io.StringIO())
    with pytest.raises(ConfigError, match=f"a run writes to {tmp_path} now"):
        Telemetry(tmp_path, "run-1", 1, stdout=io.StringIO())
    first.close()
    Telemetry(tmp_path, "run-1", 1, stdout=io.StringIO()).close()


async def test_files_that_are_not_what_the_checkpoint_knew_are_refused(tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    await go(folder, observe=Killer(folder, copy, trained_step(2)))
    (copy / "rollouts.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"rollouts.jsonl has 0 bytes, \d+ were written before"):
        await go(copy, observe=nothing)


# The command


@pytest.fixture
def assembly(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAssembly]:
    """In the place of ``actors.assembly``."""
    import actors

    for name in [n for n in os.environ if n.upper().startswith("MIDFLIGHT_")]:
        monkeypatch.delenv(name)
    fake, module = FakeAssembly(), ModuleType("actors.assembly")
    module.preflight = fake.preflight  # type: ignore[attr-defined]
    module.assemble = fake.assemble  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "actors.assembly", module)
    monkeypatch.setattr(actors, "assembly", module, raising=False)
    yield fake


SMALL = ["--max-tokens", "8", "--validate", "digest", "--probe-tokens", "10"]


def test_a_run_and_its_end_from_the_command_line(
    assembly: FakeAssembly, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 24, as a user does it: a run that failed goes on, with what it was asked for."""
    folder = tmp_path / "run"
    assembly.world.faults.fail("trainer", "train", call=3)
    begun = [*SMALL, "--steps", "3", "--checkpoint-every", "2", "--output-dir", str(folder)]
    assert cli.main(begun) == 1
    capsys.readouterr()
    assembly.world = FakeWorld()
    assert cli.main(["--resume", str(folder), "--steps", "4"]) == 0
    assert "completed: 4/4 steps, 4 swaps" in capsys.readouterr().out
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["steps"], config["max_tokens"], config["checkpoint_every"]) == (4, 8, 2)
    assert_whole(folder, 4)
    assert sorted(p.name for p in (folder / CHECKPOINTS).iterdir()) == [
        "state-000002",
        "state-000004",
    ]
    closed = assembly.closed
    assert cli.main(["--resume", str(folder)]) == 2
    assert "that run completed its 4 steps. To go on with it, give --steps 5" in (
        capsys.readouterr().err
    )
    assert assembly.closed == closed


@pytest.mark.parametrize(
    ("more", "message", "code"),
    [
        (["--seed", "4"], "seed was 0 when the checkpoint was written and is 4 now", 2),
        (["--group-size", "2"], "group_size was 4 when the checkpoint was written and is 2", 2),
        ([], "load_state", 1),
    ],
    ids=["seed", "group-size", "the-trainer-refuses"],
)
def test_a_resume_that_is_refused_changes_nothing(
    more: list[str],
    message: str,
    code: int,
    assembly: FakeAssembly,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nor does it spoil the next one, which is asked for what can be done."""
    folder = tmp_path / "run"
    begun = [*SMALL, "--steps", "2", "--checkpoint-every", "1", "--output-dir", str(folder)]
    assert cli.main(begun) == 0
    assembly.world, files = FakeWorld(), ("config.yaml", "summary.json", "rollouts.jsonl")
    before = {name: (folder / name).read_bytes() for name in files}
    if not more:
        assembly.world.faults.fail("trainer", "load_state", call=1)
    closed = assembly.closed
    capsys.readouterr()
    assert cli.main(["--resume", str(folder), "--steps", "3", *more]) == code
    assert message in capsys.readouterr().err
    assert (assembly.closed == closed) == (code == 2), "nothing was started for a mistake"
    assert {name: (folder / name).read_bytes() for name in files} == before
    assembly.world = FakeWorld()
    assert cli.main(["--resume", str(folder), "--steps", "3"]) == 0
    assert_whole(folder, 3)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_run_that_completed_is_made_longer(
    assembly: FakeAssembly, tmp_path: Path, every: int
) -> None:
    """Also where its last steps have no checkpoint: those are made again."""
    folder = tmp_path / "run"
    begun = [*SMALL, "--steps", "4", "--checkpoint-every", str(every), "--output-dir", str(folder)]
    assert cli.main(begun) == 0
    assert summary(folder).outcome == "completed"
    assembly.world = FakeWorld()
    assert cli.main(["--resume", str(folder), "--steps", "6"]) == 0
    assert_whole(folder, 6)
    assert summary(folder).resumed_at == [4 // every * every]


def test_a_run_that_completed_without_checkpoints_is_not_told_to_ask_for_more_steps(
    assembly: FakeAssembly, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert cli.main([*SMALL, "--steps", "1", "--output-dir", str(folder)]) == 0
    for more in ([], ["--steps", "2"]):
        assert cli.main(["--resume", str(folder), *more]) == 2
        told = capsys.readouterr().err
        assert "no whole checkpoint in" in told and "give --steps" not in told


def interrupted(folder: Path, **changes: Any) -> None:
    """A folder of a run that wrote nothing but its settings."""
    folder.mkdir()
    write_config(Settings(**changes), FakePrepared(), folder)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "no whole checkpoint in"),
        (["--config", "x.yaml"], "--resume takes the run's own config.yaml: leave --config out"),
        (["--output-dir", "elsewhere"], "writes into that folder, --output-dir elsewhere asks"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
    ],
)
def test_what_cannot_be_resumed_is_one_line_and_exit_code_2(
    more: list[str],
    message: str,
    assembly: FakeAssembly,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    interrupted(folder)
    before = (folder / "config.yaml").read_text()
    assert cli.main(["--resume", str(folder), *more]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("midflight: error: ") and message in err
    assert (folder / "config.yaml").read_text() == before
    assert assembly.closed == 0


def test_a_folder_without_a_run_is_refused(
    assembly: FakeAssembly, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert cli.main(["--resume", str(folder)]) == 2
        assert "there is no config.yaml in it, so it holds no run" in capsys.readouterr().err


def test_steps_that_are_done_are_refused(
    assembly: FakeAssembly, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assembly.world.faults.fail("trainer", "train", call=3)
    cli.main([*SMALL, "--steps", "4", "--checkpoint-every", "1", "--output-dir", str(folder)])
    capsys.readouterr()
    assert cli.main(["--resume", str(folder), "--steps", "2"]) == 2
    assert "step 2 is done and 2 steps are asked for in all: give --steps 3" in (
        capsys.readouterr().err
    )
    # Another seed would make other requests of the groups that are to be made again.
    assembly.world = FakeWorld()
    assert cli.main(["--resume", str(folder), "--seed", "7"]) == 2
    assert "seed was 0 when the checkpoint was written and is 7 now" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over_and_said(
    assembly: FakeAssembly, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assembly.world.faults.fail("trainer", "train", call=3)
    cli.main([*SMALL, "--steps", "3", "--checkpoint-every", "1", "--output-dir", str(folder)])
    capsys.readouterr()
    run = folder / CHECKPOINTS / "state-000002/run.json"
    run.write_text(run.read_text()[:100])
    assembly.world = FakeWorld()
    assert cli.main(["--resume", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "checkpoint passed over" in out and "state-000002" in out
    assert_whole(folder, 3)
    assert summary(folder).resumed_at == [1]
