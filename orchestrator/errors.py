"""Every error midflight raises, as one picklable tree. Standard library only.

::

    MidflightError
    ├── ConfigError(ValueError)            what was asked for cannot be run: exit code 2
    ├── IllegalTransition(RuntimeError)    the machine refused a trigger
    ├── PhaseTimeout(TimeoutError)         a phase outlived its deadline
    ├── EngineError(RuntimeError)          a replica answered with an error
    │   └── EngineDied                     its process is gone
    ├── TrainerError(RuntimeError)         the trainer answered with an error
    │   ├── TrainerDied                    its process is gone
    │   └── TrainingDiverged               it trained to what is not finite; ValidationFailed too
    ├── TransferError(RuntimeError)        weights did not move
    │   └── ChannelError                   the channel cannot carry any
    ├── SyncError(RuntimeError)            a swap failed; says what each replica was left with
    ├── SyncBusy(RuntimeError)             a swap is running and waiting was not asked for
    ├── ValidationFailed(RuntimeError)     the swap is not what was sent
    ├── StaleRollout(ValueError)           older than the limit at consumption
    └── Closed(RuntimeError)               the orchestrator was closed

Each message says what was wrong, with the values, and what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.types import Completion

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130


class MidflightError(Exception):
    """Root of all errors raised on purpose. Pickles with its attributes."""

    exit_code = EXIT_FAILED

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, dict(self.__dict__)))


def _rebuild(
    cls: type[MidflightError], args: tuple[object, ...], attributes: dict[str, object]
) -> MidflightError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(attributes)
    return error


def words(error: BaseException) -> str:
    """What ``error`` says; one that is not ours says little without its kind."""
    if isinstance(error, MidflightError):
        return str(error)
    kind = type(error).__name__
    return f"{kind}: {error}" if str(error) else kind


class ConfigError(MidflightError, ValueError):
    """A setting, a file or the hardware does not allow what was asked for."""

    exit_code = EXIT_CONFIG


def cannot_write(folder: Path, error: OSError) -> ConfigError:
    """The error for a folder that refuses a run's files."""
    reason = error.strerror or type(error).__name__
    return ConfigError(f"cannot write to {folder}: {reason}. Name a folder that can be written")


class IllegalTransition(MidflightError, RuntimeError):
    """The machine refused ``trigger`` in ``state``."""

    def __init__(self, state: str, trigger: str, reason: str) -> None:
        super().__init__(f"cannot {trigger} while {state}: {reason}")
        self.state, self.trigger, self.reason = state, trigger, reason


class PhaseTimeout(MidflightError, TimeoutError):
    """``phase`` did not end within ``seconds``."""

    def __init__(self, phase: str, seconds: float, waiting_for: str = "") -> None:
        what = f"; still waiting for {waiting_for}" if waiting_for else ""
        super().__init__(
            f"{phase} took longer than {seconds:g} s{what}. "
            f"Raise --timeout-{phase.lower()} if the hardware is only slow"
        )
        self.phase, self.seconds, self.waiting_for = phase, seconds, waiting_for


class EngineError(MidflightError, RuntimeError):
    """Replica ``engine`` answered with an error."""

    def __init__(self, engine: str, message: str) -> None:
        super().__init__(f"engine {engine}: {message}")
        self.engine = engine


class EngineDied(EngineError):
    """The process of replica ``engine`` is gone."""

    partial: Completion | None = None
    """What the request that was cut had, where the engine's actor outlived its engine core."""


class TrainerError(MidflightError, RuntimeError):
    """The trainer answered with an error."""


class TrainerDied(TrainerError):
    """The trainer's process is gone."""


class TransferError(MidflightError, RuntimeError):
    """Weights did not move, or not whole."""


class ChannelError(TransferError):
    """The channel cannot carry weights: it was not opened, not proved, or closed."""


class SyncError(MidflightError, RuntimeError):
    """A swap failed in ``phase``: a state, or STAGING while the bytes were brought before it.

    ``reason`` is what failed; ``fenced`` names the replicas that must not serve.
    """

    report: object | None = None
    """The SyncReport as far as the swap came, where it was committed."""

    def __init__(self, phase: str, message: str, fenced: tuple[str, ...] = ()) -> None:
        left = f" (fenced: {', '.join(fenced)})" if fenced else ""
        super().__init__(f"sync failed in {phase}: {message}{left}")
        self.phase, self.reason, self.fenced = phase, message, fenced


class SyncBusy(MidflightError, RuntimeError):
    """Another swap is running."""


class ValidationFailed(MidflightError, RuntimeError):
    """A check found that the engine does not hold the weights it should."""

    report: object | None = None
    """The swap's SyncReport as far as it came, with the failed check last."""


class TrainingDiverged(TrainerError, ValidationFailed):
    """What the trainer came to is not finite. No engine is to blame, and no further try helps."""


class StaleRollout(MidflightError, ValueError):
    """A rollout lags further behind than allowed."""

    def __init__(self, staleness: int, limit: int) -> None:
        super().__init__(
            f"rollout is {staleness} versions old, the limit is {limit}: "
            "discard it or raise --max-staleness"
        )
        self.staleness, self.limit = staleness, limit


class Closed(MidflightError, RuntimeError):
    """The orchestrator was closed while this was waiting."""
