"""What every engine must do: one suite over the fake and over the real Ray and vLLM one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from orchestrator.errors import ChannelError, EngineError, MidflightError
from orchestrator.protocols import Engine, WeightSender
from orchestrator.testing import FakeEngine, FakeTrainer, FakeWorld, policy
from orchestrator.types import FinishReason, KVPolicy, PauseMode, PhaseTimeouts
from tests.swaps import Rig, check_completion

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = 480
"""Tokens of a request that still runs after a swap or two, however fast the machine is."""
DEADLINE_S = 20.0


@pytest.fixture
def fake_rig() -> Rig:
    world = FakeWorld()
    trainer = FakeTrainer(world)
    weights = {"a": trainer.initial, "b": policy.make_weights("b")}

    def use(which: str) -> None:
        trainer.weights = dict(weights[which])

    return Rig(FakeEngine("fake", world, token_seconds=0.002), trainer, use)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.real)])
def rig(request: pytest.FixtureRequest) -> Rig:
    found: Rig = request.getfixturevalue(f"{request.param}_rig")
    return found


async def up(rig: Rig) -> None:
    if isinstance(rig.engine, FakeEngine) and isinstance(rig.sender, FakeTrainer):
        await rig.engine.start()
        await rig.sender.start()
    if not rig.opened:
        await rig.open()


async def test_they_are_engines_and_senders(rig: Rig) -> None:
    assert isinstance(rig.engine, Engine)
    assert isinstance(rig.sender, WeightSender)
    await up(rig)


async def test_requests_cut_by_a_swap_finish_with_tokens_of_both_versions(rig: Rig) -> None:
    await up(rig)
    async with asyncio.timeout(DEADLINE_S):
        requests = [rig.request(LONG, i) for i in range(6)]
        running = [asyncio.create_task(rig.generate(r)) for r in requests]
        await rig.engine.wait_for_tokens(10)
        old = rig.version
        swapped = await rig.swap("b")
        first = await rig.first_tokens(swapped)
        assert await rig.engine.digests(swapped.update) == swapped.sent
        completions = await asyncio.gather(*running)
    assert swapped.ack.requests_in_flight == 6
    assert first.seconds is not None and first.seconds > 0
    assert len(first.stalls) == 6
    assert swapped.stats.nbytes > 0
    for request, completion in zip(requests, completions, strict=True):
        check_completion(completion, request)
        assert len(completion.token_ids) == request.max_tokens
        assert [span.version for span in completion.spans] == [old, rig.version]
        assert [stall.sync_id for stall in completion.stalls] == [swapped.update.sync_id]
    assert (await rig.engine.status()).version == rig.version


async def test_two_swaps_make_three_spans(rig: Rig) -> None:
    await up(rig)
    async with asyncio.timeout(DEADLINE_S):
        request = rig.request(LONG)
        running = asyncio.create_task(rig.generate(request))
        first = rig.version
        for which, threshold in (("b", 5), ("a", 25)):
            await rig.engine.wait_for_tokens(threshold)
            await rig.swap(which)
        completion = await running
    check_completion(completion, request)
    assert [span.version for span in completion.spans] == [first, first + 1, first + 2]


async def test_a_b_a_gives_the_same_tokens_again(rig: Rig) -> None:
    await up(rig)
    seen = []
    async with asyncio.timeout(DEADLINE_S):
        for which in ("a", "b", "a"):
            swapped = await rig.swap(which)
            completion = await rig.generate(rig.request(16, 3))
            seen.append((dict(swapped.sent), completion.token_ids))
    assert seen[0] == seen[2]
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]


@pytest.mark.parametrize("kv", list(KVPolicy))
async def test_a_prompt_seen_before_the_swap_is_not_answered_from_its_old_cache(
    rig: Rig, kv: KVPolicy
) -> None:
    await up(rig)
    async with asyncio.timeout(DEADLINE_S):
        await rig.swap("b")
        fresh = await rig.generate(rig.request(12, 9, length=200))
        await rig.swap("a")
        old = await rig.generate(rig.request(12, 9, length=200))
        await rig.swap("b", kv=kv)
        again = await rig.generate(rig.request(12, 9, length=200))
    assert again.token_ids == fresh.token_ids != old.token_ids
    assert [span.version for span in again.spans] == [rig.version]


async def test_pause_and_resume_may_be_repeated(rig: Rig) -> None:
    await up(rig)
    async with asyncio.timeout(DEADLINE_S):
        await rig.engine.resume()
        running = asyncio.create_task(rig.generate(rig.request(30)))
        await rig.engine.wait_for_tokens(5)
        acks = [await rig.engine.pause(PauseMode.KEEP, KVPolicy.KEEP) for _ in range(2)]
        assert acks[0].requests_in_flight == acks[1].requests_in_flight == 1
        assert (await rig.engine.status()).paused
        await rig.engine.resume()
        await rig.engine.resume()
        assert not (await rig.engine.status()).paused
        assert len((await running).token_ids) == 30


async def test_requests_submitted_while_paused_start_on_resume_with_the_new_version(
    rig: Rig,
) -> None:
    await up(rig)
    async with asyncio.timeout(DEADLINE_S):
        await rig.engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
        requests = [rig.request(8, i) for i in range(5)]
        tasks = [asyncio.create_task(rig.generate(r)) for r in requests]
        update = rig.next_update()
        rig.use("b")
        await rig.sender.stage(update.version)
        await rig.apply(update)
        status = await rig.engine.status()
        assert (status.live_requests, status.held_requests) == (0, 5)
        assert not any(task.done() for task in tasks)
        await rig.engine.resume()
        for completion in await asyncio.gather(*tasks):
            assert [span.version for span in completion.spans] == [rig.version]


async def test_a_held_request_can_be_cancelled(rig: Rig) -> None:
    await up(rig)
    async with asyncio.timeout(DEADLINE_S):
        await rig.engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
        task = asyncio.create_task(rig.generate(rig.request(8)))
        await rig.engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        status = await rig.engine.status()
        assert (status.live_requests, status.held_requests) == (0, 0)
        await rig.engine.resume()
        assert (await rig.engine.status()).live_requests == 0


async def test_wait_mode_lets_requests_end_first(rig: Rig) -> None:
    await up(rig)
    async with asyncio.timeout(DEADLINE_S):
        old = rig.version
        running = asyncio.create_task(rig.generate(rig.request(40)))
        await rig.engine.wait_for_tokens(5)
        swapped = await rig.swap("b", PauseMode.WAIT)
        completion = await running
    assert swapped.ack.requests_in_flight == 0
    assert len(completion.token_ids) == 40
    assert [span.version for span in completion.spans] == [old]


async def test_abort_mode_returns_what_there_is_once(rig: Rig) -> None:
    await up(rig)
    async with asyncio.timeout(DEADLINE_S):
        running = [asyncio.create_task(rig.generate(rig.request(300, i))) for i in range(4)]
        await rig.engine.wait_for_tokens(7)
        swapped = await rig.swap("a", PauseMode.ABORT)
        completions = await asyncio.gather(*running)
        status = await rig.engine.status()
    assert swapped.ack.requests_in_flight == 0
    assert {completion.finish_reason for completion in completions} == {FinishReason.ABORT}
    assert any(7 <= len(completion.token_ids) < 300 for completion in completions)
    assert (status.live_requests, status.held_requests) == (0, 0)


async def test_abort_requests_returns_partial_output(rig: Rig) -> None:
    await up(rig)
    async with asyncio.timeout(DEADLINE_S):
        requests = [rig.request(300, i) for i in range(2)]
        running = [asyncio.create_task(rig.generate(r)) for r in requests]
        await rig.engine.wait_for_tokens(7)
        assert await rig.engine.abort_requests() == 2
        for request, completion in zip(requests, await asyncio.gather(*running), strict=True):
            check_completion(completion, request)
            assert completion.finish_reason is FinishReason.ABORT
        assert (await rig.engine.status()).live_requests == 0


async def test_a_cancelled_request_is_gone_from_the_engine(rig: Rig) -> None:
    await up(rig)
    async with asyncio.timeout(DEADLINE_S):
        running = [asyncio.create_task(rig.generate(rig.request(300, i))) for i in range(3)]
        await rig.engine.wait_for_tokens(3)
        for task in running:
            task.cancel()
        results = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert (await rig.engine.status()).live_requests == 0


async def test_waiting_for_tokens_among_some_requests(rig: Rig) -> None:
    await up(rig)
    async with asyncio.timeout(DEADLINE_S):
        ahead = asyncio.create_task(rig.generate(rig.request(200, 1)))
        await rig.engine.wait_for_tokens(20)
        late = rig.request(200, 2)
        waiting = asyncio.create_task(rig.engine.wait_for_tokens(5, [late.request_id]))
        behind = asyncio.create_task(rig.generate(late))
        assert await waiting == 2
        await rig.engine.abort_requests()
        completion = await behind
        await ahead
    assert len(completion.token_ids) >= 5


async def test_weights_under_an_update_are_never_resumed(rig: Rig) -> None:
    await up(rig)
    async with asyncio.timeout(DEADLINE_S):
        rig.use("b")
        broken = rig.next_update()
        await rig.sender.stage(broken.version)
        await rig.engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
        await rig.engine.start_update(broken)
        with pytest.raises(EngineError):
            await rig.engine.resume()
        with pytest.raises(MidflightError):
            await rig.engine.finish_update(broken)
        with pytest.raises(EngineError):
            await rig.engine.resume()
        assert (await rig.engine.status()).version == rig.version
        whole = rig.next_update()
        await rig.apply(whole)
        await rig.engine.resume()
        completion = await rig.generate(rig.request(8))
    assert [span.version for span in completion.spans] == [whole.version]


async def test_an_update_of_a_running_engine_is_refused(rig: Rig) -> None:
    await up(rig)
    with pytest.raises(EngineError):
        await rig.engine.start_update(rig.next_update())
    assert (await rig.engine.status()).version == rig.version


@pytest_asyncio.fixture(loop_scope="session")
async def staged(rig: Rig) -> AsyncIterator[Rig]:
    """A channel whose bytes arrive in a second copy; afterwards the usual one again."""
    await up(rig)
    rig.staged = True
    await rig.open()
    yield rig
    rig.staged = False
    await rig.open()


@pytest.mark.parametrize("kv", list(KVPolicy))
async def test_what_was_prefetched_is_swapped_in_one_call(staged: Rig, kv: KVPolicy) -> None:
    rig = staged
    async with asyncio.timeout(DEADLINE_S):
        request = rig.request(200)
        running = asyncio.create_task(rig.generate(request))
        await rig.engine.wait_for_tokens(5)
        ready = await rig.ready("b", kv)
        status = await rig.engine.status()
        assert (status.version, status.paused) == (rig.version, False)
        done = await rig.swap_in_one(ready.update)
        first = await rig.engine.wait_first_tokens(ready.update)
        assert await rig.engine.digests(ready.update) == ready.sent
        completion = await running
        status = await rig.engine.status()
    assert ready.stats.nbytes == done.stats.nbytes > 0
    assert (done.ack.requests_in_flight, len(first.stalls)) == (1, 1)
    assert min(done.quiesce, done.transfer, done.finalize, done.resume) >= 0
    check_completion(completion, request)
    assert [s.version for s in completion.spans] == [rig.version - 1, rig.version]
    assert (status.version, status.paused) == (rig.version, False)


async def test_one_call_leaves_what_a_swap_phase_by_phase_leaves(staged: Rig) -> None:
    rig = staged
    seen = []
    async with asyncio.timeout(DEADLINE_S):
        for which in ("a", "b", "a"):
            ready = await rig.ready(which)
            await rig.swap_in_one(ready.update)
            seen.append((ready.sent, (await rig.generate(rig.request(16, 3))).token_ids))
        swapped = await rig.swap("b")
        seen.append((swapped.sent, (await rig.generate(rig.request(16, 3))).token_ids))
    assert dict(seen[0][0]) == dict(seen[2][0]) != dict(seen[1][0]) == dict(seen[3][0])
    assert seen[0][1] == seen[2][1] != seen[1][1] == seen[3][1]


async def test_a_paused_engine_applies_what_was_prefetched_without_the_sender(staged: Rig) -> None:
    rig = staged
    async with asyncio.timeout(DEADLINE_S):
        update = (await rig.ready("b")).update
        await rig.engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
        await rig.engine.start_update(update)
        with pytest.raises(EngineError):
            await rig.engine.resume()
        assert (await rig.engine.receive_update(update)).nbytes > 0
        await rig.engine.finish_update(update)
        rig.version = update.version
        await rig.engine.resume()
        completion = await rig.generate(rig.request(8))
    assert [span.version for span in completion.spans] == [rig.version]


async def test_what_was_prefetched_and_not_applied_is_replaced(staged: Rig) -> None:
    rig = staged
    async with asyncio.timeout(DEADLINE_S):
        await rig.ready("a")
        ready = await rig.ready("b")
        await rig.swap_in_one(ready.update)
        assert await rig.engine.digests(ready.update) == ready.sent


async def test_a_prefetch_that_is_left_alone_ends_with_the_channel_and_harms_nothing(
    staged: Rig,
) -> None:
    rig = staged
    async with asyncio.timeout(DEADLINE_S):
        before = await rig.generate(rig.request(8, 2))
        rig.use("b")
        update = rig.next_update()
        await rig.sender.stage(update.version)
        alone = asyncio.create_task(rig.engine.prefetch(update))  # nobody sends
        during = await rig.generate(rig.request(8, 2))
        alone.cancel()
        await asyncio.gather(rig.engine.close_channel(), rig.sender.close_channel())
        with pytest.raises(asyncio.CancelledError):
            await alone
        after = await rig.generate(rig.request(8, 2))
        assert before.token_ids == during.token_ids == after.token_ids
        assert [s.version for s in after.spans] == [rig.version]
        await rig.open()
        ready = await rig.ready("b")
        await rig.swap_in_one(ready.update)
        assert await rig.engine.digests(ready.update) == ready.sent


async def test_a_swap_to_what_was_not_prefetched_changes_no_version_and_can_be_made_good(
    staged: Rig,
) -> None:
    rig = staged
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(MidflightError):
            await rig.engine.swap(rig.next_update(), PhaseTimeouts())
        assert (await rig.engine.status()).version == rig.version
        await rig.open()  # a failed update may have closed it
        ready = await rig.ready("a")
        await rig.swap_in_one(ready.update)
        assert not (await rig.engine.status()).paused
        completion = await rig.generate(rig.request(8))
    assert [span.version for span in completion.spans] == [rig.version]


async def test_a_closed_channel_carries_nothing(rig: Rig) -> None:
    await up(rig)
    async with asyncio.timeout(DEADLINE_S):
        update = rig.next_update()
        rig.use("a")
        await rig.sender.stage(update.version)
        rig.opened = False
        for side in (rig.engine, rig.engine, rig.sender, rig.sender):
            await side.close_channel()
        with pytest.raises(ChannelError):
            await rig.sender.send(update)
        await rig.open()
        swapped = await rig.swap("a")
        assert await rig.engine.digests(swapped.update) == swapped.sent


async def test_prompt_logprobs_belong_to_the_weights(rig: Rig) -> None:
    await up(rig)
    prompts = [rig.request(1, i, length=5 + i).prompt.token_ids for i in range(3)]
    seen = {}
    async with asyncio.timeout(DEADLINE_S):
        for which in ("a", "b"):
            await rig.swap(which)
            busy = asyncio.create_task(rig.generate(rig.request(40)))
            seen[which] = await rig.engine.prompt_logprobs(prompts)
            await busy
    for scores in seen.values():
        assert [len(score) for score in scores] == [len(prompt) - 1 for prompt in prompts]
    assert seen["a"] != seen["b"]


async def test_it_is_not_dead_while_it_lives(rig: Rig) -> None:
    await up(rig)
    waiting = asyncio.ensure_future(rig.engine.wait_dead())
    await rig.generate(rig.request(4))
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
