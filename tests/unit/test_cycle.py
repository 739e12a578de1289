"""One swap: what each phase waits for, and what a failure or a cancel in it leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.cycle import LATE_S, stall_stats
from orchestrator.errors import (
    ChannelError,
    EngineDied,
    EngineError,
    IllegalTransition,
    PhaseTimeout,
    SyncError,
    TrainerError,
    TransferError,
    ValidationFailed,
)
from orchestrator.fleet import CLOSE_S
from orchestrator.options import ValidationOptions
from orchestrator.testing import FakeWorld
from orchestrator.types import (
    CheckResult,
    Completion,
    GenerationRequest,
    KVPolicy,
    PauseMode,
    PolicyVersion,
    Prompt,
    State,
    SyncReport,
    Verdict,
)
from tests.harness import SWAP, at_suspension, now
from tests.unit.cycle_parts import LIVE_TOKENS, Parts


@pytest.fixture
async def parts(world: FakeWorld, request: pytest.FixtureRequest) -> Any:
    parts = Parts(world, **getattr(request, "param", {}))
    await parts.start()
    yield parts
    await parts.close()


# A swap that works


async def test_a_swap_goes_through_every_phase_and_publishes_once(parts: Parts) -> None:
    report = await parts.swap()
    assert parts.moves == [
        ("pause", State.PAUSING),
        ("sync", State.SYNCING),
        ("commit", State.RESUMING),
        ("validate", State.VALIDATING),
        ("verify", State.GENERATING),
    ]
    assert parts.fleet.version == 1
    assert [e.version for e in parts.engines] == [1, 1, 1]
    assert [(c.check, c.verdict) for c in report.checks] == [
        ("digest", Verdict.MATCH),
        ("canary", Verdict.MATCH),
        ("fresh", Verdict.SKIPPED),
    ]
    assert report.ok
    parts.assert_resumed_or_fenced()
    for task in parts.live:
        spans = (await task).spans
        assert [s.version for s in spans] == [0, 1]


async def test_the_report_says_where_the_time_and_the_bytes_went(parts: Parts) -> None:
    parts.world.faults.delay("engine-1", "pause", 0.2)
    parts.world.faults.delay("engine-1", "receive_update", 0.3)
    parts.world.faults.delay("engine-0", "finish_update", 0.4)
    parts.world.faults.delay("engine-2", "resume", 0.5, when="after")
    report = await parts.swap()
    seconds = report.seconds
    assert seconds.quiesce == pytest.approx(0.2)
    assert seconds.transfer == pytest.approx(0.3 + 4 * parts.world.tensor_seconds)
    assert seconds.finalize == pytest.approx(0.4)
    assert seconds.resume == pytest.approx(0.5)
    assert seconds.first_token == pytest.approx(0.01)
    assert report.nbytes == 3 * parts.nbytes
    assert report.requests_in_flight == 3
    assert report.stall_s.count == 3
    assert report.stall_s.max is not None
    assert report.stall_s.max >= 0.7
    assert report.validate_s == pytest.approx(0.01)


def test_percentiles_are_those_of_the_nearest_rank_and_none_of_nothing() -> None:
    stats = stall_stats([0.5, 0.1, 0.4, 0.2, 0.3])
    assert (stats.count, stats.p50, stats.p95, stats.max) == (5, 0.3, 0.5, 0.5)
    twenty = stall_stats([float(i) for i in range(1, 21)])
    assert (twenty.p50, twenty.p95, twenty.max) == (10.0, 19.0, 20.0)
    empty = stall_stats([])
    assert (empty.count, empty.p50, empty.p95, empty.max) == (0, None, None, None)


async def test_no_token_is_written_between_pause_and_resume(parts: Parts) -> None:
    parts.world.faults.delay("trainer", "send", 2.0)
    submitted: list[asyncio.Task[Completion]] = []

    def submit() -> None:
        """A burst around the pause: before, at and after every acknowledgement."""
        request = GenerationRequest(f"late{len(submitted)}", Prompt((9, 9)), 3)
        submitted.append(asyncio.create_task(parts.fleet.generate(request)))

    loop = asyncio.get_running_loop()
    for millisecond in range(60):
        loop.call_later(millisecond / 1000, submit)
    await parts.swap()
    (send,) = parts.world.calls("send")
    assert len(submitted) == 60
    for done in await asyncio.gather(*submitted):
        assert [s.version for s in done.spans] == [1]
    for call in parts.world.calls("generate"):
        if call.ended is not None:
            assert send.ended is not None
            assert not send.at < call.ended < send.ended


@pytest.mark.parametrize(
    ("mode", "frozen", "spans"),
    [
        (PauseMode.KEEP, 3, [(0, 0, 5), (1, 5, 40)]),
        (PauseMode.WAIT, 0, [(0, 0, 40)]),
        (PauseMode.ABORT, 0, [(0, 0, 5), (1, 5, 40)]),
    ],
)
async def test_a_pause_mode_decides_what_happens_to_running_requests(
    world: FakeWorld, mode: PauseMode, frozen: int, spans: list[tuple[int, int, int]]
) -> None:
    parts = Parts(world, options=replace(SWAP, pause_mode=mode))
    await parts.start()
    report = await parts.swap()
    assert report.requests_in_flight == frozen
    for task in parts.live:
        done = await task
        assert [(s.version, s.start, s.end) for s in done.spans] == spans
        assert len(done.token_ids) == LIVE_TOKENS
    await parts.close()


@pytest.mark.parametrize("kv", list(KVPolicy))
async def test_the_kv_policy_reaches_every_engine(world: FakeWorld, kv: KVPolicy) -> None:
    parts = Parts(world, options=replace(SWAP, kv_policy=kv))
    await parts.start()
    await parts.swap()
    assert [c.args for c in world.calls("pause")] == [(PauseMode.KEEP, kv)] * 3
    await parts.close()


async def test_a_late_receiver_is_waited_for_and_was_told_first(parts: Parts) -> None:
    parts.world.faults.delay("engine-2", "receive_update", 1.0)
    await parts.swap()
    (send,) = parts.world.calls("send")
    assert all(c.seq < send.seq for c in parts.world.calls("receive_update"))
    parts.assert_resumed_or_fenced()


# A fault at each step, at each engine


ENGINES = range(3)
STEPS = (
    # method, call number, phase, committed version after
    ("pause", 1, State.PAUSING, 0),
    ("start_update", 1, State.SYNCING, 0),
    ("receive_update", 1, State.SYNCING, 0),
    ("finish_update", 1, State.SYNCING, 0),
    ("resume", 1, State.RESUMING, 1),
    ("wait_first_tokens", 1, State.RESUMING, 1),
    ("digests", 1, State.VALIDATING, 1),
    ("prompt_logprobs", 2, State.VALIDATING, 1),
)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("method", "call", "phase", "version"), STEPS)
async def test_a_fault_at_any_step_of_any_engine_leaves_each_one_resumed_or_fenced(
    parts: Parts, method: str, call: int, phase: State, version: int, engine: int, when: str
) -> None:
    name = f"engine-{engine}"
    parts.world.faults.fail(name, method, call=call, when=when)
    with pytest.raises(SyncError, match=f"sync failed in {phase}: engine {name}: injected") as e:
        await parts.swap()
    assert e.value.phase == phase
    assert isinstance(e.value.__cause__, EngineError)
    assert parts.fleet.version == version
    told = tuple(c.actor for c in parts.world.calls("start_update"))
    expected = tuple(sorted(told)) if phase is State.SYNCING else ()
    assert parts.fleet.fenced == e.value.fenced == expected
    parts.assert_resumed_or_fenced()
    assert parts.machine.state is (State.RECOVERING if expected else State.GENERATING)
    if expected:
        assert parts.world.calls("resume") == [] or set(expected).isdisjoint(
            c.actor for c in parts.world.calls("resume")
        )
    else:
        for task in parts.live:  # generation went on
            assert len((await task).token_ids) == LIVE_TOKENS


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("method", "call", "phase", "version"), STEPS)
async def test_an_engine_that_dies_at_any_step_is_fenced_or_gone_and_the_rest_resume(
    parts: Parts, method: str, call: int, phase: State, version: int, engine: int
) -> None:
    name = f"engine-{engine}"
    parts.world.faults.die(name, method, call=call, reason="SIGKILL")
    with pytest.raises(SyncError, match=f"{name}: SIGKILL") as caught:
        await parts.swap()
    assert isinstance(caught.value.__cause__, EngineDied)
    assert caught.value.phase == phase
    assert parts.fleet.version == version
    parts.assert_resumed_or_fenced()
    await asyncio.gather(*parts.live[engine : engine + 1], return_exceptions=True)


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_engine_that_refuses_to_resume_is_fenced_by_name(
    parts: Parts, engine: int
) -> None:
    name = f"engine-{engine}"
    parts.world.faults.fail(name, "resume", call=None)
    with pytest.raises(SyncError, match=f"fenced: {name}") as caught:
        await parts.swap()
    assert caught.value.fenced == (name,)
    assert parts.fleet.version == 1
    parts.assert_resumed_or_fenced()
    assert parts.machine.state is State.RECOVERING


async def test_after_a_failed_pause_the_next_swap_works(parts: Parts) -> None:
    parts.world.faults.fail("engine-1", "pause")
    with pytest.raises(SyncError):
        await parts.swap()
    report = await parts.swap()
    assert (report.update.version, parts.fleet.version) == (1, 1)
    assert report.ok


async def test_the_version_does_not_move_when_one_tensor_did_not_arrive(parts: Parts) -> None:
    parts.world.faults.fail_at_tensor("engine-1", 2)
    with pytest.raises(SyncError):
        await parts.swap()
    assert parts.fleet.version == 0
    assert [e.version for e in parts.engines] == [0, 0, 0]
    assert [t for t, _ in parts.moves] == ["pause", "sync", "fault"]


async def test_a_receiver_that_fails_with_a_blocked_sender_ends_in_its_own_words(
    parts: Parts,
) -> None:
    """The sender sits in a collective that nothing but closing the channel ends."""
    words = "EngineCore: RuntimeError: size mismatch for layers.1"
    parts.world.faults.fail_at_tensor("engine-1", 2, error=EngineError("engine-1", words))
    began = now()
    with pytest.raises(SyncError, match=words) as caught:
        await parts.swap()
    assert now() - began < 1
    assert caught.value.fenced == ("engine-0", "engine-1", "engine-2")
    (send,) = parts.world.calls("send")
    assert isinstance(send.error, ChannelError)
    assert parts.world.channels == {}
    assert [e.channel for e in parts.engines] == [None, None, None]
    parts.assert_resumed_or_fenced()


async def test_requests_that_outlast_a_pause_of_mode_wait_go_on_under_the_old_version(
    world: FakeWorld,
) -> None:
    """The deadline comes while the engines drain; held requests must be let in again."""
    timeouts = replace(SWAP.timeouts, pausing=0.1)
    parts = Parts(world, options=replace(SWAP, pause_mode=PauseMode.WAIT, timeouts=timeouts))
    await parts.start()
    began = now()
    swap = asyncio.create_task(parts.swap())
    await asyncio.sleep(0.01)
    late = asyncio.create_task(parts.fleet.generate(GenerationRequest("late", Prompt((9, 9)), 3)))
    with pytest.raises(SyncError, match=r"PAUSING took longer than 0\.1 s"):
        await swap
    assert now() - began == pytest.approx(0.1)
    assert parts.fleet.fenced == ()
    for task in (*parts.live, late):
        assert {s.version for s in (await task).spans} == {0}
    parts.assert_resumed_or_fenced()
    await parts.close()


async def test_a_half_applied_engine_is_never_resumed_whatever_is_tried(parts: Parts) -> None:
    parts.world.faults.fail_at_tensor("engine-1", 2)
    with pytest.raises(SyncError):
        await parts.swap()
    with pytest.raises(IllegalTransition, match="cannot pause while RECOVERING"):
        await parts.swap()
    await parts.fleet.resume()
    await parts.fleet.resume_clean(5)
    assert parts.world.calls("resume") == []
    assert [e.paused for e in parts.engines] == [True, True, True]


async def test_a_sender_that_fails_says_so_and_frees_the_receivers(parts: Parts) -> None:
    parts.world.faults.fail("trainer", "send", error=TrainerError("trainer: disk full"))
    with pytest.raises(SyncError, match="SYNCING: trainer: disk full"):
        await parts.swap()
    parts.assert_resumed_or_fenced()


# Deadlines


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("method", "call", "phase", "version"), STEPS)
async def test_a_hang_at_any_step_ends_at_the_deadline_and_names_who_hangs(
    parts: Parts, method: str, call: int, phase: State, version: int, engine: int
) -> None:
    name = f"engine-{engine}"
    parts.world.faults.block(name, method, call=call)
    began = now()
    with pytest.raises(SyncError) as caught:
        await parts.swap()
    # Digests are read in no more time than the bytes had to move.
    whose = State.SYNCING if method == "digests" else phase
    budget = parts.options.timeouts.of(whose)
    assert now() - began <= budget + CLOSE_S + 1
    timeout = caught.value.__cause__
    assert isinstance(timeout, PhaseTimeout)
    assert (timeout.phase, timeout.seconds) == (whose, budget)
    assert name in timeout.waiting_for
    others = {f"engine-{i}" for i in ENGINES} - {name}
    if method != "receive_update":  # the others hang with it in the collective
        assert not [o for o in others if o in timeout.waiting_for]
    assert parts.fleet.version == version
    parts.assert_resumed_or_fenced()


async def test_a_sender_that_hangs_is_named_and_everybody_is_freed(parts: Parts) -> None:
    parts.world.faults.block("trainer", "send")
    with pytest.raises(SyncError, match="send"):
        await parts.swap()
    assert parts.fleet.fenced == ("engine-0", "engine-1", "engine-2")
    parts.assert_resumed_or_fenced()


async def test_a_fresh_check_that_hangs_ends_at_the_deadline(parts: Parts) -> None:
    async def hang() -> CheckResult:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    with pytest.raises(SyncError, match="VALIDATING took longer than 20 s"):
        await parts.swap(fresh=hang)
    assert parts.fleet.fenced == ()
    assert parts.machine.state is State.GENERATING


async def test_an_engine_that_hangs_twice_is_fenced_after_twice_the_time(parts: Parts) -> None:
    parts.world.faults.block("engine-1", "resume", call=None)
    began = now()
    with pytest.raises(SyncError, match="fenced: engine-1"):
        await parts.swap()
    assert now() - began <= 2 * parts.options.timeouts.resuming + 1
    parts.assert_resumed_or_fenced()


PATIENT = replace(SWAP, timeouts=replace(SWAP.timeouts, resuming=60))


async def late_to_pause(world: FakeWorld, heals: bool = False) -> Parts:
    """With ``engine-1`` that does not pause."""
    parts = Parts(world, options=PATIENT)
    await parts.start()
    parts.fleet.heals = heals
    world.faults.block("engine-1", "pause")
    return parts


@pytest.mark.parametrize("heals", [False, True])
async def test_who_hangs_in_the_pause_and_after_it_is_not_waited_for_as_long_as_a_resume_may_take(
    world: FakeWorld, heals: bool
) -> None:
    parts = await late_to_pause(world, heals)
    world.faults.block("engine-1", "resume", call=None)
    began = now()
    with pytest.raises(SyncError, match=r"PAUSING took longer than 3 s.*fenced: engine-1"):
        await parts.swap()
    assert now() - began <= 3 + LATE_S + 1
    resumed = {c.actor: c.ended for c in world.calls("resume") if c.ok}
    at_once = pytest.approx(began + 3)
    assert resumed == {"engine-0": at_once, "engine-2": at_once}
    (lost,) = [r.lost for r in parts.fleet._replicas if r.name == "engine-1"]
    assert (lost is not None) is heals
    parts.assert_resumed_or_fenced()
    await parts.close()


@pytest.mark.parametrize("heals", [False, True])
async def test_who_is_only_slow_to_pause_goes_on_at_the_old_version(
    world: FakeWorld, heals: bool
) -> None:
    parts = await late_to_pause(world, heals)
    world.faults.delay("engine-1", "resume", LATE_S - 1)
    with pytest.raises(SyncError, match=r"PAUSING took longer than 3 s"):
        await parts.swap()
    assert (parts.fleet.fenced, parts.machine.state) == ((), State.GENERATING)
    parts.assert_resumed_or_fenced()
    assert (await parts.swap()).ok
    await parts.close()


async def test_who_was_not_late_has_all_the_time_to_resume(world: FakeWorld) -> None:
    parts = await late_to_pause(world)
    world.faults.delay("engine-2", "resume", LATE_S + 20)
    with pytest.raises(SyncError):
        await parts.swap()
    assert parts.fleet.fenced == ()
    await parts.close()


async def test_a_receiver_that_hangs_and_does_not_close_is_given_up(parts: Parts) -> None:
    parts.world.faults.block("engine-1", "receive_update")
    parts.world.faults.block("engine-1", "close_channel")
    began = now()
    with pytest.raises(SyncError):
        await parts.swap()
    assert now() - began <= parts.options.timeouts.syncing + CLOSE_S + 1
    parts.assert_resumed_or_fenced()


# Verdicts


@pytest.mark.parametrize("receiver", ["engine-0", "engine-2"])
async def test_one_flipped_bit_names_the_tensor_and_no_engine_serves_on(
    parts: Parts, receiver: str
) -> None:
    parts.world.faults.flip_bit("layers.1", bit=77, receiver=receiver)
    with pytest.raises(ValidationFailed, match=f"1 of 4 tensors .*layers.1 on {receiver}"):
        await parts.swap()
    assert parts.fleet.fenced == ("engine-0", "engine-1", "engine-2")
    assert parts.machine.state is State.RECOVERING
    with pytest.raises(EngineError, match="no replica serves"):
        await parts.fleet.generate(GenerationRequest("after", Prompt((1, 2)), 2))


async def test_a_tensor_that_never_arrived_is_named(parts: Parts) -> None:
    parts.world.faults.drop("head", receiver="engine-1")
    with pytest.raises(ValidationFailed, match="head on engine-1"):
        await parts.swap()


async def test_a_channel_that_moves_nothing_but_says_so_is_found_out(parts: Parts) -> None:
    parts.world.faults.blank(receiver="engine-1")
    with pytest.raises(ValidationFailed, match="4 of 4 tensors"):
        await parts.swap()


@pytest.mark.parametrize(
    "parts",
    [{"validation": ValidationOptions(digest=False, canary=True, fresh=False)}],
    indirect=True,
)
async def test_wrong_weights_fail_the_canary_too(parts: Parts) -> None:
    parts.world.faults.flip_bit("embed", receiver="engine-1")
    with pytest.raises(ValidationFailed, match="canary: log-probabilities differ"):
        await parts.swap()
    assert len(parts.fleet.fenced) == 3


async def test_replicas_that_cannot_show_what_they_hold_are_fenced(parts: Parts) -> None:
    differ = TransferError("ranks 1 and 2 of engine engine-1 hold different weights: w")
    parts.world.faults.fail("engine-1", "digests", error=differ)
    with pytest.raises(ValidationFailed, match=r"ranks 1 and 2 .* Do not serve this version"):
        await parts.swap()
    assert len(parts.fleet.fenced) == parts.count
    await parts.close()


async def test_a_canary_that_can_tell_nothing_does_not_stop_the_swap(world: FakeWorld) -> None:
    parts = Parts(world, count=1)
    await parts.start()
    parts.engines[0].logprob_offset = 0.5
    await parts.validator.control()
    report = await parts.swap()
    canary = report.checks[1]
    assert (canary.verdict, report.ok) == (Verdict.INCONCLUSIVE, True)
    assert parts.machine.state is State.GENERATING
    await parts.close()


async def test_a_failed_fresh_check_fences_everybody(parts: Parts) -> None:
    async def fresh() -> CheckResult:
        return CheckResult(
            "fresh",
            Verdict.MISMATCH,
            {
                "prompts": 2,
                "passed": 1,
                "required": 1.0,
                "diverging": [
                    {
                        "prompt": "p",
                        "token": 3,
                        "expected_id": 41,
                        "actual_id": 42,
                        "expected_text": "a",
                        "actual_text": "b",
                    }
                ],
            },
        )

    with pytest.raises(ValidationFailed, match="new token 3: 41 in 'a' here, 42 in 'b' there"):
        await parts.swap(fresh=fresh)
    assert len(parts.fleet.fenced) == 3


# Cancel


def triggers(moves: Sequence[tuple[str, State]]) -> list[str]:
    return [t for t, _ in moves]


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_cancel_at_any_await_of_a_swap_is_raised_cleaned_up_and_final(
    mode: PauseMode,
) -> None:
    """Cancels at the first suspension, then at the second, ... until the swap gets through."""
    cancelled = 0
    for at in range(1, 200):
        parts = Parts(FakeWorld(), options=replace(SWAP, pause_mode=mode))
        await parts.start()
        sent = await parts.trainer.stage(PolicyVersion(1))
        moved: list[int] = []

        def cancel(parts: Parts = parts, moved: list[int] = moved) -> None:
            moved.append(len(parts.moves))
            (task,) = [t for t in asyncio.all_tasks() if t.get_name() == "swap"]
            task.cancel()

        swap = parts.cycle.run(parts.update(), sent, parts.nbytes)
        task = asyncio.create_task(at_suspension(swap, at, cancel), name="swap")
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if not moved:
            assert isinstance(result, SyncReport)
            await parts.close()
            break
        cancelled += 1
        assert isinstance(result, asyncio.CancelledError), f"suspension {at}: {result!r}"
        after = triggers(parts.moves)[moved[0] :]
        assert after in (["fault"], ["fault", "recover"]), f"suspension {at}: {after}"
        assert (after == ["fault"]) is bool(parts.fleet.fenced)
        committed = "commit" in triggers(parts.moves)
        assert parts.fleet.version == int(committed)
        parts.assert_resumed_or_fenced()
        await parts.close()
    else:
        pytest.fail("the swap never got through")
    assert cancelled >= 8


async def test_a_second_cancel_during_clean_up_does_not_tear_it(parts: Parts) -> None:
    parts.world.faults.block("engine-1", "receive_update")
    parts.world.faults.delay("engine-2", "close_channel", 3)
    task = asyncio.create_task(parts.swap())
    loop = asyncio.get_running_loop()
    for delay in (1, 2, 2.5):
        loop.call_later(delay, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(parts.fleet.fenced) == 3
    parts.assert_resumed_or_fenced()


async def test_a_cancel_while_pausing_costs_no_version_and_generation_goes_on(
    parts: Parts,
) -> None:
    gate = parts.world.faults.block("engine-1", "pause")
    task = asyncio.create_task(parts.swap())
    await gate.reached()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (parts.fleet.fenced, parts.fleet.version) == ((), 0)
    assert parts.machine.state is State.GENERATING
    parts.assert_resumed_or_fenced()
    assert (await parts.swap()).ok


async def test_a_swap_is_refused_while_another_runs(parts: Parts) -> None:
    gate = parts.world.faults.block("engine-1", "pause")
    task = asyncio.create_task(parts.swap())
    await gate.reached()
    with pytest.raises(IllegalTransition, match="cannot pause while PAUSING"):
        await parts.cycle.run(parts.update(2), {}, 0)
    gate.release()
    assert (await task).ok


async def test_the_reason_in_the_history_says_what_happened(parts: Parts) -> None:
    parts.world.faults.fail("engine-1", "digests")
    with pytest.raises(SyncError):
        await parts.swap()
    fault, recover = list(parts.machine.history)[-2:]
    assert fault.reason.startswith("VALIDATING: engine engine-1: injected")
    assert "nothing was sent" not in recover.reason
