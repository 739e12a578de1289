"""How an :class:`~orchestrator.scheduler.Orchestrator` behaves. Standard library only.

``orchestrator.config`` makes these from flags, environment and YAML; an embedding trainer
makes them directly: one that cannot be is a ConfigError at once.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from enum import Enum
from typing import SupportsFloat

from orchestrator.errors import ConfigError
from orchestrator.types import (
    KVPolicy,
    PauseMode,
    PhaseTimeouts,
    Strategy,
    TransferBackend,
    at_hand,
)


def _one_of(options: object, **kinds: type[Enum]) -> None:
    """Make members of these fields' values, which may be given by their value."""
    for name, kind in kinds.items():
        value = getattr(options, name)
        try:
            object.__setattr__(options, name, kind(value))
        except ValueError:
            choices = ", ".join(str(member.value) for member in kind)
            raise ConfigError(
                f"{type(options).__name__}: {name} is {value!r}: it must be one of {choices}"
            ) from None


def _whole(options: object, least: int, *names: str) -> None:
    """Make whole numbers of these fields' values, which may be any kind of integer."""
    for name in names:
        value = getattr(options, name)
        try:
            number = operator.index(value)
        except TypeError:
            number = least - 1
        if number < least:
            raise ConfigError(
                f"{type(options).__name__}: {name} is {value!r}: it must be a whole number, "
                f"{least} or more"
            )
        object.__setattr__(options, name, number)


def _not_negative(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, SupportsFloat) or not float(value) >= 0:
            raise ConfigError(
                f"{type(options).__name__}: {name} is {value!r}: it must be 0 or more"
            )
        object.__setattr__(options, name, float(value))


@dataclass(frozen=True, slots=True)
class SwapOptions:
    """How a swap is made."""

    backend: TransferBackend = TransferBackend.GLOO
    staged: bool = False
    """Let the bytes arrive in a second copy while decoding goes on; the pause only commits."""
    pause_mode: PauseMode = PauseMode.KEEP
    kv_policy: KVPolicy = KVPolicy.RECOMPUTE
    strategy: Strategy = Strategy.ALL_AT_ONCE
    max_unavailable: int = 1
    """Replicas that may be paused at the same time (rolling)."""
    pause_after_tokens: int = 10
    """A scheduled swap waits until a live request has this many tokens (0: do not wait)."""
    timeouts: PhaseTimeouts = field(default_factory=PhaseTimeouts)

    def __post_init__(self) -> None:
        _one_of(
            self,
            backend=TransferBackend,
            pause_mode=PauseMode,
            kv_policy=KVPolicy,
            strategy=Strategy,
        )
        _whole(self, 1, "max_unavailable")
        _whole(self, 0, "pause_after_tokens")


def check_strategy(swap: SwapOptions) -> None:
    """ConfigError for rolling swaps over a backend that cannot make them."""
    if swap.strategy is Strategy.ROLLING and not at_hand(swap.backend, swap.staged):
        raise ConfigError(
            f"rolling swaps need the bytes at the engines before the pause, over {swap.backend} "
            "they travel inside it: use a staged backend or ipc"
        )


@dataclass(frozen=True, slots=True)
class RecoveryOptions:
    """What is tried after a failure before the run is given up."""

    attempts: int = 3
    """Times a swap is tried again, a replica is resynced, or an actor is replaced, in a row.
    0: the first failure ends the run."""
    backoff_s: float = 1.0
    """Seconds before the second try; they double with each."""
    backoff_max_s: float = 30.0
    min_engines: int = 1
    """With fewer replicas that serve, or may again, the run is given up."""

    def __post_init__(self) -> None:
        _whole(self, 0, "attempts")
        _whole(self, 1, "min_engines")
        _not_negative(self, "backoff_s", "backoff_max_s")


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How rollouts are made."""

    max_tokens: int = 32
    """New tokens a rollout."""
    temperature: float = 1.0
    group_size: int = 4
    """Samples a prompt; advantages are relative to the group."""
    prompts_per_step: int = 8
    """Prompt groups in a training batch."""
    max_in_flight: int = 16
    """Rollouts that generate at the same time, over all replicas."""
    buffer_size: int = 64
    """Finished rollouts that may wait for the consumer; then generation waits."""
    max_staleness: int | None = None
    """Versions a rollout may lag at consumption; older ones are discarded and counted."""
    probe_tokens: int = 100
    """New tokens a probe writes beyond ``pause_after_tokens``."""
    seed: int = 0

    def __post_init__(self) -> None:
        _whole(self, 1, "max_tokens", "group_size", "prompts_per_step", "max_in_flight")
        _whole(self, 1, "buffer_size")
        _whole(self, 0, "probe_tokens")
        _not_negative(self, "temperature")
        if self.max_staleness is not None:
            _whole(self, 0, "max_staleness")


@dataclass(frozen=True, slots=True)
class ValidationOptions:
    """Which proof every swap owes."""

    digest: bool = True
    canary: bool = True
    fresh: bool = True
    fresh_every: int = 0
    """Fresh check after every N-th swap; 0: only after the last of a run."""
    min_pass_rate: float = 1.0
    """Share of probes that must match the fresh engine."""
    canary_tolerance: float = 1e-3
    """Largest absolute difference of a log-probability between engine and trainer."""
    canary_control_factor: float = 0.0
    """Times the control's difference that is allowed too, where the control is within twice the
    tolerance; 0: the tolerance is the limit, of the control too."""

    def __post_init__(self) -> None:
        _whole(self, 0, "fresh_every")
        _not_negative(self, "min_pass_rate", "canary_tolerance", "canary_control_factor")
        if self.min_pass_rate > 1:
            raise ConfigError(
                f"ValidationOptions: min_pass_rate is {self.min_pass_rate!r}: it must be 1 at most"
            )
