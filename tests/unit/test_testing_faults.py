"""The rules of :class:`Faults`: they strike where they were told to, and say when not."""

from __future__ import annotations

import ast
import asyncio
import sys
from pathlib import Path

import pytest

from orchestrator import testing
from orchestrator.errors import ChannelError, EngineDied, EngineError
from orchestrator.testing import FakeEngine, FakeTrainer, FakeWorld, Faults, all_blocked
from orchestrator.types import KVPolicy, PauseMode, TransferBackend

KEEP, RECOMPUTE = PauseMode.KEEP, KVPolicy.RECOMPUTE


async def engine_of(world: FakeWorld) -> FakeEngine:
    engine = FakeEngine("engine-0", world)
    await engine.start()
    return engine


async def test_fail_before_has_no_effect_and_after_has(world: FakeWorld) -> None:
    world.faults.fail("engine-0", "pause", call=1)
    world.faults.fail("engine-0", "pause", call=2, when="after")
    engine = await engine_of(world)
    with pytest.raises(EngineError, match="engine-0: injected fault in pause"):
        await engine.pause(KEEP, RECOMPUTE)
    assert engine.paused is False
    with pytest.raises(EngineError):
        await engine.pause(KEEP, RECOMPUTE)
    assert (await engine.status()).paused
    await engine.pause(KEEP, RECOMPUTE)
    assert [c.ok for c in world.calls("pause")] == [False, False, True]


async def test_fail_raises_what_it_was_given(world: FakeWorld) -> None:
    world.faults.fail("*", "status", call=None, error=ConnectionResetError("wire cut"))
    engine = await engine_of(world)
    for _ in range(2):
        with pytest.raises(ConnectionResetError, match="wire cut"):
            await engine.status()


async def test_delay_takes_virtual_time(world: FakeWorld) -> None:
    world.faults.delay("engine-0", "status", 30.0, call=2)
    engine = await engine_of(world)
    loop = asyncio.get_running_loop()
    await engine.status()
    assert loop.time() == 0
    await engine.status()
    assert loop.time() == 30


async def test_block_holds_until_released(world: FakeWorld) -> None:
    gate = world.faults.block("engine-0", "pause")
    engine = await engine_of(world)
    task = asyncio.create_task(engine.pause(KEEP, RECOMPUTE))
    await gate.reached()
    await asyncio.sleep(1000)
    assert (gate.waiting, task.done(), engine.paused) == (1, False, False)
    gate.release()
    await task
    assert (gate.waiting, engine.paused) == (0, True)


@pytest.mark.parametrize("end", ["cancel", "kill", "aclose"])
async def test_block_ends_with_the_call_or_the_actor(world: FakeWorld, end: str) -> None:
    gate = world.faults.block("engine-0", "pause")
    engine = await engine_of(world)
    task = asyncio.create_task(engine.pause(KEEP, RECOMPUTE))
    await gate.reached()
    if end == "cancel":
        task.cancel()
    elif end == "kill":
        engine.kill()
    else:
        await engine.aclose()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result, asyncio.CancelledError if end == "cancel" else EngineDied)
    assert gate.waiting == 0 and not world.running()


async def test_block_on_the_channel_ends_with_it(world: FakeWorld) -> None:
    gate = world.faults.block("trainer", "open_channel")
    trainer = FakeTrainer(world)
    await trainer.start()
    spec = await trainer.listen(TransferBackend.GLOO, 2, 10.0)
    task = asyncio.create_task(trainer.open_channel(spec))
    await gate.reached()
    await trainer.close_channel()
    with pytest.raises(ChannelError):
        await task


async def test_block_in_aclose(world: FakeWorld) -> None:
    gate = world.faults.block("engine-0", "aclose")
    engine = await engine_of(world)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.aclose(), 8)
    assert (engine.closed, gate.waiting) == (False, 0)
    await engine.aclose()
    assert (engine.closed, engine.death) == (True, "closed")


@pytest.mark.parametrize("when", ["before", "after"])
async def test_die_at_a_method(world: FakeWorld, when: str) -> None:
    world.faults.die("engine-0", "pause", when=when, reason="SIGKILL")
    engine = await engine_of(world)
    watch = asyncio.create_task(engine.wait_dead())
    waiting = asyncio.create_task(engine.wait_for_tokens(1))
    await all_blocked()
    with pytest.raises(EngineDied, match="SIGKILL"):
        await engine.pause(KEEP, RECOMPUTE)
    with pytest.raises(EngineDied):
        await waiting
    assert await watch == "SIGKILL"
    assert engine.paused is (when == "after")


async def test_hook_runs_at_the_very_call(world: FakeWorld) -> None:
    seen: list[bool] = []
    engine = await engine_of(world)
    world.faults.hook("engine-0", "pause", lambda: seen.append(engine.paused))
    world.faults.hook("engine-0", "pause", lambda: seen.append(engine.paused), when="after")
    await engine.pause(KEEP, RECOMPUTE)
    assert seen == [False, True]


def test_rules_that_never_struck_are_named() -> None:
    faults = Faults()
    faults.fail("engine-1", "pause")
    faults.flip_bit("head")
    faults.fail_at_tensor("engine-0", 3)
    faults.wrong_pattern("trainer")
    assert len(list(faults.unused)) == 4
    assert faults.on_wire("engine-0", "head", 1, b"\x00\x00") == b"\x01\x00"
    assert faults.on_wire("engine-0", "tail", 1, b"\x00\x00") == b"\x00\x00"
    assert faults.at_tensor("engine-0", 2, 1) is None
    assert list(faults.unused) == [
        "fail engine-1.pause",
        "fail_at_tensor engine-0.receive_update",
        "wrong_pattern trainer.open_channel",
    ]


def test_only_leaves_and_the_standard_library_are_imported() -> None:
    leaves = {"types", "errors", "protocols", "events", "context", "options", "testing"}
    files = list(Path(testing.__path__[0]).glob("*.py"))
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module
                names = [node.module]
            for name in names:
                top, _, rest = name.partition(".")
                if top == "orchestrator":
                    assert rest.split(".")[0] in leaves, f"{file.name} imports {name}"
                else:
                    assert top in sys.stdlib_module_names, f"{file.name} imports {name}"
