"""Values of a run as the records of :mod:`orchestrator.telemetry.schema`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import JsonValue

from orchestrator.telemetry import schema
from orchestrator.telemetry.jsonl import clean
from orchestrator.types import Rollout, StallStats, SyncReport, Verdict


def finite(value: object) -> float | None:
    """``value`` if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def swap_record(
    report: SyncReport, probes_cut: int = 0, rollouts_cut: int = 0
) -> schema.SwapRecord:
    """The entry of ``summary.json`` for one swap."""
    u, s = report.update, report.seconds
    return schema.SwapRecord(
        step=u.step,
        sync_id=u.sync_id,
        from_version=u.from_version,
        to_version=u.version,
        backend=u.route,
        kv_policy=u.kv_policy,
        pause_mode=u.pause_mode,
        bytes=report.nbytes,
        requests_in_flight=report.requests_in_flight,
        probes_cut=probes_cut,
        rollouts_cut=rollouts_cut,
        seconds=schema.PhaseRecord(
            quiesce=finite(s.quiesce),
            transfer=finite(s.transfer),
            finalize=finite(s.finalize),
            resume=finite(s.resume),
            first_token=finite(s.first_token),
            prefetch=finite(s.prefetch) if u.at_hand else None,
        ),
        stall_s=stall_record(report.stall_s),
        validate_s=finite(report.validate_s),
        checks={
            c.check: schema.CheckRecord(verdict=c.verdict, detail=_plain(c.detail))
            for c in report.checks
        },
    )


def stall_record(stats: StallStats) -> schema.StallSummary:
    """A distribution, without what is not a number."""
    return schema.StallSummary(
        count=stats.count, p50=finite(stats.p50), p95=finite(stats.p95), max=finite(stats.max)
    )


def rollout_record(rollout: Rollout, status: schema.RolloutStatus) -> schema.RolloutRecord:
    """The line of ``rollouts.jsonl`` for ``rollout``."""
    request, done = rollout.request, rollout.completion
    texts = (*done.span_texts, *[""] * len(done.spans))
    return schema.RolloutRecord(
        id=request.request_id,
        kind=request.kind,
        status=status,
        group=request.group,
        prompt=request.prompt.text,
        prompt_token_ids=list(request.prompt.token_ids),
        token_ids=list(done.token_ids),
        text=done.text,
        logprobs=[finite(p) for p in done.logprobs],
        spans=[
            schema.SpanRecord(version=s.version, start=s.start, end=s.end, text=text)
            for s, text in zip(done.spans, texts, strict=False)
        ],
        reward=finite(rollout.reward),
        staleness=rollout.staleness,
        finish_reason=done.finish_reason,
        engine=done.engine,
        stalls=[
            schema.StallRecord(sync_id=s.sync_id, seconds=finite(s.seconds)) for s in done.stalls
        ],
        temperature=request.temperature,
        seed=request.seed,
    )


def _plain(detail: Mapping[str, object]) -> dict[str, JsonValue]:
    return cast(dict[str, JsonValue], clean(detail))


def validation_record(swaps: Sequence[schema.SwapRecord]) -> schema.ValidationRecord:
    """The last fresh check and the last canary that ran."""
    last: dict[str, tuple[Verdict, Mapping[str, Any]]] = {}
    for swap in swaps:
        for name, check in swap.checks.items():
            if check.verdict is not Verdict.SKIPPED:
                last[name] = (check.verdict, check.detail)
    _, fresh = last.get("fresh", (Verdict.SKIPPED, {}))
    canary = None
    if "canary" in last:
        verdict, detail = last["canary"]
        canary = schema.CanaryRecord(
            verdict=verdict,
            control=_word(detail.get("control")),
            max_abs_diff=finite(detail.get("max_abs_diff")),
            control_max_abs_diff=finite(detail.get("control_max_abs_diff")),
            tolerance=finite(detail.get("tolerance")),
        )
    control = canary.control if canary else None
    return schema.ValidationRecord(
        prompts=_count(fresh.get("prompts")),
        passed=_count(fresh.get("passed")),
        pass_rate=finite(fresh.get("pass_rate")),
        required=finite(fresh.get("required")),
        control=control if control is not None else _word(fresh.get("control")),
        canary=canary,
    )


def _word(value: object) -> str | None:
    return None if value is None else str(clean(value))


def _count(value: object) -> int | None:
    if isinstance(value, list | tuple):
        return len(value)
    number = finite(value)
    return None if number is None else int(number)
