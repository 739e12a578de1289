"""The whole controller under random faults: whatever happens, it ends and nothing is left.

Every example is a world with a handful of faults at random calls. None of them may hang
(virtual time turns a hang into a failure), leak, serve weights that were not published, or
end without saying how.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from orchestrator import (
    Closed,
    Event,
    KVPolicy,
    MidflightError,
    Orchestrator,
    Outcome,
    PauseMode,
    RecoveryOptions,
    ReplicaAdmitted,
    RequestKind,
    RolloutFinished,
    State,
    StateChanged,
    Strategy,
    SwapDone,
    SwapFailed,
    TransferBackend,
    ValidationOptions,
    Verdict,
)
from orchestrator.tasks import settle
from orchestrator.testing import FakeEngine, FakeWorld, run
from orchestrator.testing.faults import When
from tests.harness import ALL, GENERATION, PROMPTS, SWAP, Rig, drive, make_rig, now

PROFILE = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

ENGINE_METHODS = (
    "start",
    "open_channel",
    "generate",
    "wait_for_tokens",
    "pause",
    "start_update",
    "receive_update",
    "finish_update",
    "resume",
    "wait_first_tokens",
    "digests",
    "prompt_logprobs",
    "abort_requests",
    "close_channel",
    "prefetch",
    "swap",
)
TRAINER_METHODS = (
    "start",
    "listen",
    "open_channel",
    "reference_logprobs",
    "train",
    "stage",
    "send",
    "save_checkpoint",
    "close_channel",
)
ROUTES = (
    (TransferBackend.GLOO, False),
    (TransferBackend.GLOO, True),
    (TransferBackend.NCCL, True),
    (TransferBackend.IPC, False),
)
TENSORS = ("embed", "layers.0", "layers.1", "head")


@dataclass(frozen=True)
class CallFault:
    """Something happens at a call of an actor's method."""

    actor: str
    method: str
    call: int | None
    when: When
    kind: str
    seconds: float


@dataclass(frozen=True)
class WireFault:
    """Something happens to a tensor on its way."""

    kind: str
    receiver: str
    tensor: str
    transfer: int | None


@dataclass(frozen=True)
class TimedFault:
    """Something happens at a moment, whatever is going on."""

    kind: str
    victim: str
    at: float


Fault = CallFault | WireFault | TimedFault


@dataclass(frozen=True)
class Scenario:
    engines: int
    steps: int
    mode: PauseMode
    kv: KVPolicy
    route: tuple[TransferBackend, bool]
    """Over which link, and whether the bytes come first."""
    validation: ValidationOptions
    probes: int
    max_staleness: int | None
    train_seconds: float
    answer_seconds: float
    """What the answer of a swap in one call takes; the replica goes on before it."""
    faults: tuple[Fault, ...]
    recovery: RecoveryOptions
    replacing: bool
    rolling: bool


@st.composite
def call_faults(draw: st.DrawFn, engines: int) -> CallFault:
    on_trainer = draw(st.integers(0, 3)) == 0
    if on_trainer:
        actor, method = "trainer", draw(st.sampled_from(TRAINER_METHODS))
    else:
        actor = f"engine-{draw(st.integers(0, engines - 1))}"
        method = draw(st.sampled_from(ENGINE_METHODS))
    return CallFault(
        actor,
        method,
        draw(st.sampled_from([1, 1, 2, 3, None])),
        draw(st.sampled_from(When)),
        draw(st.sampled_from(["fail", "delay", "block", "die", "cancel", "interrupt"])),
        draw(st.sampled_from([0.001, 0.02, 0.5, 4.0, 13.0])),
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    engines = draw(st.integers(1, 3))
    receivers = st.sampled_from(["*", *(f"engine-{i}" for i in range(engines))])
    wire = st.builds(
        WireFault,
        st.sampled_from(["flip", "drop", "blank", "fail"]),
        receivers,
        st.sampled_from(TENSORS),
        st.sampled_from([1, 2, None]),
    )
    timed = st.builds(
        TimedFault,
        st.sampled_from(["kill", "kill", "interrupt", "cancel"]),
        st.sampled_from(["trainer", *(f"engine-{i}" for i in range(engines))]),
        st.integers(0, 600).map(lambda ms: ms / 1000),
    )
    faults = st.one_of(call_faults(engines), call_faults(engines), wire, timed)
    return Scenario(
        engines,
        draw(st.integers(1, 3)),
        draw(st.sampled_from(PauseMode)),
        draw(st.sampled_from(KVPolicy)),
        draw(st.sampled_from(ROUTES)),
        replace(ALL, canary=draw(st.booleans()), fresh=draw(st.booleans())),
        draw(st.integers(0, 2)),
        draw(st.sampled_from([None, 0, 1])),
        draw(st.sampled_from([0.0, 0.1, 2.0])),
        draw(st.sampled_from([0.0, 0.3])),
        tuple(draw(st.lists(faults, max_size=3))),
        RecoveryOptions(draw(st.sampled_from([0, 2, 3])), 0.2, 1.0),
        draw(st.booleans()),
        draw(st.booleans()),
    )


def prepare(scenario: Scenario, cancel: Callable[[], object]) -> Rig:
    """The world of ``scenario``; ``cancel`` is what a cancel fault does."""
    world = FakeWorld()

    def weights_are_those_sent(event: Event) -> None:
        if isinstance(event, SwapDone):
            for replica in rig.orchestrator._fleet.serving:
                engine = replica.engine
                assert isinstance(engine, FakeEngine)
                if engine.death is None and engine.weights != rig.trainer.staged:
                    rig.broken.append(f"{engine.name} does not hold version {engine.version}")

    rig = make_rig(
        world,
        scenario.engines,
        swap=replace(
            SWAP,
            backend=scenario.route[0],
            staged=scenario.route[1],
            pause_mode=scenario.mode,
            kv_policy=scenario.kv,
            strategy=Strategy.ROLLING
            if scenario.rolling and (scenario.route[1] or scenario.route[0] is TransferBackend.IPC)
            else Strategy.ALL_AT_ONCE,
        ),
        generation=replace(GENERATION, max_staleness=scenario.max_staleness),
        validation=scenario.validation,
        probes=PROMPTS[: scenario.probes],
        train_seconds=scenario.train_seconds,
        recovery=scenario.recovery,
        replacing=scenario.replacing,
        observers=[weights_are_those_sent],
    )
    actors = {a.name: a for a in [*rig.engines, rig.trainer]}

    def stop(kind: str) -> None:
        rig.cancels += 1
        if kind == "cancel":
            cancel()
        else:
            rig.orchestrator.interrupt()

    faults = world.faults
    if scenario.answer_seconds:
        faults.delay("engine-0", "swap", scenario.answer_seconds, call=None, when=When.AFTER)
    for fault in scenario.faults:
        match fault:
            case CallFault(actor, method, call, when, kind, seconds):
                if kind == "fail":
                    faults.fail(actor, method, call=call, when=when)
                elif kind == "delay":
                    faults.delay(actor, method, seconds, call=call, when=when)
                elif kind == "block":
                    faults.block(actor, method, call=call, when=when)
                elif kind == "die":
                    faults.die(actor, method, call=call, when=when)
                else:
                    faults.hook(actor, method, partial(stop, kind), call=call, when=when)
            case WireFault("flip", receiver, tensor, transfer):
                faults.flip_bit(tensor, receiver=receiver, transfer=transfer)
            case WireFault("drop", receiver, tensor, transfer):
                faults.drop(tensor, receiver=receiver, transfer=transfer)
            case WireFault("blank", receiver, _, transfer):
                faults.blank(receiver=receiver, transfer=transfer)
            case WireFault("fail", receiver, tensor, transfer):
                faults.fail_at_tensor(receiver, TENSORS.index(tensor), transfer=transfer)
            case TimedFault("kill", victim, at):
                asyncio.get_running_loop().call_at(at, actors[victim].kill)
            case TimedFault(kind, _, at):
                asyncio.get_running_loop().call_at(at, stop, kind)
    return rig


def check_the_end(rig: Rig, result: BaseException | None) -> None:
    """What holds however a run ended."""
    rig.assert_invariants()
    ended = rig.ended
    if result is None:
        assert (ended.outcome, ended.error) == (Outcome.COMPLETED, None)
    elif isinstance(result, asyncio.CancelledError):
        assert rig.cancels, "cancelled by nobody"
        assert (ended.outcome, ended.error) == (Outcome.INTERRUPTED, None)
    else:
        assert isinstance(result, MidflightError), f"{result!r} is none of our errors"
        assert not isinstance(result, Closed), "the cause is hidden behind Closed"
        assert str(result)
        assert ended.outcome is Outcome.FAILED
        assert ended.error is result
    assert rig.orchestrator.state in (State.STOPPED, State.FAILED)
    commits = list(
        dict.fromkeys(e.op.version for e in rig.of(StateChanged) if e.trigger == "commit")
    )
    assert commits == list(range(1, len(commits) + 1))
    assert rig.orchestrator.version == len(commits)
    done = [e.report.update.version for e in rig.of(SwapDone)]
    assert done == sorted(set(done))
    assert set(done) <= set(commits)
    for swap in rig.of(SwapDone):
        assert swap.report.checks[0].verdict is Verdict.MATCH
        assert swap.report.ok
    budgets = SWAP.timeouts
    longest = budgets.starting + 5 + budgets.stopping
    longest += 3 * (2 * budgets.generating + budgets.pausing + budgets.syncing + 5)
    longest += 3 * (2 * budgets.resuming + budgets.validating)
    assert now() <= longest * (1 + rig.recovery.attempts)


@settings(PROFILE, max_examples=800)
@given(scenarios())
def test_a_run_under_any_faults_ends_clean_and_says_how(scenario: Scenario) -> None:
    async def main() -> None:
        rig = prepare(scenario, lambda: job.cancel())
        job = asyncio.create_task(_job(rig, scenario.steps), name="host")
        (result,) = await asyncio.gather(job, return_exceptions=True)
        check_the_end(rig, result)
        event(type(result).__name__)
        event(f"one call: {bool(rig.world.calls('swap'))}")
        if not scenario.faults:
            assert result is None
            assert len(rig.of(SwapDone)) == scenario.steps
            started = Counter(
                c.args[0].request_id.split("+")[0]  # type: ignore[attr-defined]
                for c in rig.world.calls("generate")
                if c.args[0].kind is RequestKind.ROLLOUT  # type: ignore[attr-defined]
            )
            finished = {
                e.rollout.request.request_id
                for e in rig.of(RolloutFinished)
                if e.rollout.request.kind is RequestKind.ROLLOUT
            }
            assert set(started) == finished

    run(main())


async def _job(rig: Rig, steps: int) -> None:
    async with rig.orchestrator as o:
        await o.run(steps)


@dataclass(frozen=True)
class Caller:
    """One task of an embedding trainer: calls sync, perhaps gives up waiting."""

    at: float
    wait: bool
    patience: float | None
    again: bool


callers = st.builds(
    Caller,
    st.integers(0, 300).map(lambda ms: ms / 1000),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 60).map(lambda ms: ms / 1000)),
    st.booleans(),
)


@settings(PROFILE, max_examples=400)
@given(
    scenarios(),
    st.lists(callers, max_size=4),
    st.integers(0, 500),
    st.booleans(),
    st.booleans(),
)
def test_many_callers_of_sync_under_any_faults_each_get_one_answer(
    scenario: Scenario, calls: list[Caller], leave_ms: int, trains: bool, close_first: bool
) -> None:
    async def main() -> None:
        rig = prepare(scenario, lambda: host.cancel())
        answers: list[str] = []
        tasks: list[asyncio.Task[None]] = []

        async def caller(o: Orchestrator, who: Caller) -> None:
            await asyncio.sleep(who.at)
            for _ in range(1 + who.again):
                try:
                    async with asyncio.timeout(who.patience):
                        report = await o.sync(wait=who.wait)
                    answers.append(f"version {report.update.version}")
                except TimeoutError as error:
                    # PhaseTimeout of staging is a TimeoutError too.
                    answers.append(type(error).__name__)
                except MidflightError as error:
                    answers.append(type(error).__name__)

        async def consume(o: Orchestrator) -> None:
            with suppress(MidflightError):
                async for rollout in o.rollouts():
                    assert rollout.staleness is not None

        async def body() -> None:
            async with rig.orchestrator as o:
                tasks.append(asyncio.create_task(consume(o), name="consumer"))
                tasks.extend(asyncio.create_task(caller(o, who)) for who in calls)
                if trains:
                    await o.run(scenario.steps)
                await asyncio.sleep(leave_ms / 1000)
                if close_first:
                    await o.aclose()

        host = asyncio.create_task(body(), name="host")
        (result,) = await asyncio.gather(host, return_exceptions=True)
        check_the_end(rig, result)
        # Nobody is cancelled for them: each has an answer or gets it now.
        done = await asyncio.gather(*tasks, return_exceptions=True)
        for task, outcome in zip(tasks, done, strict=True):
            assert outcome is None, f"{task.get_name()} got {outcome!r}"
        versions = [a for a in answers if a.startswith("version")]
        assert len(versions) == len(set(versions)), "two callers got the same swap"
        assert len(rig.of(SwapDone)) >= len(versions)
        asked = sum(1 + c.again for c in calls) + scenario.steps * trains
        assert len(rig.of(SwapDone)) <= asked
        tries = 1 + scenario.recovery.attempts
        assert len(rig.of(SwapFailed)) + len(rig.of(SwapDone)) <= asked * tries
        await settle(tasks)

    run(main())


SURVIVABLE = (
    "pause",
    "start_update",
    "receive_update",
    "finish_update",
    "resume",
    "swap",
    "wait_first_tokens",
    "digests",
    "prefetch",
    "abort_requests",
    "close_channel",
)


@st.composite
def survivable(draw: st.DrawFn) -> Scenario:
    """Faults that leave a way on, fewer than there are tries."""
    scenario = draw(scenarios())
    engine = st.integers(0, scenario.engines - 1).map(lambda i: f"engine-{i}")
    calls = st.builds(
        CallFault,
        engine,
        st.sampled_from(SURVIVABLE),
        st.sampled_from([1, 2, 3]),
        st.sampled_from(When),
        st.sampled_from(["fail", "delay", "block", "die"]),
        st.sampled_from([0.001, 0.5, 4.0]),
    )
    deaths = st.builds(
        CallFault,
        engine,
        st.sampled_from(["generate", "wait_for_tokens"]),
        st.integers(1, 20),
        st.sampled_from(When),
        st.just("die"),
        st.just(0.0),
    )
    sends = st.builds(
        CallFault,
        st.just("trainer"),
        st.sampled_from(["send", "close_channel"]),
        st.sampled_from([1, 2]),
        st.sampled_from(When),
        st.just("fail"),
        st.just(0.0),
    )
    wire = st.builds(
        WireFault,
        st.sampled_from(["flip", "drop", "blank", "fail"]),
        engine,
        st.sampled_from(TENSORS),
        st.sampled_from([1, 2]),
    )
    timed = st.builds(
        TimedFault, st.just("kill"), engine, st.integers(100, 900).map(lambda ms: ms / 1000)
    )
    faults = st.one_of(calls, calls, deaths, sends, wire, timed)
    return replace(
        scenario,
        faults=tuple(draw(st.lists(faults, max_size=4))),
        recovery=RecoveryOptions(attempts=6, backoff_s=0.2, backoff_max_s=1.0),
        replacing=True,
        train_seconds=0.1,
        max_staleness=None,
    )


@settings(PROFILE, max_examples=800)
@given(survivable())
def test_a_run_survives_what_leaves_a_way_on_and_loses_nothing(scenario: Scenario) -> None:
    async def main() -> None:
        rig = prepare(scenario, lambda: job.cancel())
        left_paused: list[str] = []

        async def work() -> None:
            async with rig.orchestrator as o:
                await o.run(scenario.steps)
                serving = [r.engine for r in o._fleet.serving]
                left_paused.extend(
                    e.name for e in serving if isinstance(e, FakeEngine) and e.paused
                )

        job = asyncio.create_task(work(), name="host")
        (result,) = await asyncio.gather(job, return_exceptions=True)
        assert result is None, repr(result)
        check_the_end(rig, result)
        assert not left_paused
        assert [e.report.update.version for e in rig.of(SwapDone)] == list(
            range(1, scenario.steps + 1)
        )
        ended = Counter(
            e.rollout.request.request_id
            for e in rig.of(RolloutFinished)
            if e.rollout.request.kind is RequestKind.ROLLOUT
        )
        asked = {
            c.args[0].request_id.split("+")[0]  # type: ignore[attr-defined]
            for c in rig.world.calls("generate")
            if c.args[0].kind is RequestKind.ROLLOUT  # type: ignore[attr-defined]
        }
        assert set(ended) == asked
        assert set(ended.values()) <= {1}
        event(f"admitted: {len(rig.of(ReplicaAdmitted))}")

    run(main())


def test_the_harness_sees_a_run_without_faults_complete() -> None:
    """The properties above must not hold because nothing ever gets anywhere."""

    async def main() -> None:
        rig = make_rig(engines=3)
        assert await drive(rig, 3) is None
        rig.assert_invariants()
        assert len(rig.of(SwapDone)) == 3

    run(main())
