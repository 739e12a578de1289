"""Where actors go, as far as no Ray is needed to say."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors import assembly, nodes
from actors.assembly import gpu_shares, on_one_gpu, vllm_uses_ray
from actors.core import Core
from actors.engine_settings import EngineSettings
from actors.placement import Group, Seating, Spread, amounts, describe
from actors.reporting import ActorReporter
from orchestrator.errors import ConfigError, EngineError
from orchestrator.sources import load
from orchestrator.types import TransferBackend

NCCL, IPC, GLOO = TransferBackend.NCCL, TransferBackend.IPC, TransferBackend.GLOO


def node(name: str, address: str, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerAddress": address, "Alive": alive}


def test_a_loopback_address_is_refused_when_another_node_would_have_to_reach_it() -> None:
    """Case 37."""
    table = [node("a", "127.0.0.1"), node("b", "10.0.0.2"), node("c", "10.0.0.3", alive=False)]
    with pytest.raises(ConfigError, match=r"as 127\.0\.0\.1.* at 10\.0\.0\.2: start Ray there"):
        nodes.refuse_loopback("127.0.0.1", "a", table)
    nodes.refuse_loopback("10.0.0.1", "a", table)
    # Ray nodes of one address are processes of one machine.
    nodes.refuse_loopback("127.0.0.1", "a", [node("a", "127.0.0.1"), node("b", "127.0.0.1")])
    nodes.refuse_loopback("127.0.0.1", "a", [node("a", "127.0.0.1")])


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("localhost", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("127.example.org", False),
    ],
)
def test_what_loopback_is(host: str, loopback: bool) -> None:
    assert nodes.is_loopback(host) is loopback


def test_containers_of_one_machine_are_told_apart() -> None:
    """Case 37: they share the kernel's boot id, and not their loopback."""
    assert nodes.network_id().startswith(nodes.node_id())
    assert "net:" in nodes.network_id()


def test_what_a_cluster_is_told_of_this_environment() -> None:
    found = nodes.carried_environment(
        {
            "PYTHONPATH": f"/a{os.pathsep}/b",
            "NCCL_DEBUG": "INFO",
            "VLLM_LOGGING_LEVEL": "DEBUG",
            "VLLM_API_KEY": "secret",
            "VLLM_HOST_IP": "10.0.0.1",
            "HF_TOKEN": "secret",
            "CUDA_VISIBLE_DEVICES": "3",
            "HOME": "/home/me",
        }
    )
    path = found.pop("PYTHONPATH").split(os.pathsep)
    assert path[:2] == ["/a", "/b"]
    # What the node has itself stays; Ray puts it in.
    assert path[-1] == "${PYTHONPATH}"
    assert str(Path(nodes.__file__).parents[1]) in path
    assert found == {"NCCL_DEBUG": "INFO", "VLLM_LOGGING_LEVEL": "DEBUG"}


def test_replicas_avoid_nodes_that_hold_more_of_them_than_others() -> None:
    spread = Spread()
    first, second = Group([{"CPU": 1}]), Group([{"CPU": 1}])
    assert spread.crowded(["a", "b"]) == []
    spread.note(first, frozenset({"a"}))
    assert spread.crowded(["a", "b"]) == ["a"]
    assert spread.crowded(["a"]) == []
    spread.note(second, frozenset({"b"}))
    assert spread.crowded(["a", "b"]) == []
    assert spread.crowded(["a", "b", "c"]) == ["a", "b"]
    spread.note(first, frozenset())
    assert spread.crowded(["a", "b"]) == ["b"]


def test_resources_in_words() -> None:
    assert describe([{"CPU": 0.01}, {"GPU": 1}, {"GPU": 1}]) == (
        "a bundle of 0.01 CPU and 2 bundles of 1 GPU"
    )
    assert amounts({"CPU": 2.0, "memory": 1e9}) == "2 CPU, 0 GPU"
    assert amounts({}) == "0 CPU, 0 GPU"


def test_who_shares_a_group() -> None:
    ipc = Seating(gpu_shares(IPC, 2, 1), together=on_one_gpu(IPC, 1))
    seats = [ipc.trainer(), ipc.engine(), ipc.engine(), ipc.fresh()]
    assert {id(seat.group) for seat in seats} == {id(seats[0].group)}
    assert seats[0].group.bundles == ({"CPU": 0.01, "GPU": 1},)
    assert sum(seat.gpus for seat in seats) <= 1

    nccl = Seating(gpu_shares(NCCL, 2, 1))
    seats = [nccl.trainer(), nccl.engine(), nccl.engine(), nccl.fresh()]
    assert len({id(seat.group) for seat in seats}) == 4
    assert [seat.group.bundles[0]["GPU"] for seat in seats] == [1, 0.6, 0.6, 0.4]
    assert all(seat.group.bundles[0]["GPU"] == seat.gpus for seat in seats)

    gloo = Seating(gpu_shares(GLOO, 1, 1), spread=True)
    assert gloo.engine().group.bundles == ({"CPU": 0.01},)


def test_each_ray_worker_has_a_bundle_and_the_actor_no_gpu() -> None:
    by_ray = vllm_uses_ray("auto", 2, cpu=False)
    assert by_ray and not vllm_uses_ray("auto", 2, cpu=True)
    seating = Seating(gpu_shares(NCCL, 1, 2, by_ray=by_ray), ray_workers=2)
    engine = seating.engine()
    assert engine.group.bundles == ({"CPU": 0.01}, {"GPU": 1}, {"GPU": 1})
    assert (engine.gpus, engine.worker_gpus) == (0, 0.6)
    # No replica runs: a group of its own.
    assert seating.fresh().group is not engine.group


def test_workers_in_one_process_tree_reserve_whole_gpus() -> None:
    assert gpu_shares(NCCL, 1, 2) == {"trainer": 1, "engine": 2, "fresh": 2}
    one = Seating(gpu_shares(IPC, 1, 1, by_ray=True), together=True, ray_workers=1).engine()
    assert (one.gpus, one.worker_gpus) == (0, 0.333)


@pytest.mark.parametrize(
    ("backend", "flags", "has", "says"),
    [
        (NCCL, {"engines": 2}, 2, r"takes 3 GPUs \(trainer 1, engines 2 x 1\).*cluster has 2"),
        (NCCL, {"engines": 2}, 3, None),
        (NCCL, {"engines": 2, "tensor_parallel_size": 2}, 4, r"takes 5 GPUs"),
        (
            NCCL,
            {"tensor_parallel_size": 2, "executor": "mp"},
            4,
            r"takes 5 GPUs \(trainer 1, engines 1 x 2, fresh engine 2\).*--executor ray",
        ),
        (IPC, {"engines": 4}, 1, None),
        (GLOO, {"engines": 4}, 0, None),
    ],
)
def test_more_gpus_than_the_cluster_has_are_refused_before_anything_waits(
    monkeypatch: pytest.MonkeyPatch,
    backend: TransferBackend,
    flags: dict[str, Any],
    has: int,
    says: str | None,
) -> None:
    """Case 34."""
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0, "GPU": float(has)})
    checked = cast(Any, SimpleNamespace(backend=backend))
    if says is None:
        assembly.check_room(load(flags), checked)
        return
    with pytest.raises(ConfigError, match=says):
        assembly.check_room(load(flags), checked)


async def test_a_node_without_the_model_says_so_before_vllm_starts() -> None:
    """vLLM would look the path up on the hub."""
    settings = EngineSettings(model="/no/such/model")
    core = Core("e", settings, ActorReporter("e"), asyncio.get_running_loop())
    with pytest.raises(EngineError, match=r"no model folder /no/such/model on its node \("):
        await core.start()
    assert not EngineSettings(model="org/name-on-the-hub").missing
