"""The whole controller over fakes: what a user of ``run``, ``sync`` and ``rollouts`` sees."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator import (
    ConfigError,
    EngineError,
    FinishReason,
    IllegalTransition,
    KVPolicy,
    Orchestrator,
    Outcome,
    PauseMode,
    PhaseTimeout,
    RequestKind,
    Rollout,
    RolloutConsumed,
    RolloutFinished,
    State,
    StateChanged,
    SwapDone,
    SwapFailed,
    SyncBusy,
    SyncError,
    TrainerError,
    TrainStepDone,
    ValidationFailed,
    ValidationOptions,
    Verdict,
    WeightSender,
)
from orchestrator.telemetry import RunRecorder
from orchestrator.testing import FakeEngine, FakeTrainer, FakeWorld
from tests.harness import (
    ALL,
    DIGEST,
    GENERATION,
    PROMPTS,
    SWAP,
    drive,
    make_rig,
    now,
)

# The job


@pytest.mark.parametrize("engines", [1, 2, 3])
async def test_five_steps_are_five_swaps_with_every_check(world: FakeWorld, engines: int) -> None:
    rig = make_rig(world, engines)
    assert await drive(rig, 5) is None
    reports = [e.report for e in rig.of(SwapDone)]
    assert [(r.update.from_version, r.update.version) for r in reports] == [
        (i, i + 1) for i in range(5)
    ]
    assert [r.update.step for r in reports] == [1, 2, 3, 4, 5]
    checks = [{c.check: c.verdict for c in r.checks} for r in reports]
    assert all(c["digest"] is c["canary"] is Verdict.MATCH for c in checks)
    assert [c["fresh"] for c in checks] == [Verdict.SKIPPED] * 4 + [Verdict.MATCH]
    assert reports[-1].checks[-1].detail["passed"] == 2
    assert rig.ended.outcome is Outcome.COMPLETED
    assert rig.ended.version == 5
    assert rig.orchestrator.state is State.STOPPED
    rig.assert_invariants()


async def test_fresh_every_second_step_and_always_at_the_last(world: FakeWorld) -> None:
    rig = make_rig(world, validation=replace(ALL, fresh_every=2))
    assert await drive(rig, 5) is None
    verdicts = [e.report.checks[-1].verdict for e in rig.of(SwapDone)]
    assert verdicts == [
        Verdict.SKIPPED,
        Verdict.MATCH,
        Verdict.SKIPPED,
        Verdict.MATCH,
        Verdict.MATCH,
    ]


async def test_probes_are_cut_by_the_swap_and_are_never_trained_on(world: FakeWorld) -> None:
    rig = make_rig(world)
    await drive(rig, 2)
    done = [e.rollout for e in rig.of(RolloutFinished)]
    probes = [r for r in done if r.request.kind is RequestKind.PROBE]
    assert len(probes) == 4
    assert all(r.cut and r.request.temperature == 0 for r in probes)
    trained = [r for e in rig.of(TrainStepDone) for r in e.rollouts]
    assert trained
    assert all(r.request.kind is RequestKind.ROLLOUT for r in trained)
    assert all(r.reward is not None and r.staleness is not None for r in trained)


async def test_a_batch_is_whole_groups_and_each_swap_changes_the_weights(
    world: FakeWorld,
) -> None:
    rig = make_rig(world)
    await drive(rig, 3)
    for event in rig.of(TrainStepDone):
        groups: dict[str, list[str]] = {}
        for rollout in event.rollouts:
            groups.setdefault(rollout.request.group, []).append(rollout.request.request_id)
        assert {len(g) for g in groups.values()} == {GENERATION.group_size}
        assert len(groups) == GENERATION.prompts_per_step
    digests = {tuple(sorted(rig.engines[0]._digests[f"run-s{v}"].values())) for v in (1, 2, 3)}
    assert len(digests) == 3


async def test_generation_goes_on_while_the_trainer_trains(world: FakeWorld) -> None:
    rig = make_rig(world, train_seconds=5.0, generation=replace(GENERATION, buffer_size=64))
    await drive(rig, 1)
    (train,) = world.calls("train")
    during = [c for c in world.calls("generate") if train.at < c.at < (train.ended or 0)]
    assert len(during) >= 8


@pytest.mark.parametrize("mode", list(PauseMode))
@pytest.mark.parametrize("kv", list(KVPolicy))
async def test_every_pause_mode_and_kv_policy_passes_the_fresh_check(
    world: FakeWorld, mode: PauseMode, kv: KVPolicy
) -> None:
    rig = make_rig(world, 2, swap=replace(SWAP, pause_mode=mode, kv_policy=kv))
    assert await drive(rig, 3) is None
    report = rig.of(SwapDone)[-1].report
    assert report.checks[-1].verdict is Verdict.MATCH
    fresh = [c.args[0].request_id for c in world.calls("generate", "fresh:fake://v3")]  # type: ignore[attr-defined]
    cut_is_exact = mode is PauseMode.ABORT or (mode is PauseMode.KEEP and kv is KVPolicy.RECOMPUTE)
    prefix = "fresh-p3." if cut_is_exact else "fresh-run-s3-f"
    assert all(i.startswith(prefix) for i in fresh), fresh
    rig.assert_invariants()


async def test_an_engine_that_keeps_a_stale_cache_fails_the_fresh_check(world: FakeWorld) -> None:
    world.faults.stale_cache("engine-0")
    rig = make_rig(world, validation=ALL)
    result = await drive(rig, 1)
    assert isinstance(result, ValidationFailed)
    assert "diverges at new token 0" in str(result)
    assert rig.ended.outcome is Outcome.FAILED
    rig.assert_invariants()


async def test_one_flipped_bit_ends_the_run_and_names_the_tensor(world: FakeWorld) -> None:
    world.faults.flip_bit("layers.0", receiver="engine-1", transfer=2)
    rig = make_rig(world, 2)
    result = await drive(rig, 3)
    assert isinstance(result, ValidationFailed)
    assert "layers.0 on engine-1" in str(result)
    assert result.exit_code == 1
    (failed,) = rig.of(SwapFailed)
    assert failed.fenced == ("engine-0", "engine-1")
    assert rig.ended.error is result
    report = pickle.loads(pickle.dumps(result)).report
    assert (report.update.version, report.checks[-1].check) == (2, "digest")
    assert report.checks[-1].verdict is Verdict.MISMATCH
    assert not report.ok
    rig.assert_invariants()


async def test_a_control_that_fails_makes_the_canary_inconclusive_and_the_run_goes_on(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, logprob_offset=0.5)
    assert await drive(rig, 2) is None
    for event in rig.of(SwapDone):
        canary = event.report.checks[1]
        assert canary.verdict is Verdict.INCONCLUSIVE
        assert canary.detail["control"] is Verdict.MISMATCH
    assert rig.ended.outcome is Outcome.COMPLETED


async def test_rollouts_too_stale_are_discarded_and_counted(world: FakeWorld) -> None:
    options = replace(GENERATION, max_staleness=0, buffer_size=16, max_in_flight=8)
    rig = make_rig(world, generation=options)
    assert await drive(rig, 3) is None
    refused = [e.rollout for e in rig.of(RolloutConsumed) if not e.accepted]
    assert refused
    assert rig.orchestrator._source.discarded == len(refused)
    assert all(r.staleness == 0 for e in rig.of(TrainStepDone) for r in e.rollouts)
    rig.assert_invariants()


async def test_a_run_without_probes_swaps_though_everything_was_generated(
    world: FakeWorld,
) -> None:
    """Buffer full, nothing live: waiting for a long enough request would never end."""
    rig = make_rig(world, probes=(), validation=DIGEST, train_seconds=5.0)
    assert await drive(rig, 2) is None
    assert now() < SWAP.timeouts.generating
    rig.assert_invariants()


async def test_rollouts_shorter_than_the_pause_threshold_do_not_hang_the_run(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, probes=(), validation=DIGEST, swap=replace(SWAP, pause_after_tokens=100))
    assert await drive(rig, 2) is None
    assert now() < SWAP.timeouts.generating


async def test_steps_are_counted_on_when_run_is_called_again(world: FakeWorld) -> None:
    """Else probes of the second call would have the ids of those that may still run."""
    options = replace(GENERATION, probe_tokens=500)
    rig = make_rig(world, generation=options, validation=DIGEST)
    async with rig.orchestrator as o:
        for _ in range(3):
            await o.run(1)
    assert [e.stats.step for e in rig.of(TrainStepDone)] == [1, 2, 3]
    assert [e.report.update.step for e in rig.of(SwapDone)] == [1, 2, 3]
    ids = [c.args[0].request_id for c in world.calls("generate")]  # type: ignore[attr-defined]
    assert len(ids) == len(set(ids))
    rig.assert_invariants()


async def test_run_with_a_sender_that_cannot_train_says_what_to_do(world: FakeWorld) -> None:
    class Sender:
        def __init__(self, trainer: FakeTrainer) -> None:
            for method in ("listen", "open_channel", "close_channel", "stage", "send"):
                setattr(self, method, getattr(trainer, method))
            self.wait_dead, self.aclose = trainer.wait_dead, trainer.aclose

    trainer = FakeTrainer(world)
    await trainer.start()
    sender = Sender(trainer)
    assert isinstance(sender, WeightSender)
    async with Orchestrator(
        [FakeEngine("engine-0", world)], sender, prompts=PROMPTS, generation=GENERATION
    ) as o:
        assert (await o.sync()).ok
        with pytest.raises(ConfigError, match=r"Sender only sends weights.*call sync\(\)"):
            await o.run(1)


async def test_a_fresh_check_without_a_trainer_that_saves_is_refused_at_once(
    world: FakeWorld,
) -> None:
    class Sender:
        name = "sender"

        async def listen(self, *args: Any) -> Any: ...
        async def open_channel(self, *args: Any) -> Any: ...
        async def close_channel(self, *args: Any) -> Any: ...
        async def stage(self, *args: Any) -> Any: ...
        async def send(self, *args: Any) -> Any: ...
        async def wait_dead(self) -> str: ...
        async def aclose(self) -> None: ...

    async def factory(path: str) -> FakeEngine:
        return FakeEngine(path, world)

    with pytest.raises(ConfigError, match="checkpoints"):
        Orchestrator(
            [FakeEngine("engine-0", world)],
            Sender(),
            prompts=PROMPTS,
            validation=ValidationOptions(digest=True, canary=False, fresh=True),
            engine_factory=factory,
        )


# Embedding: rollouts() and sync()


@pytest.mark.parametrize("limit", [None, 0])
async def test_a_sync_in_the_middle_of_a_group_makes_the_rest_of_it_staler(
    world: FakeWorld, tmp_path: Path, limit: int | None
) -> None:
    options = replace(GENERATION, group_size=4, max_staleness=limit)
    rig = make_rig(world, validation=DIGEST, generation=options)
    recorder = RunRecorder(tmp_path, "run-1")
    rig.told.append(recorder)
    lag: list[tuple[int, int | None]] = []
    given: dict[str, int | None] = {}
    async with rig.orchestrator as o:
        async for rollout in o.rollouts():
            lag.append((o.version - rollout.min_version, rollout.staleness))
            given[rollout.request.request_id] = rollout.staleness
            if len(lag) % 3 == 0:
                await o.sync()
            if len(lag) == 24:
                break
    assert all(true == told for true, told in lag)
    told = [count for _, count in lag]
    assert max(told) > 0 if limit is None else set(told) == {0}
    refused = [e for e in rig.of(RolloutConsumed) if not e.accepted]
    assert rig.orchestrator._source.discarded == len(refused)
    assert bool(refused) == (limit == 0)
    recorder.finish(Outcome.COMPLETED)
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    found = {line["id"]: line for line in lines}
    assert {name: found[name]["staleness"] for name in given} == given
    assert all(line["staleness"] is None for line in lines if line["status"] == "discarded")


async def test_rollouts_come_with_their_staleness_and_end_on_close(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    got: list[Rollout] = []
    ended = asyncio.Event()

    async def consume(o: Orchestrator) -> None:
        async for rollout in o.rollouts():
            got.append(rollout)
        ended.set()

    async with rig.orchestrator as o:
        consumer = asyncio.create_task(consume(o))
        await asyncio.sleep(1)
        report = await o.sync()
        assert report.update.version == o.version == 1
        await asyncio.sleep(1)
    await consumer
    assert ended.is_set()
    assert len(got) >= 20
    assert {r.staleness for r in got} <= {0, 1}
    assert 1 in {r.max_version for r in got}
    rig.assert_invariants()


async def test_nobody_consumes_so_generation_stops_and_goes_on_when_somebody_does(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, validation=DIGEST)
    async with rig.orchestrator as o:
        await asyncio.sleep(10)
        assert len(world.calls("generate")) == GENERATION.buffer_size
        rollouts = o.rollouts()
        for _ in range(GENERATION.group_size):
            await anext(rollouts)
        await asyncio.sleep(1)
        assert len(world.calls("generate")) == GENERATION.buffer_size + GENERATION.group_size
        await rollouts.aclose()  # type: ignore[attr-defined]


async def test_two_syncs_at_once_are_two_swaps_one_after_the_other(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    async with rig.orchestrator as o:
        one, two = await asyncio.gather(o.sync(), o.sync())
        assert (one.update.version, two.update.version) == (1, 2)
        assert two.update.from_version == 1
    pauses = [e.trigger for e in rig.of(StateChanged)]
    assert pauses[1:-1] == ["pause", "sync", "commit", "validate", "verify"] * 2
    rig.assert_invariants()


@pytest.mark.parametrize("delay_ms", [0, 20, 150, 190, 215, 240, 300])
async def test_a_sync_of_another_task_fits_between_the_swaps_of_a_run(
    world: FakeWorld, delay_ms: int
) -> None:
    rig = make_rig(world, 2)
    reports = []

    async def extra(o: Orchestrator) -> None:
        await asyncio.sleep(delay_ms / 1000)
        reports.append(await o.sync())

    async with rig.orchestrator as o:
        other = asyncio.create_task(extra(o))
        await o.run(2)
        await other
    assert [e.report.update.version for e in rig.of(SwapDone)] == [1, 2, 3]
    assert reports[0].ok
    rig.assert_invariants()


async def test_what_is_asked_before_entering_is_refused_at_once(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, validation=DIGEST)
    with pytest.raises(IllegalTransition, match="cannot pause while STARTING: enter"):
        await rig.orchestrator.sync()
    with pytest.raises(IllegalTransition, match="cannot run while STARTING: enter"):
        await rig.orchestrator.run(1)
    with pytest.raises(IllegalTransition, match="cannot hand out rollouts while STARTING: enter"):
        await anext(rig.orchestrator.rollouts())
    assert now() == 0
    assert world.log == []
    assert rig.events == []


async def test_a_sync_that_does_not_want_to_wait_is_told_that_one_is_running(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, validation=DIGEST)
    async with rig.orchestrator as o:
        gate = world.faults.block("engine-0", "pause")
        first = asyncio.create_task(o.sync())
        await gate.reached()
        with pytest.raises(SyncBusy, match="swap to version 1 is running"):
            await o.sync(wait=False)
        gate.release()
        assert (await first).ok
        assert (await o.sync(wait=False)).update.version == 2


async def test_a_failed_pause_leaves_the_embedder_free_to_try_again(world: FakeWorld) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    world.faults.fail("engine-1", "pause")
    async with rig.orchestrator as o:
        with pytest.raises(SyncError, match="PAUSING"):
            await o.sync()
        assert (o.state, o.version) == (State.GENERATING, 0)
        assert (await o.sync()).update.version == 1
    assert rig.ended.outcome is Outcome.COMPLETED
    rig.assert_invariants()


async def test_after_engines_were_fenced_no_sync_is_taken(world: FakeWorld) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    world.faults.fail_at_tensor("engine-1", 1)
    async with rig.orchestrator as o:
        with pytest.raises(SyncError, match="fenced: engine-0, engine-1"):
            await o.sync()
        assert (o.state, o.version) == (State.RECOVERING, 0)
        with pytest.raises(
            IllegalTransition, match="while RECOVERING: engine-0, engine-1 must not serve"
        ):
            await o.sync()
        assert len(world.calls("stage")) == 1
    rig.assert_invariants()


async def test_a_consumer_does_not_wait_for_ever_on_engines_that_were_fenced(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    world.faults.fail("engine-1", "finish_update")

    async def consume(o: Orchestrator) -> None:
        async for _ in o.rollouts():
            pass

    async with rig.orchestrator as o:
        consumer = asyncio.create_task(consume(o))
        await asyncio.sleep(0.5)
        with pytest.raises(SyncError):
            await o.sync()
        async with asyncio.timeout(10):
            with pytest.raises(EngineError, match="no replica serves"):
                await consumer
    ended = [e.rollout.completion for e in rig.of(RolloutFinished)]
    aborted = [c for c in ended if c.finish_reason is FinishReason.ABORT]
    assert any(c.token_ids for c in aborted), "what they had was lost"


async def test_staging_that_fails_touches_no_engine(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    world.faults.fail("trainer", "stage")
    async with rig.orchestrator as o:
        with pytest.raises(TrainerError, match="injected fault in stage"):
            await o.sync()
        assert world.calls("pause") == []
        assert (await o.sync()).update.version == 1


async def test_staging_that_hangs_ends_at_its_deadline(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    world.faults.block("trainer", "stage")
    async with rig.orchestrator as o:
        with pytest.raises(PhaseTimeout, match="still waiting for staging"):
            await o.sync()
        assert now() <= SWAP.timeouts.generating + 1
    rig.assert_invariants()
