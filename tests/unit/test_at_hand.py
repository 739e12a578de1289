"""Swaps whose bytes are at the engines before the pause, and those made in one call."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orchestrator import Orchestrator, SwapDone, SwapFailed
from orchestrator.errors import ChannelError, EngineDied, EngineError, PhaseTimeout, SyncError
from orchestrator.fleet import CLOSE_S
from orchestrator.options import SwapOptions
from orchestrator.tasks import settle
from orchestrator.testing import FakeWorld
from orchestrator.types import (
    ChannelSpec,
    Completion,
    GenerationRequest,
    KVPolicy,
    PauseMode,
    PolicyVersion,
    Prompt,
    State,
    SyncReport,
    TransferBackend,
)
from tests.harness import DIGEST, SWAP, Rig, at_suspension, drive, make_rig, now
from tests.unit.cycle_parts import LIVE_TOKENS, Parts

STAGED = replace(SWAP, staged=True)
IPC = replace(SWAP, backend=TransferBackend.IPC)
NCCL = replace(SWAP, backend=TransferBackend.NCCL)
PHASES = ["pause", "sync", "commit", "validate", "verify"]


@pytest.fixture
async def parts(world: FakeWorld, request: pytest.FixtureRequest) -> Any:
    """One replica, unless the test asks for more."""
    parts = Parts(world, **{"count": 1, "options": STAGED, **getattr(request, "param", {})})
    await parts.start()
    yield parts
    await parts.close()


three = pytest.mark.parametrize("parts", [{"count": 3}], indirect=True)
each_way = pytest.mark.parametrize("parts", [{}, {"options": NCCL}], indirect=True)
each_count = pytest.mark.parametrize("parts", [{"count": 1}, {"count": 3}], indirect=True)


# Before the pause


@pytest.mark.parametrize("options", [IPC, STAGED])
async def test_the_bytes_arrive_while_decoding_goes_on_and_the_pause_only_commits(
    world: FakeWorld, options: SwapOptions
) -> None:
    world.tensor_seconds = 0.02
    parts = Parts(world, count=1, options=options)
    await parts.start()
    report = await parts.swap()
    (prefetch,), (pause,) = parts.world.calls("prefetch"), parts.world.calls("pause")
    assert prefetch.ended is not None
    assert prefetch.ended <= pause.at
    assert report.seconds.prefetch == pytest.approx(0.08)
    assert report.seconds.transfer == pytest.approx(4 * parts.world.commit_seconds)
    assert report.stall_s.max is not None
    assert report.stall_s.max < 0.02
    (done,) = [await task for task in parts.live]
    cut = done.spans[0].end
    assert cut >= 5 + 0.08 // 0.01, "it wrote no token while the bytes came"
    assert report.nbytes == parts.nbytes
    parts.assert_resumed_or_fenced()
    await parts.close()


@three
async def test_replicas_are_swapped_phase_by_phase_without_the_sender(parts: Parts) -> None:
    report = await parts.swap()
    assert [t for t, _ in parts.moves] == PHASES
    assert parts.world.calls("swap") == []
    (send,) = parts.world.calls("send")
    for pause in parts.world.calls("pause"):
        assert send.ended_seq is not None
        assert send.ended_seq < pause.seq
    assert len(parts.world.calls("receive_update")) == 3
    assert report.nbytes == 3 * parts.nbytes
    assert [e.version for e in parts.engines] == [1, 1, 1]
    assert report.ok
    parts.assert_resumed_or_fenced()


@pytest.mark.parametrize("kind", ["fail", "die", "block", "tensor", "sender"])
@three
async def test_a_prefetch_that_fails_leaves_every_engine_as_it_was(parts: Parts, kind: str) -> None:
    faults = parts.world.faults
    match kind:
        case "fail":
            faults.fail("engine-1", "prefetch")
        case "die":
            faults.die("engine-1", "prefetch")
        case "block":
            faults.block("engine-1", "prefetch")
        case "tensor":
            faults.fail_at_tensor("engine-1", 2)
        case _:
            faults.fail("trainer", "send")
    began = now()
    with pytest.raises(SyncError, match="sync failed in STAGING") as caught:
        await parts.swap()
    assert (caught.value.phase, caught.value.fenced) == ("STAGING", ())
    assert now() - began <= STAGED.timeouts.staging + CLOSE_S + 1
    if kind == "block":
        timeout = caught.value.__cause__
        assert isinstance(timeout, PhaseTimeout)
        assert "prefetch of engine-1" in timeout.waiting_for
        assert "--timeout-staging" in str(timeout)
    assert parts.moves == []
    assert parts.machine.state is State.GENERATING
    assert parts.fleet.version == 0
    assert parts.world.calls("pause") == []
    assert parts.world.channels == {}, "somebody is left in the collective"
    parts.assert_resumed_or_fenced()
    for engine, task in zip(parts.engines, parts.live, strict=True):
        if engine.death is None:
            assert [s.version for s in (await task).spans] == [0]


@pytest.mark.parametrize("when", ["before", "after"])
@each_count
async def test_after_a_failed_prefetch_the_next_swap_opens_the_channel_again(
    parts: Parts, when: str
) -> None:
    parts.world.faults.fail("engine-0", "prefetch", when=when)
    with pytest.raises(SyncError, match="STAGING: engine engine-0: injected"):
        await parts.swap()
    report = await parts.swap()
    assert (report.ok, report.update.version, parts.fleet.version) == (True, 1, 1)
    assert len(parts.world.calls("listen")) == 2
    assert (await parts.swap(2)).ok
    assert len(parts.world.calls("listen")) == 2, "an open channel was opened again"
    specs = [c.args[0] for c in parts.world.calls("open_channel")]
    assert len(specs) == 2 * (1 + parts.count)
    assert all(isinstance(spec, ChannelSpec) and spec.staged for spec in specs)
    parts.assert_resumed_or_fenced()


async def test_a_channel_that_cannot_be_opened_again_is_tried_once_more(parts: Parts) -> None:
    parts.world.faults.fail("engine-0", "prefetch")
    parts.world.faults.wrong_pattern("engine-0", call=2)
    for words in ("injected", "pattern"):
        with pytest.raises(SyncError, match=f"STAGING: .*{words}"):
            await parts.swap()
    assert (await parts.swap()).ok
    assert len(parts.world.calls("listen")) == 3
    parts.assert_resumed_or_fenced()


@each_count
async def test_a_cancel_at_any_await_of_a_prefetch_is_noticed_by_nobody(parts: Parts) -> None:
    """At the first suspension, then at the second, ... on one fleet that swaps in between."""
    for at in range(1, 60):
        version = parts.fleet.version + 1
        update = parts.update(version)
        await parts.trainer.stage(update.version)
        struck: list[int] = []

        def cancel(struck: list[int] = struck) -> None:
            struck.append(1)
            (task,) = [t for t in asyncio.all_tasks() if t.get_name() == "prefetch"]
            task.cancel()

        one = at_suspension(parts.cycle.prefetch(update), at, cancel)
        task = asyncio.create_task(one, name="prefetch")
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if not struck:
            break
        assert isinstance(result, asyncio.CancelledError), f"suspension {at}: {result!r}"
        assert (parts.fleet.fenced, parts.machine.state) == ((), State.GENERATING)
        assert [e.paused for e in parts.engines] == [False for _ in parts.engines]
        parts.assert_resumed_or_fenced()
        assert (await parts.swap(version)).ok
    else:
        pytest.fail("the prefetch never got through")
    assert at >= 2
    parts.assert_resumed_or_fenced()


async def test_what_was_prefetched_for_a_swap_that_failed_is_replaced(parts: Parts) -> None:
    parts.world.faults.fail("engine-0", "pause")
    with pytest.raises(SyncError, match="PAUSING"):
        await parts.swap()
    parts.trainer.weights = {k: bytes(len(v)) for k, v in parts.trainer.weights.items()}
    assert (await parts.swap()).ok
    assert parts.engines[0].weights == parts.trainer.staged
    assert len(parts.world.calls("listen")) == 1, "the channel was fine"


# One call


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_single_replica_is_swapped_in_one_call_and_every_phase_is_seen(
    world: FakeWorld, mode: PauseMode
) -> None:
    parts = Parts(world, count=1, options=replace(STAGED, pause_mode=mode))
    await parts.start()
    world.faults.delay("engine-0", "pause", 0.2, when="after")
    world.faults.delay("engine-0", "receive_update", 0.3)
    world.faults.delay("engine-0", "finish_update", 0.4)
    world.faults.delay("engine-0", "resume", 0.5)
    world.faults.delay("engine-0", "swap", 0.6, when="after")  # the answer is slow
    report = await parts.swap()
    assert [t for t, _ in parts.moves] == PHASES
    assert len(world.calls("swap")) == 1
    assert report.ok
    s = report.seconds
    if mode is PauseMode.WAIT:
        assert 0.5 < s.quiesce < 0.6  # 35 tokens are left at first
    else:
        assert s.quiesce == pytest.approx(0.2)
    assert s.transfer == pytest.approx(0.3 + 4 * world.commit_seconds)
    assert s.finalize == pytest.approx(0.4)
    assert s.resume == pytest.approx(0.5)
    spent = {m.source: m.seconds for m in list(parts.machine.history)[-4:]}
    assert spent[State.PAUSING] == pytest.approx(s.quiesce)
    assert spent[State.SYNCING] == pytest.approx(s.transfer + s.finalize)
    assert spent[State.RESUMING] >= 0.5 + 0.6
    parts.assert_resumed_or_fenced()
    await parts.close()


@pytest.mark.parametrize("kv", list(KVPolicy))
async def test_the_kv_policy_reaches_the_engine_in_one_call(world: FakeWorld, kv: KVPolicy) -> None:
    parts = Parts(world, count=1, options=replace(STAGED, kv_policy=kv))
    await parts.start()
    await parts.swap()
    assert [c.args for c in world.calls("pause")] == [(PauseMode.KEEP, kv)]
    await parts.close()


@each_way
async def test_over_a_device_link_the_trainer_sends_while_the_replica_swaps(parts: Parts) -> None:
    direct = parts.cycle._options is NCCL
    report = await parts.swap()
    assert report.ok and [t for t, _ in parts.moves] == PHASES
    (swap,), (send,) = parts.world.calls("swap"), parts.world.calls("send")
    assert (swap.seq < send.seq) is direct
    assert len(parts.world.calls("prefetch")) == (0 if direct else 1)
    assert (report.seconds.prefetch == 0) is direct
    assert (await parts.swap(2)).ok
    parts.assert_resumed_or_fenced()


@pytest.mark.parametrize("parts", [{"options": NCCL}], indirect=True)
@pytest.mark.parametrize("how", ["fail", "block"])
async def test_a_sender_that_fails_ends_the_one_call(parts: Parts, how: str) -> None:
    if how == "fail":
        parts.world.faults.fail("trainer", "send")
    else:
        parts.world.faults.block("trainer", "send")
    began = now()
    with pytest.raises(SyncError, match="SYNCING") as caught:
        await parts.swap()
    assert now() - began <= sum((3, 12, 6)) + CLOSE_S + 1
    assert caught.value.phase == "SYNCING"
    assert parts.fleet.fenced == ("engine-0",)
    assert parts.fleet.version == 0
    assert parts.world.channels == {}, "somebody is left in the collective"


FAILURES = (
    # method, phase, committed version, fenced, moves
    ("pause", State.PAUSING, 0, False, ["pause", "fault", "recover"]),
    ("start_update", State.SYNCING, 0, True, ["pause", "sync", "fault"]),
    ("receive_update", State.SYNCING, 0, True, ["pause", "sync", "fault"]),
    ("finish_update", State.SYNCING, 0, True, ["pause", "sync", "fault"]),
    ("resume", State.RESUMING, 1, False, ["pause", "sync", "commit", "fault", "recover"]),
)


@each_way
@pytest.mark.parametrize("kind", ["before", "after", "hang"])
@pytest.mark.parametrize(("method", "phase", "version", "fenced", "moves"), FAILURES)
async def test_a_failure_in_one_call_leaves_what_one_of_its_phases_would(
    parts: Parts,
    method: str,
    phase: State,
    version: int,
    fenced: bool,
    moves: list[str],
    kind: str,
) -> None:
    if kind == "hang":
        parts.world.faults.block("engine-0", method)
    else:
        parts.world.faults.fail("engine-0", method, when=kind)
    began = now()
    with pytest.raises(SyncError, match=f"^sync failed in {phase}: (engine engine-0|{phase})") as e:
        await parts.swap()
    assert now() - began <= STAGED.timeouts.of(phase) + 1
    direct = parts.cycle._options is NCCL
    assert not direct or parts.world.channels == {}, "what nobody took waits in the channel"
    assert (e.value.phase, parts.fleet.version) == (phase, version)
    assert parts.fleet.fenced == e.value.fenced == (("engine-0",) if fenced else ())
    assert [t for t, _ in parts.moves] == moves
    parts.assert_resumed_or_fenced()
    assert parts.engines[0].paused is fenced
    if not fenced:
        assert (await parts.swap(version + 1)).ok


@pytest.mark.parametrize("method", ["pause", "receive_update", "resume", "swap"])
async def test_a_replica_that_dies_in_one_call_is_fenced(parts: Parts, method: str) -> None:
    parts.world.faults.die("engine-0", method, reason="SIGKILL")
    with pytest.raises(SyncError, match="SYNCING: engine engine-0: SIGKILL") as caught:
        await parts.swap()
    assert isinstance(caught.value.__cause__, EngineDied)
    assert parts.fleet.fenced == ("engine-0",)
    assert parts.fleet.version == 0
    await asyncio.gather(*parts.live, return_exceptions=True)


async def test_a_call_that_never_answers_ends_at_the_sum_of_its_budgets(parts: Parts) -> None:
    parts.world.faults.block("engine-0", "swap", when="after")
    began = now()
    with pytest.raises(SyncError, match="SYNCING took longer than 21 s") as caught:
        await parts.swap()
    assert now() - began <= 3 + 12 + 6 + 1
    assert "swap of engine-0" in str(caught.value)
    assert parts.fleet.fenced == ("engine-0",)


async def test_no_token_of_a_version_that_was_not_published_is_handed_out(parts: Parts) -> None:
    """The answer is lost: the replica serves the new version and nobody can know."""
    parts.world.faults.delay("engine-0", "swap", 0.2, when="after")
    parts.world.faults.fail("engine-0", "swap", when="after")
    short = GenerationRequest("short", Prompt((7, 7)), 12)
    task = asyncio.create_task(parts.fleet.generate(short))
    with pytest.raises(SyncError, match="SYNCING"):
        await parts.swap()
    assert parts.engines[0].version == 1
    for done in (await task, *[await t for t in parts.live]):
        assert {s.version for s in done.spans} <= {0}
        assert done.spans == () or done.spans[-1].end == len(done.token_ids)
        assert len(done.token_ids) == len(done.logprobs) < LIVE_TOKENS
        assert done.finish_reason == "abort"
    with pytest.raises(EngineError, match="no replica serves"):
        await parts.fleet.generate(GenerationRequest("late", Prompt((1,)), 2))


async def test_a_request_that_ends_before_the_answer_waits_for_the_version(parts: Parts) -> None:
    """The replica goes on before its answer arrives; its tokens are published with it."""
    parts.world.faults.delay("engine-0", "swap", 5, when="after")
    seen: list[int] = []

    async def one() -> Completion:
        done = await parts.fleet.generate(GenerationRequest("short", Prompt((7, 7)), 12))
        seen.append(parts.fleet.version)
        return done

    task = asyncio.create_task(one())
    assert (await parts.swap()).ok
    done = await task
    assert done.spans[-1].version == 1
    assert (len(done.token_ids), done.finish_reason) == (12, "length")
    assert seen == [1]
    asked = [c.args[0].request_id for c in parts.world.calls("generate")]  # type: ignore[attr-defined]
    assert [name for name in asked if name.startswith("short")] == ["short"], "it was cut"
    parts.assert_resumed_or_fenced()


@pytest.mark.parametrize("options", [STAGED, NCCL])
async def test_a_cancel_at_any_await_of_a_one_call_swap_is_cleaned_up_and_final(
    options: SwapOptions,
) -> None:
    cancelled = 0
    for at in range(1, 200):
        parts = Parts(FakeWorld(), count=1, options=options)
        await parts.start()
        sent = await parts.trainer.stage(PolicyVersion(1))
        await parts.cycle.prefetch(parts.update())
        struck: list[int] = []

        def cancel(struck: list[int] = struck) -> None:
            struck.append(1)
            (task,) = [t for t in asyncio.all_tasks() if t.get_name() == "swap"]
            task.cancel()

        swap = parts.cycle.run(parts.update(), sent, parts.nbytes)
        task = asyncio.create_task(at_suspension(swap, at, cancel), name="swap")
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if not struck:
            assert isinstance(result, SyncReport)
            await parts.close()
            break
        cancelled += 1
        assert isinstance(result, asyncio.CancelledError), f"suspension {at}: {result!r}"
        committed = "commit" in [t for t, _ in parts.moves]
        assert parts.fleet.version == int(committed)
        assert parts.fleet.fenced == (() if committed else ("engine-0",))
        assert not parts.cycle.committing
        parts.assert_resumed_or_fenced()
        await parts.close()
    else:
        pytest.fail("the swap never got through")
    assert cancelled >= 4


# Under the orchestrator


def staged_rig(world: FakeWorld, engines: int = 1, swap: SwapOptions = STAGED) -> Rig:
    return make_rig(world, engines, swap=swap, validation=DIGEST)


@pytest.mark.parametrize("engines", [1, 3])
async def test_a_run_with_staged_swaps_cuts_its_probes_in_every_one(
    world: FakeWorld, engines: int
) -> None:
    """The bytes take longer than a probe lives, so they come before the probes start."""
    world.tensor_seconds = 0.5
    rig = staged_rig(world, engines)
    assert await drive(rig, 3) is None
    rig.assert_invariants()
    assert [e.report.update.version for e in rig.of(SwapDone)] == [1, 2, 3]
    assert len(world.calls("swap")) == (3 if engines == 1 else 0)
    probes = [c for c in world.calls("generate") if c.args[0].kind == "probe"]  # type: ignore[attr-defined]
    assert len(probes) == 3 * 2
    for swap in rig.of(SwapDone):
        assert swap.report.requests_in_flight >= 1
        assert swap.report.seconds.prefetch == pytest.approx(2.0)


async def test_a_second_sync_waits_until_the_staged_one_is_through(world: FakeWorld) -> None:
    rig = staged_rig(world)
    gate = world.faults.block("engine-0", "prefetch")
    async with rig.orchestrator as o:
        first = asyncio.create_task(o.sync())
        await gate.reached()
        second = asyncio.create_task(o.sync())
        await asyncio.sleep(0.1)
        assert len(world.calls("stage")) == 1, "staged over bytes that are on their way"
        gate.release()
        done = [(await task).update.version for task in (first, second)]
    assert done == [1, 2]
    rig.assert_invariants()


async def test_a_sync_cancelled_while_the_bytes_come_is_called_off_and_the_next_works(
    world: FakeWorld,
) -> None:
    rig = staged_rig(world)
    gate = world.faults.block("engine-0", "prefetch")
    async with rig.orchestrator as o:
        task = asyncio.create_task(o.sync())
        await gate.reached()
        task.cancel()
        await settle([task], cancel=False)
        assert task.cancelled()
        assert (o.version, o.state) == (0, State.GENERATING)
        assert [type(e.error) for e in rig.of(SwapFailed)] == [asyncio.CancelledError]
        assert (await o.sync()).ok
        assert o.version == 1
    rig.assert_invariants()


async def test_a_failed_prefetch_is_told_and_the_next_sync_works(world: FakeWorld) -> None:
    rig = staged_rig(world, 2)
    world.faults.fail_at_tensor("engine-1", 1, error=ChannelError("the link broke"))
    async with rig.orchestrator as o:
        with pytest.raises(SyncError, match="STAGING: the link broke"):
            await o.sync()
        (failed,) = rig.of(SwapFailed)
        assert failed.fenced == ()
        assert (await o.sync()).ok
    rig.assert_invariants()


@pytest.mark.parametrize("method", ["pause", "receive_update", "finish_update", "resume"])
async def test_a_sync_cancelled_in_the_one_call_is_finished_first(
    world: FakeWorld, method: str
) -> None:
    rig = staged_rig(world)
    gate = world.faults.block("engine-0", method)
    async with rig.orchestrator as o:
        task = asyncio.create_task(o.sync())
        await gate.reached()
        task.cancel()
        await asyncio.sleep(0.5)
        assert not task.done(), "the call was left half-way"
        gate.release()
        await settle([task], cancel=False)
        assert task.cancelled()
        assert (o.version, o.state) == (1, State.GENERATING)
        assert (await o.sync()).ok
    rig.assert_invariants()
    assert [c.error for c in world.calls("swap")] == [None, None]


async def test_closing_during_the_one_call_ends_in_time(world: FakeWorld) -> None:
    rig = staged_rig(world)
    gate = world.faults.block("engine-0", "receive_update")
    orchestrator: Orchestrator = rig.orchestrator

    async def body() -> None:
        async with orchestrator as o:
            sync = asyncio.create_task(o.sync())
            await gate.reached()
            await o.aclose()
            await settle([sync], cancel=False)
            assert sync.cancelled() or sync.exception() is not None

    began = now()
    await body()
    assert now() - began <= STAGED.timeouts.stopping + 1
    rig.assert_invariants()
