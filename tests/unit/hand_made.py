"""Events made by hand, for tests of what is told about a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator import events as ev
from orchestrator.types import (
    CheckResult,
    Completion,
    EngineInfo,
    FinishReason,
    GenerationRequest,
    KVPolicy,
    OpContext,
    PauseMode,
    PhaseSeconds,
    PolicyVersion,
    Prompt,
    RequestKind,
    Rollout,
    Stall,
    StallStats,
    State,
    SyncReport,
    TokenSpan,
    TrainStats,
    TransferBackend,
    Verdict,
    WeightUpdate,
)

AT = 1_790_000_000.25
OP = OpContext("run-1", "run-1-s1", 1, 1, "SYNCING")


def rollout(
    name: str = "r0.0",
    spans: tuple[tuple[int, int, int], ...] = ((0, 0, 2), (1, 2, 5)),
    kind: RequestKind = RequestKind.ROLLOUT,
    texts: tuple[str, ...] | None = None,
    **changes: Any,
) -> Rollout:
    """A finished request with ``spans`` of (version, start, end)."""
    size = spans[-1][2] if spans else 0
    span_texts = texts or tuple(f"text{n}" for n in range(len(spans)))
    made = Rollout(
        GenerationRequest(name, Prompt((7, 8), f"prompt of {name}"), 32, kind=kind, group="g0"),
        Completion(
            name,
            "engine-0",
            tuple(range(100, 100 + size)),
            tuple(-0.5 for _ in range(size)),
            tuple(TokenSpan(PolicyVersion(v), a, b) for v, a, b in spans),
            FinishReason.LENGTH,
            "".join(span_texts),
            span_texts,
            (Stall("run-1-s1", 0.25),) if len(spans) > 1 else (),
        ),
    )
    return replace(made, **changes)


def probe(name: str = "p1.0", **changes: Any) -> Rollout:
    """A greedy request that one swap cut."""
    return rollout(name, kind=RequestKind.PROBE, **changes)


def checks(fresh: Verdict = Verdict.MATCH) -> tuple[CheckResult, ...]:
    """All three checks with the details that the validator gives."""
    return (
        CheckResult("digest", Verdict.MATCH, {"tensors": 4, "bytes": 288, "differing": []}),
        CheckResult(
            "canary",
            Verdict.MATCH,
            {
                "max_abs_diff": 1e-6,
                "tolerance": 1e-3,
                "control": Verdict.MATCH,
                "control_max_abs_diff": 2e-6,
            },
        ),
        CheckResult(
            "fresh", fresh, {"prompts": 13, "passed": 13, "pass_rate": 1.0, "required": 1.0}
        )
        if fresh is not Verdict.SKIPPED
        else CheckResult("fresh", fresh),
    )


def report(version: int = 1, fresh: Verdict = Verdict.MATCH) -> SyncReport:
    """The swap to ``version``."""
    return SyncReport(
        WeightUpdate(
            f"run-1-s{version}",
            PolicyVersion(version - 1),
            PolicyVersion(version),
            version,
            TransferBackend.GLOO,
            PauseMode.KEEP,
            KVPolicy.RECOMPUTE,
        ),
        13_600_000,
        12,
        PhaseSeconds(0.005, 0.14, 0.01, 0.0015, 0.04),
        StallStats(12, 0.18, 0.2, 0.21),
        checks(fresh),
        1.5,
    )


def stats(step: int = 1, reward: float = 0.25, **changes: Any) -> TrainStats:
    """One optimizer step."""
    return replace(TrainStats(step, 0.125, reward, 0.5, 1024, 0.6), **changes)


def changed(source: State, target: State, seconds: float = 1.0) -> ev.StateChanged:
    """The machine moved."""
    op = replace(OP, state=target.value)
    return ev.StateChanged(AT, op, source, target, "trigger", "because", seconds)


def started() -> ev.EngineStarted:
    """A replica came up."""
    info = EngineInfo("engine-0", 1, "float32", 2048, 320, (11, 12), packages={"vllm": "0.32.0"})
    return ev.EngineStarted(AT, OP, replace(info, hardware="2 cores"))
