"""What is decided before the actors of a run are made."""

from __future__ import annotations

import socket
import subprocess

import pytest

from actors import hardware
from actors.assembly import check_executor, gpu_shares, preflight
from actors.cluster import look, summed
from actors.engine_settings import EngineSettings
from actors.trainer import TrainerActor
from orchestrator.errors import ConfigError
from orchestrator.sources import load
from orchestrator.types import TransferBackend


@pytest.mark.parametrize(
    ("workers", "cpu", "expected"),
    [(1, True, "uni"), (1, False, "uni"), (2, True, "mp"), (2, False, "ray")],
)
def test_the_executor_is_one_that_runs_here(workers: int, cpu: bool, expected: str) -> None:
    settings = EngineSettings(model="m", tensor_parallel_size=workers, cpu=cpu)
    assert settings.arguments()["distributed_executor_backend"] == expected
    check_executor(expected, gpus=0 if cpu else workers)


def test_vllms_ray_executor_without_a_gpu_is_refused() -> None:
    """Case 34: vLLM itself says so after half a minute, in a log."""
    with pytest.raises(ConfigError, match=r"--executor ray needs GPUs and none is visible.*mp"):
        check_executor("ray", gpus=0)
    asked = EngineSettings(model="m", executor="ray").arguments()
    assert asked["distributed_executor_backend"] == "ray"


def test_nobody_at_the_address_of_the_cluster_is_refused() -> None:
    """Case 37."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*refused.*ray start --head"):
        look(f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="no Ray cluster at --ray-address 'nowhere'"):
        look("nowhere")


def test_a_cluster_is_the_sum_of_its_nodes() -> None:
    nodes = [
        {"CPU": 64.0, "GPU": 8.0, "memory": 2.0**40, "accelerator_type:H200": 1.0},
        {"CPU": 8.0, "memory": 2.0**34},
        {"CPU": 16.0, "GPU": 1.0},
    ]
    found = summed(nodes)
    assert (found.gpus, found.cores, found.rocm) == (("H200",) * 8 + ("GPU",), 88, False)
    assert found.describe() == "Ray cluster of 3 nodes, 88 cores, 1040 GB, 1 x GPU, 8 x H200"
    assert summed([{"GPU": 1.0, "accelerator_type:AMD-Instinct-MI300X-OAM": 1.0}]).rocm
    assert summed([{"CPU": 2.0}]).gpus == ()
    for other in ("Intel-GPU-Max-1550", "AMD-Instinct-MI300X-OAM"):
        with pytest.raises(ConfigError, match=f"H200.*{other}|{other}.*H200"):
            summed([*nodes, {"GPU": 1.0, f"accelerator_type:{other}": 1.0}])
    with pytest.raises(ConfigError, match="must be NVIDIA's or AMD's"):
        summed([{"GPU": 1.0, "accelerator_type:Intel-GPU-Max-1550": 1.0}])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('[{"GPU": 1, "accelerator_type:Intel-GPU-Max-1550": 1}]', "^the Ray cluster has Intel"),
        ("", "^no Ray cluster at .*: Expecting value"),
    ],
)
def test_what_a_cluster_answers_is_not_taken_for_no_cluster(
    answer: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=answer, stderr="")
    monkeypatch.setattr("actors.cluster.subprocess.run", lambda *_, **__: done)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=said):
        look("auto")


@pytest.mark.parametrize(("gpus", "backend"), [((), "gloo"), (("H200",) * 2, "nccl")])
def test_what_the_cluster_has_decides_not_what_the_driver_has(
    gpus: tuple[str, ...], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = hardware.Hardware("driver", 1, 1.0, ("T4",))
    there = hardware.Hardware("cluster", 1, 1.0, gpus)
    monkeypatch.setattr("actors.assembly.cluster.look", lambda address: there)
    monkeypatch.setattr(hardware, "detect", lambda: here)
    prepared = preflight(load({"ray_address": "head:6379"}, None))
    assert (prepared.backend, prepared.checked.gpus) == (backend, len(gpus))
    assert prepared.checked.hardware.startswith("cluster")
    assert preflight(load({}, None)).backend is TransferBackend.IPC


def test_a_trainer_that_must_ask_ray_for_its_address_needs_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 37: never loopback by default where engines may be on other nodes."""
    # Tests with real actors may have connected this process before.
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match="pass one outside of Ray"):
        TrainerActor(
            trainer_path="t",
            engine_path="e",
            run_dir="r",
            backend=TransferBackend.GLOO,
            learning_rate=1e-3,
            host="auto",
        )


@pytest.mark.parametrize(
    ("cpu", "invariant", "graphs", "eager", "compilation"),
    [
        (True, False, True, True, None),
        (False, False, None, False, None),
        (False, False, False, True, None),
        (False, True, None, True, None),
        (False, True, False, True, None),
        (False, True, True, False, {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}),
    ],
)
def test_batch_invariant_engines_have_graphs_only_if_asked_for_and_never_compile(
    cpu: bool, invariant: bool, graphs: bool | None, eager: bool, compilation: object
) -> None:
    settings = EngineSettings(model="m", cpu=cpu, batch_invariant=invariant, graphs=graphs)
    found = settings.arguments()
    assert found["enforce_eager"] is eager
    assert found.get("compilation_config") == compilation


def test_native_backends_reserve_what_their_kin_do() -> None:
    for native, kin in (
        (TransferBackend.NATIVE_NCCL, TransferBackend.NCCL),
        (TransferBackend.NATIVE_IPC, TransferBackend.IPC),
    ):
        assert gpu_shares(native, 2, workers=1) == gpu_shares(kin, 2, workers=1)


def test_graphs_without_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.hardware.nvidia_gpus", lambda environment: ())
    monkeypatch.setattr("actors.hardware.rocm_gpus", lambda environment: ())
    hardware.detect.cache_clear()
    try:
        with pytest.raises(ConfigError, match="--cuda-graphs needs a GPU and none is visible"):
            preflight(load({"cuda_graphs": True}))
    finally:
        hardware.detect.cache_clear()


@pytest.mark.parametrize("engines", range(1, 9))
def test_trainer_engines_and_the_fresh_one_fit_on_one_gpu(engines: int) -> None:
    share = gpu_shares(TransferBackend.IPC, engines, workers=1)
    # Ray counts in steps of 1/10000: one too much and the last actor waits for ever.
    assert 0.99 < share["trainer"] + engines * share["engine"] + share["fresh"] <= 1
