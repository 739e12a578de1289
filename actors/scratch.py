"""A temporary folder for an engine's processes.

vLLM leaves its sockets and its rendezvous file in the temporary folder, also when it ends in order.
Each engine's lie in a folder of their own, which is removed with the engine. One that nobody could
remove (the command and its Ray were killed) is removed by the next engine that starts there: its
owner holds a lock in it as long as it lives, and its children end with it (see ``processes``).
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import shutil
import stat
import tempfile
from pathlib import Path

from .nodes import node_id

SCRATCH_ENV = "MIDFLIGHT_SCRATCH"
"""Folder for what an engine's processes write to the temporary folder."""
_PREFIX = "midflight-"
_OWNER = "owner"
"""Locked by the process that made the folder; says on which machine it runs."""
_LONGEST = 107 - len("/") - 36
"""A socket's path has at most 107 bytes; vLLM appends a UUID."""

_locks: dict[str, int] = {}
"""Descriptors by folder: closed, a file is no longer locked."""


def make_scratch() -> dict[str, str]:
    """Make the folder for the processes below this one; the variables that name it.

    Empty where the temporary folder's path is too long for sockets one level deeper.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) + len(f"/{_PREFIX}12345678") > _LONGEST:
        return {}
    _sweep(Path(parent))
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    _own(folder)
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    # Compiled kernels are kept in the temporary folder and are to outlive this one: their defaults
    # (torch/_inductor/runtime/cache_dir_utils.py, nvidia-cutlass-dsl).
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": f"{parent}/torchinductor_{user}",
        "CUTE_DSL_CACHE_DIR": f"{parent}/{user}/cutlass_python_cache",
    }
    kept = {name: os.environ.get(name, path) for name, path in caches.items()}
    return {**kept, SCRATCH_ENV: folder, "TMPDIR": folder, "VLLM_RPC_BASE_PATH": folder}


def remove_scratch(folder: str | None) -> None:
    """Remove what :func:`make_scratch` made."""
    if folder is None:
        return
    lock = _locks.pop(folder, None)
    if lock is not None:
        os.close(lock)
    _remove(Path(folder))


def _own(folder: str) -> None:
    """Lock the folder for the life of this process; where that cannot be, nobody sweeps it."""
    # Locked before it has its name: nobody finds it unlocked.
    early = f"{folder}/{_OWNER}-early"
    with contextlib.suppress(OSError):
        lock = os.open(early, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(lock, node_id().encode())
            os.rename(early, f"{folder}/{_OWNER}")
        except OSError:
            os.close(lock)
            raise
        _locks[folder] = lock


def _sweep(parent: Path) -> None:
    """Remove the folders of this user whose owners, on this machine, are gone."""
    with contextlib.suppress(OSError):
        for owner in parent.glob(f"{_PREFIX}*/{_OWNER}"):
            with contextlib.suppress(OSError):
                # The temporary folder is everybody's: what lies there may be anything.
                flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                lock = os.open(owner, flags)
                try:
                    found = os.fstat(lock)
                    ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
                    if ours and not owner.parent.is_symlink():
                        _remove_if_left(owner.parent, lock)
                finally:
                    os.close(lock)


def _remove_if_left(folder: Path, lock: int) -> None:
    # Locks may be those of one machine only, and the folder be shared by several.
    if os.read(lock, 256) == node_id().encode():
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)


def _remove(folder: Path) -> None:
    """The owner's file last: what could not be removed is found again by the next sweep."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _OWNER:
                path.unlink(missing_ok=True)
        if [path.name for path in folder.iterdir()] in ([], [_OWNER]):
            shutil.rmtree(folder, ignore_errors=True)
