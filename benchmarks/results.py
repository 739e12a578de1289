"""What a benchmark run has measured, as JSON, from the first method on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import plot

from orchestrator.cycle import stall_stats
from orchestrator.telemetry.jsonl import write_atomic
from orchestrator.types import PhaseSeconds

SCHEMA = 3
_PLAIN_LIST = re.compile(r"\[[^\[\]{}]*\]")


@dataclass(slots=True)
class Method:
    """One way to swap under one load, and what it took each time."""

    name: str
    note: str
    backend: str
    requests: int
    samples: list[dict[str, Any]] = field(default_factory=list)
    growth: dict[str, Any] | None = None
    """What the processes held more after the last swap than after the warm-up."""
    growth_second_half: dict[str, Any] | None = None
    """Of it, what came in the second half: caches that fill up are full by then."""

    def add(
        self,
        seconds: PhaseSeconds,
        stalls: Sequence[float],
        in_flight: int,
        stage_s: float,
        digest_s: float | None = None,
    ) -> None:
        """``stage_s``: the trainer's snapshot and its digest, before anything else; ``digest_s``:
        that of the engine, after the stall."""
        self.samples.append(
            {
                "seconds": asdict(seconds),
                "stalls": [round(s, 6) for s in stalls],
                "requests_in_flight": in_flight,
                "stage_s": stage_s,
                "digest_s": digest_s,
            }
        )

    def result(self, nbytes: int) -> dict[str, Any]:
        """Percentiles over all requests of all swaps; None where nothing was measured."""
        phases = {
            phase: asdict(
                stall_stats([v for s in self.samples if (v := s["seconds"][phase]) is not None])
            )
            for phase in (*plot.PHASES, "prefetch")
        }
        usable = phases["transfer"]["p50"]

        def over(key: str) -> dict[str, Any]:
            return asdict(stall_stats([v for s in self.samples if (v := s[key]) is not None]))

        return {
            "name": self.name,
            "note": self.note,
            "backend": self.backend,
            "requests": self.requests,
            "swaps": len(self.samples),
            "stall_s": asdict(stall_stats([v for s in self.samples for v in s["stalls"]])),
            "phases": phases,
            "stage_s": over("stage_s"),
            "digest_s": over("digest_s"),
            "gb_per_s_until_usable": nbytes / usable / 1e9 if usable else None,
            "growth": self.growth,
            "growth_second_half": self.growth_second_half,
            "samples": self.samples,
        }


@dataclass(slots=True)
class Result:
    """Of one run, as far as it has come."""

    model: str
    kv_policy: str
    cuda_graphs: bool
    request_tokens: int
    """New tokens of a request of the load."""
    path: Path | None
    """Where :meth:`save` writes."""
    hardware: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    nbytes: int = 0
    digests_matched: int = 0
    applied_by: dict[str, str] = field(default_factory=dict)
    carried_by: dict[str, str] = field(default_factory=dict)
    control: list[dict[str, Any]] = field(default_factory=list)
    """What requests stalled while nothing was swapped, by load."""
    methods: list[Method] = field(default_factory=list)
    throughput: list[dict[str, Any]] = field(default_factory=list)
    ceiling: dict[str, Any] = field(default_factory=dict)
    complete: bool = False

    def to_json(self) -> dict[str, Any]:
        """See docs/output.md."""
        methods = [method.result(self.nbytes) for method in self.methods]
        return {
            "schema_version": SCHEMA,
            "complete": self.complete,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "hardware": self.hardware,
            "packages": self.packages,
            "model": self.model,
            "kv_policy": self.kv_policy,
            "cuda_graphs": self.cuda_graphs,
            "request_tokens": self.request_tokens,
            "bytes": self.nbytes,
            "digests_matched": self.digests_matched,
            "applied_by": self.applied_by,
            "carried_by": self.carried_by,
            "control": self.control,
            "methods": methods,
            "throughput": self.throughput,
            "ceiling": self.ceiling,
            "ratio": ratios(methods, self.ceiling),
        }

    def save(self) -> None:
        """Write it, if it is to be written; whatever happens then, a whole file is there."""
        if self.path is not None:
            write_atomic(self.path, as_text(self.to_json()))


def as_text(found: dict[str, Any]) -> str:
    """JSON with each list of plain values on one line."""
    text = json.dumps(found, indent=1)
    return _PLAIN_LIST.sub(lambda match: " ".join(match[0].split()), text) + "\n"


def ratios(methods: Sequence[dict[str, Any]], ceilings: dict[str, Any]) -> dict[str, float]:
    """Stall of every other way to our first one, and times to their ceilings, side by side.

    Those of a broadcast are of the size that was the fastest in this run.
    """
    found: dict[str, float] = {}
    ours = [m for m in methods if m["note"].startswith("this project")]
    for method in methods:
        for own in ours:
            if method is own or method["requests"] != own["requests"]:
                continue
            slow, fast = method["stall_s"]["p50"], own["stall_s"]["p50"]
            if method not in ours and slow and fast:
                key = f"stall p50, {method['name']} to {own['name']}, {own['requests']} requests"
                found[key] = slow / fast
    for own in ours:
        link = own["backend"].removeprefix("staged-")
        local = own["backend"] != link or link == "ipc"
        top = ceilings.get("memory_copy" if local else f"{link}_broadcast")
        usable = own["phases"]["transfer"]["p50"]
        if top and usable:
            key = f"ceiling's share of the transfer, {own['name']}, {own['requests']} requests"
            found[key] = top["p50_s"] / usable
        wire, brought = ceilings.get(f"{link}_broadcast"), own["phases"]["prefetch"]["p50"]
        if wire and brought:
            key = f"ceiling's share of the prefetch, {own['name']}, {own['requests']} requests"
            found[key] = wire["p50_s"] / brought
    return found
