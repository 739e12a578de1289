"""The fake engine: tokens, pauses, spans, budgets, stalls. Every case can fail."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from orchestrator.errors import EngineDied, EngineError
from orchestrator.protocols import Engine
from orchestrator.testing import FakeEngine, FakeWorld, all_blocked, policy
from orchestrator.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    KVPolicy,
    PauseMode,
    Prompt,
    RequestKind,
    TokenSpan,
)

KEEP, WAIT, ABORT = PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT
RECOMPUTE, STALE = KVPolicy.RECOMPUTE, KVPolicy.KEEP


def request(
    name: str = "r",
    *,
    max_tokens: int = 12,
    prompt: tuple[int, ...] = (1, 2, 3),
    temperature: float = 0.0,
    seed: int | None = None,
    kind: RequestKind = RequestKind.ROLLOUT,
) -> GenerationRequest:
    return GenerationRequest(name, Prompt(prompt), max_tokens, temperature, seed, kind)


async def engine_of(world: FakeWorld, **options: object) -> FakeEngine:
    engine = FakeEngine("engine-0", world, **options)  # type: ignore[arg-type]
    await engine.start()
    return engine


def generate(engine: FakeEngine, req: GenerationRequest) -> asyncio.Task[Completion]:
    return asyncio.create_task(engine.generate(req), name=req.request_id)


def test_it_is_an_engine() -> None:
    assert isinstance(FakeEngine("e"), Engine)


async def test_one_token_a_step(world: FakeWorld) -> None:
    engine = await engine_of(world, token_seconds=0.5)
    done = await engine.generate(request(max_tokens=4))
    assert asyncio.get_running_loop().time() == 2
    assert done.finish_reason is FinishReason.LENGTH
    assert done.spans == (TokenSpan(engine.version, 0, 4),)
    assert done.span_texts == (done.text,)
    assert len(done.logprobs) == 4 and all(lp < 0 for lp in done.logprobs)


async def test_tokens_are_a_function_of_weights_and_context(world: FakeWorld) -> None:
    engine = await engine_of(world)
    other = FakeEngine("other", world, weights=policy.make_weights("another"))
    await other.start()
    whole = await engine.generate(request())
    assert (await engine.generate(request("again"))).token_ids == whole.token_ids
    assert (await other.generate(request())).token_ids != whole.token_ids
    rest = await engine.generate(request(prompt=(1, 2, 3, *whole.token_ids[:5]), max_tokens=7))
    assert rest.token_ids == whole.token_ids[5:]
    score = await engine.prompt_logprobs([(1, 2, 3, *whole.token_ids)])
    assert score[0][2:] == whole.logprobs


async def test_sampling_depends_on_the_seed_and_is_not_replayed_from_the_middle(
    world: FakeWorld,
) -> None:
    engine = await engine_of(world)
    one = await engine.generate(request(temperature=1.0, seed=1))
    same = await engine.generate(request("b", temperature=1.0, seed=1))
    two = await engine.generate(request(temperature=1.0, seed=2))
    greedy = await engine.generate(request())
    assert one.token_ids == same.token_ids
    assert len({one.token_ids, two.token_ids, greedy.token_ids}) == 3
    middle = request(prompt=(1, 2, 3, *one.token_ids[:5]), max_tokens=7, temperature=1.0, seed=1)
    assert (await engine.generate(middle)).token_ids != one.token_ids[5:]


async def test_eos_ends_unless_ignored(world: FakeWorld) -> None:
    plain = await engine_of(world)
    tokens = (await plain.generate(request())).token_ids
    eos = tokens[6]
    assert eos not in tokens[:6]
    engine = FakeEngine("eos", world, eos_token_id=eos)
    await engine.start()
    stopped = await engine.generate(request())
    assert (stopped.token_ids, stopped.finish_reason) == (tokens[:7], FinishReason.STOP)
    on = GenerationRequest("r", Prompt((1, 2, 3)), 12, 0.0, ignore_eos=True)
    assert (await engine.generate(on)).token_ids == tokens


async def test_context_ends_the_request(world: FakeWorld) -> None:
    engine = await engine_of(world, max_model_len=8)
    assert len((await engine.generate(request())).token_ids) == 5
    with pytest.raises(EngineError, match="8 prompt tokens, the context has 8"):
        await engine.generate(request(prompt=tuple(range(8))))


async def test_pause_keep_freezes_and_resume_goes_on(world: FakeWorld) -> None:
    engine = await engine_of(world, token_seconds=1.0)
    task = generate(engine, request())
    assert await engine.wait_for_tokens(5) == 1
    ack = await engine.pause(KEEP, RECOMPUTE)
    assert (ack.engine, ack.requests_in_flight) == ("engine-0", 1)
    assert await engine.pause(KEEP, RECOMPUTE) == ack  # idempotent
    await asyncio.sleep(1000)
    status = await engine.status()
    assert (status.paused, status.live_requests, status.held_requests) == (True, 1, 0)
    await engine.resume()
    await engine.resume()
    done = await task
    assert asyncio.get_running_loop().time() == 5 + 1000 + 7
    assert done.token_ids == (await engine.generate(request())).token_ids
    assert done.stalls == ()  # nothing was swapped


async def test_requests_while_paused_are_held(world: FakeWorld) -> None:
    """Case 18: none runs before resume, however many come around the pause."""
    engine = await engine_of(world, token_seconds=0.01)
    tasks = []
    for i in range(20):
        if i == 10:
            await engine.pause(KEEP, RECOMPUTE)
        tasks.append(generate(engine, request(f"r{i}", max_tokens=500)))
        await asyncio.sleep(0.001)
    assert (engine.live_requests, engine.held_requests) == (10, 10)
    await asyncio.sleep(10)
    assert (engine.live_requests, engine.held_requests) == (10, 10)
    await engine.resume()
    assert (engine.live_requests, engine.held_requests) == (20, 0)
    done = await asyncio.gather(*tasks)
    assert [len(c.token_ids) for c in done] == [500] * 20


async def test_pause_wait_lets_them_end_and_holds_new_ones(world: FakeWorld) -> None:
    engine = await engine_of(world, token_seconds=1.0)
    old = generate(engine, request("old"))
    await engine.wait_for_tokens(5)
    pausing = asyncio.create_task(engine.pause(WAIT, RECOMPUTE))
    await all_blocked()
    new = generate(engine, request("new"))
    ack = await pausing
    assert ack.requests_in_flight == 0
    assert asyncio.get_running_loop().time() == 12
    assert len((await old).token_ids) == 12
    assert engine.held_requests == 1 and not new.done()
    await engine.resume()
    assert len((await new).token_ids) == 12


async def test_a_cancelled_pause_wait_is_undone_by_resume(world: FakeWorld) -> None:
    engine = await engine_of(world, token_seconds=1.0)
    old = generate(engine, request("old", max_tokens=100))
    await engine.wait_for_tokens(1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.pause(WAIT, RECOMPUTE), 10)
    new = generate(engine, request("new"))
    await all_blocked()
    assert engine.held_requests == 1
    await engine.resume()
    await asyncio.gather(old, new)


async def test_resume_beats_a_pause_that_still_drains(world: FakeWorld) -> None:
    engine = await engine_of(world)
    task = generate(engine, request())
    await engine.wait_for_tokens(1)
    pausing = asyncio.create_task(engine.pause(WAIT, RECOMPUTE))
    await all_blocked()
    await engine.resume()
    with pytest.raises(EngineError, match="resumed before the pause was complete"):
        await pausing
    assert not engine.paused
    await task


async def test_abort_returns_partials_once(world: FakeWorld) -> None:
    """Cases 16 and 17: two running, two queued; all resolve, with what they had."""
    engine = await engine_of(world, slots=2)
    tasks = [generate(engine, request(f"r{i}")) for i in range(4)]
    assert await engine.wait_for_tokens(7) == 4
    ack = await engine.pause(ABORT, RECOMPUTE)
    assert ack.requests_in_flight == 0
    done = await asyncio.gather(*tasks)
    assert [len(c.token_ids) for c in done] == [7, 7, 0, 0]
    assert {c.finish_reason for c in done} == {FinishReason.ABORT}
    assert done[0].spans == (TokenSpan(engine.version, 0, 7),)
    assert done[2].spans == ()
    assert engine.live_requests == 0
    rest = request("r0+", prompt=(1, 2, 3, *done[0].token_ids), max_tokens=5)
    continued = generate(engine, rest)
    await engine.resume()
    whole = await engine.generate(request("whole"))
    assert done[0].token_ids + (await continued).token_ids == whole.token_ids


async def test_abort_requests_without_a_pause(world: FakeWorld) -> None:
    engine = await engine_of(world)
    task = generate(engine, request())
    await engine.wait_for_tokens(3)
    assert await engine.abort_requests() == 1
    assert await engine.abort_requests() == 0
    assert len((await task).token_ids) == 3
    assert len((await engine.generate(request())).token_ids) == 12


async def test_budget_counts_over_the_whole_life(world: FakeWorld) -> None:
    """Case 19: cut at 12 of 20, at most 8 more."""
    engine = await engine_of(world)
    task = generate(engine, request(max_tokens=20))
    await engine.wait_for_tokens(12)
    await engine.pause(KEEP, RECOMPUTE)
    await engine.resume()
    assert len((await task).token_ids) == 20


@pytest.mark.parametrize("where", ["running", "queued", "held"])
async def test_a_cancelled_generate_leaves_nothing(world: FakeWorld, where: str) -> None:
    """Case 20."""
    engine = await engine_of(world, slots=1)
    first = generate(engine, request("first", max_tokens=50))
    await engine.wait_for_tokens(1)
    if where == "held":
        await engine.pause(KEEP, RECOMPUTE)
    second = generate(engine, request("second"))
    await all_blocked()
    victim = first if where == "running" else second
    victim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await victim
    assert engine.live_requests + engine.held_requests == 1
    await engine.resume()
    await asyncio.gather(*{first, second} - {victim})
    status = await engine.status()
    assert (status.live_requests, status.held_requests) == (0, 0)


async def test_wait_for_tokens_among_requests_waits_for_one_of_them(world: FakeWorld) -> None:
    engine = await engine_of(world, token_seconds=1.0)
    waiting = asyncio.create_task(engine.wait_for_tokens(3, {"probe"}))
    await all_blocked()
    rollout = generate(engine, request("rollout", max_tokens=20))
    await engine.wait_for_tokens(6)
    assert not waiting.done()
    probe = generate(engine, request("probe", kind=RequestKind.PROBE))
    assert await waiting == 2
    assert asyncio.get_running_loop().time() == 9
    await asyncio.gather(rollout, probe)


async def test_a_paused_engine_does_not_score(world: FakeWorld) -> None:
    engine = await engine_of(world)
    await engine.pause(KEEP, RECOMPUTE)
    scoring = asyncio.create_task(engine.prompt_logprobs([(1, 2, 3)]))
    await asyncio.sleep(10)
    assert not scoring.done()
    await engine.resume()
    assert len((await scoring)[0]) == 2


async def test_death_reaches_every_pending_call(world: FakeWorld) -> None:
    engine = await engine_of(world)
    watch = asyncio.create_task(engine.wait_dead())
    pending = [
        generate(engine, request(max_tokens=10_000)),
        asyncio.create_task(engine.wait_for_tokens(9_999)),
        asyncio.create_task(engine.pause(WAIT, RECOMPUTE)),
    ]
    await asyncio.sleep(1)
    assert not watch.done()
    engine.kill("out of memory")
    assert await watch == "out of memory"
    for result in await asyncio.gather(*pending, return_exceptions=True):
        assert isinstance(result, EngineDied), result
        assert result.engine == "engine-0"
    with pytest.raises(EngineDied, match="out of memory"):
        await engine.status()
    await engine.close_channel()
    await engine.aclose()
    await engine.aclose()
    assert await engine.wait_dead() == "out of memory"


@pytest.mark.parametrize("core", [True, False])
async def test_an_actor_that_outlives_its_core_says_what_requests_had(
    world: FakeWorld, core: bool
) -> None:
    engine = await engine_of(world)
    whole = await engine.generate(request("whole", max_tokens=30))
    tasks = [generate(engine, request(max_tokens=30))]
    await engine.wait_for_tokens(5)
    await engine.pause(KEEP, RECOMPUTE)
    tasks.append(generate(engine, request("held")))
    await all_blocked()
    engine.kill("SIGKILL", core=core)
    cut, held = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(cut, EngineDied) and isinstance(held, EngineDied)
    assert held.partial is None
    if not core:
        assert cut.partial is None
        return
    assert cut.partial is not None
    assert cut.partial.token_ids == whole.token_ids[:5]
    assert cut.partial.spans == (TokenSpan(engine.version, 0, 5),)
    assert cut.partial.finish_reason is FinishReason.ABORT
    copy = pickle.loads(pickle.dumps(cut))
    assert (str(copy), copy.partial) == (str(cut), cut.partial)


async def test_aclose_ends_what_is_pending(world: FakeWorld) -> None:
    engine = await engine_of(world)
    task = generate(engine, request(max_tokens=10_000))
    await engine.wait_for_tokens(3)
    await engine.aclose()
    with pytest.raises(EngineDied, match="closed"):
        await task
    assert engine.closed and engine.live_requests == 0
    assert not world.running()


@pytest.mark.provokes
async def test_breaches_of_the_protocol_are_kept(world: FakeWorld) -> None:
    engine = FakeEngine("engine-0", world)
    with pytest.raises(EngineError, match="not started"):
        await engine.generate(request())
    await engine.start()
    with pytest.raises(EngineError, match="start was called twice"):
        await engine.start()
    assert len(world.violations) == 2
