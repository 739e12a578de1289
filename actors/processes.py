"""Processes that must not outlive what started them.

A process is named by pid *and* start time: a pid alone may belong to someone else by now.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

from .nodes import node_id, ray_node
from .scratch import SCRATCH_ENV, remove_scratch

ACTOR_ENV = "MIDFLIGHT_ACTOR_PID"
"""Set by an engine actor; every vLLM process below it ends when that process does."""

_SHARED_MEMORY = "/dev/shm"
_THEIRS = ("psm_", "vllm_", "sem.mp-", "torch_", "nccl-")

_armed = False


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process for good."""

    pid: int
    started: float
    """Unix time, as psutil says it."""

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The running process ``pid``; None if there is none."""
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.Error:
            return None

    def find(self) -> psutil.Process | None:
        """The process, if it still runs."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 0.01
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


@dataclass(frozen=True, slots=True)
class Belongings:
    """What an actor must not leave behind on its machine."""

    node: str
    processes: tuple[ProcessId, ...]
    """The actor first."""
    shared_memory: frozenset[str]
    ray_node: str = ""
    """Ray's id of the node."""
    scratch: str | None = None
    """Its temporary folder."""

    def remove(self) -> None:
        """Remove what it left on this machine. Only when its processes are gone."""
        unlink(self.shared_memory)
        remove_scratch(self.scratch)


class Counted:
    """Mixed into an actor class: the actor can say what is its."""

    async def belongings(self) -> Belongings:
        """What there is now; ask again when more was started."""
        own = tree(os.getpid())
        return Belongings(
            node_id(), own, shared_memory(own), ray_node(), os.environ.get(SCRATCH_ENV)
        )


def tree(pid: int) -> tuple[ProcessId, ...]:
    """``pid`` and everything below it, the root first; empty if it is gone."""
    try:
        root = psutil.Process(pid)
        members = [root, *root.children(recursive=True)]
    except psutil.Error:
        return ()
    found = (ProcessId.of(p.pid) for p in members)
    return tuple(p for p in found if p is not None)


def kill(
    processes: Iterable[ProcessId], timeout_s: float = 2.0, first_wait_s: float = 0.0
) -> tuple[ProcessId, ...]:
    """SIGKILL those that still run, with all their descendants; returns who is left then.

    Blocks until they are gone, at most ``timeout_s``; before that they have ``first_wait_s``
    to go by themselves. Never kills the calling process.
    """
    victims: dict[int, psutil.Process] = {}
    for known in processes:
        process = known.find()
        if process is None:
            continue
        with contextlib.suppress(psutil.Error):
            for member in [*process.children(recursive=True), process]:
                victims[member.pid] = member
    victims.pop(os.getpid(), None)
    trackers = [p for p in victims.values() if _tracks_resources(p)]
    others = [p for p in victims.values() if p not in trackers]
    if first_wait_s > 0:
        _wait(others, first_wait_s)
    for process in others:
        with contextlib.suppress(psutil.Error):
            process.kill()  # psutil compares start times itself
    alive = _wait([*others, *(p for p in trackers if _parent(p) != os.getpid())], timeout_s)
    left = (ProcessId.of(p.pid) for p in alive)
    return tuple(p for p in left if p is not None)


def _wait(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until all have ended; who has not. One that nobody reaped yet has ended too."""
    deadline = time.monotonic() + timeout_s
    waiting: dict[int, psutil.Process] = {}
    poller = select.poll()
    try:
        for process in processes:
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(process.pid)
                waiting[fd] = process
                poller.register(fd, select.POLLIN)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(left * 1000):
                poller.unregister(fd)
                os.close(fd)
                del waiting[fd]
        return list(waiting.values())
    finally:
        for fd in waiting:
            os.close(fd)


def shared_memory(processes: Iterable[ProcessId]) -> frozenset[str]:
    """Files in shared memory that vLLM, torch or Python made for these processes."""
    mapped: set[int] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(errors="surrogateescape")
            for line in maps.splitlines():
                fields = line.split(maxsplit=5)
                # Not below it: another file system may be there, with the same inodes.
                if len(fields) == 6 and os.path.dirname(fields[5]) == _SHARED_MEMORY:
                    mapped.add(int(fields[4]))
    found: set[str] = set()
    # By inode: who made a semaphore has mapped it under a name that it never had since.
    with contextlib.suppress(OSError), os.scandir(_SHARED_MEMORY) as files:
        # Ray's object store is mapped too, and is not theirs.
        found |= {f.path for f in files if f.inode() in mapped and f.name.startswith(_THEIRS)}
    return frozenset(found)


def unlink(paths: Iterable[str]) -> None:
    """Remove what is still there. Only for files whose processes are gone."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def free_shared_memory() -> None:
    """Make Python's resource tracker of this process free what its dead children left, and end.

    Call it when the children are gone. The tracker would do so on its own after this process,
    but Ray kills it with its worker. Blocks until it has ended.
    """
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.Error:
        return None


def _tracks_resources(process: psutil.Process) -> bool:
    """Python's resource tracker: it ends by itself when those it serves are gone, and on its
    way out frees the shared memory that they, killed, could not.
    """
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def die_with_actor() -> None:
    """End this process when the actor named in the environment ends, however it ends.

    Only in processes made by :mod:`multiprocessing` (vLLM's engine core and workers), never in
    the actor itself or in a process that merely inherited the variable. Idempotent.

    A pidfd and a thread, not PR_SET_PDEATHSIG: that signal comes when the parent's *thread*
    that forked ends, and the actor starts its engine from a short-lived one.
    """
    global _armed
    actor = os.environ.get(ACTOR_ENV)
    if _armed or actor is None or multiprocessing.parent_process() is None:
        return
    _armed = True
    try:
        fd = os.pidfd_open(int(actor))
    except ProcessLookupError:
        _end_for_good()
        return

    def watch() -> None:
        select.select([fd], [], [])
        _end_for_good()

    threading.Thread(target=watch, name="die-with-actor", daemon=True).start()


def _end_for_good() -> None:
    """SIGKILL this process, whatever it runs, and remove its files first if that can be."""
    try:
        # Ray ends the resource tracker with the actor: perhaps nobody else is left to remove these.
        own = ProcessId.of(os.getpid())
        unlink(shared_memory([own] if own else []))
        remove_scratch(os.environ.get(SCRATCH_ENV))
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


async def gone(pids: Iterable[int]) -> int:
    """Wait until one of ``pids`` has ended; returns which. Needs pidfds (Linux)."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    fds: list[int] = []

    def notice(pid: int) -> None:
        if not ended.done():
            ended.set_result(pid)

    try:
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                return pid
            fds.append(fd)
            loop.add_reader(fd, notice, pid)
        return await ended
    finally:
        for fd in fds:
            loop.remove_reader(fd)
            os.close(fd)
