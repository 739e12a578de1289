"""What is printed of simulated runs."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.simulate.result import SimulationResult, Spread

_COLUMNS = (
    "replicas",
    "pause p50 / p99, ms",
    "commit p50 / p99, ms",
    "controller CPU in a swap p50 / p99, ms",
    "a replica, µs",
    "waits it adds p99, ms",
    "CPU a replica and step, ms",
    "requests",
    "lost",
    "faults met",
    "recovery p50 / p99, s",
)


def _short(value: float | None) -> str:
    if value is None:
        return "–"  # noqa: RUF001
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _ms(seconds: float | None) -> str:
    return _short(None if seconds is None else 1000 * seconds)


def _pair(spread: Spread, scale: float = 1000.0) -> str:
    if spread.p50 is None or spread.p99 is None:
        return _short(None)
    return f"{_short(scale * spread.p50)} / {_short(scale * spread.p99)}"


def _cells(result: SimulationResult) -> tuple[str, ...]:
    engines = int(result.scenario["engines"])
    middle = result.overhead_cpu_s.p50
    each = None if middle is None else 1000 * middle / engines
    met, planned = sum(result.faults_struck.values()), sum(result.faults.values())
    return (
        f"{engines:,}",
        _pair(result.pause_s),
        _pair(result.commit_s),
        _pair(result.overhead_cpu_s),
        _ms(each),
        _ms(result.waiting_s.p99),
        _ms(result.controller_cpu_per_replica_step_s),
        f"{result.requests:,}",
        f"{result.requests_lost:,}",
        f"{met:,} of {planned:,}",
        _pair(result.recovery_s, 1.0),
    )


def markdown(results: Sequence[SimulationResult]) -> str:
    """A table with a line a run."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + " --- |" * len(_COLUMNS)]
    lines += ["| " + " | ".join(_cells(result)) + " |" for result in results]
    lines += [f"\n{_ended(result)}" for result in results if not result.ok]
    return "\n".join(lines)


def show(result: SimulationResult) -> None:
    """Print one run, a line a value."""
    steps = f"{result.steps} of {result.scenario['steps']}"
    rows = [
        ("replicas", _cells(result)[0]),
        ("steps", f"{steps}, {result.swaps} swaps, {result.failed_swaps} failed"),
        *zip(_COLUMNS[1:7], _cells(result)[1:7], strict=True),
        ("requests", f"{result.requests:,}, {result.requests_lost:,} lost"),
        ("tokens", f"{result.tokens_written:,} written, {result.tokens_lost:,} lost"),
        *_fault_rows(result),
        ("virtual seconds", f"{result.seconds:.1f}"),
        (
            "CPU seconds",
            f"{result.controller_cpu_s:.2f} controller, {result.simulation_cpu_s:.2f} simulation, "
            f"{result.collection_cpu_s:.2f} garbage collection",
        ),
        ("trace", result.trace),
        ("ended", _ended(result)),
    ]
    for name, value in rows:
        print(f"{name:<40}{value}")


def _fault_rows(result: SimulationResult) -> list[tuple[str, str]]:
    if not result.faults:
        return []
    kinds = (
        f"{kind} {result.faults_struck.get(kind, 0):,} of {planned:,}"
        for kind, planned in result.faults.items()
    )
    seconds = _pair(result.recovery_s, 1.0)
    recovered = (
        f"{result.recovery_s.count:,}, p50 / p99 {seconds} s, {result.still_out:,} still out"
    )
    return [("faults met", ", ".join(kinds)), ("recoveries", recovered)]


def _ended(result: SimulationResult) -> str:
    if result.ok:
        return "completed: no request lost, every invariant held"
    engines = f"{result.scenario['engines']:,} replicas"
    parts = [result.error or "completed", f"{result.requests_lost:,} requests lost"]
    parts += list(result.broken[:5])
    if len(result.broken) > 5:
        parts.append(f"and {len(result.broken) - 5:,} more")
    return f"{engines}: {'; '.join(parts)}"
