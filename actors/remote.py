"""One Ray actor from this side: its calls, its log, its death and its processes.

A remote call is cancelled when the local one is. Ray's errors become ours here.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray.exceptions as rex
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.context import current_op
from orchestrator.errors import MidflightError

from . import processes
from .nodes import node_id
from .placement import Seat
from .reporting import Record

OnEvent = Callable[[str, Record], None]
"""Called in the event loop with the actor's name and each of its log records."""

CLOSE_S = 5.0
"""What an actor may take to close itself before it is killed."""
KILL_S = 2.0
"""What Ray may take to kill an actor before we do."""
SWEEP_S = 3.0
"""What a task on another node may take to start there and to kill."""


class RemoteActor:
    """One Ray actor: its calls, its log, its death and its processes."""

    def __init__(
        self,
        name: str,
        died: Callable[[str], MidflightError],
        failed: Callable[[str], MidflightError],
        on_event: OnEvent | None = None,
    ) -> None:
        self.name = name
        self._died, self._failed = died, failed
        self._on_event = on_event
        self._handle: ActorHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._death: asyncio.Future[str] | None = None
        self._belongings = processes.Belongings("", (), frozenset())
        self._closing: asyncio.Task[None] | None = None
        self._launched = False
        self._gone = False
        """Ray said that its process is gone."""
        self._seat: Seat | None = None

    async def launch(
        self,
        cls: type[Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        groups: Mapping[str, int],
        options: Mapping[str, Any],
        seat: Seat | None = None,
    ) -> None:
        """Create the actor (once), in ``seat`` if given, and wait until its process is there.

        A seat is given back when the actor is closed or gone, and when it was never created.
        """
        if self._launched or self._was_closed():
            raise self._failed("it was started before, or is closed")
        self._launched = True
        counted = type(cls.__name__, (processes.Counted, cls), {})
        remote = ray.remote(
            num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups=dict(groups)
        )(counted)
        if seat is not None:
            options = {**options, **await seat.take(self._failed)}
            self._seat = seat
            if self._was_closed():  # meanwhile
                await self._stand_up()
                raise self._died("it was closed")
        # Without a name: a run never meets an actor of another run.
        self._handle = remote.options(**options).remote(*args, **kwargs)
        self._death = asyncio.get_running_loop().create_future()
        try:
            await self.count()
        except MidflightError:
            await self._stand_up()
            raise
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._watch())]

    async def count(self) -> None:
        """Note what is the actor's, so that it can be removed when the actor cannot answer."""
        self._belongings = await self.call("watch", "belongings")

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes, the actor's first, as last counted."""
        return tuple(p.pid for p in self._belongings.processes)

    async def call(self, group: str, method: str, *args: Any) -> Any:
        """Call ``method`` in concurrency group ``group``; errors are ours."""
        handle = self._handle
        if handle is None:
            raise self._failed("it was not started")
        if self._was_closed() and method != "aclose":
            raise self._died("it was closed")
        ref = getattr(handle, method).options(concurrency_group=group).remote(*args)
        problem: MidflightError
        try:
            return await ref
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                ray.cancel(ref)
            raise
        except rex.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, MidflightError):
                problem = cause
            else:
                problem = self._failed(f"{method}: {_last_line(cause or error)}")
        except rex.RayActorError as error:
            self._gone = not isinstance(error, rex.ActorUnavailableError)
            problem = self._died(_cause_of_death(error))
        except rex.RayError as error:
            problem = self._failed(f"{method}: {type(error).__name__}: {_first_line(error)}")
        raise problem from None

    async def wait_dead(self) -> str:
        """Return why the actor, or what it depends on, is gone; never while it lives."""
        if self._death is None:
            raise self._failed("it was not started")
        return await asyncio.shield(self._death)

    async def aclose(self) -> None:
        """Close the actor, then kill it and its processes. Idempotent; finishes if cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    def _was_closed(self) -> bool:
        return self._closing is not None

    async def _close(self) -> None:
        handle = self._handle
        answered = killed = False
        if handle is not None:
            if ray.is_initialized():
                with contextlib.suppress(MidflightError, TimeoutError):
                    await asyncio.wait_for(self.call("control", "aclose", current_op()), CLOSE_S)
                    answered = True
                with contextlib.suppress(Exception):
                    ray.kill(handle, no_restart=True)
                    killed = True
            if self._belongings.node == node_id():
                # Ray's own kill first: it would report one of ours as a crash.
                await asyncio.to_thread(
                    processes.kill,
                    self._belongings.processes,
                    first_wait_s=KILL_S if killed else 0.0,
                )
                await asyncio.to_thread(self._belongings.remove)
            elif killed and not answered:
                await sweep(self._belongings)
        await self._stand_up()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._death is not None and not self._death.done():
            self._death.set_result("it was closed")

    async def _stand_up(self) -> None:
        seat, self._seat = self._seat, None
        if seat is not None:
            await seat.leave()

    async def _pump(self) -> None:
        while True:
            try:
                records = await self.call("watch", "next_events")
            except MidflightError:
                return  # the actor is gone; _watch says so
            if self._on_event is not None:
                for record in records:
                    self._on_event(self.name, record)

    async def _watch(self) -> None:
        assert self._death is not None
        try:
            cause = str(await self.call("watch", "watch"))
        except MidflightError as error:
            cause = str(error)
        if not self._death.done():
            self._death.set_result(cause)
        if self._gone:
            await self._stand_up()  # the next replica may need the room before this one is closed


async def sweep(belongings: processes.Belongings, timeout_s: float = SWEEP_S) -> bool:
    """Kill an actor's processes on its own node, by a task there; whether that was done in time.

    For an actor that did not close itself. Ray has killed it, and vLLM's processes end with it
    (:func:`actors.processes.die_with_actor`) unless they hang where no thread of theirs runs.
    When no task gets through either, that node is unreachable: its processes and their shared
    memory stay until it is seen to.
    """
    if not belongings.ray_node:
        return False
    where = NodeAffinitySchedulingStrategy(belongings.ray_node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(_end)
    ref = task.options(scheduling_strategy=where).remote(belongings)
    try:
        async with asyncio.timeout(timeout_s):
            await ref
    except (TimeoutError, rex.RayError):
        with contextlib.suppress(Exception):
            ray.cancel(ref, force=True)
        return False
    return True


def _end(belongings: processes.Belongings) -> None:
    processes.kill(belongings.processes, timeout_s=KILL_S)
    belongings.remove()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _last_line(error: BaseException) -> str:
    """What went wrong: the end of a traceback, or the message."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"


def _cause_of_death(error: BaseException) -> str:
    if missing := re.search(r"ModuleNotFoundError: .*", str(error)):
        return f"it cannot run on its node, which lacks what this one has: {missing[0]}"
    if "in its creation task" in str(error):
        return f"it could not be made: {_last_line(error).partition(': ')[2]}"
    wanted = ("worker process", "killed", "died", "exit", "unavailable")
    for line in str(error).splitlines():
        if any(word in line.lower() for word in wanted) and "class_name" not in line:
            return f"its actor process is gone: {line.strip()}"
    return f"its actor process is gone: {_first_line(error)}"
