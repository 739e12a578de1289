"""Carries out injections: an observer that strikes in the very transition into a state.

It knows the processes of a run from what started actors say of themselves, and touches no other:
one on another machine, or one whose pid belongs to somebody else by now, is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.events import (
    EngineStarted,
    Event,
    FaultInjected,
    Observer,
    PrefetchStarted,
    ReplicaDied,
    StateChanged,
    SwapDone,
    TrainerStarted,
)
from orchestrator.injection import STAGING, FaultKind, Injection
from orchestrator.machine import Trigger
from orchestrator.types import OpContext, State


class Process(Protocol):
    """What it needs of ``psutil.Process``, which compares start times before it signals."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def suspend(self) -> None: ...

    def resume(self) -> None: ...


FindProcesses = Callable[[Sequence[int], str], Sequence[Process]]
"""Finds the running ones of some pids on the machine with this address."""


def find_processes(pids: Sequence[int], node_ip: str) -> Sequence[Process]:
    """None unless that is this machine.

    Without Python's resource trackers: they free the shared memory of who is killed.
    """
    import psutil

    if node_ip not in _own_addresses():
        return ()
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if not any("resource_tracker" in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _own_addresses() -> set[str]:
    import psutil

    return {a.address for each in psutil.net_if_addrs().values() for a in each}


@dataclass(slots=True)
class _Planned:
    injection: Injection
    left: int
    reached: bool = False
    """Its time came, but nobody was there to be struck."""


class Injector:
    """Observer that carries out ``injections`` and tells of each (FaultInjected).

    :meth:`close` it when the run has ended. Belongs to one event loop.
    """

    def __init__(
        self,
        injections: Sequence[Injection],
        tell: Observer = lambda event: None,
        *,
        find: FindProcesses = find_processes,
    ) -> None:
        self._tell, self._find = tell, find
        self._planned = [_Planned(injection, injection.times) for injection in injections]
        self._actors: dict[str, tuple[int, Sequence[Process]]] = {}
        """Those that live: the pid of the actor itself, and all its processes."""
        self._step = 1
        """Whose rollouts are generated now."""
        self._stopped: dict[int, Process] = {}
        self._timers: list[asyncio.TimerHandle] = []

    def __call__(self, event: Event) -> None:
        match event:
            case EngineStarted(info=info):
                self._up(info.name, info.pids, info.node_ip)
            case TrainerStarted(info=info):
                self._up("trainer", info.pids, info.node_ip)
            case ReplicaDied(actor=actor):
                self._actors.pop(actor, None)
            case PrefetchStarted():
                self._reached(event, STAGING, event.op.step)
            case StateChanged(target=State.GENERATING):
                if event.trigger == Trigger.VERIFY:
                    self._step = (event.op.step or self._step) + 1
                self._reached(event, State.GENERATING, self._step)
            case StateChanged(target=target):
                self._reached(event, target, event.op.step)
            case SwapDone(report=report):
                # Also of a swap that recovery ended: GENERATING was entered before it was done.
                self._step = max(self._step, report.update.step + 1)
            case _:
                pass

    def never_struck(self) -> list[str]:
        """What did not come to pass, a line each."""
        lines = []
        for planned in self._planned:
            injection, struck = planned.injection, planned.injection.times - planned.left
            if not planned.left:
                continue
            if struck:
                lines.append(f"injection {injection} struck {struck} of {injection.times} times")
            elif planned.reached:
                lines.append(
                    f"injection {injection} never struck: its target had no process on this machine"
                )
            else:
                step = "" if injection.step is None else f" of step {injection.step}"
                lines.append(
                    f"injection {injection} never struck: the run did not come to "
                    f"{injection.place}{step}"
                )
        return lines

    def close(self) -> None:
        """Whoever still stands still may go on. Idempotent."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._go_on(list(self._stopped.values()))

    def _up(self, actor: str, pids: Sequence[int], node_ip: str) -> None:
        if pids and self._planned:
            self._actors[actor] = pids[0], self._find(pids, node_ip)

    def _reached(self, event: Event, place: str, step: int | None) -> None:
        step = step or self._step
        for planned in self._planned:
            injection = planned.injection
            if planned.left and injection.place == place and injection.step in (None, step):
                planned.reached = True
                actors = [name for name in self._actors if injection.concerns(name)]
                struck = [name for name in actors if self._strike(injection, name, event.op, step)]
                planned.left -= bool(struck)

    def _strike(self, injection: Injection, actor: str, op: OpContext, step: int) -> bool:
        own, processes = self._actors[actor]
        if injection.part:
            processes = [p for p in processes if (p.pid == own) is (injection.part == "actor")]
        struck = []
        for process in processes:
            try:
                if injection.kind is FaultKind.CRASH:
                    process.kill()
                else:
                    process.suspend()
                    self._stopped[process.pid] = process
            except Exception:  # gone before, or not ours to signal
                continue
            struck.append(process)
        if not struck:
            return False
        if injection.kind is FaultKind.CRASH:
            left = [p for p in self._actors[actor][1] if p not in struck]
            self._actors[actor] = own, left
        if injection.seconds is not None:
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(injection.seconds, self._go_on, struck))
        self._tell(
            FaultInjected(
                time.time(),
                op,
                actor,
                injection.kind,
                injection.place,
                step,
                tuple(p.pid for p in struck),
                injection.seconds,
            )
        )
        return True

    def _go_on(self, processes: Sequence[Process]) -> None:
        for process in processes:
            self._stopped.pop(process.pid, None)
            with contextlib.suppress(Exception):  # it may be gone
                process.resume()
