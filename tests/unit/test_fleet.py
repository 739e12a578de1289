"""Replicas as one: who is asked, who is fenced, whose words an error carries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator.continuation import joined
from orchestrator.errors import ChannelError, EngineDied, EngineError, TrainerError
from orchestrator.fleet import CLOSE_S, Fleet
from orchestrator.replica import first_ranks
from orchestrator.tasks import settle
from orchestrator.testing import FakeEngine, FakeTrainer, FakeWorld, all_blocked
from orchestrator.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    KVPolicy,
    PauseMode,
    PolicyVersion,
    Prompt,
    TokenSpan,
    TransferBackend,
    WeightUpdate,
)
from tests.harness import now


def update(version: int = 1, mode: PauseMode = PauseMode.KEEP) -> WeightUpdate:
    return WeightUpdate(
        f"s{version}",
        PolicyVersion(version - 1),
        PolicyVersion(version),
        version,
        TransferBackend.GLOO,
        mode,
        KVPolicy.RECOMPUTE,
    )


def request(request_id: str = "r0", max_tokens: int = 20, **more: Any) -> GenerationRequest:
    return GenerationRequest(request_id, Prompt((1, 2, 3)), max_tokens, **more)


class Parts:
    """A started fleet with an open channel."""

    def __init__(self, world: FakeWorld, engines: int = 2, **options: Any) -> None:
        self.world = world
        self.trainer = FakeTrainer(world)
        self.engines = [FakeEngine(f"engine-{i}", world, **options) for i in range(engines)]
        self.fleet = Fleet(self.engines)

    async def start(self) -> None:
        await self.trainer.start()
        await self.fleet.start()
        await self.fleet.open_channel(self.trainer, TransferBackend.GLOO, 10)

    async def until_received(self, to: WeightUpdate) -> None:
        await self.trainer.stage(to.version)
        await self.fleet.pause(to.pause_mode, to.kv_policy)
        await self.fleet.start_update(to)
        await self.fleet.transfer(to, self.trainer)

    async def swap(self, to: WeightUpdate) -> None:
        await self.until_received(to)
        await self.fleet.finish_update(to)
        self.fleet.commit(to.version)
        await self.fleet.resume()

    async def close(self) -> None:
        await self.fleet.aclose()
        await self.trainer.aclose()


@pytest.fixture
async def parts(world: FakeWorld) -> Any:
    parts = Parts(world)
    await parts.start()
    yield parts
    await parts.close()


# Names and ranks


def test_ranks_of_engines_with_several_workers_do_not_collide() -> None:
    assert first_ranks([2, 1, 4]) == [1, 3, 4]
    assert first_ranks([]) == []


async def test_every_worker_gets_its_rank_in_one_group(world: FakeWorld) -> None:
    trainer = FakeTrainer(world)
    engines = [FakeEngine(f"e{i}", world, workers=n) for i, n in enumerate((2, 1, 4))]
    fleet = Fleet(engines)
    await trainer.start()
    await fleet.start()
    spec = await fleet.open_channel(trainer, TransferBackend.GLOO, 10)
    assert spec.world_size == 8
    (channel,) = world.channels.values()
    assert channel.members == {"trainer": (0,), "e0": (1, 2), "e1": (3,), "e2": (4, 5, 6, 7)}
    await fleet.aclose()
    await trainer.aclose()


def test_two_engines_of_one_name_or_none_at_all_are_refused() -> None:
    world = FakeWorld()
    with pytest.raises(ValueError, match="different names"):
        Fleet([FakeEngine("a", world), FakeEngine("a", world)])
    with pytest.raises(ValueError, match="different names"):
        Fleet([])


# Requests


async def test_requests_go_to_the_least_loaded_engine(parts: Parts) -> None:
    tasks = [asyncio.create_task(parts.fleet.generate(request(f"r{i}"))) for i in range(4)]
    await all_blocked()
    assert [e.live_requests for e in parts.engines] == [2, 2]
    await asyncio.gather(*tasks)


async def test_a_cancelled_consumer_leaves_no_request_in_the_engine(parts: Parts) -> None:
    task = asyncio.create_task(parts.fleet.generate(request()))
    await all_blocked()
    assert parts.engines[0].live_requests == 1
    await settle([task])
    assert task.cancelled()
    assert [e.live_requests for e in parts.engines] == [0, 0]
    assert (await parts.engines[0].status()).live_requests == 0


async def test_a_fenced_engine_gets_no_request(parts: Parts) -> None:
    parts.fleet._replicas[0].fenced = True
    await asyncio.gather(*(parts.fleet.generate(request(f"r{i}", 3)) for i in range(3)))
    assert len(parts.world.calls("generate", "engine-0")) == 0
    assert len(parts.world.calls("generate", "engine-1")) == 3


async def test_no_serving_engine_is_an_error_that_names_them(parts: Parts) -> None:
    parts.fleet.fence_all()
    with pytest.raises(EngineError, match="engine-0, engine-1: no replica serves"):
        await parts.fleet.generate(request())


async def test_abort_returns_partial_output_and_continues_within_the_budget(
    world: FakeWorld,
) -> None:
    """Budget 20, cut at 12: at most 8 more, and the 12 arrive once."""
    parts = Parts(world, 1)
    await parts.start()
    task = asyncio.create_task(parts.fleet.generate(request(max_tokens=20, seed=5)))
    await parts.engines[0].wait_for_tokens(12)
    await parts.swap(update(mode=PauseMode.ABORT))
    done = await task
    assert (len(done.token_ids), done.finish_reason) == (20, FinishReason.LENGTH)
    assert done.spans == (TokenSpan(PolicyVersion(0), 0, 12), TokenSpan(PolicyVersion(1), 12, 20))
    assert len(done.logprobs) == 20
    assert "".join(done.span_texts) == done.text
    assert done.request_id == "r0"
    first, second = (c.args[0] for c in world.calls("generate"))
    assert isinstance(first, GenerationRequest)
    assert isinstance(second, GenerationRequest)
    assert second.max_tokens == 8
    assert second.prompt.token_ids == first.prompt.token_ids + done.token_ids[:12]
    assert second.request_id != first.request_id
    assert second.seed != first.seed
    await parts.close()
    assert world.violations == []


async def test_abort_in_the_step_of_the_last_token_asks_for_no_more(world: FakeWorld) -> None:
    class Late(FakeEngine):
        async def generate(self, request: GenerationRequest) -> Completion:
            whole = await super().generate(request)
            return Completion(
                **{
                    **{f: getattr(whole, f) for f in Completion.__slots__},
                    "finish_reason": FinishReason.ABORT,
                }
            )

    engine = Late("engine-0", world)
    fleet = Fleet([engine])
    await fleet.start()
    done = await fleet.generate(request(max_tokens=4))
    assert (len(done.token_ids), done.finish_reason) == (4, FinishReason.LENGTH)
    assert len(world.calls("generate")) == 1
    await fleet.aclose()


async def test_two_swaps_inside_one_rollout_are_three_spans(parts: Parts) -> None:
    task = asyncio.create_task(parts.fleet.generate(request(max_tokens=12)))
    await parts.engines[0].wait_for_tokens(5)
    await parts.swap(update(1))
    await parts.engines[0].wait_for_tokens(9)
    await parts.swap(update(2))
    done = await task
    assert [(s.version, s.start, s.end) for s in done.spans] == [(0, 0, 5), (1, 5, 9), (2, 9, 12)]


async def test_a_request_submitted_during_a_swap_is_held_and_runs_after(parts: Parts) -> None:
    await parts.until_received(update())
    tasks = [asyncio.create_task(parts.fleet.generate(request(f"r{i}", 4))) for i in range(6)]
    await asyncio.sleep(1)
    assert not any(t.done() for t in tasks)
    assert [e.held_requests for e in parts.engines] == [3, 3]
    await parts.fleet.finish_update(update())
    parts.fleet.commit(PolicyVersion(1))
    await parts.fleet.resume()
    for done in await asyncio.gather(*tasks):
        assert [s.version for s in done.spans] == [1]


async def test_a_pause_that_aborts_ends_queued_requests_as_well_as_running_ones(
    world: FakeWorld,
) -> None:
    """Two run, two wait for a slot: no future stays unresolved."""
    engine = FakeEngine("engine-0", world, slots=2)
    await engine.start()
    tasks = [asyncio.create_task(engine.generate(request(f"r{i}", 50))) for i in range(4)]
    await engine.wait_for_tokens(7)
    await Fleet([engine]).pause(PauseMode.ABORT, KVPolicy.RECOMPUTE)
    done = await asyncio.gather(*tasks)
    assert [len(d.token_ids) for d in done] == [7, 7, 0, 0]
    assert {d.finish_reason for d in done} == {FinishReason.ABORT}
    await engine.aclose()


async def test_aborted_requests_that_waited_for_a_slot_still_get_their_whole_budget(
    world: FakeWorld,
) -> None:
    parts = Parts(world, 1, slots=2)
    await parts.start()
    tasks = [asyncio.create_task(parts.fleet.generate(request(f"r{i}", 12))) for i in range(4)]
    await parts.engines[0].wait_for_tokens(7)
    await parts.swap(update(mode=PauseMode.ABORT))
    done = await asyncio.gather(*tasks)
    assert [len(d.token_ids) for d in done] == [12] * 4
    assert [[(s.version, s.start, s.end) for s in d.spans] for d in done] == [
        [(0, 0, 7), (1, 7, 12)],
        [(0, 0, 7), (1, 7, 12)],
        [(1, 0, 12)],
        [(1, 0, 12)],
    ]
    await parts.close()


async def test_ending_for_good_gives_each_request_what_it_has(parts: Parts) -> None:
    tasks = [asyncio.create_task(parts.fleet.generate(request(f"r{i}", 50))) for i in range(4)]
    await parts.engines[0].wait_for_tokens(7)
    assert await parts.fleet.abort_requests() == 4
    for done in await asyncio.gather(*tasks):
        assert (len(done.token_ids), done.finish_reason) == (7, FinishReason.ABORT)


async def test_ending_for_good_reaches_fenced_engines_too(parts: Parts) -> None:
    """A swap that was given up holds requests frozen; their tokens are still worth keeping."""
    tasks = [asyncio.create_task(parts.fleet.generate(request(f"r{i}", 50))) for i in range(2)]
    await parts.engines[0].wait_for_tokens(7)
    await parts.fleet.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
    await parts.fleet.start_update(update())
    parts.fleet.fence_dirty()
    assert await parts.fleet.abort_requests() == 2
    for done in await asyncio.gather(*tasks):
        assert (len(done.token_ids), done.finish_reason) == (7, FinishReason.ABORT)


async def test_one_dead_engine_does_not_keep_the_others_from_ending(parts: Parts) -> None:
    tasks = [asyncio.create_task(parts.fleet.generate(request(f"r{i}", 50))) for i in range(2)]
    await parts.engines[0].wait_for_tokens(7)
    parts.world.faults.delay("engine-1", "abort_requests", 0.001)
    parts.engines[0].kill("out of memory")
    assert await parts.fleet.abort_requests() == 1
    first, second = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, EngineDied)
    assert isinstance(second, Completion)
    assert second.finish_reason is FinishReason.ABORT


def test_joining_parts_keeps_every_field_aligned() -> None:
    head = Completion(
        "r", "e0", (1, 2), (-1.0, -2.0), (TokenSpan(PolicyVersion(0), 0, 2),),
        FinishReason.ABORT, "ab", ("ab",),
    )  # fmt: skip
    tail = Completion(
        "r+2", "e1", (3, 4), (-3.0, -4.0),
        (TokenSpan(PolicyVersion(0), 0, 1), TokenSpan(PolicyVersion(1), 1, 2)),
        FinishReason.STOP, "cd", ("c", "d"),
    )  # fmt: skip
    whole = joined(head, tail)
    assert whole.spans == (TokenSpan(PolicyVersion(0), 0, 3), TokenSpan(PolicyVersion(1), 3, 4))
    assert whole.span_texts == ("abc", "d")
    assert (whole.request_id, whole.token_ids, whole.text) == ("r", (1, 2, 3, 4), "abcd")
    assert (whole.logprobs, whole.finish_reason) == ((-1.0, -2.0, -3.0, -4.0), FinishReason.STOP)
    assert joined(None, tail) is tail


def test_joining_to_a_part_that_wrote_nothing_keeps_the_spans() -> None:
    empty = Completion("r", "e0", (), (), (), FinishReason.ABORT)
    tail = Completion(
        "r+0", "e1", (3,), (0.0,), (TokenSpan(PolicyVersion(1), 0, 1),), FinishReason.LENGTH,
        "c", ("c",),
    )  # fmt: skip
    whole = joined(empty, tail)
    assert (whole.spans, whole.span_texts) == (tail.spans, ("c",))


# The channel


async def test_a_channel_that_carries_a_wrong_pattern_is_refused(world: FakeWorld) -> None:
    world.faults.wrong_pattern("engine-1")
    parts = Parts(world)
    with pytest.raises(ChannelError, match="engine-1: the known pattern arrived wrong"):
        await parts.start()
    await parts.close()


async def test_a_channel_that_does_not_open_is_closed_for_everybody(world: FakeWorld) -> None:
    world.faults.fail("engine-1", "open_channel")
    parts = Parts(world)
    with pytest.raises(EngineError):
        await parts.start()
    assert all(engine.channel is None for engine in parts.engines)
    assert parts.trainer.channel is None
    await parts.fleet.ensure_channel(parts.trainer, TransferBackend.GLOO, 10)
    assert all(engine.channel is not None for engine in parts.engines)
    await parts.close()


async def test_a_side_of_the_channel_that_does_not_close_is_left_after_its_time(
    parts: Parts,
) -> None:
    parts.world.faults.block("engine-1", "close_channel")
    parts.world.faults.fail("trainer", "close_channel")
    await parts.fleet.close_channel(parts.trainer)
    assert now() == CLOSE_S
    assert parts.engines[0].channel is None
    assert parts.world.running() == []


# One swap


async def test_receivers_are_told_before_the_sender_starts(parts: Parts) -> None:
    parts.world.faults.delay("engine-1", "receive_update", 1.0)
    await parts.swap(update())
    receives = parts.world.calls("receive_update")
    (send,) = parts.world.calls("send")
    assert len(receives) == 2
    assert all(r.seq < send.seq for r in receives)
    assert parts.world.violations == []
    assert now() >= 1.0


async def test_a_receiver_that_fails_frees_the_blocked_sender_at_once(parts: Parts) -> None:
    parts.world.faults.fail_at_tensor(
        "engine-1", 2, error=EngineError("engine-1", "shape mismatch in layers.1")
    )
    began = now()
    with pytest.raises(EngineError, match=r"engine-1: shape mismatch in layers\.1"):
        await parts.until_received(update())
    assert now() - began < 1
    assert parts.world.running() == []
    assert parts.world.channels == {}
    (send,) = parts.world.calls("send")
    assert isinstance(send.error, ChannelError)


async def test_a_sender_that_fails_frees_the_blocked_receivers(parts: Parts) -> None:
    parts.world.faults.fail("trainer", "send", error=TrainerError("staging buffer lost"))
    with pytest.raises(TrainerError, match="staging buffer lost"):
        await parts.until_received(update())
    assert parts.world.running() == []


async def test_cancelling_twice_in_a_transfer_leaves_no_call_behind(parts: Parts) -> None:
    """The first cancel closes the channel, which may take a while; the second comes then."""
    parts.world.faults.block("engine-0", "receive_update")
    parts.world.faults.block("engine-1", "close_channel")
    task = asyncio.create_task(parts.until_received(update()))
    await all_blocked()
    task.cancel()
    await all_blocked()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [str(c) for c in parts.world.running()] == []


async def test_an_engine_that_finished_is_dirty_until_the_fleet_commits(parts: Parts) -> None:
    """Else it would resume with a version that was never published."""
    parts.world.faults.fail("engine-1", "finish_update")
    await parts.until_received(update())
    with pytest.raises(EngineError, match="engine-1"):
        await parts.fleet.finish_update(update())
    assert parts.engines[0].version == 1
    parts.fleet.fence_dirty()
    assert parts.fleet.fenced == ("engine-0", "engine-1")
    await parts.fleet.resume_clean(5)
    assert parts.world.calls("resume") == []
    assert parts.fleet.version == 0


async def test_half_applied_weights_are_neither_committed_nor_resumed(parts: Parts) -> None:
    await parts.until_received(update())
    with pytest.raises(EngineError, match=r"engine-0, engine-1: cannot commit 1 over 0"):
        parts.fleet.commit(PolicyVersion(1))
    with pytest.raises(EngineError, match="half-applied"):
        await parts.fleet.resume()
    assert parts.world.calls("resume") == []
    assert parts.fleet.version == 0


async def test_a_version_never_goes_backwards_or_is_published_twice(parts: Parts) -> None:
    await parts.swap(update(1))
    for version in (1, 0):
        with pytest.raises(EngineError, match=f"cannot commit {version} over 1"):
            parts.fleet.commit(PolicyVersion(version))
    assert parts.fleet.version == 1


async def test_who_is_still_missing_is_known_while_waiting(parts: Parts) -> None:
    gate = parts.world.faults.block("engine-1", "pause")
    task = asyncio.create_task(parts.fleet.pause(PauseMode.KEEP, KVPolicy.KEEP))
    await all_blocked()
    assert parts.fleet.waiting_for() == "pause of engine-1"
    gate.release()
    await task
    assert parts.fleet.waiting_for() == ""


async def test_an_engine_that_does_not_resume_after_a_failure_is_fenced_by_name(
    parts: Parts,
) -> None:
    await parts.fleet.pause(PauseMode.KEEP, KVPolicy.KEEP)
    parts.world.faults.block("engine-0", "resume")
    await parts.fleet.resume_clean(4)
    assert parts.fleet.fenced == ("engine-0",)
    assert [e.paused for e in parts.engines] == [True, False]
    assert now() == 4


async def test_digests_of_a_then_b_then_a_are_equal_for_a(parts: Parts) -> None:
    """A transfer that moves nothing but says it did would show here."""
    a, b = dict(parts.trainer.weights), dict(parts.trainer.initial)
    seen, outputs = [], []
    for version, weights in enumerate((a, b, a), start=1):
        parts.trainer.weights = dict(weights)
        sent = await parts.trainer.stage(PolicyVersion(version))
        await parts.swap(update(version))
        received = await parts.fleet.digests(update(version))
        assert received == {"engine-0": sent, "engine-1": sent}
        seen.append(received["engine-1"])
        outputs.append(await parts.fleet.generate(request(f"r{version}", 8, temperature=0)))
    assert seen[0] == seen[2] != seen[1]
    assert outputs[0].token_ids == outputs[2].token_ids != outputs[1].token_ids


async def test_a_receiver_that_takes_nothing_does_not_look_like_one_that_did(
    parts: Parts,
) -> None:
    parts.world.faults.blank(receiver="engine-1")
    sent = await parts.trainer.stage(PolicyVersion(1))
    await parts.swap(update())
    received = await parts.fleet.digests(update())
    assert received["engine-0"] == sent
    assert all(received["engine-1"][name] != sent[name] for name in sent)


async def test_closing_tries_every_engine_and_then_raises(parts: Parts) -> None:
    parts.world.faults.fail("engine-0", "aclose", error=EngineError("engine-0", "stuck"))
    with pytest.raises(EngineError, match="stuck"):
        await parts.fleet.aclose()
    assert parts.engines[1].closed


async def test_only_engines_that_run_one_of_the_requests_are_waited_for(parts: Parts) -> None:
    probes = [asyncio.create_task(parts.fleet.generate(request("p0", 9)))]
    await all_blocked()
    other = asyncio.create_task(parts.fleet.generate(request("r0", 2)))
    await parts.fleet.wait_for_tokens(5, among={"p0"})
    assert other.done()
    assert parts.world.calls("wait_for_tokens", "engine-1") == []
    (done,) = await asyncio.gather(*probes)
    assert len(done.token_ids) == 9


async def test_waiting_for_tokens_where_nobody_serves_says_so(parts: Parts) -> None:
    parts.fleet.fence_all()
    for among in (None, {"p0"}):
        with pytest.raises(EngineError, match="engine-0, engine-1: no replica serves"):
            await parts.fleet.wait_for_tokens(5, among)


async def test_a_wait_for_tokens_beside_a_swap_does_not_blur_who_is_missing(
    parts: Parts,
) -> None:
    task = asyncio.create_task(parts.fleet.generate(request("p0", 90)))
    await all_blocked()
    waits = [
        asyncio.create_task(parts.fleet.wait_for_tokens(80, among)) for among in ({"p0"}, None)
    ]
    gate = parts.world.faults.block("engine-1", "pause")
    pause = asyncio.create_task(parts.fleet.pause(PauseMode.KEEP, KVPolicy.KEEP))
    await all_blocked()
    waits.append(asyncio.create_task(parts.fleet.wait_for_tokens(80)))
    await all_blocked()
    assert parts.fleet.waiting_for() == "pause of engine-1"
    gate.release()
    await pause
    await settle([*waits, task])


async def test_waiting_for_tokens_ends_with_an_engine_that_dies(parts: Parts) -> None:
    waiting = asyncio.create_task(parts.fleet.wait_for_tokens(5))
    await all_blocked()
    parts.engines[1].kill("segfault")
    with pytest.raises(EngineDied, match="segfault"):
        await waiting
    assert parts.world.running() == []
