"""Real parts under load, and the ways to swap their weights that the benchmark compares."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import naive
import resources
from results import Method

from actors import assembly
from actors.adapters import RayEngine
from orchestrator.config import Settings
from orchestrator.context import operation
from orchestrator.cycle import SwapCycle
from orchestrator.errors import ValidationFailed
from orchestrator.fleet import Fleet
from orchestrator.machine import Guard, SwapMachine, Trigger
from orchestrator.options import SwapOptions, ValidationOptions
from orchestrator.tasks import deadline
from orchestrator.types import (
    KVPolicy,
    PauseMode,
    PolicyVersion,
    TransferBackend,
    Verdict,
    WeightUpdate,
    route,
)
from orchestrator.validation import Validator, explain

DIGEST_S = 60.0
"""What a digest may take."""
STAGE_S = 60.0
"""What the trainer may take to stage a version."""
NAIVE_S = 120.0
"""What a swap the naive way may take, its sleep included."""


def say(line: str) -> None:
    """Tell the user, beside the result."""
    now = time.strftime("%H:%M:%S", time.gmtime())
    print(f"{now} {Path(sys.argv[0]).stem}: {line}", file=sys.stderr, flush=True)


class Bench:
    """Real parts under load, and the ways to swap them."""

    def __init__(self, parts: assembly.Parts, kv: KVPolicy) -> None:
        self.parts = parts
        self.fleet, self.trainer = Fleet(parts.engines), parts.trainer
        self._kv = kv
        self.nbytes = 0
        self.digests_matched = 0
        self.pids: list[int] = []
        """Processes of the engines and the trainer."""
        self.applied_by: dict[str, str] = {}
        """How the engine said that it applies the updates of each backend."""
        self.carried_by: dict[str, str] = {}
        """What the trainer said that each backend's bytes travel over, with its version."""
        self._machine = SwapMachine()
        self._validator = Validator(ValidationOptions(canary=False, fresh=False), self.fleet)
        self._swap = SwapOptions()
        self._cycle: SwapCycle | None = None

    async def up(self) -> None:
        """Start everything."""
        infos, _ = await asyncio.gather(self.fleet.start(), self.trainer.start())
        started = getattr(self.trainer, "started", {})
        self.pids = [pid for info in infos for pid in info.pids] + [started["pid"]]
        self._machine.fire(Trigger.START, Guard.CHANNEL_PROVED)

    async def use(self, backend: TransferBackend, staged: bool) -> None:
        """Swap over this backend from now on; its channel is proved."""
        self._swap = SwapOptions(
            backend=backend,
            staged=staged,
            pause_mode=PauseMode.KEEP,
            kv_policy=self._kv,
        )
        await self.fleet.close_channel(self.trainer)
        spec = await self.fleet.open_channel(
            self.trainer, backend, self._swap.timeouts.channel, staged=staged
        )
        self.nbytes = spec.nbytes
        self._cycle = SwapCycle(
            self._machine, self.fleet, self.trainer, self._validator, self._swap
        )

    def heard(self, actor: str, record: dict[str, Any]) -> None:
        """Record of an actor."""
        if record.get("event") == "updates are applied by":
            self.applied_by[route(self._swap.backend, self._swap.staged)] = "; ".join(
                record["workers"]
            )
        elif record.get("event") == "channel proved":
            self.carried_by[route(self._swap.backend, self._swap.staged)] = record["over"]
        elif record.get("level") in ("warning", "error"):
            say(f"{actor}: {record.get('event')} {record.get('message', '')}")

    async def update(self) -> tuple[WeightUpdate, dict[str, str], float]:
        """The next version, its digests, and the seconds it took to stage it at the trainer."""
        version = PolicyVersion(self.fleet.version + 1)
        update = WeightUpdate(
            sync_id=f"s{version}",
            from_version=self.fleet.version,
            version=version,
            step=version,
            backend=self._swap.backend,
            pause_mode=self._swap.pause_mode,
            kv_policy=self._swap.kv_policy,
            staged=self._swap.staged,
        )
        began = time.perf_counter()
        async with deadline("stage", STAGE_S, lambda: "the trainer"):
            sent = dict(await self.trainer.stage(version))
        return update, sent, time.perf_counter() - began

    async def ours(self, method: Method | None = None) -> None:
        """One swap by this project's cycle, digests checked."""
        assert self._cycle is not None
        update, sent, stage_s = await self.update()
        with operation(sync_id=update.sync_id, version=update.version):
            before = await self._cycle.prefetch(update)
            report = await self._cycle.run(update, sent, self.nbytes, prefetch_s=before)
        self.digests_matched += 1
        if method is not None:
            in_flight = report.requests_in_flight
            method.add(report.seconds, report.stalls, in_flight, stage_s, report.validate_s)

    async def theirs(self, method: Method | None, sleep_s: float) -> None:
        """One swap the naive way; digests are checked after it: nothing moved is not fast."""
        update, sent, stage_s = await self.update()
        with operation(sync_id=update.sync_id, version=update.version):
            async with deadline("naive swap", NAIVE_S, self.fleet.waiting_for):
                done = await naive.naive_swap(self.fleet, self.trainer, update, sleep_s)
                checked = await self._validator.digest(update, sent, self.nbytes)
        if checked.verdict is not Verdict.MATCH:
            raise ValidationFailed(explain(checked))
        self.digests_matched += 1
        if method is not None:
            in_flight = sum(a.requests_in_flight for a in done.acks)
            method.add(done.seconds, done.stalls, in_flight, stage_s)

    async def held(self) -> dict[str, Any]:
        """What engines and trainer hold now."""
        return await asyncio.to_thread(resources.snapshot, self.pids)

    @property
    def engines(self) -> list[BenchmarkEngine]:
        return [cast(BenchmarkEngine, replica.engine) for replica in self.fleet.serving]

    async def written(self) -> list[tuple[float, int]]:
        """Of every engine: now, and its tokens until now."""
        return [await engine.written() for engine in self.engines]

    async def bring(self, update: WeightUpdate) -> None:
        """Bring the trainer's snapshot to the engine while it decodes, and commit nothing."""
        assert self._cycle is not None
        with operation(sync_id=update.sync_id, version=update.version):
            await self._cycle.prefetch(update)

    async def digest(self, update: WeightUpdate) -> None:
        """Digest what the engines hold while they decode, and compare it with nothing."""
        with operation(sync_id=update.sync_id, version=update.version):
            async with deadline("digest", DIGEST_S, lambda: "the engines' digests"):
                found = await self.fleet.digests(update)
        if not all(found.values()):
            raise ValidationFailed(f"an engine digested nothing: {found}")


class BenchmarkEngine(RayEngine):
    """A real engine, see :class:`naive.BenchmarkEngineActor`."""

    actor = "naive:BenchmarkEngineActor"

    async def pause_publicly(self, mode: PauseMode, kv: KVPolicy) -> None:
        await self._call("control", "pause_publicly", mode, kv)

    async def nothing_swapped(self) -> tuple[float, ...]:
        return tuple(await self._call("wait", "nothing_swapped"))

    async def written(self) -> tuple[float, int]:
        now, tokens = await self._call("control", "written")
        return now, tokens


@contextlib.asynccontextmanager
async def real_parts(
    settings: Settings, prepared: assembly.Prepared, run_dir: Path
) -> AsyncIterator[Bench]:
    """Engines and trainer as a run would have them, started; all of it gone after the block."""
    heard: list[Bench] = []

    def on_event(actor: str, record: dict[str, Any]) -> None:
        for bench in heard:
            bench.heard(actor, record)

    async with assembly.connected(None, run_dir):
        parts = assembly.make_parts(
            settings,
            prepared,
            run_dir,
            on_event,
            BenchmarkEngine,
            # Exactness costs speed, and is not what is measured here.
            batch_invariant=False,
        )
        bench = Bench(parts, KVPolicy(settings.kv))
        heard.append(bench)
        try:
            await bench.up()
            say("everything is up")
            yield bench
        finally:
            await asyncio.gather(
                bench.fleet.aclose(), parts.trainer.aclose(), return_exceptions=True
            )
