"""Observer that turns events into log lines, and lines from actors into events."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from orchestrator import events as ev
from orchestrator.telemetry.jsonl import describe
from orchestrator.telemetry.log import LEVELS, LogPipeline, format_traceback
from orchestrator.types import OpContext, Outcome


class EventLog:
    """Observer that turns every event into a line."""

    def __init__(self, pipeline: LogPipeline) -> None:
        self._write = pipeline.write

    def __call__(self, event: ev.Event) -> None:
        level, name, fields = _describe_event(event)
        self._write(level, name, op=event.op, at=event.at, **fields)


def _describe_event(event: ev.Event) -> tuple[str, str, dict[str, Any]]:
    match event:
        case ev.StateChanged():
            return (
                "debug",
                "state changed",
                {
                    "source": event.source,
                    "target": event.target,
                    "state": event.target,
                    "trigger": event.trigger,
                    "reason": event.reason,
                    "seconds": event.seconds,
                },
            )
        case ev.EngineStarted(info=info):
            return (
                "info",
                "engine started",
                {
                    "actor": info.name,
                    "workers": info.workers,
                    "dtype": info.dtype,
                    "max_model_len": info.max_model_len,
                    "vocab_size": info.vocab_size,
                    "pids": info.pids,
                    "node_ip": info.node_ip,
                    "packages": info.packages,
                    "hardware": info.hardware,
                    "console_level": "debug",
                },
            )
        case ev.TrainerStarted(info=trainer):
            return (
                "debug",
                "trainer process started",
                {"actor": "trainer", "pids": trainer.pids, "node_ip": trainer.node_ip},
            )
        case ev.PrefetchStarted(update=u):
            return "debug", "prefetch started", {"step": u.step, "version": u.version}
        case ev.FaultInjected():
            return (
                "warning",
                f"injected {event.kind} into {event.actor} at {event.place} of step {event.step}",
                {
                    "kind": event.kind,
                    "target": event.actor,
                    "place": event.place,
                    "step": event.step,
                    "pids": event.pids,
                    "seconds": event.seconds,
                },
            )
        case ev.RolloutFinished(rollout=r):
            return (
                "debug",
                "rollout finished",
                {
                    "id": r.request.request_id,
                    "kind": r.request.kind,
                    "engine": r.completion.engine,
                    "tokens": len(r.completion.token_ids),
                    "cut": r.cut,
                    "finish_reason": r.completion.finish_reason,
                    "spans": [(s.version, s.start, s.end) for s in r.completion.spans],
                },
            )
        case ev.RolloutConsumed(rollout=r):
            level = "debug" if event.accepted else "info"
            name = "rollout consumed" if event.accepted else "rollout too old, discarded"
            return (
                level,
                name,
                {"id": r.request.request_id, "staleness": r.staleness, "console_level": "debug"},
            )
        case ev.TrainStepDone(stats=s):
            return (
                "info",
                "train step done",
                {
                    "train_step": s.step,
                    "loss": s.loss,
                    "reward": s.reward,
                    "tokens": s.tokens,
                    "grad_norm": s.grad_norm,
                    "seconds": s.seconds,
                    "rollouts": [r.request.request_id for r in event.rollouts],
                    "shown_elsewhere": True,
                },
            )
        case ev.SwapDone(report=report):
            u = report.update
            return (
                ("info" if report.ok else "error"),
                "swap done",
                {
                    "sync_id": u.sync_id,
                    "step": u.step,
                    "version": u.version,
                    "from_version": u.from_version,
                    "backend": u.route,
                    "kv_policy": u.kv_policy,
                    "pause_mode": u.pause_mode,
                    "bytes": report.nbytes,
                    "requests_in_flight": report.requests_in_flight,
                    "seconds": report.seconds,
                    "stall_s": report.stall_s,
                    "checks": report.checks,
                    "validate_s": report.validate_s,
                    "shown_elsewhere": True,
                },
            )
        case ev.SwapFailed(error=error):
            off = isinstance(error, asyncio.CancelledError)
            return (
                ("info" if off else "error"),
                "swap called off" if off else "swap failed",
                {
                    "error": describe(error),
                    "fenced": event.fenced,
                    "traceback": format_traceback(error),
                    "shown_elsewhere": True,
                },
            )
        case ev.ReplicaDied():
            return "error", "process died", {"actor": event.actor, "cause": event.cause}
        case ev.ReplicaAdmitted():
            return (
                "warning",
                f"{event.engine} serves version {event.version} again",
                {"engine": event.engine, "after_s": round(event.seconds, 3)},
            )
        case ev.ActorLogged():
            quiet = "debug" if LEVELS.get(event.level, 20) < LEVELS["warning"] else None
            fields = {k: v for k, v in event.fields.items() if k not in _RESERVED}
            return (
                event.level,
                event.message,
                {**fields, "actor": event.actor, "console_level": quiet},
            )
        case ev.CheckpointWritten():
            fields = {"path": event.path, "seconds": event.seconds}
            return "info", "checkpoint written", fields
        case ev.RunResumed():
            return "info", "run resumed", {"resumed_step": event.step, "path": event.path}
        case ev.RunEnded():
            bad = event.outcome is Outcome.FAILED
            fields = {"outcome": event.outcome, "final_version": event.version}
            if event.error is not None:
                fields |= {
                    "error": describe(event.error),
                    "traceback": format_traceback(event.error),
                }
            return ("error" if bad else "info"), "run ended", {**fields, "shown_elsewhere": True}
        case _:
            return "debug", type(event).__name__, {"data": event}


_RESERVED = ("op", "at", "shown_elsewhere", "console_level")


def actor_event(actor: str, data: dict[str, Any]) -> ev.ActorLogged:
    """The event for a dict that came out of an actor, with that actor's own time and context."""
    rest = dict(data)
    at = rest.pop("at", None)
    op = OpContext(
        run_id=str(rest.pop("run_id", "") or ""),
        sync_id=rest.pop("sync_id", None),
        step=rest.pop("step", None),
        version=rest.pop("version", None),
        state=rest.pop("state", None),
    )
    return ev.ActorLogged(
        at=float(at) if isinstance(at, int | float) else datetime.now(UTC).timestamp(),
        op=op,
        actor=str(rest.pop("actor", "") or actor),
        level=str(rest.pop("level", "info")).lower(),
        message=str(rest.pop("event", "")),
        fields=rest,
    )
