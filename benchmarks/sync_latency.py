"""How long requests stall when a policy's weights are swapped under them, on real parts.

    python benchmarks/sync_latency.py --swaps 50 --json out.json

A real engine decodes all the time; its weights are swapped again and again by this project's
cycle and by the naive way, side by side in one run. The ceiling of the same bytes over the same
backend is measured in that run too. Durations on a busy CPU are noisy; their ratios are not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import queue
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import ceiling
import naive
import plot

from actors import assembly
from actors.adapters import RayEngine
from orchestrator.config import Settings
from orchestrator.context import operation
from orchestrator.cycle import SwapCycle, stall_stats
from orchestrator.errors import EXIT_INTERRUPTED, MidflightError
from orchestrator.fleet import Fleet
from orchestrator.machine import Guard, SwapMachine, Trigger
from orchestrator.options import SwapOptions, ValidationOptions
from orchestrator.protocols import Trainer
from orchestrator.sources import load
from orchestrator.tasks import settle
from orchestrator.types import (
    GenerationRequest,
    KVPolicy,
    PauseMode,
    PhaseSeconds,
    PolicyVersion,
    Prompt,
    WeightUpdate,
)
from orchestrator.validation import Validator

SCHEMA = 1


class Load:
    """Keeps ``count`` requests decoding: one that ends is replaced at once."""

    def __init__(self, fleet: Fleet, prompts: Sequence[Prompt], count: int, tokens: int) -> None:
        self._fleet, self._prompts, self._tokens = fleet, prompts, tokens
        self._tasks = [asyncio.create_task(self._lane(i)) for i in range(count)]
        self.written = 0
        """Tokens of ended requests."""

    async def _lane(self, lane: int) -> None:
        turn = 0
        while True:
            request = GenerationRequest(
                f"load-{lane}-{turn}",
                self._prompts[lane % len(self._prompts)],
                # Staggered ends: a fleet whose requests all end together is not under load.
                max_tokens=self._tokens + 7 * (lane % 5),
                temperature=1.0,
                seed=1000 * lane + turn,
                ignore_eos=True,
            )
            done = await self._fleet.generate(request)
            self.written += len(done.token_ids)
            turn += 1

    def check(self) -> None:
        """Raise what a lane failed with."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        await settle(self._tasks)


@dataclass(slots=True)
class Method:
    """One way to swap, and what it took each time."""

    name: str
    note: str
    samples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, seconds: PhaseSeconds, stalls: Sequence[float], in_flight: int) -> None:
        self.samples.append(
            {"seconds": asdict(seconds), "stalls": list(stalls), "requests_in_flight": in_flight}
        )

    def result(self, nbytes: int) -> dict[str, Any]:
        """Percentiles over all requests of all swaps; None where nothing was measured."""
        phases = {
            phase: asdict(
                stall_stats([v for s in self.samples if (v := s["seconds"][phase]) is not None])
            )
            for phase in plot.PHASES
        }
        usable = phases["transfer"]["p50"]
        return {
            "name": self.name,
            "note": self.note,
            "swaps": len(self.samples),
            "stall_s": asdict(stall_stats([v for s in self.samples for v in s["stalls"]])),
            "phases": phases,
            "gb_per_s_until_usable": nbytes / usable / 1e9 if usable else None,
            "samples": self.samples,
        }


class Bench:
    """Real parts under load, and the methods that swap them."""

    def __init__(self, fleet: Fleet, trainer: Trainer, options: argparse.Namespace) -> None:
        self.fleet, self.trainer, self.options = fleet, trainer, options
        self._firsts: list[float] = []
        self.nbytes = 0
        self.digests_matched = 0
        self._machine = SwapMachine()
        self._swap = SwapOptions(
            backend=options.prepared.backend,
            pause_mode=PauseMode.KEEP,
            kv_policy=KVPolicy(options.kv),
        )
        validator = Validator(ValidationOptions(canary=False, fresh=False), fleet)
        self._cycle = SwapCycle(self._machine, fleet, trainer, validator, self._swap)

    async def up(self) -> None:
        """Start everything and prove the channel."""
        await asyncio.gather(self.fleet.start(), self.trainer.start())
        spec = await self.fleet.open_channel(
            self.trainer, self._swap.backend, self._swap.timeouts.syncing
        )
        self.nbytes = spec.nbytes
        self._machine.fire(Trigger.START, Guard.CHANNEL_PROVED)

    async def _update(self) -> tuple[WeightUpdate, dict[str, str]]:
        version = PolicyVersion(self.fleet.version + 1)
        update = WeightUpdate(
            sync_id=f"s{version}",
            from_version=self.fleet.version,
            version=version,
            step=version,
            backend=self._swap.backend,
            pause_mode=self._swap.pause_mode,
            kv_policy=self._swap.kv_policy,
        )
        return update, dict(await self.trainer.stage(version))

    async def ours(self, method: Method | None) -> None:
        """One swap by this project's cycle, digests checked."""
        update, sent = await self._update()
        with operation(sync_id=update.sync_id, version=update.version):
            report = await self._cycle.run(update, sent, self.nbytes)
        self.digests_matched += 1
        if method is not None:
            method.add(report.seconds, report.stalls, report.requests_in_flight)

    async def theirs(self, method: Method, sleep_s: float) -> None:
        """One swap the naive way."""
        update, _ = await self._update()
        with operation(sync_id=update.sync_id, version=update.version):
            done = await naive.naive_swap(self.fleet, self.trainer, update, sleep_s)
        method.add(done.seconds, done.stalls, sum(a.requests_in_flight for a in done.acks))


class BenchmarkEngine(RayEngine):
    """A real engine that can also pause the public way."""

    actor = "naive:BenchmarkEngineActor"

    async def pause_publicly(self, mode: PauseMode, kv: KVPolicy) -> None:
        """See :class:`naive.BenchmarkEngineActor`."""
        await self._call("control", "pause_publicly", mode, kv)


@contextlib.asynccontextmanager
async def real_parts(options: argparse.Namespace, run_dir: Path) -> AsyncIterator[Bench]:
    """Engines and trainer as a run would have them, started; all of it gone after the block."""

    def quiet(actor: str, record: dict[str, Any]) -> None:
        if record.get("level") in ("warning", "error"):
            print(f"{actor}: {record.get('event')} {record.get('message', '')}", file=sys.stderr)

    async with assembly.connected(None, run_dir):
        parts = assembly.make_parts(
            options.settings, options.prepared, run_dir, quiet, BenchmarkEngine
        )
        fleet = Fleet(parts.engines)
        bench = Bench(fleet, parts.trainer, options)
        options.parts = parts
        try:
            await bench.up()
            yield bench
        finally:
            await asyncio.gather(fleet.aclose(), parts.trainer.aclose(), return_exceptions=True)


async def measure(options: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """Everything, in one run."""
    ours = Method("midflight", "this project's cycle, digests checked")
    seed = Method("naive", f"public pause, {naive.SLEEP_S:g} s sleep, one call a step")
    awake = Method("naive, no sleep", "the same without its sleep after pausing")
    async with real_parts(options, run_dir) as bench:
        tokens = min(192, options.prepared.checked.max_model_len // 2)
        work = Load(bench.fleet, options.prepared.checked.prompts, options.requests, tokens)
        try:
            say(f"decoding {options.requests} requests; warming up")
            for _ in range(options.warmup):
                await asyncio.sleep(options.interval)
                await bench.ours(None)
            every = max(1, options.swaps // max(1, options.naive_swaps))
            for turn in range(options.swaps):
                await asyncio.sleep(options.interval)
                work.check()
                await bench.ours(ours)
                if turn % every == 0 and len(seed.samples) < options.naive_swaps:
                    await asyncio.sleep(options.interval)
                    await bench.theirs(awake, 0.0)
                    await asyncio.sleep(options.interval)
                    await bench.theirs(seed, naive.SLEEP_S)
                    say(f"{turn + 1} of {options.swaps} swaps")
        finally:
            await work.stop()
        nbytes, matched, parts = bench.nbytes, bench.digests_matched, options.parts
    say("measuring the ceiling")
    backend = options.prepared.backend.value
    on_gpu = backend != "gloo"
    copy = ceiling.memory_copy(nbytes, "cuda" if on_gpu else "cpu")
    raw: list[float] | None = copy
    if backend != "ipc":
        try:
            raw = await asyncio.to_thread(ceiling.raw_broadcast, backend, nbytes)
        except (RuntimeError, queue.Empty) as error:
            say(f"no ceiling: {error}")  # null in the result, never a made-up zero
            raw = None
    ceilings = {
        "broadcast": ceiling.summary(raw, nbytes) if raw else None,
        "memory_copy": ceiling.summary(copy, nbytes),
    }
    methods = [m.result(nbytes) for m in (ours, seed, awake)]
    return {
        "schema_version": SCHEMA,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": parts.hardware,
        "packages": dict(parts.packages),
        "model": options.settings.model,
        "backend": backend,
        "kv_policy": options.kv,
        "bytes": nbytes,
        "requests": options.requests,
        "digests_matched": matched,
        "methods": methods,
        "ceiling": ceilings,
        "ratio": {
            "stall_p50_naive_to_ours": ratio(methods[1], methods[0]),
            "stall_p50_naive_no_sleep_to_ours": ratio(methods[2], methods[0]),
            "transfer_p50_to_ceiling": (
                methods[0]["phases"]["transfer"]["p50"] / ceilings["broadcast"]["p50_s"]
                if ceilings["broadcast"]
                else None
            ),
        },
    }


def ratio(slow: dict[str, Any], fast: dict[str, Any]) -> float | None:
    """How many times longer; None where one was not measured."""
    a, b = slow["stall_s"]["p50"], fast["stall_s"]["p50"]
    return a / b if a and b and b > 0 else None


def show(result: dict[str, Any]) -> None:
    """The console's table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['model']}: {result['bytes'] / 1e6:.1f} MB over "
                        f"{result['backend']}, {result['requests']} requests (ms)")  # fmt: skip
    for column in ("method", "swaps", "stall p50", "p95", "max", *plot.PHASES, "GB/s usable"):
        side: Literal["left", "right"] = "left" if column == "method" else "right"
        table.add_column(column.replace("_", " "), justify=side, no_wrap=True)
    for method in result["methods"]:
        stall = method["stall_s"]
        speed = method["gb_per_s_until_usable"]
        table.add_row(
            method["name"],
            str(method["swaps"]),
            *(ms(stall[k]) for k in ("p50", "p95", "max")),
            *(ms(method["phases"][p]["p50"]) for p in plot.PHASES),
            "-" if speed is None else f"{speed:.3f}",
        )
    # A pipe has no width: never squeeze the numbers there.
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    copy = result["ceiling"]["memory_copy"]
    raw = result["ceiling"]["broadcast"] or copy
    console.print(
        f"ceiling: raw {'copy' if result['backend'] == 'ipc' else 'broadcast'} "
        f"{ms(raw['p50_s'])} ms ({raw['gb_per_s']:.2f} GB/s), "
        f"memory copy {ms(copy['p50_s'])} ms ({copy['gb_per_s']:.2f} GB/s)"
    )
    for name, value in result["ratio"].items():
        console.print(f"{name.replace('_', ' ')}: " + ("-" if value is None else f"{value:.1f}"))
    console.print(f"hardware: {result['hardware']}")


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def say(line: str) -> None:
    print(f"sync_latency: {line}", file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--swaps", type=int, default=50, help="swaps by our cycle (default 50)")
    parser.add_argument("--naive-swaps", type=int, default=5, help="naive swaps of each kind")
    parser.add_argument("--warmup", type=int, default=3, help="swaps that do not count")
    parser.add_argument("--requests", type=int, default=13, help="requests decoding all the time")
    parser.add_argument("--interval", type=float, default=0.3, help="seconds between swaps")
    parser.add_argument("--model", default="tiny", help="as of python -m orchestrator")
    parser.add_argument("--backend", default="auto", help="auto, gloo, nccl or ipc")
    parser.add_argument("--kv", default="recompute", choices=[k.value for k in KVPolicy])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--plot", type=Path, help="write a PNG here (default: beside --json)")
    options = parser.parse_args(argv)
    if options.swaps < 1 or options.requests < 1:
        parser.error("--swaps and --requests must be at least 1")
    for target in (options.json, options.plot):
        if target is not None:
            try:  # now, not after minutes of measuring
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            except OSError as error:
                parser.error(f"cannot write {target}: {error.strerror}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write. Exit code 1 with one line if something fails."""
    options = parse(argv)
    try:
        options.settings: Settings = load(  # type: ignore[misc]
            {
                "model": options.model,
                "backend": options.backend,
                "kv": options.kv,
                "max_in_flight": options.requests,
            },
            None,
        )
        options.prepared = assembly.preflight(options.settings)
        with (
            tempfile.TemporaryDirectory(prefix="midflight-bench-") as folder,
            operation(run_id="bench"),
        ):
            result = asyncio.run(measure(options, Path(folder)))
    except MidflightError as error:
        print(f"sync_latency: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("sync_latency: interrupted, nothing written", file=sys.stderr)
        return EXIT_INTERRUPTED
    show(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    picture = options.plot or (options.json.with_suffix(".png") if options.json else None)
    if picture is not None:
        plot.draw(result, picture)
        say(f"wrote {', '.join(str(p) for p in (options.json, picture) if p)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
