"""What a swap and each of its parts take away from decoding, in milliseconds of it.

    python benchmarks/swap_costs.py --slots 12 --requests 13,64 --json costs.json

Slots of half a second take turns: in some nothing is done, in the others one thing again and
again. Options are those of sync_latency.py, which measures what requests see instead; the first
backend counts.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import sync_latency
from bench import Bench, real_parts
from load import Load, Slots
from results import as_text
from table import ms

from orchestrator.context import operation
from orchestrator.errors import EXIT_INTERRUPTED, MidflightError
from orchestrator.types import WeightUpdate, route

SLOT_S = 0.5
NOTHING = "nothing"


Part = Callable[[WeightUpdate], Awaitable[object]]
"""Whole on return; of an update that the trainer has taken its snapshot for."""


def parts(bench: Bench) -> dict[str, Part]:
    """What may be done again and again, by name."""
    return {
        "snapshot and its digest, by the trainer": lambda update: bench.update(),
        "prefetch": bench.bring,
        "digest by the engine": bench.digest,
        "the whole swap": lambda update: bench.ours(),
    }


async def costs(bench: Bench, work: Load, slots: int) -> dict[str, Any]:
    """Of each part under ``work``; see :meth:`load.Slots.result`."""
    found = Slots(bench.written)
    ways = parts(bench)

    async def nothing(update: WeightUpdate) -> int:
        await asyncio.sleep(SLOT_S)
        return 0

    def again(part: Part) -> Callable[[WeightUpdate], Awaitable[int]]:
        async def over(update: WeightUpdate) -> int:
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < SLOT_S:
                await part(update)
                await asyncio.sleep(0)  # where the part is none, others must run all the same
                count += 1
            return count

        return over

    kinds = {NOTHING: nothing} | {name: again(part) for name, part in ways.items()}
    await bench.ours()
    for turn in range(slots):
        work.check()
        for name in kinds if turn % 2 == 0 else reversed(kinds):
            update, _, _ = await bench.update()
            await found.measure(name, functools.partial(kinds[name], update))
    return {"slots": slots, "slot_s": SLOT_S} | found.result(NOTHING, list(ways))


async def measure(options: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """Everything, in one run."""
    backend, staged = options.routes[0]
    async with real_parts(options.settings, options.prepared, run_dir) as bench:
        await bench.use(backend, staged)
        rows = []
        for requests in options.requests:
            work = Load(bench.engines, options.prepared.checked.prompts, requests, options.tokens)
            try:
                await asyncio.sleep(2 * SLOT_S)  # the first prefill
                for _ in range(options.warmup):
                    await bench.ours()
                rows.append({"requests": requests} | await costs(bench, work, options.slots))
            finally:
                await work.stop()
        return {
            "hardware": bench.parts.hardware,
            "packages": dict(bench.parts.packages),
            "model": options.settings.model,
            "backend": route(backend, staged),
            "kv_policy": options.kv,
            "request_tokens": options.tokens,
            "bytes": bench.nbytes,
            "rows": rows,
        }


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
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0] if __doc__ else None,
        epilog="Further options: see sync_latency.py --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--slots", type=int, default=12, help="of each kind (default 12)")
    own, others = parser.parse_known_args(argv)
    if own.slots < 2:
        parser.error("--slots must be at least 2: the error is from their differences")
    options = sync_latency.parse(others)
    options.slots = own.slots
    try:
        sync_latency.prepare(options)
        with (
            tempfile.TemporaryDirectory(prefix="midflight-bench-") as folder,
            operation(run_id="bench"),
        ):
            found = asyncio.run(measure(options, Path(folder)))
    except MidflightError as error:
        print(f"swap_costs: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("swap_costs: interrupted, nothing is kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    show(found)
    if options.json is not None:
        options.json.write_text(as_text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
