"""Calls of a real Ray actor whose slots are full: no vLLM in it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from actors.adapters import RayEngine
from actors.engine_settings import EngineSettings
from orchestrator.errors import EngineDied
from orchestrator.types import (
    GenerationRequest,
    KVPolicy,
    OpContext,
    PauseAck,
    PauseMode,
    Prompt,
)

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]
DEADLINE_S = 30.0


SLOTS = 4


class BlockedActor:
    """Its generate calls never end by themselves."""

    def __init__(self, name: str, settings: EngineSettings) -> None:
        self._name = name
        self._running = 0
        self._full = threading.Event()

    async def generate(self, ctx: OpContext, request: GenerationRequest) -> None:
        self._running += 1
        if self._running == SLOTS:
            self._full.set()
        await asyncio.get_running_loop().create_future()

    async def wait_for_tokens(self, ctx: OpContext, threshold: int, among: Any = None) -> int:
        """Until every slot is taken; how many generate calls run."""
        await asyncio.to_thread(self._full.wait)
        return self._running

    async def pause(self, ctx: OpContext, mode: PauseMode, kv: KVPolicy) -> PauseAck:
        return PauseAck(self._name, self._running)

    async def next_events(self) -> list[dict[str, Any]]:
        return await asyncio.get_running_loop().create_future()

    async def watch(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def aclose(self, ctx: OpContext) -> None:
        pass


async def test_a_pause_gets_through_when_generate_calls_fill_every_slot(ray_session: None) -> None:
    settings = EngineSettings(model="none")
    engine = RayEngine("blocked", settings)
    groups = {"control": 2, "wait": 2, "generate": SLOTS, "watch": 8}
    running: list[asyncio.Task[Any]] = []
    async with asyncio.timeout(DEADLINE_S):
        try:
            await engine._remote.launch(BlockedActor, ("blocked", settings), {}, groups, {})
            requests = [GenerationRequest(f"r{i}", Prompt((1,)), 4) for i in range(20)]
            running = [asyncio.create_task(engine.generate(request)) for request in requests]
            await engine.wait_for_tokens(1)
            began = time.monotonic()
            ack = await engine.pause(PauseMode.KEEP, KVPolicy.RECOMPUTE)
            assert time.monotonic() - began < 2
            assert ack.requests_in_flight == SLOTS
            assert not any(task.done() for task in running)
        finally:
            await engine.aclose()
        results = await asyncio.gather(*running, return_exceptions=True)
    assert {type(result) for result in results} == {EngineDied}
