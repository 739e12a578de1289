"""How long requests stall when a policy's weights are swapped under them, on real parts.

    python benchmarks/sync_latency.py --swaps 50 --json out.json

A real engine decodes all the time; its weights are swapped again and again over one backend after
the other, and by the naive way of published examples, all in one run. The ceiling of the same bytes
is measured in that run too. Durations on a busy CPU are noisy; their ratios are not.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ceiling
import load_options
import naive
import plot
import resources
import table
from bench import Bench, real_parts, say
from load import Load, Slots
from results import Method, Result

from orchestrator.cycle import stall_stats
from orchestrator.tasks import deadline
from orchestrator.types import (
    TransferBackend,
    route,
)

CONTROL_S = 60.0
"""What requests may take to write a few tokens more."""
MOMENTS = 100
"""At which nothing is swapped, for the control."""
SLOT_S = 1.0
"""Of a throughput's alternating slots."""


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
    async with real_parts(options.settings, options.prepared, run_dir) as bench:
        engines = [replica.engine for replica in bench.fleet.serving]
        result.hardware, result.packages = bench.parts.hardware, dict(bench.parts.packages)

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
                        result.control.append(await control(bench, work, requests, options))
                    result.methods += await swaps(
                        bench, work, name, backend, requests, options, naive_too=first
                    )
                finally:
                    await work.stop()
                save()
            if options.window > 0 and not backend.native:
                for requests in options.requests:
                    say(f"{name}: throughput of {requests} requests")
                    work = decoding(requests)
                    try:
                        row = await speed(bench, work, options.window, staged)
                        result.throughput.append({"backend": name, "requests": requests} | row)
                    finally:
                        await work.stop()
                    save()
    say("measuring the ceiling")
    result.ceiling = measure_ceilings(result.nbytes, [backend for backend, _ in options.routes])
    result.complete = True
    result.save()
    return result


async def control(
    bench: Bench, work: Load, requests: int, options: argparse.Namespace
) -> dict[str, Any]:
    """What requests stall while nothing is swapped: of a stall, that much is not the swap's."""
    stalls: list[float] = []
    await asyncio.sleep(SLOT_S)  # the first prefill
    moments = min(MOMENTS, options.swaps)
    for _ in range(moments):
        await asyncio.sleep(options.interval)
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
    options: argparse.Namespace,
    naive_too: bool,
) -> list[Method]:
    """Swap again and again under ``work``."""
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


async def speed(bench: Bench, work: Load, window: float, staged: bool) -> dict[str, Any]:
    """Tokens a second without swaps, with one a second, with one after the other and, staged,
    while bytes always arrive.

    Of the last only the transfer counts: the trainer takes its snapshot once, before it.
    """
    slots = Slots(bench.written)
    count = max(2, round(window / SLOT_S))

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

    # As near to those without as can be: what drifts, as contexts grow, comes least between them.
    kinds = [one_a_second, without, *([staging] if staged else []), one_after_the_other]
    await nothing()  # the first prefill
    for turn in range(count):
        work.check()
        for one in kinds if turn % 2 == 0 else reversed(kinds):
            await one()
    row = {"slots": count, "slot_s": SLOT_S}
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


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--swaps", type=int, default=50, help="swaps by our cycle (default 50)")
    parser.add_argument("--naive-swaps", type=int, default=5, help="naive and native swaps each")
    parser.add_argument("--interval", type=float, default=0.3, help="seconds between swaps")
    parser.add_argument("--window", type=float, default=0.0, help="seconds of each throughput")
    parser.add_argument("--backends", default="auto", help="e.g. ipc,staged-ipc,native-ipc")
    parser.add_argument("--plot", type=Path, help="write a PNG here (default: beside --json)")
    return load_options.parse(parser, argv, at_least_one=["swaps"], targets=["plot"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write. Exit code 1 with one line if something fails."""
    options = parse(argv)
    result = load_options.run("sync_latency", options, options.backends, measure)
    found = result.to_json()
    table.show(found)
    picture = options.plot or (options.json.with_suffix(".png") if options.json else None)
    if picture is not None:
        plot.draw(found, picture)
        say(f"wrote {', '.join(str(p) for p in (options.json, picture) if p)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
