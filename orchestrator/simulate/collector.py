"""An observer that measures a simulated run, checks its invariants and hashes its trace."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from orchestrator.events import (
    EngineStarted,
    Event,
    ReplicaAdmitted,
    ReplicaDied,
    RolloutConsumed,
    RolloutFinished,
    RunEnded,
    StateChanged,
    SwapDone,
    SwapFailed,
    TrainStepDone,
)
from orchestrator.simulate.meter import Meter
from orchestrator.simulate.parts import Injector
from orchestrator.testing import Call
from orchestrator.types import PolicyVersion, Rollout, State

_IN_ONE_CALL = ("swap", "wait_first_tokens")
_MANY_CALLS = ("pause", "start_update", "finish_update", "resume", "wait_first_tokens")


class Collector:
    """``version`` is the newest published one; ``limit`` the staleness that is allowed."""

    def __init__(
        self,
        meter: Meter,
        injector: Injector,
        version: Callable[[], PolicyVersion],
        limit: int | None,
    ) -> None:
        self.steps = self.swaps = self.failed_swaps = self.deaths = 0
        self.tokens = 0
        """Handed over."""
        self.pause: list[float] = []
        self.commit: list[float] = []
        self.stopped: list[float] = []
        self.waiting: list[float] = []
        self.overhead_cpu: list[float] = []
        self.recovery: list[float] = []
        self.broken: list[str] = []
        self._meter, self._injector = meter, injector
        self._version, self._limit = version, limit
        self._asked: set[str] = set()
        self._answered: set[str] = set()
        self._down: dict[str, float] = {}
        self._hash = hashlib.sha256()
        self._newest = PolicyVersion(0)
        self._ended = False
        self._pausing: tuple[float, float] | None = None
        """When the pause of this swap was asked for, and the controller's CPU seconds then."""

    @property
    def trace(self) -> str:
        """Digest of everything so far."""
        return self._hash.hexdigest()

    @property
    def requests(self) -> int:
        """Given to an engine so far; parts of one that was cut count once."""
        return len(self._asked)

    @property
    def still_out(self) -> int:
        """Engines that died or were fenced and have not served again."""
        return sum(not name.startswith("trainer") for name in self._down)

    @property
    def lost(self) -> list[str]:
        """Requests that were given to an engine and have no answer, in order."""
        return sorted(self._asked - self._answered)

    def called(self, call: Call) -> None:
        """A call at a simulated actor begins."""
        self._write("call", call.actor, call.method)
        if call.method == "generate":
            request = call.args[0]
            self._asked.add(getattr(request, "request_id", "").partition("+")[0])

    def observe(self, event: Event) -> None:
        """Takes one event; on the simulation's account."""
        self._meter.run(self._observe, event)

    def _observe(self, event: Event) -> None:
        version = self._version()
        if version < self._newest:
            self.broken.append(f"version {version} after {self._newest}")
        self._newest = version
        if self._ended:
            self.broken.append(f"{type(event).__name__} after RunEnded")
        match event:
            case StateChanged():
                self._write("state", event.source, event.trigger, event.target)
                self._moved(event)
            case EngineStarted(info=info):
                self._write("started", info.name)
            case RolloutFinished(rollout=rollout):
                self._finished(rollout, version)
            case RolloutConsumed(rollout=rollout, accepted=accepted):
                stale = rollout.staleness
                self._write("consumed", rollout.request.request_id, accepted, stale)
                over = accepted and self._limit is not None and (stale or 0) > self._limit
                if over:
                    self.broken.append(f"{rollout.request.request_id} is {stale} versions stale")
            case TrainStepDone(stats=stats):
                self.steps += 1
                self._write("trained", stats.step, stats.tokens)
            case SwapDone():
                self._swapped(event)
            case SwapFailed(error=error, fenced=fenced):
                self.failed_swaps += 1
                self._write("swap failed", error, fenced)
                for name in fenced:
                    self._is_down(name)
            case ReplicaDied(actor=actor, cause=cause):
                self.deaths += 1
                self._write("died", actor, cause)
                self._is_down(actor)
            case RunEnded(outcome=outcome):
                self._ended = True
                self._write("ended", outcome, version)
            case ReplicaAdmitted(engine=engine):
                self._write("admitted", engine)
                self._is_up(engine)
            case _:
                self._write(type(event).__name__)

    # -- inside -----------------------------------------------------------------------------

    def _write(self, *parts: object) -> None:
        line = "\t".join((f"{_now():.9f}", *map(str, parts)))
        self._hash.update(line.encode() + b"\n")

    def _moved(self, move: StateChanged) -> None:
        if move.trigger in ("pause", "retry"):
            self._pausing = _now(), self._meter.controller_s
            self._meter.forget_calls()
        elif self._pausing is None:
            return
        elif move.target is State.SYNCING:
            self.pause.append(move.seconds)
        elif move.target is State.RESUMING:
            self.commit.append(move.seconds)
        elif move.target is State.VALIDATING:
            began, cpu = self._pausing
            self._pausing = None
            self.stopped.append(_now() - began)
            self.waiting.append(max(0.0, _now() - began - self._longest()))
            self.overhead_cpu.append(self._meter.controller_s - cpu)
        elif move.target is not State.PAUSING:
            self._pausing = None

    def _longest(self) -> float:
        """What the data plane needs for a swap: the slowest replica of each phase."""
        took = self._meter.longest
        if "swap" in took:
            return sum(took.get(method, 0.0) for method in _IN_ONE_CALL)
        moved = max(took.get("receive_update", 0.0), took.get("send", 0.0))
        return moved + sum(took.get(method, 0.0) for method in _MANY_CALLS)

    def _finished(self, rollout: Rollout, version: PolicyVersion) -> None:
        request, done = rollout.request, rollout.completion
        name, tokens = request.request_id, len(done.token_ids)
        self._write("finished", name, done.engine, done.finish_reason, done.spans)
        self.tokens += tokens
        if name in self._answered:
            self.broken.append(f"{name} was answered twice")
        self._answered.add(name)
        if done.spans and rollout.max_version > version:
            self.broken.append(f"{name} has tokens of {rollout.max_version}, published {version}")
        at = 0
        for span in done.spans:
            if span.start != at:
                break
            at = span.end
        if at != tokens or tokens > request.max_tokens:
            self.broken.append(f"{name}: spans {done.spans} of {tokens} tokens")

    def _swapped(self, event: SwapDone) -> None:
        self.swaps += 1
        report = event.report
        self._write("swapped", report.update.version, report.seconds, report.stall_s)
        trainer = self._injector.trainer
        serving = report.checks[0].detail.get("engines", ())
        by_name = {engine.name: engine for engine in self._injector.engines}
        for name in serving if isinstance(serving, list) else ():
            engine = by_name.get(name)
            if engine is None or engine.death is not None or trainer is None:
                continue
            if engine.weights != trainer.staged:
                self.broken.append(f"{name} serves what is not version {report.update.version}")

    def _is_down(self, name: str) -> None:
        self._down.setdefault(name.partition(".")[0], _now())

    def _is_up(self, name: str) -> None:
        since = self._down.pop(name.partition(".")[0], None)
        if since is not None:
            self.recovery.append(_now() - since)


def _now() -> float:
    return asyncio.get_running_loop().time()
