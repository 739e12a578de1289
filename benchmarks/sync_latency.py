"""How long requests stall when a policy's weights are swapped under them, on real parts.

    python benchmarks/sync_latency.py --swaps 50 --json out.json

A real engine decodes all the time; its weights are swapped again and again over one backend after
the other, and by the naive way of published examples, all in one run. The ceiling of the same bytes
is measured in that run too. Durations on a busy CPU are noisy; their ratios are not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import queue
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import ceiling
import naive
import plot
import resources
import table
from load import Load, Slots
from results import Method, Result

from actors import assembly, models
from actors.adapters import RayEngine
from actors.hardware import choose_backend, split_backend
from orchestrator.config import Settings
from orchestrator.context import operation
from orchestrator.cycle import SwapCycle, stall_stats
from orchestrator.errors import EXIT_INTERRUPTED, ConfigError, MidflightError, ValidationFailed
from orchestrator.fleet import Fleet
from orchestrator.machine import Guard, SwapMachine, Trigger
from orchestrator.options import SwapOptions, ValidationOptions
from orchestrator.protocols import Trainer
from orchestrator.sources import load
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

DECODE_TOKENS = {"cpu": 192, "gpu": 2048}
"""New tokens of a request of the load: seconds of decoding, as rollouts are."""
CONTROL_S = 60.0
"""What requests may take to write a few tokens more."""
MOMENTS = 100
"""At which nothing is swapped, for the control."""
SLOT_S = 1.0
"""Of a throughput's alternating slots."""


class Bench:
    """Real parts under load, and the ways to swap them."""

    def __init__(self, fleet: Fleet, trainer: Trainer, options: argparse.Namespace) -> None:
        self.fleet, self.trainer, self.options = fleet, trainer, options
        self.nbytes = 0
        self.digests_matched = 0
        self.pids: list[int] = []
        """Processes of the engines and the trainer."""
        self.applied_by: dict[str, str] = {}
        """How the engine said that it applies the updates of each backend."""
        self.carried_by: dict[str, str] = {}
        """What the trainer said that each backend's bytes travel over, with its version."""
        self._machine = SwapMachine()
        self._validator = Validator(ValidationOptions(canary=False, fresh=False), fleet)
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
            kv_policy=KVPolicy(self.options.kv),
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
async def real_parts(options: argparse.Namespace, run_dir: Path) -> AsyncIterator[Bench]:
    """Engines and trainer as a run would have them, started; all of it gone after the block."""
    heard: list[Bench] = []

    def on_event(actor: str, record: dict[str, Any]) -> None:
        for bench in heard:
            bench.heard(actor, record)

    async with assembly.connected(None, run_dir):
        parts = assembly.make_parts(
            options.settings,
            options.prepared,
            run_dir,
            on_event,
            BenchmarkEngine,
            # Exactness costs speed, and is not what is measured here.
            batch_invariant=False,
        )
        fleet = Fleet(parts.engines)
        bench = Bench(fleet, parts.trainer, options)
        heard.append(bench)
        options.parts = parts
        try:
            await bench.up()
            yield bench
        finally:
            await asyncio.gather(fleet.aclose(), parts.trainer.aclose(), return_exceptions=True)


async def measure(options: argparse.Namespace, run_dir: Path) -> Result:
    """Everything, in one run; what has been measured is saved as it comes."""
    checked = options.prepared.checked
    result = Result(
        model=options.settings.model,
        kv_policy=options.kv,
        cuda_graphs=bool(checked.gpus),
        request_tokens=options.tokens,
        path=options.json,
    )
    result.save()
    async with real_parts(options, run_dir) as bench:
        engines = [replica.engine for replica in bench.fleet.serving]
        result.hardware, result.packages = options.parts.hardware, dict(options.parts.packages)

        def decoding(requests: int) -> Load:
            return Load(engines, checked.prompts, requests, options.tokens)

        def save() -> None:
            result.nbytes, result.digests_matched = bench.nbytes, bench.digests_matched
            result.applied_by, result.carried_by = bench.applied_by, bench.carried_by
            result.save()

        for backend, staged in options.routes:
            name = route(backend, staged)
            await bench.use(backend, staged)
            for requests in options.requests:
                say(f"{name}: decoding {requests} requests")
                first = not result.methods
                work = decoding(requests)
                try:
                    if all(row["requests"] != requests for row in result.control):
                        result.control.append(await control(bench, work, requests))
                    result.methods += await swaps(
                        bench, work, name, backend, requests, naive_too=first
                    )
                finally:
                    await work.stop()
                save()
            if options.window > 0 and not backend.native:
                for requests in options.requests:
                    say(f"{name}: throughput of {requests} requests")
                    work = decoding(requests)
                    try:
                        result.throughput.append(await speed(bench, work, name, staged, requests))
                    finally:
                        await work.stop()
                    save()
    say("measuring the ceiling")
    result.ceiling = measure_ceilings(result.nbytes, [backend for backend, _ in options.routes])
    result.complete = True
    result.save()
    return result


async def control(bench: Bench, work: Load, requests: int) -> dict[str, Any]:
    """What requests stall while nothing is swapped: of a stall, that much is not the swap's."""
    stalls: list[float] = []
    await asyncio.sleep(SLOT_S)  # the first prefill
    moments = min(MOMENTS, bench.options.swaps)
    for _ in range(moments):
        await asyncio.sleep(bench.options.interval)
        work.check()
        async with deadline("control", CONTROL_S, lambda: "the next tokens of every request"):
            seen = [await engine.nothing_swapped() for engine in bench.engines]
        stalls += (stall for of_one in seen for stall in of_one)
    return {"requests": requests, "moments": moments, "stall_s": asdict(stall_stats(stalls))}


async def swaps(
    bench: Bench,
    work: Load,
    name: str,
    backend: TransferBackend,
    requests: int,
    naive_too: bool,
) -> list[Method]:
    """Swap again and again under ``work``."""
    options = bench.options
    pause_s = options.interval
    if backend.native:
        own = Method(name, "vLLM's own transfer and public pause", name, requests)

        async def once(method: Method | None) -> None:
            await bench.theirs(method, 0.0)

        count = options.naive_swaps
    else:
        own = Method(name, "this project's cycle, digests checked", name, requests)
        once = bench.ours
        count = options.swaps
    seed = Method(
        "naive", f"public pause, {naive.SLEEP_S:g} s sleep, one call a step", name, requests
    )
    awake = Method("naive, no sleep", "the same without its sleep after pausing", name, requests)
    for _ in range(options.warmup):
        await asyncio.sleep(pause_s)
        await once(None)
    held = [await bench.held()]
    every = max(1, count // max(1, options.naive_swaps))
    for turn in range(count):
        if turn == count // 2:
            held.append(await bench.held())
        await asyncio.sleep(pause_s)
        work.check()
        await once(own)
        if naive_too and turn % every == 0 and len(seed.samples) < options.naive_swaps:
            await asyncio.sleep(pause_s)
            await bench.theirs(awake, 0.0)
            await asyncio.sleep(pause_s)
            await bench.theirs(seed, naive.SLEEP_S)
            say(f"{turn + 1} of {count} swaps")
    held.append(await bench.held())
    own.growth = resources.growth(held[0], held[-1])
    own.growth_second_half = resources.growth(held[-2], held[-1])
    return [m for m in (own, awake, seed) if m.samples]


async def speed(bench: Bench, work: Load, name: str, staged: bool, requests: int) -> dict[str, Any]:
    """Tokens a second without swaps, with one a second, with one after the other and, staged,
    while bytes always arrive.

    Of the last only the transfer counts: the trainer takes its snapshot once, before it.
    """
    slots = Slots(bench.written)
    count = max(2, round(bench.options.window / SLOT_S))

    async def nothing() -> int:
        await asyncio.sleep(SLOT_S)
        return 0

    async def swap() -> int:
        began = time.perf_counter()
        await bench.ours()
        await asyncio.sleep(max(0.0, SLOT_S - (time.perf_counter() - began)))
        return 1

    async def swap_on_and_on() -> int:
        began, swaps = time.perf_counter(), 0
        while time.perf_counter() - began < SLOT_S:
            await bench.ours()
            swaps += 1
        return swaps

    async def without() -> None:
        await slots.measure("without", nothing)

    async def one_a_second() -> None:
        await slots.measure("one_swap_a_second", swap)

    async def one_after_the_other() -> None:
        await slots.measure("always_swapping", swap_on_and_on)

    async def staging() -> None:
        update, _, _ = await bench.update()

        async def bring() -> int:
            began = time.perf_counter()
            while time.perf_counter() - began < SLOT_S:
                await bench.bring(update)
            return 0

        await slots.measure("always_staging", bring)

    kinds = [without, one_a_second, one_after_the_other, *([staging] if staged else [])]
    await nothing()  # the first prefill
    for turn in range(count):
        work.check()
        for one in kinds if turn % 2 == 0 else reversed(kinds):
            await one()
    row = {"backend": name, "requests": requests, "slots": count, "slot_s": SLOT_S}
    return row | slots.result("without", ("one_swap_a_second", "always_swapping", "always_staging"))


def measure_ceilings(nbytes: int, backends: Sequence[TransferBackend]) -> dict[str, Any]:
    """What the hardware can do at best with as many bytes; None where it was not measured."""
    on_gpu = any(backend is not TransferBackend.GLOO for backend in backends)
    found: dict[str, Any] = {
        "memory_copy": ceiling.summary(
            ceiling.memory_copy(nbytes, "cuda" if on_gpu else "cpu"), nbytes
        )
    }
    links = {
        link
        for backend in backends
        if (link := backend.value.removeprefix("native-")) in ("gloo", "nccl")
    }
    if "nccl" in links:
        found["peer_copy"] = ceiling.peer_copy(nbytes)
    for link in sorted(links):
        try:
            found[f"{link}_broadcast"] = ceiling.broadcasts(link, nbytes)
        except (RuntimeError, queue.Empty) as error:
            say(f"no ceiling of {link}: {error}")  # null in the result, never a made-up zero
            found[f"{link}_broadcast"] = None
    return found


def say(line: str) -> None:
    print(f"sync_latency: {line}", file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--swaps", type=int, default=50, help="swaps by our cycle (default 50)")
    parser.add_argument("--naive-swaps", type=int, default=5, help="naive and native swaps each")
    parser.add_argument("--warmup", type=int, default=3, help="swaps that do not count")
    parser.add_argument("--requests", default="13", help="requests decoding, e.g. 13 or 13,64")
    defaults = ", ".join(f"{count} on a {where.upper()}" for where, count in DECODE_TOKENS.items())
    parser.add_argument("--tokens", type=int, help=f"new tokens a request (default: {defaults})")
    parser.add_argument("--interval", type=float, default=0.3, help="seconds between swaps")
    parser.add_argument("--window", type=float, default=0.0, help="seconds of each throughput")
    parser.add_argument("--model", default="tiny", help="as of python -m orchestrator")
    parser.add_argument("--backends", default="auto", help="e.g. ipc,staged-ipc,native-ipc")
    parser.add_argument("--kv", default="recompute", choices=[k.value for k in KVPolicy])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--plot", type=Path, help="write a PNG here (default: beside --json)")
    options = parser.parse_args(argv)
    try:
        options.requests = [int(part) for part in options.requests.split(",")]
    except ValueError:
        parser.error("--requests takes numbers, e.g. 13 or 13,64")
    counts = (
        options.swaps,
        *options.requests,
        options.warmup,
        1 if options.tokens is None else options.tokens,
    )
    if min(counts) < 1:
        parser.error("--swaps, --requests, --warmup and --tokens must be at least 1")
    for target in (options.json, options.plot):
        if target is not None:
            try:  # now, not after minutes of measuring
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            except OSError as error:
                parser.error(f"cannot write {target}: {error.strerror}")
    return options


def routes(asked: str, gpus: int) -> list[tuple[TransferBackend, bool]]:
    """Backends to compare, by name (ConfigError for one that cannot run here)."""
    names = asked.split(",")
    if asked == "auto":
        link = choose_backend(None, gpus).value
        names = [link, f"staged-{link}", *([f"native-{link}"] if gpus else [])]
    found = []
    for name in names:
        link_name, staged = split_backend(name)
        found.append((choose_backend(link_name, gpus), staged))
    return found


def prepare(options: argparse.Namespace) -> None:
    """Resolve what was asked for, before anything starts (ConfigError)."""
    settings: Settings = load(
        {
            "model": options.model,
            "backend": options.backends.split(",")[0],
            "kv": options.kv,
            "max_in_flight": max(options.requests),
        },
        None,
    )
    prepared = assembly.preflight(settings)
    checked = prepared.checked
    asked = options.tokens
    options.tokens = asked or DECODE_TOKENS["gpu" if checked.gpus else "cpu"]
    context = checked.max_model_len
    if settings.max_model_len is None:
        limit = int(models.read_config(checked.engine_path)["max_position_embeddings"])
        context = max(context, min(2 * options.tokens, limit))
    most = context // 2
    if asked and asked > most:
        raise ConfigError(f"--tokens {asked}: a context of {context} tokens leaves room for {most}")
    options.tokens = min(options.tokens, most)
    options.settings = settings
    options.prepared = replace(prepared, checked=replace(checked, max_model_len=context))
    options.routes = routes(options.backends, checked.gpus)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write. Exit code 1 with one line if something fails."""
    options = parse(argv)
    try:
        prepare(options)
        with (
            tempfile.TemporaryDirectory(prefix="midflight-bench-") as folder,
            operation(run_id="bench"),
        ):
            result = asyncio.run(measure(options, Path(folder)))
    except MidflightError as error:
        print(f"sync_latency: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        kept = "nothing is kept without --json"
        if options.json is not None:
            kept = f"what was measured until then is in {options.json}"
        print(f"sync_latency: interrupted, {kept}", file=sys.stderr)
        return EXIT_INTERRUPTED
    found = result.to_json()
    table.show(found)
    picture = options.plot or (options.json.with_suffix(".png") if options.json else None)
    if picture is not None:
        plot.draw(found, picture)
        say(f"wrote {', '.join(str(p) for p in (options.json, picture) if p)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
