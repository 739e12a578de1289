"""A sync_latency result on the console."""

from __future__ import annotations

import sys
from typing import Any

import plot


def show(result: dict[str, Any]) -> None:
    """Tables of stalls, throughput, ceilings and ratios."""
    from rich.console import Console
    from rich.table import Table

    # A pipe has no width: never squeeze the numbers there.
    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table(title=f"{result['model']}: {result['bytes'] / 1e6:.1f} MB, KV "
                        f"{result['kv_policy']} (ms)")  # fmt: skip
    columns = ("method", "requests", "swaps", "stall p50", "p95", "max", *plot.PHASES, "prefetch")
    for column in (*columns, "GB/s usable"):
        table.add_column(
            column.replace("_", " "), justify="left" if column == "method" else "right"
        )
    for method in result["methods"]:
        stall, speed = method["stall_s"], method["gb_per_s_until_usable"]
        table.add_row(
            method["name"],
            str(method["requests"]),
            str(method["swaps"]),
            *(ms(stall[k]) for k in ("p50", "p95", "max")),
            *(ms(method["phases"][p]["p50"]) for p in (*plot.PHASES, "prefetch")),
            "-" if speed is None else f"{speed:.3f}",
        )
    console.print(table)
    for row in result["control"]:
        stall = ", ".join(f"{k} {ms(row['stall_s'][k])}" for k in ("p50", "p95", "max"))
        console.print(f"nothing swapped, {row['requests']} requests: stall {stall}")
    if result["throughput"]:
        console.print(_throughput(result["throughput"]))
    for name, top in result["ceiling"].items():
        words = (
            "not measured" if top is None else f"{ms(top['p50_s'])} ms, {top['gb_per_s']:.2f} GB/s"
        )
        console.print(f"ceiling, {name.replace('_', ' ')}: {words}{_buckets(top or {})}")
    for name, value in result["ratio"].items():
        console.print(f"{name}: {value:.2f}")
    for method in result["methods"]:
        if method["growth"] is not None:
            name, swaps = method["name"], method["swaps"]
            outside = (
                f"stage {ms(method['stage_s']['p50'])}, digest {ms(method['digest_s']['p50'])}"
            )
            console.print(f"{name}, outside the stall (p50, ms): {outside}")
            console.print(f"{name}, held more after {swaps} swaps: {_growth(method['growth'])}")
            late = _growth(method["growth_second_half"])
            console.print(f"{name}, of that in the second half: {late}")
    for backend, how in result["applied_by"].items():
        console.print(f"{backend} is applied by {how}")
    for backend, over in result["carried_by"].items():
        console.print(f"{backend} is carried by {over}")
    console.print(f"hardware: {result['hardware']}")


def _throughput(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="tokens a second")
    for column in (
        "backend",
        "requests",
        "without",
        "a swap a second",
        "always swapping",
        "always staging",
        "a swap costs",
    ):
        table.add_column(column, justify="left" if column == "backend" else "right")
    for row in rows:
        speed, share = row["tokens_per_s"], row["share"]
        cells = [
            f"{speed[key]:.0f} ({share[key]:.1%}{_error(row, key)})"
            if share.get(key) is not None
            else "-"
            for key in ("one_swap_a_second", "always_swapping", "always_staging")
        ]
        # Results from before it was measured have none.
        cost, error = (
            row.get(key, {}).get("always_swapping")
            for key in ("swap_costs_s", "swap_costs_error_s")
        )
        cells.append("-" if cost is None else f"{ms(cost)} \u00b1 {ms(error)} ms")
        table.add_row(row["backend"], str(row["requests"]), f"{speed['without']:.0f}", *cells)
    return table


def _error(row: dict[str, Any], key: str) -> str:
    error = row["share_error"][key]
    return "" if error is None else f" \u00b1 {error:.1%}"


def _buckets(top: dict[str, Any]) -> str:
    if len(top.get("by_bucket", ())) < 2:
        return ""
    all_of_them = ", ".join(f"{b} {s['gb_per_s']:.0f}" for b, s in top["by_bucket"].items())
    return f" (best by bucket: {top['bucket']}; GB/s: {all_of_them})"


def _growth(found: dict[str, Any]) -> str:
    words = []
    for name, value in found.items():
        if value is None:
            continue
        shown = f"{value / 2**20:+.1f} MiB" if name.endswith("bytes") else f"{value:+d}"
        words.append(f"{name.removesuffix('_bytes').replace('_', ' ')} {shown}")
    return ", ".join(words)


def ms(seconds: float | None) -> str:
    """Milliseconds with as many digits as they deserve."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"
