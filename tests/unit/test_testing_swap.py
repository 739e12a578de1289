"""A swap by hand on the fakes, step by step, and what each fault does to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from orchestrator.errors import (
    ChannelError,
    EngineDied,
    EngineError,
    TrainerDied,
    TrainerError,
)
from orchestrator.protocols import Trainer
from orchestrator.testing import (
    FakeEngine,
    FakeTrainer,
    FakeWorld,
    all_blocked,
    fake_engine_factory,
    policy,
)
from orchestrator.types import (
    Completion,
    GenerationRequest,
    KVPolicy,
    PauseMode,
    PolicyVersion,
    Prompt,
    Rollout,
    TokenSpan,
    TransferBackend,
    TransferStats,
    WeightUpdate,
)

PROMPT = (1, 2, 3)
V0, V1, V2 = PolicyVersion(0), PolicyVersion(1), PolicyVersion(2)


def request(name: str = "r", max_tokens: int = 12) -> GenerationRequest:
    return GenerationRequest(name, Prompt(PROMPT), max_tokens, 0.0)


def update_to(version: int, kv: KVPolicy = KVPolicy.RECOMPUTE) -> WeightUpdate:
    return WeightUpdate(
        sync_id=f"sync-{version}",
        from_version=PolicyVersion(version - 1),
        version=PolicyVersion(version),
        step=version,
        backend=TransferBackend.GLOO,
        pause_mode=PauseMode.KEEP,
        kv_policy=kv,
    )


class Rig:
    """A trainer and engines, driven by hand as a controller would."""

    def __init__(self, world: FakeWorld, workers: tuple[int, ...] = (1,)) -> None:
        self.world = world
        self.trainer = FakeTrainer(world)
        self.engines = [
            FakeEngine(f"engine-{i}", world, workers=w, token_seconds=1.0)
            for i, w in enumerate(workers)
        ]

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    async def up(self, timeout_s: float = 10.0) -> None:
        await asyncio.gather(self.trainer.start(), *(e.start() for e in self.engines))
        await self.open(timeout_s)

    async def open(self, timeout_s: float = 10.0) -> None:
        world_size = 1 + sum(e.workers for e in self.engines)
        spec = await self.trainer.listen(TransferBackend.GLOO, world_size, timeout_s)
        joins, rank = [self.trainer.open_channel(spec)], 1
        for engine in self.engines:
            joins.append(engine.open_channel(spec, rank))
            rank += engine.workers
        results = await asyncio.gather(*joins, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def down(self) -> None:
        await asyncio.gather(self.trainer.aclose(), *(e.aclose() for e in self.engines))
        assert not self.world.running()

    async def pause(self, update: WeightUpdate) -> None:
        await asyncio.gather(*(e.pause(update.pause_mode, update.kv_policy) for e in self.engines))

    async def transfer(self, update: WeightUpdate) -> list[TransferStats]:
        await asyncio.gather(*(e.start_update(update) for e in self.engines))
        return await asyncio.gather(
            *(e.receive_update(update) for e in self.engines), self.trainer.send(update)
        )

    async def swap(self, update: WeightUpdate) -> dict[str, str]:
        sent = dict(await self.trainer.stage(update.version))
        await self.pause(update)
        await self.transfer(update)
        await asyncio.gather(*(e.finish_update(update) for e in self.engines))
        await asyncio.gather(*(e.resume() for e in self.engines))
        return sent

    async def train(self, step: int = 1) -> None:
        completion = Completion("r", "engine-0", (step, 4), (-1.0, -1.0), (), "stop")  # type: ignore[arg-type]
        await self.trainer.train([Rollout(request(), completion)], step)


def test_it_is_a_trainer() -> None:
    assert isinstance(FakeTrainer(), Trainer)


async def test_two_swaps_cut_one_rollout_exactly(world: FakeWorld) -> None:
    """Case 21: swaps at 5 and 9 of 12 tokens."""
    rig = Rig(world)
    await rig.up()
    task = asyncio.create_task(rig.engine.generate(request()))
    weights = [dict(rig.engine.weights)]
    for version, at in ((1, 5), (2, 9)):
        update = update_to(version)
        await rig.engine.wait_for_tokens(at)
        sent = await rig.swap(update)
        assert await rig.engine.digests(update) == sent
        assert rig.engine.weights == rig.trainer.staged
        weights.append(dict(rig.engine.weights))
        await rig.train(version)
    done = await task
    assert done.spans == (TokenSpan(V0, 0, 5), TokenSpan(V1, 5, 9), TokenSpan(V2, 9, 12))
    assert [s.sync_id for s in done.stalls] == ["sync-1", "sync-2"]
    assert "".join(done.span_texts) == done.text and len(done.span_texts) == 3
    for span in done.spans:  # each part is what a fresh engine with those weights writes
        fresh = FakeEngine(f"fresh-{span.version}", world, weights=weights[span.version])
        await fresh.start()
        prompt = Prompt((*PROMPT, *done.token_ids[: span.start]))
        rest = await fresh.generate(GenerationRequest("f", prompt, span.end - span.start, 0.0))
        assert rest.token_ids == done.token_ids[span.start : span.end]
        assert rest.logprobs == done.logprobs[span.start : span.end]
    assert world.violations == []
    await rig.down()


async def fresh_check(rig: Rig, done: Completion) -> bool:
    """Whether an engine from the checkpoint continues the cut probe the same way."""
    path = await rig.trainer.save_checkpoint("fresh")
    fresh = await fake_engine_factory(rig.trainer)(path)
    await fresh.start()
    cut = done.spans[-1].start
    prompt = Prompt((*PROMPT, *done.token_ids[:cut]))
    rest = await fresh.generate(GenerationRequest("f", prompt, len(done.token_ids) - cut, 0.0))
    await fresh.aclose()
    return rest.token_ids == done.token_ids[cut:]


@pytest.mark.parametrize(
    ("kv", "fault", "same"),
    [
        (KVPolicy.RECOMPUTE, False, True),
        (KVPolicy.KEEP, False, False),
        (KVPolicy.RECOMPUTE, True, False),
    ],
)
async def test_only_a_recomputed_cache_equals_a_fresh_engine(
    world: FakeWorld, kv: KVPolicy, fault: bool, same: bool
) -> None:
    """Case 7 too: a reset that silently does nothing shows in the fresh check."""
    if fault:
        world.faults.stale_cache("engine-0")
    rig = Rig(world)
    await rig.up()
    task = asyncio.create_task(rig.engine.generate(request()))
    await rig.engine.wait_for_tokens(5)
    await rig.swap(update_to(1, kv))
    assert await fresh_check(rig, await task) is same
    await rig.down()


@pytest.mark.parametrize("kv", list(KVPolicy))
@pytest.mark.parametrize("stale", [False, True])
async def test_a_new_request_uses_no_prefix_of_old_weights(
    world: FakeWorld, kv: KVPolicy, stale: bool
) -> None:
    """Case 6: the same prompt before and after a swap; only a reset that lies is seen."""
    rig = Rig(world)
    if stale:
        world.faults.stale_cache("engine-0")
    await rig.up()
    await rig.engine.generate(request())
    await rig.swap(update_to(1, kv))
    after = await rig.engine.generate(request())
    fresh = FakeEngine("fresh", world, weights=rig.engine.weights)
    await fresh.start()
    same = (await fresh.generate(request())).token_ids == after.token_ids
    assert same is not stale
    await rig.down()


@pytest.mark.parametrize("kv", list(KVPolicy))
async def test_an_aborted_request_is_continued_exactly(world: FakeWorld, kv: KVPolicy) -> None:
    rig = Rig(world)
    await rig.up()
    task = asyncio.create_task(rig.engine.generate(request()))
    await rig.engine.wait_for_tokens(5)
    await rig.swap(replace(update_to(1, kv), pause_mode=PauseMode.ABORT))
    head = await task
    rest = GenerationRequest("rest", Prompt((*PROMPT, *head.token_ids)), 7, 0.0)
    tail = await rig.engine.generate(rest)
    fresh = FakeEngine("fresh", world, weights=rig.engine.weights)
    await fresh.start()
    assert (await fresh.generate(rest)).token_ids == tail.token_ids
    await rig.down()


async def test_stall_and_first_token_are_virtual_time(world: FakeWorld) -> None:
    world.tensor_seconds = 2.0
    rig = Rig(world)
    await rig.up()
    task = asyncio.create_task(rig.engine.generate(request()))
    await rig.engine.wait_for_tokens(5)
    await rig.swap(update_to(1))
    first = await rig.engine.wait_first_tokens(update_to(1))
    transfer = 2.0 * len(rig.engine.weights)
    assert first.seconds == 1.0
    assert first.stalls == (transfer,)
    done = await task
    assert [s.seconds for s in done.stalls] == [transfer]
    await rig.down()


async def test_first_tokens_of_an_idle_engine(world: FakeWorld) -> None:
    rig = Rig(world)
    await rig.up()
    await rig.swap(update_to(1))
    first = await rig.engine.wait_first_tokens(update_to(1))
    assert (first.seconds, first.stalls) == (None, ())
    await rig.down()


async def test_a_frozen_request_that_is_cancelled_is_not_waited_for(world: FakeWorld) -> None:
    rig = Rig(world)
    await rig.up()
    task = asyncio.create_task(rig.engine.generate(request()))
    await rig.engine.wait_for_tokens(5)
    update = update_to(1)
    await rig.trainer.stage(update.version)
    await rig.pause(update)
    await rig.transfer(update)
    await rig.engine.finish_update(update)
    waiting = asyncio.create_task(rig.engine.wait_first_tokens(update))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await all_blocked()
    assert not waiting.done()  # not resumed yet
    await rig.engine.resume()
    assert (await waiting).seconds is None
    await rig.down()


async def test_ranks_of_several_workers(world: FakeWorld) -> None:
    """Case 15: workers 2, 1, 4 take 1, 3 and 4 of 8."""
    rig = Rig(world, workers=(2, 1, 4))
    await rig.up()
    (channel,) = world.channels.values()
    assert channel.spec.world_size == 8
    assert channel.members == {
        "trainer": (0,),
        "engine-0": (1, 2),
        "engine-1": (3,),
        "engine-2": (4, 5, 6, 7),
    }
    sent = await rig.swap(update_to(1))
    for engine in rig.engines:
        assert await engine.digests(update_to(1)) == sent
    await rig.down()


@pytest.mark.provokes
async def test_colliding_ranks_are_refused(world: FakeWorld) -> None:
    rig = Rig(world, workers=(2, 1))
    await asyncio.gather(rig.trainer.start(), *(e.start() for e in rig.engines))
    spec = await rig.trainer.listen(TransferBackend.GLOO, 4, 10.0)
    joining = asyncio.create_task(rig.engines[0].open_channel(spec, 1))
    await all_blocked()
    with pytest.raises(ChannelError, match="rank 2 of engine-1 is already engine-0's"):
        await rig.engines[1].open_channel(spec, 2)
    with pytest.raises(ChannelError, match="rank 4 of engine-1 is outside a group of 4"):
        await rig.engines[1].open_channel(spec, 4)
    await rig.engines[0].close_channel()
    with pytest.raises(ChannelError, match="left its transfer channel"):
        await joining
    await rig.down()


@pytest.mark.provokes
async def test_a_group_that_stays_incomplete_times_out(world: FakeWorld) -> None:
    rig = Rig(world)
    await rig.trainer.start()
    spec = await rig.trainer.listen(TransferBackend.GLOO, 2, 7.0)
    with pytest.raises(ChannelError, match=r"waited 7 s, 1 of 2 ranks never joined"):
        await rig.trainer.open_channel(spec)
    assert asyncio.get_running_loop().time() == 7
    with pytest.raises(EngineError, match="not started"):
        await rig.engine.open_channel(spec, 1)
    await rig.engine.start()
    with pytest.raises(ChannelError, match="nobody listens at"):
        await rig.engine.open_channel(replace(spec, port=1), 1)
    await rig.down()


@pytest.mark.parametrize("actor", ["engine-0", "trainer"])
async def test_a_wrong_pattern_refuses_the_channel(world: FakeWorld, actor: str) -> None:
    """Case 8: a channel that carries nothing is never used."""
    world.faults.wrong_pattern(actor)
    rig = Rig(world)
    with pytest.raises(ChannelError, match=f"{actor}: the known pattern"):
        await rig.up()
    await asyncio.gather(rig.trainer.close_channel(), rig.engine.close_channel())
    await rig.open()  # the next one works
    await rig.swap(update_to(1))
    await rig.down()


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [("flip", {"layers.1"}), ("drop", {"layers.1"}), ("blank", None)],
)
async def test_a_wire_fault_shows_in_the_digests(
    world: FakeWorld, fault: str, wrong: set[str] | None
) -> None:
    if fault == "flip":
        world.faults.flip_bit("layers.1", bit=77, transfer=2)
    elif fault == "drop":
        world.faults.drop("layers.1", transfer=2)
    else:
        world.faults.blank(transfer=2)
    rig = Rig(world)
    await rig.up()
    sent = await rig.swap(update_to(1))
    assert await rig.engine.digests(update_to(1)) == sent
    await rig.train()
    sent = await rig.swap(update_to(2))
    got = await rig.engine.digests(update_to(2))
    differing = {name for name in sent if got.get(name) != sent[name]}
    assert differing == (set(sent) if wrong is None else wrong)
    assert (fault == "drop") == ("layers.1" not in got)
    assert rig.engine.weights != rig.trainer.staged
    prompts = [(5, 6, 7, 8)]
    assert await rig.engine.prompt_logprobs(prompts) != await rig.trainer.reference_logprobs(
        prompts
    )
    await rig.down()


async def test_a_b_a(world: FakeWorld) -> None:
    """Case 8: A, B, A gives A's digest and A's output both times."""
    rig = Rig(world)
    await rig.up()
    a, outputs, digests = dict(rig.trainer.weights), [], []
    for version, weights in ((1, a), (2, policy.make_weights("b")), (3, a)):
        rig.trainer.weights = dict(weights)
        await rig.swap(update_to(version))
        digests.append(await rig.engine.digests(update_to(version)))
        outputs.append((await rig.engine.generate(request())).token_ids)
    assert digests[0] == digests[2] != digests[1]
    assert outputs[0] == outputs[2] != outputs[1]
    await rig.down()


async def test_canary_and_its_control(world: FakeWorld) -> None:
    rig = Rig(world)
    await rig.up()
    prompts = [(5, 6, 7, 8), (9, 10)]
    control = await rig.trainer.reference_logprobs(prompts, initial=True)
    assert await rig.engine.prompt_logprobs(prompts) == control
    assert [len(p) for p in control] == [3, 1]
    with pytest.raises(TrainerError, match="nothing was staged"):
        await rig.trainer.reference_logprobs(prompts)
    await rig.swap(update_to(1))
    now = await rig.trainer.reference_logprobs(prompts)
    assert await rig.engine.prompt_logprobs(prompts) == now != control
    await rig.down()


@pytest.mark.provokes
async def test_a_receiver_that_fails_leaves_the_sender_in_the_collective(
    world: FakeWorld,
) -> None:
    """Case 1: only closing the channel frees the sender and the other receivers."""
    world.faults.fail_at_tensor("engine-0", 2)
    rig = Rig(world, workers=(1, 1))
    await rig.up()
    update = update_to(1)
    before = dict(rig.engine.weights)
    await rig.trainer.stage(update.version)
    await rig.pause(update)
    await asyncio.gather(*(e.start_update(update) for e in rig.engines))
    bad, good, send = (
        asyncio.create_task(c)
        for c in (
            rig.engines[0].receive_update(update),
            rig.engines[1].receive_update(update),
            rig.trainer.send(update),
        )
    )
    with pytest.raises(EngineError, match="engine-0: injected fault at tensor 2"):
        await bad
    await asyncio.sleep(1000)
    assert not good.done() and not send.done()
    await rig.trainer.close_channel()
    with pytest.raises(ChannelError, match="trainer left"):
        await send
    await asyncio.sleep(1000)
    assert not good.done()
    await rig.engines[1].close_channel()
    with pytest.raises(ChannelError, match="engine-1 left"):
        await good
    mixed = rig.engine.weights
    assert mixed != before and mixed != rig.trainer.staged
    assert rig.engine.version == V0  # case 22: the version did not move
    with pytest.raises(EngineError, match="resume with half-applied weights"):
        await rig.engine.resume()
    assert world.violations == ["engine-0: resume with half-applied weights"]
    # Case 26: a whole resync on a new channel repairs both.
    await rig.engines[0].close_channel()
    await rig.open()
    again = replace(update, sync_id="sync-1b")
    sent = await rig.swap(again)
    for engine in rig.engines:
        assert await engine.digests(again) == sent
        assert (engine.version, engine.half_applied, engine.paused) == (V1, False, False)
    await rig.down()


async def test_a_channel_that_lost_step_is_not_used_again(world: FakeWorld) -> None:
    world.faults.fail_at_tensor("engine-0", 1)
    rig = Rig(world)
    await rig.up()
    update = update_to(1)
    await rig.trainer.stage(update.version)
    await rig.pause(update)
    await rig.engine.start_update(update)
    send = asyncio.create_task(rig.trainer.send(update))
    with pytest.raises(EngineError, match="tensor 1"):
        await rig.engine.receive_update(update)
    await rig.engine.start_update(update)
    with pytest.raises(ChannelError, match="out of step"):
        await rig.engine.receive_update(update)
    send.cancel()
    with pytest.raises(asyncio.CancelledError):
        await send
    with pytest.raises(ChannelError, match="out of step"):
        await rig.trainer.send(update)
    await rig.down()


async def test_the_log_shows_that_receive_was_dispatched_first(world: FakeWorld) -> None:
    """Case 2: the engine is a second late, the collective still completes."""
    world.faults.delay("engine-0", "receive_update", 1.0)
    rig = Rig(world)
    await rig.up()
    await rig.swap(update_to(1))
    (receive,), (send,) = world.calls("receive_update"), world.calls("send")
    assert receive.seq < send.seq and receive.at == send.at
    assert receive.ok and send.ok
    assert receive.ended == pytest.approx(1.0 + world.tensor_seconds * 4)
    assert world.violations == []
    await rig.down()


@pytest.mark.provokes
async def test_a_send_before_its_receivers_is_a_violation(world: FakeWorld) -> None:
    rig = Rig(world)
    await rig.up()
    update = update_to(1)
    await rig.trainer.stage(update.version)
    await rig.pause(update)
    await rig.engine.start_update(update)
    send = asyncio.create_task(rig.trainer.send(update))
    await all_blocked()
    await rig.engine.receive_update(update)
    await send
    assert world.violations == ["trainer: send of sync-1 before receive_update of engine-0"]
    await rig.down()


@pytest.mark.provokes
async def test_steps_out_of_order_are_refused(world: FakeWorld) -> None:
    rig = Rig(world)
    await rig.up()
    update, other = update_to(1), update_to(2)
    engine, trainer = rig.engine, rig.trainer
    with pytest.raises(TrainerError, match="send of version 1, staged is None"):
        await trainer.send(update)
    with pytest.raises(EngineError, match="start_update of sync-1 while tokens are written"):
        await engine.start_update(update)
    await engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
    with pytest.raises(EngineError, match="receive_update of sync-1 before start_update"):
        await engine.receive_update(update)
    await engine.start_update(update)
    with pytest.raises(EngineError, match="finish_update of sync-1 before all was received"):
        await engine.finish_update(update)
    with pytest.raises(EngineError, match="receive_update of sync-2 in the session of sync-1"):
        await engine.receive_update(other)
    with pytest.raises(EngineError, match="half-applied"):
        await engine.resume()
    with pytest.raises(EngineError, match="open_channel while a channel is open"):
        await engine.open_channel(next(iter(world.channels.values())).spec, 1)
    with pytest.raises(TrainerError, match="listen while a channel is open"):
        await trainer.listen(TransferBackend.GLOO, 2, 1.0)
    assert len(world.violations) == 8
    with pytest.raises(EngineError, match="no pause belongs to sync sync-2"):
        await engine.wait_first_tokens(other)
    with pytest.raises(EngineError, match="nothing was received for sync sync-2"):
        await engine.digests(other)
    await rig.down()


@pytest.mark.provokes
async def test_a_cancelled_receive_leaves_the_engine_half_applied(world: FakeWorld) -> None:
    rig = Rig(world)
    await rig.up()
    update = update_to(1)
    await rig.trainer.stage(update.version)
    await rig.pause(update)
    await rig.engine.start_update(update)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rig.engine.receive_update(update), 5)  # nobody sends
    assert rig.engine.half_applied
    with pytest.raises(EngineError, match="half-applied"):
        await rig.engine.resume()
    await rig.down()


async def test_staged_weights_do_not_follow_training(world: FakeWorld) -> None:
    rig = Rig(world)
    await rig.up()
    first = await rig.trainer.stage(V1)
    await rig.train(1)
    assert policy.digests(rig.trainer.weights) != first
    assert all(policy.digests(rig.trainer.weights)[n] != d for n, d in first.items())
    rig.trainer.weights["head"] = b"changed in place"
    update = update_to(1)
    await rig.pause(update)
    await rig.transfer(update)
    assert await rig.engine.digests(update) == first
    await rig.down()


async def test_training_is_deterministic_and_scores_its_batch(world: FakeWorld) -> None:
    trainers = [FakeTrainer(world, name=f"t{i}", train_seconds=3.0) for i in range(2)]
    completion = Completion("r", "e", (2, 4, 5, 8), (-1.0,) * 4, (), "stop")  # type: ignore[arg-type]
    batch = [Rollout(request(), completion)]
    for trainer in trainers:
        await trainer.start()
        stats = await trainer.train(batch, 1)
        assert (stats.reward, stats.rewards, stats.tokens, stats.seconds) == (0.75, (0.75,), 4, 3)
    assert trainers[0].weights == trainers[1].weights
    with pytest.raises(TrainerError, match="batch is empty"):
        await trainers[0].train([], 2)
    other = replace(completion, token_ids=(2, 4, 5, 9))
    await trainers[0].train(batch, 2)
    await trainers[1].train([Rollout(request(), other)], 2)
    assert trainers[0].weights != trainers[1].weights


async def test_a_trainer_that_dies_in_send_ends_its_calls_only(world: FakeWorld) -> None:
    rig = Rig(world)
    await rig.up()
    update = update_to(1)
    await rig.trainer.stage(update.version)
    await rig.pause(update)
    await rig.engine.start_update(update)
    world.faults.die("trainer", "send", reason="segfault")
    watch = asyncio.create_task(rig.trainer.wait_dead())
    receive = asyncio.create_task(rig.engine.receive_update(update))
    await all_blocked()
    with pytest.raises(TrainerDied, match="segfault"):
        await rig.trainer.send(update)
    assert await watch == "segfault"
    await asyncio.sleep(100)
    assert not receive.done()
    await rig.engine.close_channel()
    with pytest.raises(ChannelError):
        await receive
    await rig.down()


async def test_an_engine_that_dies_in_receive_leaves_the_sender(world: FakeWorld) -> None:
    rig = Rig(world)
    await rig.up()
    update = update_to(1)
    await rig.trainer.stage(update.version)
    await rig.pause(update)
    await rig.engine.start_update(update)
    receive = asyncio.create_task(rig.engine.receive_update(update))
    send = asyncio.create_task(rig.trainer.send(update))
    await asyncio.sleep(world.tensor_seconds * 1.5)
    rig.engine.kill("oom")
    with pytest.raises(EngineDied, match="oom"):
        await receive
    await asyncio.sleep(100)
    assert not send.done()
    await rig.trainer.close_channel()
    with pytest.raises(ChannelError):
        await send
    await rig.down()
