"""Placement groups of a real Ray: what is reserved, for whom, and that all of it is given back.

Its GPUs are only counted. That they are back is proved by reserving all of them again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio

from actors import placement
from actors.assembly import gpu_shares
from actors.placement import Group, Seat, Seating
from actors.processes import Belongings, ProcessId
from actors.remote import RemoteActor, sweep
from orchestrator.errors import ConfigError, EngineDied, EngineError
from orchestrator.types import OpContext, TransferBackend

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]
DEADLINE_S = 60.0
GPUS = 4
GROUPS = {"control": 4, "watch": 8}


class Tenant:
    """An actor that says where it is."""

    def __init__(self, fail: str = "") -> None:
        if fail:
            raise RuntimeError(fail)

    async def where(self) -> tuple[str, tuple[int, ...], int]:
        """Its group, its GPUs, its process."""
        import ray
        from ray.util import get_current_placement_group

        group = get_current_placement_group()
        return group.id.hex(), tuple(ray.get_gpu_ids()), os.getpid()

    async def workers(self, share: float) -> list[tuple[int, ...]]:
        """GPUs of two workers, each started in a bundle of its own as vLLM's executor does."""
        import ray
        from ray.util import get_current_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = get_current_placement_group()
        bundles = [i for i, spec in enumerate(group.bundle_specs) if spec.get("GPU")]
        plain = ray.remote(Worker)
        self._workers = [
            plain.options(
                num_cpus=0,
                num_gpus=share,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
            ).remote()
            for bundle in bundles
        ]
        return list(await asyncio.gather(*(worker.gpus.remote() for worker in self._workers)))

    async def vllm_finds(self) -> tuple[str, list[int]]:
        """The group that vLLM's Ray executor takes in this actor, and the bundles it takes."""
        return await asyncio.to_thread(_ask_vllm)

    async def next_events(self) -> list[dict[str, Any]]:
        return await asyncio.get_running_loop().create_future()

    async def watch(self) -> str:
        return await asyncio.get_running_loop().create_future()

    async def aclose(self, ctx: OpContext) -> None:
        pass


class Worker:
    def gpus(self) -> tuple[int, ...]:
        import ray

        return tuple(ray.get_gpu_ids())


def _ask_vllm() -> tuple[str, list[int]]:
    from ray.util import get_current_placement_group
    from vllm.config import ParallelConfig
    from vllm.platforms import current_platform
    from vllm.v1.executor import ray_utils

    type(current_platform).ray_device_key = "GPU"  # vLLM's CPU platform has none
    config = ParallelConfig(
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
        # As AsyncEngineArgs passes it from an actor to the engine core.
        placement_group=get_current_placement_group(),
    )
    ray_utils.initialize_ray_cluster(config, require_gpu_on_driver=False)
    found = ray_utils.get_bundles_sorted_by_node(config.placement_group)
    return config.placement_group.id.hex(), [bundle for bundle, _, _ in found]


def actor(name: str = "tenant") -> RemoteActor:
    return RemoteActor(name, lambda text: EngineDied(name, text), lambda t: EngineError(name, t))


async def launch(
    remote: RemoteActor, seat: Seat, **kwargs: Any
) -> tuple[str, tuple[int, ...], int]:
    await remote.launch(Tenant, (), kwargs, GROUPS, {}, seat)
    where: tuple[str, tuple[int, ...], int] = await remote.call("control", "where")
    return where


def alive() -> set[str]:
    """Groups that are there or on their way."""
    found: Mapping[str, Any] = placement.placement_group_table()
    return {name for name, entry in found.items() if entry["state"] != "REMOVED"}


async def everything_is_back() -> None:
    """All GPUs can be had again."""
    group = Group([{"GPU": GPUS}], deadline_s=DEADLINE_S)
    await group.enter()
    await group.leave()
    assert alive() == set()


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _nothing_left(ray_session: None) -> AsyncIterator[None]:
    async with asyncio.timeout(2 * DEADLINE_S):
        yield
        await everything_is_back()


async def test_an_actor_runs_in_its_group_which_goes_when_it_is_closed() -> None:
    remote = actor()
    group, gpus, _ = await launch(remote, Seat(Group([{"GPU": 1}]), 1))
    assert alive() == {group} and len(gpus) == 1
    await asyncio.gather(remote.aclose(), remote.aclose())
    assert alive() == set()


async def test_a_failed_launch_leaves_no_group() -> None:
    remote = actor()
    with pytest.raises(EngineError, match="no weights"):
        await launch(remote, Seat(Group([{"GPU": 1}]), 1), fail="no weights")
    assert alive() == set()
    await remote.aclose()


async def test_a_dead_actor_gives_its_group_back_before_it_is_closed() -> None:
    remote = actor()
    _, _, pid = await launch(remote, Seat(Group([{"GPU": GPUS}]), GPUS))
    os.kill(pid, signal.SIGKILL)
    await remote.wait_dead()
    await everything_is_back()
    await remote.aclose()


@pytest.mark.parametrize("end", ["cancel", "close"])
async def test_a_launch_that_is_ended_while_it_waits_for_room_leaves_no_group(end: str) -> None:
    first, second = actor("first"), actor("second")
    await launch(first, Seat(Group([{"GPU": GPUS}]), GPUS))
    (held,) = alive()
    asked = asyncio.Event()
    waits = Group([{"GPU": 1}], deadline_s=DEADLINE_S if end == "cancel" else 1.0)
    reserve = waits._reserve

    async def noted(*args: Any) -> Any:
        asyncio.get_running_loop().call_soon(asked.set)
        return await reserve(*args)

    waits._reserve = noted  # type: ignore[method-assign]
    launching = asyncio.create_task(launch(second, Seat(waits, 1)))
    await asked.wait()
    if end == "cancel":
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launching
        await second.aclose()
    else:
        await second.aclose()
        with pytest.raises(EngineError, match="no room"):
            await launching
    assert alive() == {held}
    await first.aclose()


async def test_what_is_closed_while_its_group_is_made_is_not_started() -> None:
    remote = actor()
    launching = asyncio.create_task(launch(remote, Seat(Group([{"GPU": 1}]), 1)))
    await asyncio.sleep(0)  # one turn: it has begun
    await remote.aclose()
    with pytest.raises(EngineDied, match="it was closed"):
        await launching
    assert alive() == set()


async def test_no_room_says_what_was_asked_for_and_what_is_free() -> None:
    first, second = actor("first"), actor("second")
    await launch(first, Seat(Group([{"GPU": GPUS}]), GPUS))
    seat = Seat(Group([{"CPU": 0.01, "GPU": 1}], deadline_s=1.0), 1)
    with pytest.raises(EngineError, match=r"no room for a bundle of 0\.01 CPU, 1 GPU .* 1 s: \d"):
        await launch(second, seat)
    await asyncio.gather(first.aclose(), second.aclose())


async def test_what_the_cluster_can_never_hold_is_refused_at_once() -> None:
    for bundles in ([{"GPU": GPUS + 1}], [{"GPU": 1}] * (GPUS + 1)):
        remote = actor()
        with pytest.raises(ConfigError, match=rf"never hold .* GPU: it has 8 CPU, {GPUS} GPU on 1"):
            await launch(remote, Seat(Group(bundles), 0))
        await remote.aclose()


async def test_those_who_share_memory_are_on_one_gpu_and_its_group_outlives_each_of_them() -> None:
    """A group each would not do: with half of a GPU taken, shares lie on two."""
    other = actor("other")
    await launch(other, Seat(Group([{"GPU": 0.5}]), 0.5))
    (strange,) = alive()
    seating = Seating(gpu_shares(TransferBackend.IPC, 2, 1), together=True)
    tenants = [actor(name) for name in ("trainer", "engine-0", "engine-1", "fresh")]
    seats = [seating.trainer(), seating.engine(), seating.engine(), seating.fresh()]
    where = await asyncio.gather(*map(launch, tenants, seats))
    assert len({(group, gpus) for group, gpus, _ in where}) == 1
    await tenants[1].aclose()
    again = actor("engine-0.r1")
    assert (await launch(again, seating.engine()))[:2] == where[0][:2]
    for tenant in [*tenants, again]:
        assert where[0][0] in alive()
        await tenant.aclose()
    assert alive() == {strange}
    await other.aclose()


async def test_workers_of_vllms_ray_executor_run_in_the_group_of_their_replica() -> None:
    shares = gpu_shares(TransferBackend.NCCL, 1, 2, by_ray=True)
    seating = Seating(shares, ray_workers=2)
    trainer, engine, fresh = actor("trainer"), actor("engine-0"), actor("fresh")
    _, trains_on, _ = await launch(trainer, seating.trainer())
    group, gpus, _ = await launch(engine, seating.engine())
    assert gpus == ()
    ours = await engine.call("control", "workers", 0.6)
    assert len({*ours, trains_on}) == 3
    # A GPU of a replica's worker has room for the same worker of the fresh engine.
    assert (await launch(fresh, seating.fresh()))[0] == group
    assert await fresh.call("control", "workers", 0.4) == ours
    assert await engine.call("control", "vllm_finds") == (group, [1, 2])
    await asyncio.gather(trainer.aclose(), engine.aclose())
    assert alive() == {group}
    await fresh.aclose()
    assert alive() == set()


async def test_a_cancel_at_any_step_of_making_a_group_leaves_none() -> None:
    for steps in range(12):
        group = Group([{"GPU": 1}])
        entering = asyncio.create_task(group.enter())
        for _ in range(steps):  # turns of the loop, not time: the cancel comes at each of them
            await asyncio.sleep(0)
        entering.cancel()
        try:
            await entering
        except asyncio.CancelledError:
            continue
        await group.leave()  # it was there already
    assert alive() == set()


def leftover() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])


async def test_what_an_actor_left_on_another_node_is_ended_there() -> None:
    import ray

    with leftover() as left:
        known = ProcessId.of(left.pid)
        assert known is not None
        node = ray.get_runtime_context().get_node_id()
        assert await sweep(Belongings("elsewhere", (known,), frozenset(), node), DEADLINE_S)
        assert left.wait(timeout=DEADLINE_S) == -signal.SIGKILL
    nobody = "0" * len(node)
    assert not await sweep(Belongings("elsewhere", (known,), frozenset(), nobody), DEADLINE_S)
    assert not await sweep(Belongings("elsewhere", (known,), frozenset()))
