"""Ray actors as the control plane's protocols; Ray's errors as ours.

A remote call is cancelled when the local one is. No Ray exception leaves this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
import ray.exceptions as rex
from ray.actor import ActorHandle

from orchestrator.context import current_op
from orchestrator.errors import (
    EngineDied,
    EngineError,
    MidflightError,
    TrainerDied,
    TrainerError,
)
from orchestrator.protocols import Digests, FirstTokens
from orchestrator.types import (
    ChannelSpec,
    Completion,
    EngineInfo,
    EngineStatus,
    GenerationRequest,
    KVPolicy,
    PauseAck,
    PauseMode,
    PolicyVersion,
    Rollout,
    TrainStats,
    TransferBackend,
    TransferStats,
    WeightUpdate,
)

from . import processes
from .engine_settings import EngineSettings
from .reporting import Record
from .transfer.rendezvous import node_id

OnEvent = Callable[[str, Record], None]
"""Called in the event loop with the actor's name and each of its log records."""

CLOSE_S = 5.0
"""What an actor may take to close itself before it is killed."""
KILL_S = 2.0
"""What Ray may take to kill an actor before we do."""
CANCEL_S = 2.0
"""What an actor may take to end a cancelled request before we stop waiting for it."""


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

    async def launch(
        self,
        cls: type[Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        groups: Mapping[str, int],
        options: Mapping[str, Any],
    ) -> None:
        """Create the actor (once) and wait until its process is there."""
        if self._handle is not None or self._closing is not None:
            raise self._failed("it was started before, or is closed")
        counted = type(cls.__name__, (processes.Counted, cls), {})
        remote = ray.remote(
            num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups=dict(groups)
        )(counted)
        self._handle = remote.options(**options).remote(*args, **kwargs)
        self._death = asyncio.get_running_loop().create_future()
        await self.count()
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._watch())]

    async def count(self) -> None:
        """Note what is the actor's, so that it can be removed when the actor cannot answer."""
        self._belongings = await self.call("watch", "belongings")

    async def call(self, group: str, method: str, *args: Any) -> Any:
        """Call ``method`` in concurrency group ``group``; errors are ours."""
        handle = self._handle
        if handle is None:
            raise self._failed("it was not started")
        if self._closing is not None and method != "aclose":
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

    async def _close(self) -> None:
        handle = self._handle
        killed = False
        if handle is not None:
            if ray.is_initialized():
                with contextlib.suppress(MidflightError, TimeoutError):
                    await asyncio.wait_for(self.call("control", "aclose", current_op()), CLOSE_S)
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
                processes.unlink(self._belongings.shared_memory)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._death is not None and not self._death.done():
            self._death.set_result("it was closed")

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


class RayEngine:
    """:class:`orchestrator.protocols.Engine` over an :class:`actors.engine.EngineActor`.

    A subclass may name a subclass of that actor in ``actor``, as ``module:class``: it is only
    imported when the engine starts.
    """

    actor = "actors.engine:EngineActor"

    def __init__(
        self,
        name: str,
        settings: EngineSettings,
        *,
        on_event: OnEvent | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """``options``: Ray's actor options (``num_gpus``, ``runtime_env``, placement)."""
        self._name = name
        self._settings = settings
        self._options = dict(options or {})
        self._remote = RemoteActor(
            name,
            lambda text: EngineDied(name, text),
            lambda text: EngineError(name, text),
            on_event,
        )

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> EngineInfo:
        module, _, name = self.actor.partition(":")
        actor = getattr(importlib.import_module(module), name)
        # Groups of their own: a pause never queues behind thousands of generate calls.
        groups = {"control": 32, "wait": 1000, "generate": 100_000, "watch": 8}
        await self._remote.launch(actor, (self._name, self._settings), {}, groups, self._options)
        info: EngineInfo = await self._call("control", "start")
        await self._remote.count()
        return info

    async def generate(self, request: GenerationRequest) -> Completion:
        try:
            completion: Completion = await self._call("generate", "generate", request)
        except asyncio.CancelledError:
            # Return only when the engine is rid of it, or cannot say so in time.
            ending = self._remote.call("control", "cancel_request", request.request_id)
            with contextlib.suppress(MidflightError, TimeoutError):
                await asyncio.wait_for(ending, CANCEL_S)
            raise
        return completion

    async def wait_for_tokens(self, threshold: int, among: Collection[str] | None = None) -> int:
        ids = None if among is None else frozenset(among)
        return int(await self._call("wait", "wait_for_tokens", threshold, ids))

    async def open_channel(self, spec: ChannelSpec, first_rank: int) -> None:
        await self._call("control", "open_channel", spec, first_rank)

    async def close_channel(self) -> None:
        await self._call("control", "close_channel")

    async def pause(self, mode: PauseMode, kv: KVPolicy) -> PauseAck:
        ack: PauseAck = await self._call("control", "pause", mode, kv)
        return ack

    async def start_update(self, update: WeightUpdate) -> None:
        await self._call("control", "start_update", update)

    async def receive_update(self, update: WeightUpdate) -> TransferStats:
        stats: TransferStats = await self._call("control", "receive_update", update)
        return stats

    async def finish_update(self, update: WeightUpdate) -> None:
        await self._call("control", "finish_update", update)

    async def resume(self) -> None:
        await self._call("control", "resume")

    async def wait_first_tokens(self, update: WeightUpdate) -> FirstTokens:
        tokens: FirstTokens = await self._call("wait", "wait_first_tokens", update)
        return tokens

    async def digests(self, update: WeightUpdate) -> Digests:
        digests: Digests = await self._call("wait", "digests", update)
        return digests

    async def prompt_logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[tuple[float, ...], ...]:
        plain = [[int(token) for token in prompt] for prompt in prompts]
        scores: tuple[tuple[float, ...], ...] = await self._call("wait", "prompt_logprobs", plain)
        return scores

    async def status(self) -> EngineStatus:
        status: EngineStatus = await self._call("control", "status")
        return status

    async def abort_requests(self) -> int:
        return int(await self._call("control", "abort_requests"))

    async def wait_dead(self) -> str:
        return await self._remote.wait_dead()

    async def aclose(self) -> None:
        await self._remote.aclose()

    async def _call(self, group: str, method: str, *args: Any) -> Any:
        return await self._remote.call(group, method, current_op(), *args)


class RayTrainer:
    """:class:`orchestrator.protocols.Trainer` over an :class:`actors.trainer.TrainerActor`."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        name: str = "trainer",
        on_event: OnEvent | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """``arguments``: keywords of TrainerActor. ``options``: Ray's actor options."""
        self._arguments = dict(arguments)
        self.started: Mapping[str, Any] = {}
        """What the actor said about itself when it was up: ``packages``, ``hardware``, ..."""
        self._options = dict(options or {})
        self._remote = RemoteActor(name, TrainerDied, TrainerError, on_event)

    @property
    def name(self) -> str:
        return self._remote.name

    async def start(self) -> None:
        from .trainer import TrainerActor

        # Closing must get through while a send or a train step blocks.
        groups = {"control": 16, "work": 4, "watch": 8}
        await self._remote.launch(
            TrainerActor, (), {**self._arguments, "name": self.name}, groups, self._options
        )
        self.started = await self._call("work", "start")
        await self._remote.count()

    async def listen(
        self, backend: TransferBackend, world_size: int, timeout_s: float
    ) -> ChannelSpec:
        spec: ChannelSpec = await self._call("control", "listen", backend, world_size, timeout_s)
        return spec

    async def open_channel(self, spec: ChannelSpec) -> None:
        await self._call("control", "open_channel", spec)

    async def close_channel(self) -> None:
        await self._call("control", "close_channel")

    async def stage(self, version: PolicyVersion) -> Digests:
        digests: Digests = await self._call("control", "stage", version)
        return digests

    async def send(self, update: WeightUpdate) -> TransferStats:
        stats: TransferStats = await self._call("control", "send", update)
        return stats

    async def reference_logprobs(
        self, prompts: Sequence[Sequence[int]], *, initial: bool = False
    ) -> tuple[tuple[float, ...], ...]:
        plain = [[int(token) for token in prompt] for prompt in prompts]
        scores: tuple[tuple[float, ...], ...] = await self._call(
            "control", "reference_logprobs", plain, initial
        )
        return scores

    async def train(self, batch: Sequence[Rollout], step: int) -> TrainStats:
        stats: TrainStats = await self._call("work", "train", list(batch), step)
        return stats

    async def save_checkpoint(self, name: str) -> str:
        return str(await self._call("control", "save_checkpoint", name))

    async def wait_dead(self) -> str:
        return await self._remote.wait_dead()

    async def aclose(self) -> None:
        await self._remote.aclose()

    async def _call(self, group: str, method: str, *args: Any) -> Any:
        return await self._remote.call(group, method, current_op(), *args)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _last_line(error: BaseException) -> str:
    """What went wrong: the end of a traceback, or the message."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"


def _cause_of_death(error: BaseException) -> str:
    wanted = ("worker process", "killed", "died", "exit", "unavailable")
    for line in str(error).splitlines():
        if any(word in line.lower() for word in wanted) and "class_name" not in line:
            return f"its actor process is gone: {line.strip()}"
    return f"its actor process is gone: {_first_line(error)}"
