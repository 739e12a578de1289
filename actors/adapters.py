"""Ray actors as the control plane's protocols; every call goes through :mod:`actors.remote`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

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
    PhaseTimeouts,
    PolicyVersion,
    Rollout,
    Swapped,
    TrainerInfo,
    TrainStats,
    TransferBackend,
    TransferStats,
    WeightUpdate,
)

from .engine_settings import EngineSettings
from .placement import Seat
from .remote import OnEvent, RemoteActor

CANCEL_S = 2.0
"""What an actor may take to end a cancelled request before we stop waiting for it."""


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
        seat: Seat | None = None,
    ) -> None:
        """``options``: Ray's actor options (``num_gpus``, ``runtime_env``, placement).

        ``seat``: where it runs and how many GPUs it gets there; wins over ``options``.
        """
        self._name = name
        self._settings = settings
        self._options, self._seat = dict(options or {}), seat
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
        arguments = (self._name, self._settings)
        await self._remote.launch(actor, arguments, {}, groups, self._options, self._seat)
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

    async def prefetch(self, update: WeightUpdate) -> TransferStats:
        stats: TransferStats = await self._call("control", "prefetch", update)
        return stats

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

    async def swap(self, update: WeightUpdate, timeouts: PhaseTimeouts) -> Swapped:
        swapped: Swapped = await self._call("control", "swap", update, timeouts)
        return swapped

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
    """:class:`orchestrator.protocols.Trainer` over an :class:`actors.trainer.TrainerActor`.

    It is :class:`orchestrator.protocols.Resumable` too.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        name: str = "trainer",
        on_event: OnEvent | None = None,
        options: Mapping[str, Any] | None = None,
        seat: Seat | None = None,
    ) -> None:
        """``arguments``: keywords of TrainerActor. ``options``, ``seat``: as of RayEngine."""
        self._arguments = dict(arguments)
        self.started: Mapping[str, Any] = {}
        """What the actor said about itself when it was up: ``packages``, ``hardware``, ..."""
        self._options, self._seat = dict(options or {}), seat
        self._remote = RemoteActor(name, TrainerDied, TrainerError, on_event)

    @property
    def name(self) -> str:
        return self._remote.name

    async def start(self) -> TrainerInfo:
        from .trainer import TrainerActor

        # Closing must get through while a send or a train step blocks.
        groups = {"control": 16, "work": 4, "watch": 8}
        arguments = {**self._arguments, "name": self.name}
        await self._remote.launch(TrainerActor, (), arguments, groups, self._options, self._seat)
        self.started = await self._call("work", "start")
        await self._remote.count()
        return TrainerInfo(self._remote.pids, self.started["node_ip"])

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

    async def save_state(self, path: str) -> None:
        await self._call("control", "save_state", path)

    async def load_state(self, path: str) -> None:
        await self._call("control", "load_state", path)

    async def wait_dead(self) -> str:
        return await self._remote.wait_dead()

    async def aclose(self) -> None:
        await self._remote.aclose()

    async def _call(self, group: str, method: str, *args: Any) -> Any:
        return await self._remote.call(group, method, current_op(), *args)
