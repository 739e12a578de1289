"""What the simulated data plane takes: seconds of each call, from a measured run.

A broadcast is pipelined: its seconds do not grow with the number of receivers. Calls vary
log-normally around their median, each engine with a seeded stream of its own.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.simulate.faults import FaultRule
from orchestrator.types import TransferBackend, at_hand

_P95 = 1.6449
"""Standard deviations between the median and the 95th percentile of a normal distribution."""
_STAGED = "staged-"
_NOT_NEGATIVE = (
    "control_call_s",
    "jitter",
    "pause_s",
    "stage_s",
    "digest_s",
    "train_s",
    "engine_start_s",
)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds are medians, bandwidths bytes a second until the data is usable.

    The defaults are what :meth:`from_json` makes of ``benchmarks/baselines/nvidia-h200-x2.json``:
    Qwen3-1.7B's shape, staged over NCCL between two H200. ``train_s`` and ``engine_start_s`` are
    not in such a file; the latter is about what vLLM took on that machine.
    """

    backend: TransferBackend = TransferBackend.NCCL
    staged: bool = True
    """Bytes arrive before the pause; the pause commits them from device memory."""
    nbytes: int = 3441149952
    """Of the model."""
    link_bytes_per_s: float = 37882557410.13144
    """Trainer to engines."""
    commit_bytes_per_s: float = 1843641782786.398
    """Second copy to the model, on the device. Used when ``staged``."""
    decode_step_s: float = 0.008706169999982194
    """One token for every running request."""
    control_call_s: float = 0.004489515000045685
    """A call that does nothing: from the controller to an engine and back."""
    jitter: float = 0.6469080833965649
    """Standard deviation of the logarithm of a call's seconds."""
    pause_s: float = 0.0013538340000422977
    """Until nothing is scheduled, beside the call."""
    stage_s: float = 0.023745394000002307
    """The trainer's snapshot and its digest."""
    digest_s: float = 0.02767430299991247
    """An engine's digest of what it received, the call included."""
    train_s: float = 1.0
    """One optimizer step."""
    engine_start_s: float = 60.0
    """A new engine, from nothing to serving."""
    failures: tuple[FaultRule, ...] = ()
    """What fails of itself, beside the faults a scenario asks for. No measured file has any."""

    def __post_init__(self) -> None:
        for name in ("nbytes", "link_bytes_per_s", "commit_bytes_per_s", "decode_step_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"cost model: {name} is {getattr(self, name)}: not above 0")
        for name in _NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"cost model: {name} is {getattr(self, name)}: below 0")

    @property
    def wire_s(self) -> float:
        """Seconds of the model's bytes on the wire."""
        return self.nbytes / self.link_bytes_per_s

    @property
    def commit_s(self) -> float:
        """Seconds to bring prefetched bytes into the model."""
        return self.nbytes / self.commit_bytes_per_s

    def varied(self, seconds: float, rng: random.Random) -> float:
        """``seconds`` as one call happens to take them."""
        return seconds * math.exp(self.jitter * rng.gauss(0.0, 1.0)) if self.jitter else seconds

    def of_call(self, method: str, rng: random.Random) -> float:
        """Seconds of a call of an engine or the trainer, beside what the fake itself takes."""
        match method:
            case "pause":
                seconds = self.control_call_s + self.pause_s
            case "digests":
                seconds = max(self.digest_s, self.control_call_s)
            case "stage":
                seconds = self.control_call_s + self.stage_s
            case _:
                seconds = self.control_call_s
        return self.varied(seconds, rng)

    def in_one_call(self, method: str, rng: random.Random) -> float:
        """As :meth:`of_call`, for a part of a swap made in one call: nobody is asked."""
        return self.varied(self.pause_s, rng) if method == "pause" else 0.0

    @classmethod
    def from_json(cls, path: str | Path) -> CostModel:
        """Calibrate from a result of ``benchmarks/sync_latency.py``.

        Its staged way is taken, else its first one by this project's cycle. ConfigError names the
        file and what it lacks.
        """
        file = Path(path).expanduser()
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--costs {file}: {error}. Give a sync_latency.py JSON") from None
        return replace(cls(), **_Measured(file, found).costs())


class _Measured:
    """Values of a result file; what is not there is a ConfigError."""

    def __init__(self, file: Path, found: object) -> None:
        self._file = file
        self._found: Mapping[str, Any] = found if isinstance(found, dict) else {}
        methods = self._found.get("methods")
        self._methods = (
            [m for m in methods if isinstance(m, dict)] if isinstance(methods, list) else []
        )

    def costs(self) -> dict[str, Any]:
        ours = [m for m in self._methods if str(m.get("note", "")).startswith("this project")]
        if not ours:
            raise self._without("methods: none by this project's cycle")
        staged = [m for m in ours if str(m.get("backend", "")).startswith(_STAGED)]
        method = (staged or ours)[0]
        name = str(method.get("backend"))
        try:
            backend = TransferBackend(name.removeprefix(_STAGED))
        except ValueError:
            raise self._without(f"backend {name!r} is none of a transfer") from None
        nbytes = self._number(self._found, "bytes")
        where = f"methods[{name}]"
        transfer = self._p50(method, where, "phases", "transfer")
        wire = (
            self._p50(method, where, "phases", "prefetch")
            if at_hand(backend, bool(staged))
            else transfer
        )
        return {
            "backend": backend,
            "staged": bool(staged),
            "nbytes": int(nbytes),
            "link_bytes_per_s": nbytes / wire,
            # Unused when nothing is at hand.
            "commit_bytes_per_s": nbytes / transfer,
            "decode_step_s": self._decode_step(method, where),
            "control_call_s": self._control_call(method, where),
            "jitter": self._jitter(method, where),
            "pause_s": self._p50(method, where, "phases", "quiesce"),
            "stage_s": self._p50(method, where, "stage_s"),
            "digest_s": self._p50(method, where, "digest_s"),
        }

    def _decode_step(self, method: Mapping[str, Any], where: str) -> float:
        """A step of as many requests; else resume to first token, which is one step and more."""
        found = self._found.get("throughput")
        windows = [w for w in found if isinstance(w, dict)] if isinstance(found, list) else []
        windows.sort(key=lambda w: w.get("backend") != method.get("backend"))
        for window in windows:
            speed = window.get("tokens_per_s", {}).get("without")
            if window.get("requests") == method.get("requests") and speed:
                return float(window["requests"]) / float(speed)
        return self._p50(method, where, "phases", "first_token")

    def _control_call(self, method: Mapping[str, Any], where: str) -> float:
        """The naive way makes one call a phase, and finalising does next to nothing."""
        for naive in self._methods:
            if str(naive.get("name", "")).startswith("naive"):
                return self._p50(naive, f"methods[{naive['name']}]", "phases", "finalize")
        return self._p50(method, where, "phases", "resume")

    def _jitter(self, method: Mapping[str, Any], where: str) -> float:
        stats = self._within(method, where, "phases", "quiesce")
        middle = self._number(stats, "p50", f"{where}.phases.quiesce.")
        high = self._number(stats, "p95", f"{where}.phases.quiesce.")
        return math.log(max(1.0, high / middle)) / _P95

    def _p50(self, method: Mapping[str, Any], where: str, *keys: str) -> float:
        return self._number(
            self._within(method, where, *keys), "p50", ".".join((where, *keys)) + "."
        )

    def _within(self, method: Mapping[str, Any], where: str, *keys: str) -> Mapping[str, Any]:
        found: Any = method
        for key in keys:
            where += f".{key}"
            found = found.get(key) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            raise self._without(where)
        return found

    def _number(self, found: Mapping[str, Any], key: str, where: str = "") -> float:
        value = found.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._without(f"{where}{key} (a number above 0, found {value!r})")
        return float(value)

    def _without(self, what: str) -> ConfigError:
        return ConfigError(
            f"--costs {self._file} lacks {what}: give a result of benchmarks/sync_latency.py"
        )
