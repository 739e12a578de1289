"""What the processes of a benchmark hold, so that a leak shows as a difference."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

_SHARED = Path("/dev/shm")


def snapshot(pids: Iterable[int]) -> dict[str, Any]:
    """Host memory (bytes, shared pages counted once), descriptors and threads of the processes;
    files in shared memory of the machine; what is used of the GPUs that are visible here (bytes,
    None without one)."""
    held = {"host_bytes": 0, "descriptors": 0, "threads": 0}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            held["host_bytes"] += process.memory_full_info().pss
            held["descriptors"] += process.num_fds()
            held["threads"] += process.num_threads()
    shared = len(list(_SHARED.iterdir())) if _SHARED.is_dir() else 0
    return {**held, "shared_memory_files": shared, "gpu_bytes": _gpu_bytes()}


def growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Difference of two snapshots, where both have a number."""
    return {
        key: None if before[key] is None or after[key] is None else after[key] - before[key]
        for key in before
    }


def _gpu_bytes() -> int | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        asked.append(f"--id={visible}")
    done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    lines = done.stdout.split()
    return sum(map(int, lines)) << 20 if done.returncode == 0 and lines else None
