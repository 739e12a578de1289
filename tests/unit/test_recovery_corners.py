"""Corners of recovery that a reviewer told to break it has found; each once went wrong."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import orchestrator.testing.policy as policy
import tests.harness as harness
from orchestrator import (
    Checkpoints,
    Completion,
    Digests,
    Engine,
    Event,
    GenerationRequest,
    MidflightError,
    PauseMode,
    PolicyVersion,
    ReplicaAdmitted,
    ReplicaDied,
    Rollout,
    RolloutFinished,
    State,
    Strategy,
    SwapDone,
    SwapFailed,
    SyncError,
    Trainer,
    TrainerDied,
    TrainerError,
    TrainingDiverged,
    TrainStats,
    TrainStepDone,
)
from orchestrator.testing import FakeTrainer, FakeWorld
from tests.harness import DIGEST, GENERATION, SWAP, drive, make_rig
from tests.unit.test_recovery import TRIES, a_rig, kill_on

ROLLING = replace(SWAP, strategy=Strategy.ROLLING, staged=True)
CANARY = replace(DIGEST, canary=True)


async def test_weights_of_another_step_never_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = a_rig(2, checkpoints=Checkpoints(tmp_path), checkpoint_every=2, validation=CANARY)
    rig.world.faults.flip_bit("layers.1", receiver="engine-1", transfer=3)
    rig.world.faults.die("trainer", "reference_logprobs", call=4)
    first: dict[int, Digests] = {}
    wrong: list[tuple[str, int]] = []
    stage = FakeTrainer.stage

    async def noted(self: FakeTrainer, version: PolicyVersion) -> Digests:
        digests = await stage(self, version)
        first.setdefault(version, digests)
        return digests

    def watch(e: Event) -> None:
        if isinstance(e, ReplicaDied) and e.actor == "trainer":
            for x in rig.engines[:2]:
                asyncio.get_running_loop().call_soon(x.kill)
        if isinstance(e, ReplicaAdmitted):
            x = next(x for x in rig.engines if x.name == e.engine)
            if policy.digests(x.weights) != first[e.version]:
                wrong.append((e.engine, e.version))

    monkeypatch.setattr(FakeTrainer, "stage", noted)
    rig.told.append(watch)
    assert await drive(rig, 4) is None
    assert wrong == []


async def test_a_trainer_that_dies_in_prove_does_not_make_the_version_twice(tmp_path: Path) -> None:
    rig = a_rig(2, checkpoints=Checkpoints(tmp_path), checkpoint_every=2, validation=CANARY)
    rig.world.faults.flip_bit("layers.1", receiver="engine-1", transfer=3)
    rig.world.faults.die("trainer", "reference_logprobs", call=4)
    assert await drive(rig, 4) is None
    assert [e.report.update.version for e in rig.of(SwapDone)] == [1, 2, 3, 4]


def diverge(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """The trainer's weights of ``version`` score nan."""
    score = FakeTrainer.reference_logprobs

    async def scores(
        self: FakeTrainer, prompts: Sequence[Sequence[int]], *, initial: bool = False
    ) -> tuple[tuple[float, ...], ...]:
        rows = await score(self, prompts, initial=initial)
        bad = not initial and self.staged_version == version
        return tuple((math.nan,) * len(row) for row in rows) if bad else rows

    monkeypatch.setattr(FakeTrainer, "reference_logprobs", scores)


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("heals", [False, True])
async def test_training_that_diverged_ends_the_run_without_another_try(
    monkeypatch: pytest.MonkeyPatch, heals: bool, strategy: Strategy
) -> None:
    diverge(monkeypatch, 2)
    recovery = TRIES if heals else harness.NO_RECOVERY
    swap = replace(SWAP, strategy=strategy, staged=True)
    rig = a_rig(2, validation=CANARY, recovery=recovery, replacing=heals, swap=swap)
    error = await drive(rig, 4)
    assert isinstance(error, TrainingDiverged)
    assert str(error).startswith("training diverged at step 2: ")
    assert [e.error for e in rig.of(SwapFailed)] == [error]
    assert rig.of(ReplicaDied) == [] and rig.of(ReplicaAdmitted) == []
    assert rig.orchestrator._fleet.serving == []
    assert [e.report.update.version for e in rig.of(SwapDone)] == [1]


async def test_training_that_diverged_is_told_also_when_another_try_found_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diverge(monkeypatch, 2)
    rig = a_rig(2, validation=CANARY)
    rig.world.faults.fail("engine-1", "receive_update", call=2)
    assert isinstance(await drive(rig, 4), TrainingDiverged)
    assert len(rig.of(SwapFailed)) == 2


async def test_what_was_distrusted_is_not_trained_on() -> None:
    generation = replace(GENERATION, max_tokens=40, buffer_size=40, max_in_flight=8)
    rig = a_rig(2, validation=DIGEST, generation=generation, train_seconds=0.01)
    rig.world.faults.flip_bit("layers.1", receiver="engine-1", transfer=2)
    rig.world.faults.delay("engine-0", "digests", 2.0, call=2)
    assert await drive(rig, 6) is None
    at = next(n for n, e in enumerate(rig.events) if isinstance(e, SwapFailed))
    bad = {
        e.rollout.request.request_id
        for e in rig.events[:at]
        if isinstance(e, RolloutFinished)
        and e.rollout.completion.engine == "engine-1"
        and e.rollout.completion.spans[-1].version == 2
    }
    trained = {r.request.request_id for e in rig.of(TrainStepDone) for r in e.rollouts}
    assert bad & trained == set()


async def test_an_embedder_that_catches_the_failed_sync_is_not_left_waiting() -> None:
    rig = a_rig(1, validation=DIGEST)
    rig.world.faults.fail("engine-0", "receive_update", call=None)
    with pytest.raises(MidflightError):
        async with rig.orchestrator as o:
            with pytest.raises(SyncError):
                await o.sync()
            async with asyncio.timeout(5000):
                async for _ in o.rollouts():
                    pass


async def test_attempts_0_a_fenced_replica_keeps_the_next_swap_out() -> None:
    rig = make_rig(FakeWorld(), 2, validation=DIGEST)
    rig.world.faults.fail("engine-1", "resume", call=1)
    rig.world.faults.fail("engine-1", "resume", call=2)
    async with rig.orchestrator as o:
        with pytest.raises(SyncError):
            await o.sync()
        assert o.state is State.RECOVERING


async def test_attempts_0_rolling_leaves_no_two_versions() -> None:
    rig = make_rig(FakeWorld(), 3, swap=ROLLING, validation=DIGEST)
    rig.world.faults.fail("engine-1", "pause", call=1)
    async with rig.orchestrator as o:
        with pytest.raises(SyncError):
            await o.sync()
        names = {r.name for r in o._fleet.serving}
        assert {e.version for e in rig.engines if e.name in names} == {o.version}


async def test_closing_starts_no_trainer(tmp_path: Path) -> None:
    rig = a_rig(
        1,
        checkpoints=Checkpoints(tmp_path),
        checkpoint_every=1,
        validation=DIGEST,
        train_seconds=1.0,
    )

    async def job() -> None:
        async with rig.orchestrator as o:
            await o.run(5)

    task = asyncio.create_task(job())
    await asyncio.sleep(1.7)
    await rig.orchestrator.aclose()
    await asyncio.gather(task, return_exceptions=True)
    assert [t.name for t in rig.trainers if t.death is None] == []


async def test_a_trainer_that_trains_to_other_bits_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = a_rig(2, checkpoints=Checkpoints(tmp_path), checkpoint_every=2, validation=CANARY)
    train = FakeTrainer.train

    async def other_bits(self: FakeTrainer, batch: Sequence[Rollout], step: int) -> TrainStats:
        stats = await train(self, batch, step)
        if self.name != "trainer":
            self.weights = policy.next_weights(self.weights, [1])
        return stats

    monkeypatch.setattr(FakeTrainer, "train", other_bits)
    rig.world.faults.die("trainer", "reference_logprobs", call=4)
    error = await drive(rig, 5)
    assert "of 0 tensors" not in str(error)


async def test_a_replacement_that_is_up_during_a_swap_is_resynced_after_it() -> None:
    rig = a_rig(2, validation=DIGEST)
    async with rig.orchestrator as o:
        await o.sync()
        rig.engines[1].kill()
        rig.world.faults.delay("engine-1.r1", "start", 1.0)
        rig.world.faults.delay("engine-0", "pause", 2.0, call=2)
        await o.sync()
        await asyncio.sleep(300)
        assert o._fleet.fenced == ()


async def test_a_request_that_kills_engines_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = a_rig(2, validation=DIGEST)
    generate = harness.WatchedEngine.generate

    async def poisoned(self: harness.WatchedEngine, request: GenerationRequest) -> Completion:
        if request.request_id.startswith("r3.1"):
            asyncio.get_running_loop().call_later(0.03, self.kill)
        return await generate(self, request)

    monkeypatch.setattr(harness.WatchedEngine, "generate", poisoned)
    try:
        async with rig.orchestrator:
            await asyncio.sleep(10)
    except MidflightError:
        pass
    assert len(rig.engines) < 20


async def test_sync_of_another_task_and_a_trainer_that_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = a_rig(
        2,
        checkpoints=Checkpoints(tmp_path),
        checkpoint_every=2,
        validation=DIGEST,
        train_seconds=0.5,
    )
    rig.world.faults.die("trainer", "train", call=4)
    rig.world.faults.delay("trainer.1", "stage", 0.001, call=2)

    async def job() -> None:
        async with rig.orchestrator as o:
            adopted = asyncio.Event()
            adopt = o._adopt

            def told(trainer: Trainer) -> None:
                adopt(trainer)
                adopted.set()

            monkeypatch.setattr(o, "_adopt", told)

            async def other() -> None:
                await adopted.wait()
                await o.sync()

            task = asyncio.create_task(other())
            await o.run(5)
            await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(asyncio.create_task(job()), return_exceptions=True)
    assert rig.world.violations == []


async def test_a_trainer_that_hangs_in_open_channel_costs_no_replica() -> None:
    rig = a_rig(3, validation=DIGEST)
    rig.world.faults.fail("engine-2", "receive_update", call=2)
    rig.world.faults.block("trainer", "open_channel", call=2)
    await drive(rig, 3)
    assert [e.actor for e in rig.of(ReplicaDied)] == []


async def test_a_listen_that_hangs_costs_no_replica_of_an_older_fan_out() -> None:
    generation = replace(GENERATION, max_tokens=200, buffer_size=40, max_in_flight=8)
    rig = a_rig(
        3, validation=DIGEST, swap=replace(SWAP, pause_mode=PauseMode.WAIT), generation=generation
    )
    rig.world.faults.die("engine-2", "pause", call=2)
    rig.world.faults.block("trainer", "listen", call=2)
    await drive(rig, 3)
    assert [e.actor for e in rig.of(ReplicaDied)] == ["engine-2"]


async def test_one_that_cannot_join_does_not_take_another_with_it() -> None:
    rig = a_rig(3, validation=DIGEST)
    rig.world.faults.flip_bit("layers.1", receiver="engine-1", transfer=2)
    for call in range(2, 40):
        rig.world.faults.fail("engine-1", "open_channel", call=call)
    kill_on(rig, State.VALIDATING, "engine-0", nth=2)
    await drive(rig, 4)
    assert "engine-0.r1" not in [e.actor for e in rig.of(ReplicaDied)]


async def test_sync_that_nobody_can_make_yet_can_be_called_off() -> None:
    rig = a_rig(1, validation=DIGEST, start_seconds=30.0)
    async with rig.orchestrator as o:
        rig.engines[0].kill()
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await o.sync()
        assert asyncio.get_running_loop().time() - began < 10


async def test_the_first_reason_is_told_when_replacements_take_too_long() -> None:
    rig = a_rig(1, validation=DIGEST)
    for n in range(1, 9):
        rig.world.faults.block(f"engine-0.r{n}", "start", call=1)
    kill_on(rig, State.SYNCING, "engine-0", nth=2)
    assert "killed" in str(await drive(rig, 3))


async def test_the_first_reason_is_told_when_no_trainer_comes_up(tmp_path: Path) -> None:
    rig = a_rig(1, checkpoints=Checkpoints(tmp_path), checkpoint_every=1, validation=DIGEST)
    rig.world.faults.die("trainer", "train", call=2)
    for n in range(1, 30):
        rig.world.faults.fail(f"trainer.{n}", "load_state", call=None)
    error = await drive(rig, 4)
    assert len(rig.trainers) <= 1 + TRIES.attempts
    assert "killed" in f"{error} {error.__cause__}"


async def test_a_trainer_that_cannot_send_is_not_asked_without_end() -> None:
    rig = a_rig(2, validation=DIGEST)
    async with rig.orchestrator as o:
        await o.sync()
        error = TrainerError("trainer: busy")
        rig.world.faults.fail("trainer", "listen", call=None, error=error)
        rig.engines[1].kill()
        await asyncio.sleep(60)
        assert len(rig.world.calls("listen")) < 70
        assert rig.orchestrator._fleet.serving
    rig.assert_invariants()


async def test_rolling_a_death_in_the_second_group_does_not_fence_all() -> None:
    rig = make_rig(FakeWorld(), 4, swap=ROLLING, validation=DIGEST, recovery=TRIES, replacing=True)
    rig.world.faults.die("engine-1", "receive_update", call=2)
    serving: list[int] = []
    rig.told.append(lambda e: serving.append(len(rig.orchestrator._fleet.serving)))
    assert await drive(rig, 3) is None
    assert min(serving) > 0


async def test_a_maker_that_raises_does_not_end_a_run_that_others_serve() -> None:
    rig = a_rig(3, validation=DIGEST)

    def no(name: str) -> Engine:
        raise RuntimeError("no resources in the cluster")

    rig.orchestrator._recovery._make = no
    kill_on(rig, State.GENERATING, "engine-0", nth=2)
    assert await drive(rig, 3) is None


async def test_a_trainer_that_takes_over_and_diverges_is_not_replaced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(
        FakeWorld(),
        1,
        validation=DIGEST,
        recovery=TRIES,
        replacing=True,
        checkpoints=Checkpoints(tmp_path),
        checkpoint_every=3,
    )
    real = FakeTrainer.train
    tries: list[str] = []

    async def train(self: FakeTrainer, batch: Sequence[Any], step: int) -> Any:
        if self.name != "trainer":
            tries.append(self.name)
            raise TrainingDiverged(f"training diverged at step {step}")
        if step == 2:
            self.kill("killed")
            raise TrainerDied("trainer: killed")
        return await real(self, batch, step)

    monkeypatch.setattr(FakeTrainer, "train", train)
    assert isinstance(await drive(rig, 3), TrainingDiverged)
    assert len(tries) == 1


async def test_who_was_late_to_resume_has_all_the_time_to_do_it(world: FakeWorld) -> None:
    """Only after PAUSING, where nothing was applied, the others shall not wait for it."""
    timeouts = replace(SWAP.timeouts, resuming=20, stopping=60)
    rig = make_rig(world, 2, validation=DIGEST, swap=replace(SWAP, timeouts=timeouts))
    world.faults.delay("engine-0", "resume", 25, call=1)
    world.faults.delay("engine-0", "resume", 15, call=2)
    with pytest.raises(SyncError) as failed:
        async with rig.orchestrator as o:
            await o.sync()
    assert failed.value.phase == State.RESUMING and "fenced" not in str(failed.value)
