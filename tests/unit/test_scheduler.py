"""The whole controller over fakes: what a user of ``run``, ``sync`` and ``rollouts`` sees."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orchestrator import (
    ChannelError,
    Closed,
    Completion,
    ConfigError,
    EngineDied,
    EngineError,
    EngineStarted,
    Event,
    FinishReason,
    GenerationOptions,
    GenerationRequest,
    IllegalTransition,
    KVPolicy,
    MidflightError,
    Orchestrator,
    Outcome,
    PauseMode,
    PhaseTimeout,
    PhaseTimeouts,
    ReplicaDied,
    RequestKind,
    Rollout,
    RolloutConsumed,
    RolloutFinished,
    RunEnded,
    State,
    StateChanged,
    SwapDone,
    SwapFailed,
    SwapOptions,
    SyncBusy,
    SyncError,
    TrainerDied,
    TrainerError,
    TrainerStarted,
    TrainStepDone,
    ValidationFailed,
    ValidationOptions,
    Verdict,
    WeightSender,
)
from orchestrator.tasks import settle
from orchestrator.testing import FakeEngine, FakeTrainer, FakeWorld, all_blocked
from tests.harness import (
    ALL,
    DIGEST,
    GENERATION,
    PROMPTS,
    SWAP,
    Rig,
    at_suspension,
    drive,
    make_rig,
    now,
)

NOTICED_S = 5.0


def ids(rollouts: list[Rollout]) -> list[str]:
    return [r.request.request_id for r in rollouts]


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


async def test_a_sync_before_entering_is_refused_and_touches_nothing(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    with pytest.raises(IllegalTransition, match="cannot pause while STARTING: enter"):
        await rig.orchestrator.sync()
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


# A sync that is cancelled


PHASE_CALLS = (
    ("trainer", "stage", State.GENERATING),
    ("engine-1", "pause", State.PAUSING),
    ("engine-1", "start_update", State.SYNCING),
    ("engine-1", "receive_update", State.SYNCING),
    ("trainer", "send", State.SYNCING),
    ("engine-1", "finish_update", State.SYNCING),
    ("engine-1", "resume", State.RESUMING),
    ("engine-1", "wait_first_tokens", State.RESUMING),
    ("engine-1", "digests", State.VALIDATING),
)


@pytest.mark.parametrize(("actor", "method", "phase"), PHASE_CALLS)
async def test_a_cancelled_sync_is_called_off_unless_weights_are_half_applied(
    world: FakeWorld, actor: str, method: str, phase: State
) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    gate = world.faults.block(actor, method)
    async with rig.orchestrator as o:
        sync = asyncio.create_task(o.sync())
        await gate.reached()
        assert o.state is phase
        sync.cancel()
        await all_blocked()
        called_off = phase in (State.GENERATING, State.PAUSING, State.VALIDATING)
        assert sync.done() is called_off
        if not called_off:
            assert o.state is phase
            gate.release()
        with pytest.raises(asyncio.CancelledError):
            await sync
        assert o.state is State.GENERATING
        assert o.version == (0 if phase in (State.GENERATING, State.PAUSING) else 1)
        assert not any(e.paused for e in rig.engines)
        assert (await o.sync()).update.version == o.version
    assert rig.ended.outcome is Outcome.COMPLETED
    rig.assert_invariants()


async def test_a_swap_that_fails_after_its_caller_gave_up_is_told_once_by_an_event(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    swaps: list[Any] = []

    def remember() -> None:
        swaps.extend(t for t in asyncio.all_tasks() if t.get_name() == "run-s1")

    world.faults.hook("engine-1", "wait_first_tokens", remember)
    world.faults.delay("engine-1", "wait_first_tokens", 1)
    world.faults.fail("engine-1", "wait_first_tokens")
    async with rig.orchestrator as o:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await o.sync()
        (swap,) = swaps
        assert swap.done()
        assert not swap._log_traceback, "asyncio will log an error that nobody retrieved"
    (failed,) = rig.of(SwapFailed)
    assert isinstance(failed.error, SyncError)
    rig.assert_invariants()


async def test_an_impatient_second_cancel_does_not_let_another_swap_in_between(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    gate = world.faults.block("engine-1", "finish_update")
    async with rig.orchestrator as o:
        first = asyncio.create_task(o.sync())
        await gate.reached()
        for _ in range(2):
            first.cancel()
            await all_blocked()
        second = asyncio.create_task(o.sync())
        await all_blocked()
        gate.release()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await second).update.version == 2
    rig.assert_invariants()


async def test_a_cancel_of_the_run_at_any_await_is_an_interruption_that_leaves_nothing() -> None:
    for at in range(1, 400):
        rig = make_rig(engines=2)
        cancelled: list[State] = []

        def cancel(rig: Rig = rig, cancelled: list[State] = cancelled) -> None:
            cancelled.append(rig.orchestrator.state)
            (task,) = [t for t in asyncio.all_tasks() if t.get_name() == "host"]
            task.cancel()

        async def job(rig: Rig = rig) -> None:
            async with rig.orchestrator as o:
                await o.run(2)

        task = asyncio.create_task(at_suspension(job(), at, cancel), name="host")
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if not cancelled:
            assert result is None
            break
        assert isinstance(result, asyncio.CancelledError), f"suspension {at}: {result!r}"
        assert rig.ended.outcome is Outcome.INTERRUPTED
        rig.assert_invariants()
    else:
        pytest.fail("the run never got through")
    assert at >= 10


# interrupt()


INTERRUPT_AT = (
    ("engine-0", "start", State.STARTING),
    ("engine-0", "open_channel", State.STARTING),
    ("trainer", "train", State.GENERATING),
    *PHASE_CALLS,
    ("engine-0", "prompt_logprobs", State.STARTING),
    ("fresh:fake://v1", "start", State.VALIDATING),
    ("fresh:fake://v1", "generate", State.VALIDATING),
)


@pytest.mark.parametrize(("actor", "method", "phase"), INTERRUPT_AT)
async def test_an_interrupt_in_any_state_ends_within_the_stopping_time(
    world: FakeWorld, actor: str, method: str, phase: State
) -> None:
    rig = make_rig(world, 2)
    at: list[float] = []

    def interrupt() -> None:
        at.append(now())
        assert rig.orchestrator.state is phase
        rig.orchestrator.interrupt()

    world.faults.hook(actor, method, interrupt)
    world.faults.block(actor, method)
    result = await drive(rig, 1)
    assert isinstance(result, asyncio.CancelledError)
    assert now() - at[0] <= SWAP.timeouts.stopping
    assert rig.ended.outcome is Outcome.INTERRUPTED
    assert rig.orchestrator.state is State.STOPPED
    rig.assert_invariants()


@pytest.mark.parametrize(
    ("actor", "method"),
    [
        ("trainer", "train"),
        ("engine-1", "pause"),
        ("trainer", "send"),
        ("engine-1", "finish_update"),
        ("engine-1", "resume"),
    ],
)
async def test_an_interrupt_hands_over_what_every_request_has(
    world: FakeWorld, actor: str, method: str
) -> None:
    rig = make_rig(
        world, 2, generation=replace(GENERATION, max_tokens=2000, buffer_size=8), validation=DIGEST
    )
    gate = world.faults.block(actor, method)

    async def job() -> None:
        async with rig.orchestrator as o:
            for engine in rig.engines:
                await engine.wait_for_tokens(7)
            if method == "train":
                await rig.trainer.train([_any_rollout()], 1)
            await o.sync()

    task = asyncio.create_task(job())
    await gate.reached()
    rig.orchestrator.interrupt()
    await settle([task], cancel=False)
    partial = [e.rollout for e in rig.of(RolloutFinished)]
    assert len(partial) == 4
    assert all(r.completion.finish_reason is FinishReason.ABORT for r in partial)
    assert all(len(r.completion.token_ids) >= 7 for r in partial)
    rig.assert_invariants()


def _any_rollout() -> Rollout:
    done = Completion("x", "e", (1,), (0.0,), (), FinishReason.STOP)
    return Rollout(GenerationRequest("x", PROMPTS[0], 1), done)


async def test_a_partial_rollout_has_every_token_that_was_written(world: FakeWorld) -> None:
    rig = make_rig(world, generation=replace(GENERATION, max_tokens=2000), validation=DIGEST)

    async def job() -> None:
        async with rig.orchestrator:
            await asyncio.Event().wait()

    task = asyncio.create_task(job())
    await all_blocked()
    await rig.engines[0].wait_for_tokens(7)
    rig.orchestrator.interrupt()
    rig.orchestrator.interrupt()
    with pytest.raises(asyncio.CancelledError):
        await task
    partial = [e.rollout.completion for e in rig.of(RolloutFinished)]
    assert [len(c.token_ids) for c in partial] == [7] * 4
    assert rig.ended.outcome is Outcome.INTERRUPTED
    assert len(world.calls("generate")) == 4  # what ended was not replaced
    rig.assert_invariants()


async def test_an_interrupt_when_all_is_over_cancels_nobody(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    async with rig.orchestrator:
        pass
    rig.orchestrator.interrupt()
    await asyncio.sleep(1)
    assert rig.ended.outcome is Outcome.COMPLETED


async def test_after_an_interrupt_the_host_task_is_not_left_cancelled(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    with pytest.raises(asyncio.CancelledError):
        async with rig.orchestrator as o:
            o.interrupt()
            await asyncio.sleep(60)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(1)


async def test_an_interrupt_while_the_fresh_engine_closes_leaves_no_fresh_engine(
    world: FakeWorld,
) -> None:
    rig = make_rig(world)
    fresh = "fresh:fake://v1"
    world.faults.hook(fresh, "aclose", lambda: rig.orchestrator.interrupt())
    world.faults.delay(fresh, "aclose", 2)
    result = await drive(rig, 1)
    assert isinstance(result, asyncio.CancelledError)
    (close,) = world.calls("aclose", fresh)
    assert close.ok
    rig.assert_invariants()


async def test_a_fresh_engine_that_does_not_close_is_an_error_soon(world: FakeWorld) -> None:
    rig = make_rig(world)
    fresh = "fresh:fake://v1"
    world.faults.block(fresh, "aclose")
    result = await drive(rig, 1)
    assert isinstance(result, SyncError)
    assert "fresh:fake://v1: did not close within 15 s" in str(result)
    assert now() < SWAP.timeouts.validating
    rig.assert_invariants()


# Deaths


DIE_AT = (
    ("engine-1", "start"),
    ("engine-1", "open_channel"),
    ("engine-1", "generate"),
    ("engine-1", "wait_for_tokens"),
    ("engine-1", "pause"),
    ("engine-1", "start_update"),
    ("engine-1", "receive_update"),
    ("engine-1", "finish_update"),
    ("engine-1", "resume"),
    ("engine-1", "wait_first_tokens"),
    ("engine-1", "digests"),
    ("engine-1", "prompt_logprobs"),
    ("trainer", "start"),
    ("trainer", "listen"),
    ("trainer", "open_channel"),
    ("trainer", "reference_logprobs"),
    ("trainer", "train"),
    ("trainer", "stage"),
    ("trainer", "send"),
    ("trainer", "save_checkpoint"),
)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("actor", "method"), DIE_AT)
async def test_a_process_that_dies_in_any_call_ends_the_run_within_five_seconds(
    world: FakeWorld, actor: str, method: str, when: str
) -> None:
    rig = make_rig(world, 2)
    died: list[float] = []
    world.faults.hook(actor, method, lambda: died.append(now()), when=when)
    world.faults.die(actor, method, when=when, reason="SIGKILL")
    result = await drive(rig, 2)
    assert isinstance(result, MidflightError), repr(result)
    assert "SIGKILL" in str(result)
    assert actor in str(result)
    assert now() - died[0] <= NOTICED_S
    assert rig.ended.outcome is Outcome.FAILED
    assert rig.ended.error is result
    assert rig.orchestrator.state is State.FAILED
    rig.assert_invariants()


@pytest.mark.parametrize("victim", ["engine-0", "engine-2", "trainer"])
async def test_a_process_that_dies_while_nobody_calls_it_is_noticed(
    world: FakeWorld, victim: str
) -> None:
    rig = make_rig(world, 3, validation=DIGEST)

    async def job() -> None:
        async with rig.orchestrator:
            await asyncio.Event().wait()

    task = asyncio.create_task(job())
    await asyncio.sleep(20)  # the buffer is full, everything is idle
    actor = {a.name: a for a in [*rig.engines, rig.trainer]}[victim]
    actor.kill("OOM killer")
    began = now()
    with pytest.raises(TrainerDied if victim == "trainer" else EngineDied, match="OOM killer"):
        await task
    assert now() - began <= NOTICED_S
    (dead,) = rig.of(ReplicaDied)
    assert (dead.actor, dead.cause) == (victim, "OOM killer")
    rig.assert_invariants()


@pytest.mark.parametrize(("actor", "method", "phase"), PHASE_CALLS)
@pytest.mark.parametrize("victim", ["engine-0", "trainer"])
async def test_a_death_while_another_hangs_ends_the_run_long_before_the_deadline(
    world: FakeWorld, victim: str, actor: str, method: str, phase: State
) -> None:
    rig = make_rig(world, 2)
    gate = world.faults.block(actor, method)
    task = asyncio.create_task(drive(rig, 1))
    await gate.reached()
    assert rig.orchestrator.state is phase
    victims = {a.name: a for a in [*rig.engines, rig.trainer]}
    victims[victim].kill("SIGKILL")
    began = now()
    result = await task
    assert isinstance(result, MidflightError)
    assert "SIGKILL" in str(result)
    assert now() - began <= NOTICED_S
    rig.assert_invariants()


async def test_an_engine_that_dies_while_another_still_starts_is_noticed(world: FakeWorld) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    world.faults.block("engine-1", "start")
    asyncio.get_running_loop().call_later(3, rig.engines[0].kill, "SIGKILL")
    result = await drive(rig)
    assert isinstance(result, EngineDied)
    assert "SIGKILL" in str(result)
    assert now() <= 3 + NOTICED_S
    rig.assert_invariants()


async def test_a_background_task_that_fails_ends_the_job_with_its_cause(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    world.faults.fail(
        "engine-0", "generate", call=6, error=EngineError("engine-0", "request r2.1: bad prompt")
    )

    async def job() -> None:
        async with rig.orchestrator as o:
            async for _ in o.rollouts():
                pass

    with pytest.raises(EngineError, match=r"request r2\.1: bad prompt"):
        await asyncio.create_task(job())
    assert now() <= NOTICED_S
    assert rig.ended.outcome is Outcome.FAILED
    rig.assert_invariants()


async def test_the_body_that_idles_is_cancelled_when_a_background_task_died(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, validation=DIGEST)
    world.faults.fail("engine-0", "generate", call=3)
    began = now()
    with pytest.raises(EngineError, match="injected"):
        async with rig.orchestrator:
            await asyncio.Event().wait()
    assert now() - began <= NOTICED_S
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_an_error_of_the_body_is_raised_as_it_is(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    with pytest.raises(ZeroDivisionError):
        async with rig.orchestrator:
            raise ZeroDivisionError("mine")
    assert rig.ended.outcome is Outcome.FAILED
    assert isinstance(rig.ended.error, ZeroDivisionError)
    rig.assert_invariants()


# Deadlines of the run


HANG_AT = (
    ("engine-1", "start", State.STARTING),
    ("trainer", "start", State.STARTING),
    ("trainer", "listen", State.STARTING),
    ("engine-1", "prompt_logprobs", State.STARTING),
    ("trainer", "train", State.GENERATING),
    *PHASE_CALLS,
    ("trainer", "save_checkpoint", State.VALIDATING),
    ("fresh:fake://v1", "start", State.VALIDATING),
    ("fresh:fake://v1", "generate", State.VALIDATING),
)


@pytest.mark.parametrize(("actor", "method", "phase"), HANG_AT)
async def test_a_call_that_hangs_ends_the_run_at_the_deadline_of_its_phase(
    world: FakeWorld, actor: str, method: str, phase: State
) -> None:
    rig = make_rig(world, 2)
    world.faults.block(actor, method)
    hung: list[float] = []
    world.faults.hook(actor, method, lambda: hung.append(now()))
    task = asyncio.create_task(drive(rig, 1))
    result = await task
    assert isinstance(result, (PhaseTimeout, SyncError)), repr(result)
    timeout = result if isinstance(result, PhaseTimeout) else result.__cause__
    assert isinstance(timeout, PhaseTimeout)
    phase = State.SYNCING if method == "digests" else phase  # whose budget they have
    assert timeout.phase == phase
    budget = SWAP.timeouts.of(phase)
    assert now() <= 2 + budget + 5 + SWAP.timeouts.stopping
    assert rig.ended.outcome is Outcome.FAILED
    rig.assert_invariants()


async def test_a_channel_that_one_side_never_joins_ends_the_start(world: FakeWorld) -> None:
    rig = make_rig(world, 2)
    world.faults.block("engine-1", "open_channel")
    result = await drive(rig)
    assert isinstance(result, ChannelError)
    assert "1 of 3 ranks never joined" in str(result)
    assert now() <= SWAP.timeouts.syncing + SWAP.timeouts.stopping
    rig.assert_invariants()


async def test_probes_that_all_end_before_they_are_long_enough_do_not_hang_the_run(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    world.faults.block("engine-1", "wait_for_tokens")
    assert await drive(rig, 1) is None
    assert len(rig.of(SwapDone)) == 1
    rig.assert_invariants()


async def test_an_engine_that_never_generates_ends_the_run_and_says_what_is_missing(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, validation=DIGEST)
    world.faults.block("engine-0", "generate", call=None)
    result = await drive(rig, 1)
    assert isinstance(result, PhaseTimeout)
    assert "GENERATING took longer than 40 s; still waiting for rollouts" in str(result)
    rig.assert_invariants()


# Starting


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: f.fail("engine-1", "start"), "engine engine-1: injected fault in start"),
        (lambda f: f.fail("trainer", "start"), "trainer: injected fault in start"),
        (lambda f: f.fail("trainer", "listen"), "trainer: injected fault in listen"),
        (lambda f: f.fail("engine-1", "open_channel"), "injected fault in open_channel"),
        (lambda f: f.wrong_pattern("engine-1"), "engine-1: the known pattern arrived wrong"),
        (lambda f: f.wrong_pattern("trainer"), "trainer: the known pattern did not come back"),
        (lambda f: f.fail("engine-1", "prompt_logprobs"), "engine engine-1: injected"),
        (lambda f: f.fail("trainer", "reference_logprobs"), "trainer: injected"),
    ],
    ids=[
        "engine start",
        "trainer start",
        "listen",
        "open_channel",
        "engine pattern",
        "trainer pattern",
        "control engine",
        "control trainer",
    ],
)
async def test_a_start_that_fails_releases_everything_and_says_why(
    world: FakeWorld, spoil: Callable[[Any], None], message: str
) -> None:
    rig = make_rig(world, 3)
    spoil(world.faults)
    result = await drive(rig)
    assert isinstance(result, MidflightError)
    assert message in str(result)
    assert rig.ended.outcome is Outcome.FAILED
    assert rig.orchestrator.state is State.FAILED
    assert world.calls("generate") == []
    assert world.calls("start_update") == []
    rig.assert_invariants()


async def test_no_request_runs_before_the_channel_is_proved(world: FakeWorld) -> None:
    rig = make_rig(world, 2)
    world.faults.delay("engine-1", "open_channel", 5, when="after")
    await drive(rig, 1)
    proved = max(c.ended_seq or 0 for c in world.calls("open_channel"))
    assert min(c.seq for c in world.calls("generate")) > proved


# Leaving


async def test_entering_twice_is_refused(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    async with rig.orchestrator as o:
        with pytest.raises(Closed, match="entered once"):
            await o.__aenter__()
    with pytest.raises(Closed, match="entered once"):
        await rig.orchestrator.__aenter__()
    rig.assert_invariants()


async def test_entering_after_closing_is_refused_and_starts_nothing(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    await rig.orchestrator.aclose()
    with pytest.raises(Closed):
        await rig.orchestrator.__aenter__()
    assert world.calls("start") == []


async def test_closing_is_idempotent_and_leaving_still_says_how_it_ended(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, validation=DIGEST)
    async with rig.orchestrator as o:
        await asyncio.sleep(1)
        await o.aclose()
        await o.aclose()
        with pytest.raises(Closed):
            await o.sync()
        left = [r.request.group async for r in o.rollouts()]
        assert all(left.count(group) == GENERATION.group_size for group in left)
    await rig.orchestrator.aclose()
    assert rig.ended.outcome is Outcome.COMPLETED
    rig.assert_invariants()


async def test_whoever_closes_second_waits_until_all_is_released(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    world.faults.delay("engine-0", "aclose", 2)
    async with rig.orchestrator as o:
        await asyncio.sleep(1)
        closing = asyncio.create_task(o.aclose())
        await all_blocked()
    assert rig.engines[0].closed
    await closing
    rig.assert_invariants()


async def test_a_sync_that_waits_its_turn_is_told_that_all_was_closed(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    gate = world.faults.block("engine-0", "pause")
    async with rig.orchestrator as o:
        syncs = [asyncio.create_task(o.sync()) for _ in range(3)]
        await gate.reached()
    for sync in syncs:
        with pytest.raises(Closed):
            await sync
    assert len(world.calls("stage")) == 1
    rig.assert_invariants()


async def test_syncs_of_other_tasks_do_not_start_after_an_interrupt(world: FakeWorld) -> None:
    rig = make_rig(world, validation=DIGEST)
    gate = world.faults.block("engine-0", "receive_update")
    others: list[asyncio.Task[Any]] = []

    async def job() -> None:
        async with rig.orchestrator as o:
            first = asyncio.create_task(o.sync())
            await gate.reached()
            others.extend([first, asyncio.create_task(o.sync())])
            await o.sync()

    task = asyncio.create_task(job())
    await gate.reached()
    await all_blocked()
    rig.orchestrator.interrupt()
    with pytest.raises(asyncio.CancelledError):
        await task
    for other in others:
        with pytest.raises(Closed):
            await other
    assert len(world.calls("stage")) == 1
    rig.assert_invariants()


@pytest.mark.parametrize("actor", ["engine-0", "trainer"])
async def test_an_actor_that_does_not_close_is_left_in_time_and_told(
    world: FakeWorld, actor: str
) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    world.faults.block(actor, "aclose")
    world.faults.block("engine-1", "abort_requests")
    with pytest.raises(MidflightError, match="may be left: not closed within 16 s"):
        async with rig.orchestrator:
            await asyncio.sleep(1)
    assert now() - 1 <= 3 * SWAP.timeouts.stopping
    assert rig.engines[1].closed
    for stuck in [*rig.engines, rig.trainer]:
        await stuck.aclose()
    rig.assert_invariants()


async def test_stopping_is_bounded_though_an_engine_neither_resumes_nor_closes(
    world: FakeWorld,
) -> None:
    rig = make_rig(world, 2, validation=DIGEST, swap=replace(
        SWAP, timeouts=replace(SWAP.timeouts, resuming=60)
    ))  # fmt: skip
    gate = world.faults.block("engine-0", "pause")
    world.faults.block("engine-0", "resume")
    world.faults.block("engine-0", "aclose")
    task = asyncio.create_task(drive(rig))
    await gate.reached()
    began = now()
    rig.orchestrator.interrupt()
    assert isinstance(await task, asyncio.CancelledError)
    assert now() - began <= SWAP.timeouts.stopping
    await rig.engines[0].aclose()
    rig.assert_invariants()


async def test_a_failed_swap_is_reported_with_its_cause_not_with_the_closing(
    world: FakeWorld,
) -> None:
    """The swap is still cleaning up when the machine has already stopped."""
    rig = make_rig(world, 2, validation=DIGEST)
    gate = world.faults.block("engine-0", "pause")
    world.faults.delay("engine-0", "resume", 3.5)
    task = asyncio.create_task(drive(rig))
    await gate.reached()
    rig.orchestrator.interrupt()
    await task
    (failed,) = rig.of(SwapFailed)
    assert isinstance(failed.error, asyncio.CancelledError)
    rig.assert_invariants()


# Observers


async def test_an_observer_that_raises_is_logged_and_disturbs_nothing(world: FakeWorld) -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))

    def broken(event: Event) -> None:
        raise RuntimeError("dashboard is down")

    rig = make_rig(world, 2, observers=[broken])
    assert await drive(rig, 2) is None
    assert len(rig.of(SwapDone)) == 2
    assert len(logged) == len(rig.events)
    assert "dashboard is down" in str(logged[0]["exception"])
    rig.assert_invariants()


async def test_every_event_of_a_swap_carries_run_sync_step_and_version(world: FakeWorld) -> None:
    rig = make_rig(world, 2)
    await drive(rig, 2)
    for event in rig.events:
        assert event.op.run_id == "run"
    for version in (1, 2):
        moves = [e for e in rig.of(StateChanged) if e.op.sync_id == f"run-s{version}"]
        assert [m.trigger for m in moves] == ["pause", "sync", "commit", "validate", "verify"]
        assert {(m.op.step, m.op.version) for m in moves} == {(version, version)}


async def test_events_tell_the_run_in_order(world: FakeWorld) -> None:
    rig = make_rig(world, 2)
    await drive(rig, 1)
    kinds = [type(e) for e in rig.events]
    assert set(kinds[:3]) == {EngineStarted, TrainerStarted}
    assert kinds[3] is StateChanged
    assert kinds[-2:] == [StateChanged, RunEnded]
    assert kinds.index(TrainStepDone) < kinds.index(SwapDone)
    history = [(m.source, m.target) for m in rig.orchestrator.history]
    assert history == [(e.source, e.target) for e in rig.of(StateChanged)]
    assert history[-1] == (State.VALIDATING, State.GENERATING) or history[-1][1] is State.STOPPED


async def test_an_observer_may_interrupt(world: FakeWorld) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, SwapDone):
            rig.orchestrator.interrupt()

    rig = make_rig(world, observers=[stop])
    result = await drive(rig, 5)
    assert isinstance(result, asyncio.CancelledError)
    assert len(rig.of(SwapDone)) == 1
    assert rig.ended.outcome is Outcome.INTERRUPTED
    rig.assert_invariants()


def test_defaults_are_usable_as_they_are() -> None:
    world = FakeWorld()
    o = Orchestrator([FakeEngine("engine-0", world)], FakeTrainer(world), prompts=PROMPTS)
    assert (o.state, o.version, o.history) == (State.STARTING, 0, ())
    assert len(o.run_id) == 12
    assert SwapOptions().timeouts == PhaseTimeouts()
    assert GenerationOptions().buffer_size >= 32


async def test_sync_takes_the_trainers_own_version_and_only_goes_up(world: FakeWorld) -> None:
    rig = make_rig(world, 2, validation=DIGEST)
    async with rig.orchestrator as o:
        assert (await o.sync(7)).update.version == 7
        with pytest.raises(ConfigError, match="version 7 is not newer than 7"):
            await o.sync(7)
        assert len(world.calls("stage")) == 1, "refused before anything moved"
        assert (await o.sync()).update.version == 8
        assert {e.version for e in rig.engines} == {8}
    rig.assert_invariants()


async def test_what_a_request_says_of_itself_has_the_version_of_then(world: FakeWorld) -> None:
    rig = make_rig(world, 1, validation=DIGEST)
    assert await drive(rig, 3) is None
    seen = {e.op.version for e in rig.of(RolloutFinished)}
    assert {1, 2} <= seen and None not in seen


@pytest.mark.parametrize("slow", ["before", "after"])
async def test_the_reason_of_a_fence_outranks_what_follows_from_it(
    world: FakeWorld, slow: str
) -> None:
    """Fencing all ends their requests, and then none can be submitted: that is not the cause."""
    world.faults.flip_bit("head")
    world.faults.delay("engine-0", "abort_requests", 0.1, when=slow)
    busy = replace(GENERATION, buffer_size=400)  # it never stops to submit
    rig = make_rig(world, 1, validation=DIGEST, generation=busy)
    error = await drive(rig)
    assert isinstance(error, ValidationFailed)
    assert "head on engine-0" in str(error)
    assert rig.ended.error is error
