"""What a fleet survives, over fakes and virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import (
    Checkpoints,
    EngineDied,
    EngineError,
    Event,
    MidflightError,
    PauseMode,
    RecoveryOptions,
    ReplicaAdmitted,
    ReplicaDied,
    RequestKind,
    RolloutFinished,
    State,
    StateChanged,
    SwapDone,
    SwapFailed,
    TrainStepDone,
    TransferBackend,
    ValidationFailed,
    Verdict,
)
from orchestrator.testing import FakeWorld, all_blocked
from tests.harness import DIGEST, SWAP, Rig, drive, make_rig

TRIES = RecoveryOptions(attempts=3, backoff_s=0.5, backoff_max_s=2)
ROUTES = [(TransferBackend.GLOO, False), (TransferBackend.GLOO, True), (TransferBackend.IPC, False)]
PHASES = [State.PAUSING, State.SYNCING, State.RESUMING, State.VALIDATING]


def a_rig(engines: int = 2, route: tuple[TransferBackend, bool] = ROUTES[0], **more: object) -> Rig:
    swap = replace(SWAP, backend=route[0], staged=route[1])
    options: dict[str, object] = {"recovery": TRIES, "replacing": True, "swap": swap, **more}
    return make_rig(FakeWorld(), engines, **options)  # type: ignore[arg-type]


def kill_on(rig: Rig, state: State, victim: str, *, nth: int = 1) -> None:
    """Kill ``victim`` in the very move into ``state``, the ``nth`` time."""
    left = nth

    def observer(event: Event) -> None:
        nonlocal left
        if isinstance(event, StateChanged) and event.target is state:
            left -= 1
            if left == 0:
                actor = next(a for a in [*rig.engines, rig.trainer] if a.name == victim)
                asyncio.get_running_loop().call_soon(actor.kill)

    rig.told.append(observer)


def rollouts_once(rig: Rig) -> None:
    """Every rollout that was submitted ended once, with all its tokens."""
    submitted = {
        c.args[0].request_id.split("+")[0]  # type: ignore[attr-defined]
        for c in rig.world.calls("generate")
        if c.args[0].kind is RequestKind.ROLLOUT  # type: ignore[attr-defined]
    }
    ended = [
        e.rollout.request.request_id
        for e in rig.of(RolloutFinished)
        if e.rollout.request.kind is RequestKind.ROLLOUT
    ]
    assert sorted(submitted) == sorted(ended)


@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("state", [State.GENERATING, *PHASES])
async def test_a_replica_that_dies_in_any_state_is_replaced_and_the_run_completes(
    state: State, engines: int, route: tuple[TransferBackend, bool]
) -> None:
    rig = a_rig(engines, route)
    kill_on(rig, state, "engine-0", nth=2)
    assert await drive(rig, 4) is None
    rig.assert_invariants()
    rollouts_once(rig)
    assert rig.orchestrator.version == 4
    assert [e.report.update.version for e in rig.of(SwapDone)] == [1, 2, 3, 4]
    assert [e.actor for e in rig.of(ReplicaDied)] == ["engine-0"]
    assert [e.engine for e in rig.of(ReplicaAdmitted)][-1] == "engine-0.r1"
    first = min(c.seq for c in rig.world.calls("generate", "engine-0.r1"))
    proofs = [c.seq for c in rig.world.calls("digests", "engine-0.r1") if c.ok]
    assert proofs and min(proofs) < first


async def test_a_replica_that_dies_before_the_first_swap_is_replaced_as_it_started() -> None:
    rig = a_rig(1)
    kill_on(rig, State.GENERATING, "engine-0")
    assert await drive(rig, 2) is None
    rig.assert_invariants()
    rollouts_once(rig)
    (admitted,) = rig.of(ReplicaAdmitted)
    assert (admitted.engine, admitted.version) == ("engine-0.r1", 0)


async def test_a_flipped_bit_costs_a_resync_and_the_tokens_under_it() -> None:
    rig = a_rig(2, validation=DIGEST)
    rig.world.faults.flip_bit("layers.1", receiver="engine-1", transfer=2)
    assert await drive(rig, 3) is None
    rig.assert_invariants()
    rollouts_once(rig)
    (failed,) = rig.of(SwapFailed)
    assert isinstance(failed.error, ValidationFailed) and "layers.1 on engine-1" in str(
        failed.error
    )
    assert failed.fenced == ("engine-1",)
    (admitted,) = rig.of(ReplicaAdmitted)
    assert (admitted.engine, admitted.version) == ("engine-1", 2)
    assert all(e.report.checks[0].verdict is Verdict.MATCH for e in rig.of(SwapDone))
    assert len(rig.of(SwapDone)) == 3


async def test_a_bit_that_flips_every_time_ends_the_run_with_its_name() -> None:
    rig = a_rig(1, validation=DIGEST)
    rig.world.faults.flip_bit("layers.1", receiver="engine-0", transfer=None)
    error = await drive(rig, 3)
    assert isinstance(error, ValidationFailed) and "layers.1 on engine-0" in str(error)
    rig.assert_invariants()
    assert rig.ended.error is error


async def test_one_replica_that_cannot_be_healed_is_given_up_and_the_other_goes_on() -> None:
    rig = a_rig(2, validation=DIGEST)
    rig.world.faults.flip_bit("layers.1", receiver="engine-1", transfer=None)
    assert await drive(rig, 3) is None
    rig.assert_invariants()
    assert len(rig.of(SwapDone)) == 3
    assert [e.actor for e in rig.of(ReplicaDied)] == ["engine-1"]


async def test_fewer_replicas_than_wanted_end_the_run_with_the_first_reason() -> None:
    rig = a_rig(2, recovery=replace(TRIES, min_engines=2), replacing=False)
    kill_on(rig, State.GENERATING, "engine-1", nth=2)
    error = await drive(rig, 3)
    assert isinstance(error, EngineDied) and "engine-1" in str(error)
    rig.assert_invariants()


async def test_a_replica_that_hangs_in_a_phase_is_replaced() -> None:
    for method in ("pause", "start_update", "finish_update", "resume", "digests"):
        rig = a_rig(2, validation=DIGEST)
        rig.world.faults.block("engine-1", method, call=2)
        assert await drive(rig, 3) is None, method
        rig.assert_invariants()
        rollouts_once(rig)
        assert len(rig.of(SwapDone)) == 3


async def test_an_update_that_one_replica_refuses_is_made_again_by_all() -> None:
    rig = a_rig(3)
    rig.world.faults.fail("engine-2", "receive_update", error=EngineError("engine-2", "no memory"))
    assert await drive(rig, 2) is None
    rig.assert_invariants()
    (failed,) = rig.of(SwapFailed)
    assert "no memory" in str(failed.error)
    assert len(failed.fenced) == 3
    assert [e.report.update.version for e in rig.of(SwapDone)] == [1, 2]


async def test_a_replacement_that_does_not_start_is_tried_again() -> None:
    rig = a_rig(1)
    rig.world.faults.fail("engine-0.r1", "start")
    kill_on(rig, State.GENERATING, "engine-0", nth=2)
    assert await drive(rig, 3) is None
    rig.assert_invariants()
    assert rig.of(ReplicaAdmitted)[-1].engine == "engine-0.r2"


async def test_replacements_that_never_start_end_the_run_with_why_it_began() -> None:
    rig = a_rig(1)
    for n in range(1, 9):
        rig.world.faults.fail(f"engine-0.r{n}", "start", call=None)
    kill_on(rig, State.GENERATING, "engine-0", nth=2)
    error = await drive(rig, 3)
    assert isinstance(error, EngineDied) and "engine-0" in str(error) and "killed" in str(error)
    rig.assert_invariants()
    assert len([e for e in rig.engines if e.name != "engine-0"]) == TRIES.attempts


async def test_every_pause_mode_survives_a_death_in_syncing() -> None:
    for mode in PauseMode:
        rig = a_rig(2, swap=replace(SWAP, pause_mode=mode))
        kill_on(rig, State.SYNCING, "engine-1")
        assert await drive(rig, 3) is None, mode
        rig.assert_invariants()
        rollouts_once(rig)


@pytest.mark.parametrize("state", PHASES)
async def test_the_last_one_dies_while_the_other_is_still_being_replaced(state: State) -> None:
    rig = a_rig(2, start_seconds=20.0, validation=DIGEST)
    rig.world.faults.die("engine-1", "generate", call=12)
    kill_on(rig, state, "engine-0", nth=3)
    assert await drive(rig, 4) is None
    rig.assert_invariants()
    rollouts_once(rig)
    assert [e.report.update.version for e in rig.of(SwapDone)] == [1, 2, 3, 4]
    assert "engine-1.r1" in {e.engine for e in rig.of(ReplicaAdmitted)}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(
    ("method", "call"),
    [("train", 3), ("stage", 3), ("send", 3), ("reference_logprobs", 4), ("save_state", 2)],
)
async def test_a_trainer_that_dies_is_replaced_and_its_steps_made_again(
    tmp_path: Path, method: str, call: int, every: int
) -> None:
    calm = a_rig(2)
    assert await drive(calm, 4) is None
    rig = a_rig(2, checkpoints=Checkpoints(tmp_path), checkpoint_every=every)
    rig.world.faults.die("trainer", method, call=call)
    assert await drive(rig, 4) is None
    rig.assert_invariants()
    rollouts_once(rig)
    assert [e.report.update.version for e in rig.of(SwapDone)] == [1, 2, 3, 4]
    assert [e.actor for e in rig.of(ReplicaDied)] == ["trainer"]
    assert [e.stats.step for e in rig.of(TrainStepDone)] == [1, 2, 3, 4]
    trained = [r.request.request_id for e in rig.of(TrainStepDone) for r in e.rollouts]
    assert len(trained) == len(set(trained))
    assert len(rig.trainers) == 2


async def test_a_trainer_without_checkpoints_ends_the_run() -> None:
    rig = a_rig(2)
    rig.world.faults.die("trainer", "send", call=2)
    error = await drive(rig, 3)
    assert isinstance(error, MidflightError) and "trainer" in str(error)
    rig.assert_invariants()


async def test_trainers_that_keep_dying_end_the_run(tmp_path: Path) -> None:
    rig = a_rig(1, checkpoints=Checkpoints(tmp_path), checkpoint_every=1)
    for name in ("trainer", *(f"trainer.{n}" for n in range(1, 9))):
        rig.world.faults.die(name, "send", call=None)
    error = await drive(rig, 3)
    assert isinstance(error, MidflightError) and "trainer" in str(error)
    rig.assert_invariants()
    assert len(rig.trainers) == 1 + TRIES.attempts


async def test_sync_of_an_embedder_survives_too() -> None:
    rig = a_rig(2, validation=DIGEST)
    async with rig.orchestrator as o:
        kill_on(rig, State.SYNCING, "engine-1")
        report = await o.sync()
        assert report.update.version == 1 and report.ok
        await all_blocked()
        assert (await o.sync()).update.version == 2
    rig.assert_invariants()


async def test_leaving_while_a_replacement_starts_closes_it() -> None:
    rig = a_rig(1, start_seconds=5.0)
    async with rig.orchestrator:
        rig.engines[0].kill()
        await asyncio.sleep(1)
        assert [e.name for e in rig.engines] == ["engine-0", "engine-0.r1"]
    rig.assert_invariants()
