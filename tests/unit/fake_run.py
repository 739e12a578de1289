"""A run of the real command flow over the public fakes; also a program, for signal tests.

    python -m tests.unit.fake_run FOLDER STATE [hang]

runs until the machine is in STATE, where a fault holds it, prints ``at STATE`` and the pid of
a helper process that only an orderly (or forced) end removes, and waits for signals. STATE
``DIED``: an engine dies while it generates.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import runner
from orchestrator.config import Settings
from orchestrator.events import Event, Observer, StateChanged
from orchestrator.protocols import EngineFactory, EngineMaker, TrainerMaker
from orchestrator.runner import OnActorEvent
from orchestrator.testing import FakeEngine, FakeTrainer, FakeWorld, fake_engine_factory
from orchestrator.types import Prompt, TransferBackend

PROMPTS = [Prompt((1, 2, n + 3), f"prompt {n}") for n in range(5)]


@dataclass
class FakePrepared:
    backend: TransferBackend = TransferBackend.GLOO
    min_pass_rate: float = 1.0
    canary_tolerance: float = 1e-3
    staged: bool = False


@dataclass
class FakeParts:
    engines: list[FakeEngine]
    trainer: FakeTrainer
    engine_factory: EngineFactory
    replace_engine: EngineMaker | None = None
    replace_trainer: TrainerMaker | None = None
    prompts: list[Prompt] = field(default_factory=lambda: list(PROMPTS))
    probes: list[Prompt] = field(default_factory=lambda: list(PROMPTS))
    hardware: str = "fake"
    packages: dict[str, str] = field(default_factory=lambda: {"fake": "1"})


@dataclass
class FakeAssembly:
    """What ``actors.assembly`` is to a real run."""

    world: FakeWorld = field(default_factory=FakeWorld)
    before: Callable[[OnActorEvent], Any] = lambda on_event: None
    after: Callable[[], Any] = lambda: None
    up: bool = False
    closed: int = 0

    def preflight(self, settings: Settings) -> FakePrepared:
        return FakePrepared()

    @asynccontextmanager
    async def assemble(
        self, settings: Settings, prepared: Any, run_dir: Path, on_event: OnActorEvent
    ) -> AsyncIterator[FakeParts]:
        self.up = True
        try:
            starting = self.before(on_event)
            if starting is not None:
                await starting
            trainer = FakeTrainer(self.world)
            engines = [FakeEngine(f"engine-{n}", self.world) for n in range(settings.engines)]
            yield FakeParts(engines, trainer, fake_engine_factory(trainer))
        finally:
            self.up = False
            self.closed += 1
            ending = self.after()
            if ending is not None:
                await ending


HOLD = {
    "STARTING": ("engine-0", "start"),
    "PAUSING": ("engine-0", "pause"),
    "SYNCING": ("engine-0", "receive_update"),
    "RESUMING": ("engine-0", "resume"),
    "VALIDATING": ("engine-0", "digests"),
}


async def main(folder: str, state: str, hang: bool, helper: subprocess.Popen[bytes]) -> int:
    assembly = FakeAssembly()
    if state == "FAILED":
        assembly.world.faults.flip_bit("head")
    if state == "DIED":
        # While the run waits for the trainer: it learns of the death by being cancelled.
        assembly.world.faults.block("trainer", "train")
        assembly.world.faults.die("engine-0", "generate", call=40)
    if state in HOLD:
        assembly.world.faults.block(*HOLD[state])

    def say() -> None:
        print(f"at {state} {helper.pid}", flush=True)

    def watch(event: Event) -> None:
        if isinstance(event, StateChanged) and event.target.value == state:
            # Once the held call is under way.
            asyncio.get_running_loop().call_later(0.3, say)

    if state in ("STARTING", "ASSEMBLING", "DIED"):
        asyncio.get_running_loop().call_later(0.3, say)
    if state == "ASSEMBLING":
        assembly.before = lambda on_event: asyncio.Event().wait()

    async def down() -> None:
        if hang:
            print("hangs", flush=True)
            await asyncio.Event().wait()
        helper.kill()
        helper.wait()

    assembly.after = down
    observers: list[Observer] = [watch]
    return await runner.run(
        Settings(steps=1 if state == "STOPPED" else 100_000, quiet=True),
        assembly.preflight(Settings()),
        assembly.assemble,
        run_dir=Path(folder),
        run_id="run-1",
        observers=observers,
    )


if __name__ == "__main__":
    if "quick" in sys.argv:
        from orchestrator import shutdown

        shutdown.GRACE_S = runner.GRACE_S = runner.FINAL_GRACE_S = 1.0
    helper = subprocess.Popen(["sleep", "600"])
    sys.exit(asyncio.run(main(sys.argv[1], sys.argv[2], "hang" in sys.argv, helper)))
