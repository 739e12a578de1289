"""A fleet of fakes that generates, and the cycle that swaps it, for tests of one swap."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from orchestrator.cycle import FreshCheck, SwapCycle
from orchestrator.fleet import Fleet
from orchestrator.machine import Guard, SwapMachine, Trigger
from orchestrator.options import SwapOptions, ValidationOptions
from orchestrator.protocols import Digests
from orchestrator.tasks import settle
from orchestrator.testing import FakeEngine, FakeTrainer, FakeWorld
from orchestrator.types import (
    Completion,
    GenerationRequest,
    PolicyVersion,
    Prompt,
    State,
    SyncReport,
    WeightUpdate,
)
from orchestrator.validation import Validator
from tests.harness import PROMPTS, SWAP, now

BOTH = ValidationOptions(digest=True, canary=True, fresh=False)
PAUSE_AT, LIVE_TOKENS = 5, 40


@dataclass
class Parts:
    """A fleet that generates, one long request an engine, and the cycle that swaps it."""

    world: FakeWorld
    count: int = 3
    validation: ValidationOptions = BOTH
    options: SwapOptions = SWAP
    moves: list[tuple[str, State]] = field(default_factory=list)
    live: list[asyncio.Task[Completion]] = field(default_factory=list)

    async def start(self) -> None:
        self.trainer = FakeTrainer(self.world)
        self.engines = [FakeEngine(f"engine-{i}", self.world) for i in range(self.count)]
        self.fleet = Fleet(self.engines)
        self.machine = SwapMachine(
            lambda m: self.moves.append((m.trigger.value, m.target)), clock=now
        )
        self.validator = Validator(
            self.validation, self.fleet, scorer=self.trainer, canary_prompts=PROMPTS
        )
        self.cycle = SwapCycle(self.machine, self.fleet, self.trainer, self.validator, self.options)
        await self.trainer.start()
        await self.fleet.start()
        spec = await self.fleet.open_channel(
            self.trainer, self.options.backend, 10, staged=self.options.staged
        )
        self.nbytes = spec.nbytes
        await self.validator.control()
        self.machine.fire(Trigger.START, Guard.CHANNEL_PROVED)
        self.live = [
            asyncio.create_task(
                self.fleet.generate(GenerationRequest(f"r{i}", Prompt((i, 2, 3)), LIVE_TOKENS))
            )
            for i in range(self.count)
        ]
        for engine in self.engines:
            await engine.wait_for_tokens(PAUSE_AT)
        self.moves.clear()

    def update(self, version: int = 1) -> WeightUpdate:
        return WeightUpdate(
            f"s{version}",
            self.fleet.version,
            PolicyVersion(version),
            version,
            self.options.backend,
            self.options.pause_mode,
            self.options.kv_policy,
            self.options.staged,
        )

    async def swap(self, version: int = 1, fresh: FreshCheck | None = None) -> SyncReport:
        sent: Digests = await self.trainer.stage(PolicyVersion(version))
        update = self.update(version)
        prefetch_s = await self.cycle.prefetch(update)
        return await self.cycle.run(update, sent, self.nbytes, fresh, prefetch_s=prefetch_s)

    async def close(self) -> None:
        await self.fleet.aclose()
        await self.trainer.aclose()
        await settle(self.live)

    def assert_resumed_or_fenced(self) -> None:
        """Every engine that lives writes tokens of a committed version, or is fenced by name."""
        for engine in self.engines:
            if engine.name in self.fleet.fenced or engine.death is not None:
                continue
            assert not engine.paused, f"{engine.name} was left paused"
            assert not engine.half_applied, f"{engine.name} serves mixed weights"
            assert engine.version == self.fleet.version, f"{engine.name} serves another version"
        assert self.world.violations == []
        assert [str(c) for c in self.world.running() if c.method != "generate"] == []
