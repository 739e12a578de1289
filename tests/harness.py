"""A controller over fakes, everything it said, and what must be true when it is over."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from orchestrator import (
    Checkpoints,
    Engine,
    EngineFactory,
    Event,
    GenerationOptions,
    Observer,
    Orchestrator,
    PhaseTimeouts,
    PolicyVersion,
    Prompt,
    RecoveryOptions,
    ReplicaAdmitted,
    RolloutFinished,
    RunEnded,
    Strategy,
    SwapFailed,
    SwapOptions,
    Swapped,
    ValidationOptions,
    WeightUpdate,
)
from orchestrator.testing import FakeEngine, FakeTrainer, FakeWorld, fake_engine_factory

E = TypeVar("E", bound=Event)
T = TypeVar("T")

PROMPTS = tuple(Prompt((i + 1, i + 2, i + 3), f"prompt {i}") for i in range(4))
SWAP = SwapOptions(
    pause_after_tokens=3,
    timeouts=PhaseTimeouts(
        starting=50,
        generating=40,
        pausing=3,
        syncing=12,
        resuming=6,
        validating=20,
        stopping=8,
        staging=10,
    ),
)
GENERATION = GenerationOptions(
    max_tokens=8, group_size=2, prompts_per_step=2, max_in_flight=4, buffer_size=8, probe_tokens=12
)
ALL = ValidationOptions(digest=True, canary=True, fresh=True)
NO_RECOVERY = RecoveryOptions(attempts=0)
DIGEST = ValidationOptions(digest=True, canary=False, fresh=False)


class WatchedEngine(FakeEngine):
    """A fake engine that notes when it is to serve a version that was never published."""

    published: Callable[[], PolicyVersion]
    broken: list[str]
    rolling: bool = False
    in_one_call: PolicyVersion | None = None
    """What a swap in one call is about to publish: it resumes first."""

    async def swap(self, update: WeightUpdate, timeouts: PhaseTimeouts) -> Swapped:
        """As in the base."""
        self.in_one_call = update.version
        try:
            return await super().swap(update, timeouts)
        finally:
            self.in_one_call = None

    async def resume(self) -> None:
        """As in the base."""
        good = self.version in (self.published(), self.in_one_call)
        if self.rolling and self.version < self.published():
            good = True  # the version before serves on until its turn
        if self.death is None and not good:
            self.broken.append(
                f"{self.name} resumed with {self.version}, published is {self.published()}"
            )
        await super().resume()


@dataclass
class Rig:
    """One controller over one world."""

    world: FakeWorld
    trainers: list[FakeTrainer]
    """The last one is the one that trains."""
    engines: list[WatchedEngine]
    events: list[Event] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Invariants that did not hold at the moment of an event."""
    versions: list[PolicyVersion] = field(default_factory=list)
    cancels: int = 0
    """How often the test cancelled or interrupted the host."""
    fenced_at: dict[str, int] = field(default_factory=dict)
    """Sequence number of the world at which an engine was said to be fenced."""
    fences: list[tuple[str, int, int]] = field(default_factory=list)
    """Engine, and from when to when it was fenced, of those that were admitted again."""
    recovery: RecoveryOptions = NO_RECOVERY
    told: list[Observer] = field(default_factory=list)
    """Who else is told, after the rig."""
    orchestrator: Orchestrator = field(init=False)

    @property
    def trainer(self) -> FakeTrainer:
        """Who trains now."""
        return self.trainers[-1]

    def of(self, kind: type[E]) -> list[E]:
        """Events of one kind, in order."""
        return [e for e in self.events if isinstance(e, kind)]

    @property
    def ended(self) -> RunEnded:
        """The one and last event of the run."""
        assert len(self.of(RunEnded)) == 1, f"{len(self.of(RunEnded))} RunEnded events"
        last = self.events[-1]
        assert isinstance(last, RunEnded), f"{last} came after RunEnded"
        return last

    def observe(self, event: Event) -> None:
        """Records, checks what must hold at this very moment, and tells who else is told."""
        self._check(event)
        for observer in self.told:
            observer(event)

    def _check(self, event: Event) -> None:
        version = self.orchestrator.version
        self.events.append(event)
        self.versions.append(version)
        match event:
            case RolloutFinished(rollout=rollout):
                if rollout.completion.spans and rollout.max_version > version:
                    self.broken.append(f"{rollout.request.request_id} has uncommitted tokens")
                covered = [i for s in rollout.completion.spans for i in range(s.start, s.end)]
                if covered != list(range(len(rollout.completion.token_ids))):
                    self.broken.append(f"spans of {rollout.request.request_id} do not cover it")
                if len(rollout.completion.token_ids) > rollout.request.max_tokens:
                    self.broken.append(f"{rollout.request.request_id} outran its budget")
            case ReplicaAdmitted(engine=name):
                (admitted,) = [e for e in self.engines if e.name == name]
                if admitted.death is None and (admitted.half_applied or admitted.paused):
                    self.broken.append(f"{name} was admitted half-applied or paused")
                if admitted.death is None and admitted.version != version:
                    self.broken.append(f"{name} was admitted with {admitted.version}")
                if name in self.fenced_at:
                    self.fences.append((name, self.fenced_at.pop(name), self.world.tick()))
            case SwapFailed(fenced=fenced):
                for name in fenced:
                    self.fenced_at.setdefault(name, self.world.tick())
                for engine in self.engines:
                    if engine.death is None and engine.paused and engine.name not in fenced:
                        self.broken.append(f"{engine.name} was left paused and not fenced")
                    if engine.death is None and engine.half_applied and engine.name not in fenced:
                        self.broken.append(f"{engine.name} is half-applied and not fenced")

    def assert_invariants(self) -> None:
        """What holds after any run, however it ended, once the block was left."""
        assert not self.broken, self.broken
        assert not self.world.violations, self.world.violations
        assert self.versions == sorted(self.versions), "the version went backwards"
        running = [str(c) for c in self.world.running()]
        assert running == [], f"calls that never ended: {running}"
        finished = [e.rollout.request.request_id for e in self.of(RolloutFinished)]
        assert len(finished) == len(set(finished)), "a rollout was delivered twice"
        for name, fenced_at in self.fenced_at.items():
            late = [c for c in self.world.calls("generate", name) if c.seq > fenced_at]
            assert late == [], f"{name} was given requests after it was fenced"
        for name, begin, end in self.fences:
            between = [c for c in self.world.calls("generate", name) if begin < c.seq < end]
            assert between == [], f"{name} was given requests while it was fenced"
        for call in self.world.calls("resume"):
            mixed = [
                c
                for c in self.world.calls("start_update", call.actor)
                if c.seq < call.seq and not self._whole_between(call.actor, c.seq, call.seq)
            ]
            assert mixed == [], f"{call} after {mixed[-1]} without a whole update"
        for trainer in self.trainers:
            assert trainer.death is not None, f"{trainer.name} was not released"
        for engine in self.engines:
            assert engine.death is not None, f"{engine.name} was not released"
            assert (engine.live_requests, engine.held_requests) == (0, 0)
        assert self.ended

    def _whole_between(self, engine: str, start: int, end: int) -> bool:
        return any(start < c.seq < end and c.ok for c in self.world.calls("finish_update", engine))


def make_rig(
    world: FakeWorld | None = None,
    engines: int = 1,
    *,
    swap: SwapOptions = SWAP,
    generation: GenerationOptions = GENERATION,
    validation: ValidationOptions = ALL,
    probes: Sequence[Prompt] = PROMPTS[:2],
    prompts: Sequence[Prompt] = PROMPTS,
    train_seconds: float = 0.1,
    recovery: RecoveryOptions = NO_RECOVERY,
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int = 0,
    replacing: bool = False,
    observers: Sequence[Callable[[Event], None]] = (),
    **engine_options: Any,
) -> Rig:
    """A rig of ``engines`` replicas that has not been entered yet."""
    world = world or FakeWorld()
    trainer = FakeTrainer(world, train_seconds=train_seconds)
    replicas = [WatchedEngine(f"engine-{i}", world, **engine_options) for i in range(engines)]
    rig = Rig(world, [trainer], replicas, recovery=recovery)

    def watched(replica: WatchedEngine) -> WatchedEngine:
        replica.published, replica.broken = lambda: rig.orchestrator.version, rig.broken
        replica.rolling = swap.strategy is Strategy.ROLLING
        return replica

    def another(name: str) -> WatchedEngine:
        rig.engines.append(watched(WatchedEngine(name, world, **engine_options)))
        return rig.engines[-1]

    def another_trainer() -> FakeTrainer:
        name = f"trainer.{len(rig.trainers)}"
        rig.trainers.append(FakeTrainer(world, name=name, train_seconds=train_seconds))
        return rig.trainers[-1]

    for replica in replicas:
        watched(replica)
    rig.orchestrator = Orchestrator(
        replicas,
        trainer,
        prompts=prompts,
        probes=probes,
        swap=swap,
        generation=generation,
        validation=validation,
        engine_factory=_factory_of_last(rig),
        observers=[rig.observe, *observers],
        run_id="run",
        recovery=recovery,
        replace_engine=another if replacing else None,
        replace_trainer=another_trainer if replacing else None,
        checkpoints=checkpoints,
        checkpoint_every=checkpoint_every,
    )
    return rig


def _factory_of_last(rig: Rig) -> EngineFactory:
    async def make(checkpoint: str) -> Engine:
        return await fake_engine_factory(rig.trainer)(checkpoint)

    return make


async def drive(rig: Rig, steps: int = 1) -> BaseException | None:
    """The whole job in a task of its own; returns what it ended with."""

    async def job() -> None:
        async with rig.orchestrator as o:
            await o.run(steps)

    (result,) = await asyncio.gather(asyncio.create_task(job()), return_exceptions=True)
    return result


@types.coroutine
def _stepped(
    coroutine: Coroutine[Any, Any, T], at: int, act: Callable[[], object]
) -> Generator[Any, Any, T]:
    inner = coroutine.__await__()
    step = 0
    try:
        waits_for = inner.send(None)
        while True:
            step += 1
            if step == at:
                act()
            try:
                value = yield waits_for
            except BaseException as error:
                waits_for = inner.throw(error)
            else:
                waits_for = inner.send(value)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def at_suspension(coroutine: Coroutine[Any, Any, T], at: int, act: Callable[[], object]) -> T:
    """Run ``coroutine``; call ``act`` when it suspends for the ``at``-th time (from 1)."""
    return await _stepped(coroutine, at, act)


def now() -> float:
    """Virtual seconds."""
    return asyncio.get_running_loop().time()
