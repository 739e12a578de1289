"""What a swap and each of its parts take away from decoding, in milliseconds of it.

    python benchmarks/swap_costs.py --slots 12 --requests 13,64 --json costs.json

Slots of half a second take turns: in some nothing is done, in the others one thing again and
again. What requests see of a swap, sync_latency.py measures.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import load_options
from bench import Bench, real_parts
from load import Load, Slots
from results import as_text
from table import ms

from orchestrator.telemetry.jsonl import write_atomic
from orchestrator.types import WeightUpdate, route

SLOT_S = 0.5
NOTHING = "nothing"


Part = Callable[[WeightUpdate], Awaitable[object]]
"""Whole on return; of an update that the trainer has taken its snapshot for."""


def parts(bench: Bench, update: WeightUpdate) -> dict[str, Part]:
    """What may be done again and again, by name; of ``update``'s kind."""
    found: dict[str, Part] = {"snapshot and its digest, by the trainer": lambda _: bench.update()}
    if update.at_hand:
        found["prefetch"] = bench.bring
    found["digest by the engine"] = bench.digest
    found["the whole swap"] = lambda _: bench.ours()
    return found


async def costs(bench: Bench, work: Load, slots: int) -> dict[str, Any]:
    """Of each part under ``work``; see :meth:`load.Slots.result`."""
    found = Slots(bench.written)
    await bench.ours()
    ways = parts(bench, (await bench.update())[0])

    async def nothing(update: WeightUpdate) -> int:
        await asyncio.sleep(SLOT_S)
        return 0

    def again(part: Part) -> Callable[[WeightUpdate], Awaitable[int]]:
        async def over(update: WeightUpdate) -> int:
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < SLOT_S:
                await part(update)
                count += 1
            return count

        return over

    kinds = {NOTHING: nothing} | {name: again(part) for name, part in ways.items()}
    for turn in range(slots):
        work.check()
        for name in kinds if turn % 2 == 0 else reversed(kinds):
            update, _, _ = await bench.update()
            await found.measure(name, functools.partial(kinds[name], update))
    return {"slots": slots, "slot_s": SLOT_S} | found.result(NOTHING, list(ways))


async def measure(options: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """Everything, in one run; what has been measured is saved as it comes."""
    backend, staged = options.routes[0]
    found: dict[str, Any] = {
        "model": options.settings.model,
        "backend": route(backend, staged),
        "kv_policy": options.kv,
        "request_tokens": options.tokens,
        "rows": [],
    }
    async with real_parts(options.settings, options.prepared, run_dir) as bench:
        found |= {"hardware": bench.parts.hardware, "packages": dict(bench.parts.packages)}
        await bench.use(backend, staged)
        for requests in options.requests:
            work = Load(bench.engines, options.prepared.checked.prompts, requests, options.tokens)
            try:
                await asyncio.sleep(2 * SLOT_S)  # the first prefill
                for _ in range(options.warmup):
                    await bench.ours()
                row = {"requests": requests} | await costs(bench, work, options.slots)
            finally:
                await work.stop()
            found["rows"].append(row)
            found["bytes"] = bench.nbytes
            if options.json is not None:
                write_atomic(options.json, as_text(found))
    return found


def show(found: dict[str, Any]) -> None:
    """A line for each part."""
    for row in found["rows"]:
        speed = row["tokens_per_s"][NOTHING]
        print(f"{found['backend']}, {row['requests']} requests, {speed:.0f} tokens/s without")
        for name, cost in row["swap_costs_s"].items():
            error, count = row["swap_costs_error_s"][name], row["swaps"][name]
            print(f"  {name}: {ms(cost)} \u00b1 {ms(error)} ms of decoding ({count} times)")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write. Exit code 1 with one line if something fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--slots", type=int, default=12, help="of each kind (default 12)")
    parser.add_argument("--backend", default="auto", help="e.g. ipc, staged-ipc, staged-gloo")
    options = load_options.parse(parser, argv)
    if options.slots < 2:
        parser.error("--slots must be at least 2: the error is from their differences")
    found = load_options.run("swap_costs", options, options.backend, measure)
    show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
