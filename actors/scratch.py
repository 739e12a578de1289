"""A temporary folder for an engine's processes.

vLLM leaves its sockets and its rendezvous file in the temporary folder, also when it ends in order.
Each engine's lie in a folder of their own, which is removed with the engine. One that nobody could
remove (the command and its Ray were killed) is removed by the next engine that starts: as long as
the owner lives, it holds a lock in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import shutil
import tempfile
from pathlib import Path

SCRATCH_ENV = "MIDFLIGHT_SCRATCH"
"""Folder for what an engine's processes write to the temporary folder."""
_PREFIX = "midflight-"
_OWNER = "owner"
"""Locked by the process that made the folder."""
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
    shutil.rmtree(folder, ignore_errors=True)
    lock = _locks.pop(folder, None)
    if lock is not None:
        os.close(lock)


def _own(folder: str) -> None:
    """Lock the folder for the life of this process, where its file system can."""
    # Locked before it has its name: nobody finds it unlocked.
    early = f"{folder}/{_OWNER}-early"
    lock = os.open(early, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(early, f"{folder}/{_OWNER}")
    except OSError:
        os.close(lock)
    else:
        _locks[folder] = lock


def _sweep(parent: Path) -> None:
    """Remove the folders whose owners are gone, other containers' and users' not."""
    for owner in parent.glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError):
            lock = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner.parent, ignore_errors=True)
            finally:
                os.close(lock)
