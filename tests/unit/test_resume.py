"""A run that goes on from its checkpoint is the run it would have been."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator import (
    Checkpoints,
    CheckpointWritten,
    ConfigError,
    GenerationOptions,
    Orchestrator,
    PhaseTimeout,
    PolicyVersion,
    RolloutConsumed,
    RunCheckpoint,
    RunResumed,
    SourceState,
    State,
    StateChanged,
    SwapDone,
    SwapOptions,
    TrainerError,
    TrainStepDone,
    TransferBackend,
    ValidationFailed,
)
from orchestrator.protocols import Resumable
from orchestrator.testing import FakeEngine, FakeTrainer, FakeWorld, fake_engine_factory
from tests.harness import ALL, GENERATION, PROMPTS, SWAP, Rig, WatchedEngine, drive


def make(
    folder: Path,
    world: FakeWorld,
    *,
    resume: RunCheckpoint | None = None,
    every: int = 1,
    engines: int = 1,
    swap: SwapOptions = SWAP,
    generation: GenerationOptions = GENERATION,
) -> Rig:
    """A rig whose run writes checkpoints below ``folder``, or goes on from one."""
    trainer = FakeTrainer(world)
    replicas = [WatchedEngine(f"engine-{i}", world) for i in range(engines)]
    rig = Rig(world, [trainer], replicas)
    for replica in replicas:
        replica.published, replica.broken = lambda: rig.orchestrator.version, rig.broken
    rig.orchestrator = Orchestrator(
        replicas,
        trainer,
        prompts=PROMPTS,
        probes=PROMPTS[:2],
        swap=swap,
        generation=generation,
        validation=ALL,
        engine_factory=fake_engine_factory(trainer),
        observers=[rig.observe],
        run_id="run",
        checkpoints=Checkpoints(folder),
        checkpoint_every=every,
        resume=resume,
    )
    return rig


def trained(rig: Rig) -> list[tuple[int, list[str]]]:
    """Steps made, each with its batch."""
    return [
        (e.stats.step, [r.request.request_id for r in e.rollouts]) for e in rig.of(TrainStepDone)
    ]


def groups(rig: Rig) -> list[str]:
    return [
        e.rollout.request.group
        for e in rig.of(RolloutConsumed)
        if e.rollout.request.request_id.endswith(".0")
    ]


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def trainer_state(folder: str) -> dict[str, Any]:
    return dict(json.loads(Path(folder, "trainer", "state.json").read_text()))


def test_the_fake_trainer_can_be_resumed() -> None:
    assert isinstance(FakeTrainer(), Resumable)


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize(
    "swap",
    [
        SWAP,
        replace(SWAP, staged=True),
        replace(SWAP, backend=TransferBackend.IPC),
        replace(SWAP, backend=TransferBackend.NCCL),
    ],
    ids=["gloo", "staged", "ipc", "nccl"],
)
async def test_a_resumed_run_counts_on_and_syncs_whole_before_the_first_request(
    tmp_path: Path, world: FakeWorld, engines: int, swap: SwapOptions
) -> None:
    """Case 24: resumed after step 2, versions go on, and base weights serve nobody."""
    first = make(tmp_path, world, engines=engines, swap=swap)
    assert await drive(first, 2) is None
    point = Checkpoints(tmp_path).latest()
    assert (point.step, point.version, point.run_id) == (2, 2, "run")

    again = FakeWorld()
    second = make(tmp_path, again, resume=point, engines=engines, swap=swap)
    assert await drive(second, 4) is None
    second.assert_invariants()
    assert [step for step, _ in trained(second)] == [3, 4]
    swaps = [e.report.update for e in second.of(SwapDone)]
    assert [(u.step, u.from_version, u.version) for u in swaps] == [(3, 2, 3), (4, 3, 4)]
    assert all(e.report.ok for e in second.of(SwapDone))
    (resumed,) = second.of(RunResumed)
    assert (resumed.step, resumed.version, resumed.path) == (2, 2, str(point.folder))
    generating = next(
        i for i, e in enumerate(second.events)
        if isinstance(e, StateChanged) and e.target is State.GENERATING
    )  # fmt: skip
    assert second.events.index(resumed) < generating
    for engine in second.engines:
        calls = [c for c in again.log if c.actor == engine.name]
        synced = next(c for c in calls if c.method == "finish_update")
        generated = [c for c in calls if c.method == "generate"]
        assert generated and all(c.seq > (synced.ended_seq or 0) for c in generated)
    assert all(
        span.version >= 2
        for e in second.of(RolloutConsumed)
        for span in e.rollout.completion.spans
        if e.rollout.request.request_id not in known(point)
    )
    assert Checkpoints(tmp_path).latest().step == 4


def known(point: RunCheckpoint) -> set[str]:
    return {r.request.request_id for group in point.source.waiting for r in group}


async def test_the_resumed_run_is_the_run_that_was_never_cut(tmp_path: Path) -> None:
    """One request at a time and no room for more than a batch, so that time decides nothing."""
    narrow = replace(GENERATION, max_in_flight=1, buffer_size=4)
    whole = make(tmp_path / "whole", FakeWorld(), generation=narrow)
    assert await drive(whole, 4) is None

    first = make(tmp_path / "cut", FakeWorld(), generation=narrow)
    assert await drive(first, 2) is None
    point = Checkpoints(tmp_path / "cut").latest()
    second = make(tmp_path / "cut", FakeWorld(), resume=point, generation=narrow)
    assert await drive(second, 4) is None
    assert trained(first) + trained(second) == trained(whole)
    numbers = [int(group[1:]) for group in groups(first) + groups(second)]
    assert numbers == list(range(8))


async def test_a_checkpoint_is_of_the_step_that_was_just_proved(
    tmp_path: Path, world: FakeWorld
) -> None:
    rig = make(tmp_path, world, every=2)
    assert await drive(rig, 5) is None
    written = rig.of(CheckpointWritten)
    assert [(e.step, e.version, e.op.version) for e in written] == [(2, 2, 2), (4, 4, 4)]
    for event in written:
        before = [e for e in rig.events[: rig.events.index(event)] if isinstance(e, SwapDone)]
        assert before[-1].report.update.version == event.version
        trained_before = rig.events[: rig.events.index(event)]
        steps = [e.stats.step for e in trained_before if isinstance(e, TrainStepDone)]
        assert steps[-1] == event.step
    saved = trainer_state(written[-1].path)
    assert (saved["step"], saved["version"]) == (4, 4)


async def test_without_checkpoint_every_nothing_is_written(
    tmp_path: Path, world: FakeWorld
) -> None:
    assert await drive(make(tmp_path / "c", world, every=0), 2) is None
    assert not (tmp_path / "c").exists()
    assert world.calls("save_state") == []


async def test_generation_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, world: FakeWorld
) -> None:
    world.faults.delay("trainer", "save_state", 5.0, call=1)
    wide = replace(GENERATION, buffer_size=64)
    rig = make(tmp_path, world, generation=wide)
    assert await drive(rig, 2) is None
    save = world.calls("save_state")[0]
    assert save.ended is not None and save.ended - save.at >= 5
    during = [c for c in world.calls("generate") if save.at < c.at < save.ended]
    assert len(during) >= 4
    # What ended meanwhile is not in it: it is made again.
    assert Checkpoints(tmp_path).latest().step == 2


async def test_a_run_that_dies_is_resumed_from_its_last_checkpoint(
    tmp_path: Path, world: FakeWorld
) -> None:
    world.faults.die("trainer", "train", call=4)
    first = make(tmp_path, world, every=2)
    assert await drive(first, 6) is not None
    assert [step for step, _ in trained(first)] == [1, 2, 3]
    point = Checkpoints(tmp_path).latest()
    assert point.step == 2

    second = make(tmp_path, FakeWorld(), resume=point, every=2)
    assert await drive(second, 6) is None
    second.assert_invariants()
    kept = [batch for step, batch in trained(first) if step <= 2]
    used = [name for batch in [*kept, *(b for _, b in trained(second))] for name in batch]
    assert len(used) == len(set(used)), "a rollout was trained on twice"
    assert [step for step, _ in trained(second)] == [3, 4, 5, 6]
    highest = max(int(name[1:].split(".")[0]) for name in used)
    in_play = {f"r{n}.{i}" for n in range(highest + 1) for i in range(2)} - set(used)
    state = Checkpoints(tmp_path).latest().source
    left = {f"r{n}.{i}" for n in state.unfinished for i in range(2)}
    left |= {r.request.request_id for group in state.waiting for r in group}
    assert in_play <= left, "a group was skipped"


async def test_a_crash_in_the_middle_of_a_checkpoint_leaves_the_one_before(
    tmp_path: Path, world: FakeWorld
) -> None:
    world.faults.die("trainer", "save_state", call=2)
    first = make(tmp_path, world)
    error = await drive(first, 3)
    assert error is not None and "trainer" in str(error)
    assert [name for name in names(tmp_path) if name.startswith(".state-000002-")]
    point = Checkpoints(tmp_path).latest()
    assert point.step == 1
    second = make(tmp_path, FakeWorld(), resume=point)
    assert await drive(second, 3) is None
    assert names(tmp_path) == ["state-000002", "state-000003"]


async def test_a_checkpoint_that_takes_too_long_ends_the_run_by_name(
    tmp_path: Path, world: FakeWorld
) -> None:
    world.faults.block("trainer", "save_state")
    error = await drive(make(tmp_path, world), 2)
    assert error is not None and "still waiting for the checkpoint" in str(error)


async def test_a_state_that_does_not_fit_ends_the_start(tmp_path: Path, world: FakeWorld) -> None:
    assert await drive(make(tmp_path, world), 1) is None
    point = Checkpoints(tmp_path).latest()
    again = FakeWorld()
    rig = make(tmp_path, again, resume=point)
    rig.trainer.weights = {"other": b"1234"}
    error = await drive(rig, 2)
    assert isinstance(error, TrainerError) and "is of other tensors" in str(error)
    assert again.calls("generate") == []


async def test_a_sync_that_arrives_wrong_ends_the_start(tmp_path: Path, world: FakeWorld) -> None:
    assert await drive(make(tmp_path, world), 1) is None
    again = FakeWorld()
    again.faults.flip_bit("head")
    rig = make(tmp_path, again, resume=Checkpoints(tmp_path).latest())
    error = await drive(rig, 2)
    assert isinstance(error, ValidationFailed) and "head on engine-0" in str(error)
    assert again.calls("generate") == []


async def test_a_hang_at_the_start_of_a_resumed_run_ends_it_and_leaves_nothing(
    tmp_path: Path, world: FakeWorld
) -> None:
    assert await drive(make(tmp_path, world), 1) is None
    for actor, method in (
        ("trainer", "load_state"), ("trainer", "stage"), ("engine-0", "pause"),
        ("trainer", "send"), ("engine-0", "finish_update"), ("engine-0", "digests"),
    ):  # fmt: skip
        again = FakeWorld()
        again.faults.block(actor, method)
        rig = make(tmp_path, again, resume=Checkpoints(tmp_path).latest())
        error = await drive(rig, 2)
        assert isinstance(error, PhaseTimeout), method
        assert again.calls("generate") == []
        assert all(e.death for e in rig.engines) and rig.trainer.death


async def test_a_second_call_of_run_counts_on(tmp_path: Path, world: FakeWorld) -> None:
    assert await drive(make(tmp_path, world), 2) is None
    rig = make(tmp_path, FakeWorld(), resume=Checkpoints(tmp_path).latest())
    async with rig.orchestrator as o:
        await o.run(2)
        assert trained(rig) == []
        await o.run(1)
        await o.run(2)
    assert [step for step, _ in trained(rig)] == [3, 4, 5]
    assert rig.orchestrator.version == 5


async def test_a_run_that_was_given_no_id_has_that_of_its_checkpoint(tmp_path: Path) -> None:
    assert await drive(make(tmp_path, FakeWorld()), 1) is None
    world = FakeWorld()
    o = Orchestrator(
        [FakeEngine("engine-0", world)],
        FakeTrainer(world),
        prompts=PROMPTS,
        generation=GENERATION,
        resume=Checkpoints(tmp_path).latest(),
    )
    assert o.run_id == "run"


class Sender:
    """A trainer without the two methods."""

    def __init__(self, inner: FakeTrainer) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in ("save_state", "load_state"):
            raise AttributeError(name)
        return getattr(self._inner, name)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"checkpoint_every": -1}, "checkpoint_every is -1"),
        ({"checkpoint_every": 2}, "checkpoint_every 2 needs checkpoints"),
        (
            {"resume": RunCheckpoint("r", 0, PolicyVersion(0), SourceState(0))},
            "a checkpoint of step 0",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(changes: dict[str, Any], reason: str) -> None:
    world = FakeWorld()
    with pytest.raises(ConfigError, match=reason):
        Orchestrator([FakeEngine("e", world)], FakeTrainer(world), prompts=PROMPTS, **changes)


def test_a_trainer_that_cannot_save_is_refused_at_once(tmp_path: Path) -> None:
    world = FakeWorld()
    with pytest.raises(ConfigError, match="Sender has no save_state and load_state"):
        Orchestrator(
            [FakeEngine("e", world)],
            Sender(FakeTrainer(world)),  # type: ignore[arg-type]
            prompts=PROMPTS,
            checkpoints=Checkpoints(tmp_path),
            checkpoint_every=1,
        )
