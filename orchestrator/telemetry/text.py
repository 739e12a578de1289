"""How a run reads: plain functions from facts to lines and tables."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from orchestrator.telemetry.schema import StallSummary, Summary, SwapRecord
from orchestrator.types import PhaseSeconds, SyncReport


def printable(text: str, limit: int = 160, *, tail: bool = False) -> str:
    """``text`` on one line, cut to ``limit`` (its end with ``tail``), control codes spelt out.

    A model may write anything: escape sequences must not reach the terminal.
    """
    text = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )
    if len(text) <= limit:
        return text
    return "…" + text[1 - limit :] if tail else text[: limit - 1] + "…"


def milliseconds(seconds: float | None) -> str:
    """``0.0123`` as ``12.3 ms``; a dash for what was not measured."""
    if seconds is None:
        return "-"
    if abs(seconds) >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.{1 if abs(seconds) < 0.1 else 0}f} ms"


PHASES = {
    "quiesce": "quiesce",
    "transfer": "transfer",
    "finalize": "finalize",
    "resume": "resume",
    "first token": "first_token",
}
"""How a phase is called -> its field."""


def phases(s: PhaseSeconds) -> str:
    """Phase times of one swap on one line."""
    shown = [f"{name} {milliseconds(getattr(s, field))}" for name, field in PHASES.items()]
    if s.prefetch:
        shown.append(f"prefetch {milliseconds(s.prefetch)} before it")
    return ", ".join(shown)


def swap_line(report: SyncReport, steps: int) -> str:
    """One swap on one line."""
    u, stall = report.update, report.stall_s
    checks = ", ".join(f"{c.check} {c.verdict}" for c in report.checks) or "not checked"
    return (
        f"swap {u.step}/{steps}  v{u.from_version} -> v{u.version}  "
        f"{report.nbytes / 1e6:.1f} MB over {u.route}  {report.requests_in_flight} in flight  "
        f"| {phases(report.seconds)} | stall p50 {milliseconds(stall.p50)}, "
        f"p95 {milliseconds(stall.p95)}, max {milliseconds(stall.max)} | {checks}"
    )


def _check(swap: SwapRecord, name: str) -> str:
    check = swap.checks.get(name)
    if check is None:
        return "-"
    mark = {"match": "ok", "mismatch": "MISMATCH", "skipped": "-"}
    text = mark.get(check.verdict.value, check.verdict.value)
    if "passed" in check.detail:
        count = f"{check.detail['passed']}/{check.detail.get('prompts')}"
        text = count if text == "ok" else f"{count} {text}"
    return text


TABLE_WIDTH = 118
"""Columns the table needs; on a narrower terminal its rows would be folded."""


def swap_table(summary: Summary) -> Table:
    """Every swap with its phases, stall and checks."""
    table = Table(
        title="swaps (times in ms)", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in ("step", "policy", "reward", "cut", *PHASES, "stall p50/95/max"):
        table.add_column(name, justify="right")
    for name in ("digest", "canary", "fresh"):
        table.add_column(name)
    rewards = {t.step: t.reward for t in summary.training}
    for s in summary.swaps:
        reward = rewards.get(s.step)
        table.add_row(
            str(s.step),
            f"v{s.from_version}>v{s.to_version}",
            "-" if reward is None else f"{reward:.3f}",
            str(s.probes_cut + s.rollouts_cut),
            *(_ms(getattr(s.seconds, name)) for name in PHASES.values()),
            "/".join(_ms(x) for x in (s.stall_s.p50, s.stall_s.p95, s.stall_s.max)),
            *(_check(s, name) for name in ("digest", "canary", "fresh")),
        )
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else milliseconds(seconds).removesuffix(" ms")


def _stall(s: StallSummary) -> str:
    return " / ".join(milliseconds(x) for x in (s.p50, s.p95, s.max))


def result_lines(summary: Summary, run_dir: Path) -> list[str]:
    """How the run ended, in plain words; the first line is the outcome."""
    done = f"{summary.steps_done}/{summary.steps} steps, {len(summary.swaps)} swaps"
    lines = [f"{summary.outcome.value}: {done} in {summary.duration_s:.1f} s on {summary.hardware}"]
    if summary.reward:
        shown = " ".join("-" if r is None else f"{r:.3f}" for r in summary.reward)
        lines.append(f"reward by step: {shown}")
    if summary.stall_s.count:
        lines.append(f"stall p50/p95/max: {_stall(summary.stall_s)} ({summary.stall_s.count} seen)")
    verdicts: dict[str, dict[str, int]] = {}
    for swap in summary.swaps:
        for name, check in swap.checks.items():
            counts = verdicts.setdefault(name, {})
            counts[check.verdict.value] = counts.get(check.verdict.value, 0) + 1
    if verdicts:
        each = (f"{k} " + "/".join(f"{n} {v}" for v, n in c.items()) for k, c in verdicts.items())
        lines.append("checks: " + ", ".join(each))
    v = summary.validation
    if v.prompts is not None:
        control = "" if v.control is None else f"; the canary's control: {v.control}"
        lines.append(f"fresh engine: {v.passed} of {v.prompts} probes equal{control}")
    r = summary.rollouts
    tokens = ", ".join(f"v{k} {n}" for k, n in summary.tokens.items()) or "none"
    lines.append(
        f"requests: {r.finished} ended, {r.trained} trained on, {r.cut} cut; "
        f"tokens by version: {tokens}"
    )
    lines.append(f"files: {run_dir}/ (summary.json, rollouts.jsonl, events.jsonl, config.yaml)")
    return lines
