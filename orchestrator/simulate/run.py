"""Runs a scenario: the real :class:`~orchestrator.scheduler.Orchestrator`, all else simulated."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.errors import ConfigError, MidflightError
from orchestrator.options import GenerationOptions, RecoveryOptions, SwapOptions, ValidationOptions
from orchestrator.scheduler import Orchestrator
from orchestrator.simulate.collector import Collector
from orchestrator.simulate.costs import CostModel
from orchestrator.simulate.faults import FaultRule, plan
from orchestrator.simulate.meter import Meter, MeteredLoop
from orchestrator.simulate.parts import Injector, SimulatedEngine, SimulatedTrainer, make_world
from orchestrator.simulate.result import SimulationResult, Spread
from orchestrator.testing import assert_no_leaked_tasks
from orchestrator.types import PolicyVersion, Prompt, at_hand

_GROUP = 4
_RUN_ID = "simulated"


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated. Equal scenarios have equal traces."""

    engines: int = 8
    steps: int = 10
    seed: int = 0
    faults: tuple[FaultRule, ...] = ()
    costs: CostModel = field(default_factory=CostModel)
    requests: int = 4
    """That run at the same time, a replica; a train step takes as many rollouts."""
    max_tokens: int = 256
    """New tokens a rollout."""
    max_staleness: int | None = None
    recovery_attempts: int = 3

    def __post_init__(self) -> None:
        for name in ("engines", "steps", "requests", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}: 1 or more")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ConfigError(f"--max-staleness is {self.max_staleness}: 0 or more")
        if self.recovery_attempts < 0:
            raise ConfigError(f"--recovery-attempts is {self.recovery_attempts}: 0 or more")

    def describe(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "engines": self.engines,
            "steps": self.steps,
            "seed": self.seed,
            "faults": ",".join(map(str, (*self.costs.failures, *self.faults))),
            "requests": self.requests,
            "max_tokens": self.max_tokens,
            "max_staleness": self.max_staleness,
            "recovery_attempts": self.recovery_attempts,
            "costs": {k: v for k, v in asdict(self.costs).items() if k != "failures"},
        }


def simulate(scenario: Scenario) -> SimulationResult:
    """Run ``scenario`` to its end, whatever that is. Blocks; needs no running event loop.

    Deadlock (an AssertionError) when the controller waits for what can never happen.
    """
    meter = Meter()
    with (
        meter.counting_collections(),
        asyncio.Runner(loop_factory=lambda: MeteredLoop(meter, horizon=math.inf)) as runner,
    ):
        return runner.run(_simulated(scenario, meter))


async def _simulated(scenario: Scenario, meter: Meter) -> SimulationResult:
    costs = scenario.costs
    rules = (*costs.failures, *scenario.faults)
    ahead = at_hand(costs.backend, costs.staged)
    planned = plan(rules, scenario.engines, scenario.steps, scenario.seed, prefetched=ahead)
    injector = Injector(planned, costs)
    world = make_world(costs)
    parts: list[SimulatedEngine] = []
    orchestrator: Orchestrator | None = None

    def version() -> PolicyVersion:
        return orchestrator.version if orchestrator is not None else PolicyVersion(0)

    collector = Collector(meter, injector, version, scenario.max_staleness)

    def make_engine(name: str) -> SimulatedEngine:
        engine = SimulatedEngine(name, world, costs, scenario.seed, meter, injector)
        engine.called = collector.called
        injector.add(engine)
        parts.append(engine)
        return engine

    def make_trainer() -> SimulatedTrainer:
        before = injector.trainer
        number = 0 if before is None else 1 + int(before.name.partition(".r")[2] or 0)
        name = f"trainer.r{number}" if number else "trainer"
        trainer = SimulatedTrainer(name, world, costs, scenario.seed, meter, injector, before)
        trainer.called = collector.called
        injector.trainer = trainer
        return trainer

    rollouts = scenario.engines * scenario.requests
    groups = math.ceil(rollouts / _GROUP)
    orchestrator = Orchestrator(
        [make_engine(f"engine-{i}") for i in range(scenario.engines)],
        make_trainer(),
        prompts=[Prompt((1, 2, 3))],
        swap=SwapOptions(backend=costs.backend, staged=costs.staged),
        generation=GenerationOptions(
            max_tokens=scenario.max_tokens,
            group_size=_GROUP,
            prompts_per_step=groups,
            max_in_flight=rollouts,
            buffer_size=2 * groups * _GROUP,
            max_staleness=scenario.max_staleness,
            seed=scenario.seed,
        ),
        validation=ValidationOptions(digest=True, canary=False, fresh=False),
        observers=[collector.observe],
        run_id=_RUN_ID,
        recovery=RecoveryOptions(attempts=scenario.recovery_attempts),
        replace_engine=lambda name: meter.run(make_engine, name),
        replace_trainer=lambda: meter.run(make_trainer),
    )
    error: str | None = None
    try:
        async with orchestrator:
            await orchestrator.run(scenario.steps)
    except MidflightError as failure:
        error = f"{type(failure).__name__}: {failure}"
    assert_no_leaked_tasks()
    for engine in parts:
        if engine.death is None:
            collector.broken.append(f"{engine.name} was not released")
    written = sum(engine.tokens_written for engine in parts)
    return SimulationResult(
        scenario=scenario.describe(),
        steps=collector.steps,
        swaps=collector.swaps,
        failed_swaps=collector.failed_swaps,
        error=error,
        pause_s=Spread.of(collector.pause),
        commit_s=Spread.of(collector.commit),
        stopped_s=Spread.of(collector.stopped),
        waiting_s=Spread.of(collector.waiting),
        overhead_cpu_s=Spread.of(collector.overhead_cpu),
        tokens_written=written,
        tokens_lost=written - collector.tokens,
        requests=collector.requests,
        requests_lost=len(collector.lost),
        faults=dict(Counter(str(f.kind) for step in planned for f in step)),
        faults_struck=dict(Counter(str(f.kind) for f in injector.struck)),
        deaths=collector.deaths,
        recovery_s=Spread.of(collector.recovery),
        still_out=collector.still_out,
        seconds=asyncio.get_running_loop().time(),
        controller_cpu_s=meter.controller_s,
        simulation_cpu_s=meter.simulation_s,
        collection_cpu_s=meter.collection_s,
        trace=collector.trace,
        broken=(*collector.broken, *world.violations),
    )
