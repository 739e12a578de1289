"""JSON that can always be written: one object a line, and whole files at once."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Set
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import TracebackType

from orchestrator.files import sync_folder

_DEPTH = 12


def clean(value: object, depth: int = _DEPTH) -> object:
    """``value`` as plain JSON data; never raises, whatever it is given.

    Keys become text, tuples and sets lists, dataclasses objects, errors ``"Kind: message"``,
    numbers that are not finite null, and what cannot be shown is named by its type.
    """
    try:
        return _clean(value, depth)
    except Exception:
        return f"<unprintable {type(value).__name__}>"


def _clean(value: object, depth: int) -> object:
    if isinstance(value, Enum):
        return clean(value.value, depth)
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, BaseException):
        return describe(value)
    if depth == 0:
        return "…"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return {name: clean(getattr(value, name), depth - 1) for name in names}
    if isinstance(value, Mapping):
        return {_key(k): clean(v, depth - 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v, depth - 1) for v in value]
    if isinstance(value, Set):
        return sorted((clean(v, depth - 1) for v in value), key=str)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, Path):
        return str(value)
    return repr(value)


def _key(key: object) -> str:
    plain = clean(key, 3)
    if isinstance(plain, list):
        return ",".join(map(str, plain))
    return str(plain)


def describe(error: BaseException) -> str:
    """``Kind: message`` on one line, also when the message itself cannot be made."""
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = "<unprintable message>"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def dumps(data: Mapping[str, object]) -> str:
    """``data`` as one line. ASCII: text of a model may hold anything that ends a line."""
    return json.dumps(clean(data), allow_nan=False, separators=(",", ":"))


class JsonLines:
    """An append-only file of JSON objects, one write a line and nothing held back.

    A full disk must not end a run: the first failed write is told on stderr, all are counted
    in ``lost``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._torn = False
        self._file = path.open("ab", buffering=0)

    def write(self, data: Mapping[str, object]) -> None:
        """Append one object."""
        line = ("\n" if self._torn else "") + dumps(data) + "\n"
        try:
            written = self._file.write(line.encode("ascii"))
            self._torn = written != len(line)
            if self._torn:
                self._complain("the disk is full")
        except (OSError, ValueError) as error:
            self._complain(str(error))

    def claim(self) -> bool:
        """Whether nobody else has claimed the file; until it is closed nobody else can."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a filesystem without locks
        return True

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Return when every line so far is on the disk (OSError)."""
        os.fsync(self._file.fileno())

    def _complain(self, why: str) -> None:
        if not self.lost:
            print(f"midflight: cannot write {self.path}: {why}", file=sys.stderr)
        self.lost += 1

    def close(self) -> None:
        """Flush to disk and close. Idempotent."""
        if not self._file.closed:
            with suppress(OSError):
                os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def cut(path: Path, size: int | None = None) -> None:
    """Take off what is behind ``size`` bytes (None: behind the last whole line); OSError.

    For a file to go on with, whose writer may have died in the middle of a line.
    """
    if size is None:
        text = path.read_bytes() if path.exists() else b""
        size = text.rfind(b"\n") + 1
    if path.exists() and path.stat().st_size > size:
        os.truncate(path, size)


def write_atomic(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all: a reader never sees half of it (OSError)."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
