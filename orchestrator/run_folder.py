"""A run's folder that a run is to go on in: its settings and its last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError
from orchestrator.types import Outcome

if TYPE_CHECKING:
    from orchestrator.checkpoint import RunCheckpoint
    from orchestrator.config import Settings

CHECKPOINTS = "checkpoints"


def config_of(run_dir: Path) -> Path:
    """The settings that the run in ``run_dir`` had; ConfigError when it holds no run."""
    path = run_dir.expanduser() / "config.yaml"
    if not path.is_file():
        raise ConfigError(
            f"--resume {run_dir}: there is no {path.name} in it, so it holds no run. Name the "
            "folder that a run wrote, like runs/<run id>"
        )
    return path


def checkpoint_of(run_dir: Path, settings: Settings) -> tuple[RunCheckpoint, tuple[str, ...]]:
    """The checkpoint to go on from, and why newer ones were passed over.

    ConfigError for a run that has none, where ``settings`` leave nothing to do (a run that
    completed goes on if more steps are asked for than it made), and where they would make other
    requests than it made.
    """
    from orchestrator.checkpoint import Checkpoints
    from orchestrator.rollouts import same_requests

    other = settings.output_dir
    if other is not None and other.expanduser().resolve() != run_dir.expanduser().resolve():
        raise ConfigError(
            f"--resume {run_dir} writes into that folder, --output-dir {other} asks for another: "
            "leave --output-dir out"
        )
    checkpoints = Checkpoints(run_dir / CHECKPOINTS)
    checkpoint = checkpoints.latest()
    summary = _summary(run_dir)
    done = summary.get("steps_done") if summary.get("outcome") == Outcome.COMPLETED else None
    if isinstance(done, int) and done >= settings.steps:
        raise ConfigError(
            f"--resume {run_dir}: that run completed its {done} steps. To go on with it, give "
            f"--steps {done + 1} or more: steps count from its beginning"
        )
    if checkpoint.step >= settings.steps:
        raise ConfigError(
            f"--resume {run_dir}: step {checkpoint.step} is done and {settings.steps} steps are "
            f"asked for in all: give --steps {checkpoint.step + 1} or more"
        )
    same_requests(checkpoint.source, settings.generation_options())
    return checkpoint, checkpoints.skipped


def _summary(run_dir: Path) -> dict[str, Any]:
    """Empty where there is none that can be read: the run was killed."""
    try:
        data = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
