"""Checkpoints of a run: written whole or not at all, the newest two are kept.

::

    RUN_DIR/checkpoints/
        state-000003/run.json     where the run was
        state-000003/trainer/     what the trainer saved
        .state-000004-x1y2/       being written, or left by a crash: ignored, later removed

A checkpoint appears by one rename, when everything in it is on the disk. ``run.json`` names every
file beside it with its size, so one that lost a part is told from a whole one.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from orchestrator.errors import ConfigError, MidflightError
from orchestrator.files import sync_folder
from orchestrator.rollouts import SourceState
from orchestrator.tasks import uninterrupted
from orchestrator.types import PolicyVersion

SCHEMA_VERSION = 1
KEPT = 2
"""Whole checkpoints that stay; older ones are removed."""

_NAME = re.compile(r"state-(\d{6,})")
_PARTIAL = ".state-"
_RUN, _TRAINER = "run.json", "trainer"


class Attachment(Protocol):
    """Somebody else whose state belongs into the checkpoint (the run's summary so far)."""

    def state(self) -> Mapping[str, Any]:
        """Plain JSON data, as of this moment."""
        ...

    def sync(self) -> None:
        """Return when the files that :meth:`state` counts on are on the disk. Runs in a thread."""
        ...

    def resumed(self) -> None:
        """A run has gone back to a checkpoint: forget what came after it. Raising ends the run."""
        ...


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """Where a run was after a step whose swap was committed and proved."""

    run_id: str
    step: int
    """Train steps made."""
    version: PolicyVersion
    """Published then; the trainer's weights are it."""
    source: SourceState
    attached: Mapping[str, Any] = field(default_factory=dict)
    """What the :class:`Attachment` said."""
    schema_version: int = SCHEMA_VERSION
    folder: Path | None = None
    """Where it was read from; not part of the file."""

    @property
    def trainer_path(self) -> str:
        """What the trainer loads (ConfigError for one that was not read from a folder)."""
        if self.folder is None:
            raise ConfigError("this checkpoint has no folder: take it from Checkpoints.latest()")
        return str(self.folder / _TRAINER)


_ADAPTER = TypeAdapter(RunCheckpoint)


class Checkpoints:
    """The checkpoints of one run, below ``folder``. One writer at a time."""

    def __init__(self, folder: Path, attachment: Attachment | None = None) -> None:
        self.folder = folder.absolute()  # the trainer's process may be somewhere else
        self.skipped: tuple[str, ...] = ()
        """What :meth:`latest` passed over, each with its reason."""
        self._attachment = attachment

    def resumed(self) -> None:
        """Tell whoever attaches its state that the run goes on from a checkpoint."""
        if self._attachment is not None:
            self._attachment.resumed()

    def latest(self) -> RunCheckpoint:
        """The newest whole checkpoint; ConfigError when there is none."""
        skipped: list[str] = []
        try:
            for path in reversed(self._numbered()):
                try:
                    return _read(path)
                except (OSError, ValueError) as error:
                    skipped.append(f"{path}: {' '.join(str(error).split())}")
        finally:
            self.skipped = tuple(skipped)
        why = f" ({'; '.join(skipped)})" if skipped else ""
        raise ConfigError(
            f"no whole checkpoint in {self.folder}{why}: a run writes some with "
            "--checkpoint-every N. Start a new run"
        )

    async def write(
        self, checkpoint: RunCheckpoint, save_trainer: Callable[[str], Awaitable[None]]
    ) -> RunCheckpoint:
        """Write ``checkpoint`` with what ``save_trainer(path)`` saves; returns it as written.

        The attachment is asked before anything is waited for. MidflightError when the disk
        refuses; whatever happens, the one before stays usable until this one is whole.
        """
        if self._attachment is not None:
            checkpoint = replace(checkpoint, attached=self._attachment.state())
        temporary = self.folder / f"{_PARTIAL}{checkpoint.step:06d}-{secrets.token_hex(4)}"
        try:
            await uninterrupted(asyncio.to_thread(self._begin, temporary))
            await save_trainer(str(temporary / _TRAINER))
            return await uninterrupted(asyncio.to_thread(self._finish, temporary, checkpoint))
        except OSError as error:
            raise MidflightError(
                f"cannot write the checkpoint of step {checkpoint.step} to {self.folder}: "
                f"{error.strerror or error}. Make room or mend it, then --resume the run"
            ) from error

    def _numbered(self) -> list[Path]:
        """Oldest first. None when there is no folder."""
        try:
            found = [p for p in self.folder.iterdir() if _NAME.fullmatch(p.name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"cannot read {self.folder}: {error.strerror}") from None
        return sorted(found, key=_step_of)

    def _begin(self, temporary: Path) -> None:
        _make(self.folder)
        sync_folder(self.folder.parent)
        for left in self.folder.iterdir():
            if left.name.startswith(_PARTIAL):
                _remove(left)
        _make(temporary)

    def _finish(self, temporary: Path, checkpoint: RunCheckpoint) -> RunCheckpoint:
        if self._attachment is not None:
            self._attachment.sync()
        target = self.folder / f"state-{checkpoint.step:06d}"
        files = _sizes(temporary)
        if not any(name.startswith(f"{_TRAINER}/") for name in files):
            raise MidflightError(
                f"the trainer saved nothing in {temporary / _TRAINER} that can be seen from here: "
                "the run's folder must be on a disk that both share"
            )
        _write(temporary / _RUN, json.dumps({**_plain(checkpoint), "files": files}))
        sync_folder(temporary)
        # Behind it there is nothing but what a run left behind that was resumed from before.
        for path in self._numbered():
            if _step_of(path) >= checkpoint.step:
                self._discard(path)
        _rename(temporary, target)
        sync_folder(self.folder)
        self._prune()
        return replace(checkpoint, folder=target)

    def _prune(self) -> None:
        kept = 0
        for path in reversed(self._numbered()):
            if kept < KEPT and _whole(path):
                kept += 1
            else:
                self._discard(path)

    def _discard(self, path: Path) -> None:
        # Out of sight first: half of it must not look like one.
        aside = self.folder / f"{_PARTIAL}{secrets.token_hex(4)}-old"
        _rename(path, aside)
        _remove(aside)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _plain(checkpoint: RunCheckpoint) -> dict[str, Any]:
    data = asdict(checkpoint)
    del data["folder"]
    return data


def _read(path: Path) -> RunCheckpoint:
    """OSError or ValueError, with the reason, for one that is not whole."""
    data = json.loads((path / _RUN).read_text(encoding="utf-8"))
    if not isinstance(data, dict) or not isinstance(files := data.pop("files", None), dict):
        raise ValueError(f"{_RUN} is not that of a checkpoint")
    if (schema := data.get("schema_version")) != SCHEMA_VERSION:
        raise ValueError(f"{_RUN} has schema_version {schema}, this reads {SCHEMA_VERSION}")
    try:
        checkpoint = _ADAPTER.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{_RUN} is damaged at {where}: {first['msg']}") from None
    for name, size in files.items():
        found = (path / name).stat().st_size
        if found != size:
            raise ValueError(f"{name} has {found} bytes, {size} were written")
    return replace(checkpoint, folder=path)


def _whole(path: Path) -> bool:
    try:
        _read(path)
    except (OSError, ValueError):
        return False
    return True


def _sizes(folder: Path) -> dict[str, int]:
    return {
        str(p.relative_to(folder)): p.stat().st_size
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


# Every change of the disk goes through these.


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
