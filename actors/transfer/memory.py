"""One process's tensor memory in another process of the same machine, named by plain data.

A handle is JSON: kind, node, ids, sizes, and what CUDA wants as base64. Nothing is pickled.

- ``cuda``: torch's CUDA IPC. The exporter's allocation lives until every handle that was made of
  it was attached and dropped again, so make one handle for each receiver; one whose receiver died
  before it attached keeps the memory until the exporter ends.
- ``host``: an anonymous file that has no name (memfd), opened through ``/proc/<pid>/fd``. The
  kernel frees it with its last mapping, however the processes end. Only what :func:`allocate`
  made can be exported, to processes of the same user and pid namespace.
"""

from __future__ import annotations

import base64
import mmap
import os
import weakref
from collections.abc import Mapping

import psutil
import torch

from actors.nodes import node_id
from orchestrator.errors import ChannelError

Handle = Mapping[str, object]

SNAPSHOT = "the trainer's snapshot of the weights"

_files: dict[int, tuple[int, int]] = {}
"""Address of a host buffer made here -> descriptor of its file, size in bytes."""


def must_have_room(nbytes: int, device: torch.device, what: str) -> None:
    """ChannelError, with the numbers, unless ``device`` has memory for ``what`` now.

    On the host the kernel hands out pages only when they are written: without this, more than
    there is would not be refused, it would end some process then.
    """
    if device.type == "cuda":
        # What torch keeps of a former buffer is free, and not counted so.
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        remedy = "lower --gpu-memory-utilization"
    else:
        host = psutil.virtual_memory()
        free, total = host.available, host.total
        remedy = "free some, start fewer engines on this machine or take a smaller model"
    if nbytes > free:
        raise ChannelError(
            f"{what} takes {nbytes / 1e9:.2f} GB, {free / 1e9:.2f} of {total / 1e9:.0f} GB are "
            f"free on {device}: {remedy}"
        )


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Zeroed flat uint8 that :func:`export` takes (ChannelError if there is no memory)."""
    if device.type == "cpu":
        must_have_room(nbytes, device, SNAPSHOT)
    try:
        if device.type != "cpu":
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return _host_buffer(nbytes)
    except (RuntimeError, OSError) as error:
        raise ChannelError(f"no memory to share {nbytes / 1e9:.2f} GB on {device}: {error}") from (
            error
        )


def export(tensor: torch.Tensor) -> dict[str, object]:
    """A handle of ``tensor``: contiguous uint8, alive as long as it is used (ChannelError)."""
    if tensor.dtype != torch.uint8 or tensor.ndim != 1 or not tensor.is_contiguous():
        raise ChannelError(f"only flat uint8 is shared, not {tensor.dtype} {tuple(tensor.shape)}")
    if tensor.device.type == "cuda":
        return _export_cuda(tensor)
    offset = int(tensor.storage_offset())
    base = tensor.data_ptr() - offset
    if tensor.device.type != "cpu" or base not in _files:
        raise ChannelError("this memory cannot be shared: it was not made by memory.allocate()")
    descriptor, size = _files[base]
    file = os.fstat(descriptor)
    return {
        "kind": "host",
        "node": node_id(),
        "id": f"{file.st_dev}:{file.st_ino}",
        "nbytes": tensor.numel(),
        "offset": offset,
        "pid": os.getpid(),
        "descriptor": descriptor,
        "size": size,
    }


def identity(handle: Handle) -> str:
    """Differs between two memories (ChannelError for a malformed handle)."""
    return f"{_text(handle, 'kind')} {_text(handle, 'id')} {_number(handle, 'offset')}"


def attach(handle: Handle, device: torch.device) -> torch.Tensor:
    """The exporter's memory, flat uint8 on ``device``. Use each handle once.

    ChannelError for a malformed handle, another machine, another GPU or memory that is gone.
    """
    kind = _text(handle, "kind")
    if kind not in ("cuda", "host"):
        raise ChannelError(f"a memory handle of unknown kind {kind!r}")
    owner = "cpu" if kind == "host" else f"GPU {_text(handle, 'gpu')}"
    here = f"GPU {gpu_id(device)}" if device.type == "cuda" else device.type
    if handle.get("node") != node_id() or owner != here:
        raise ChannelError(
            f"memory is shared on one device only: the trainer's weights are on {owner} of node "
            f"{handle.get('node')}, this worker is on {here} of node {node_id()}. Use backend "
            "nccl between GPUs, gloo otherwise"
        )
    return _attach_host(handle) if kind == "host" else _attach_cuda(handle, device)


def gpu_id(device: torch.device) -> str:
    """UUID of the GPU: the same in every process, whatever number it has there."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _host_buffer(nbytes: int) -> torch.Tensor:
    descriptor = os.memfd_create("midflight")
    try:
        os.ftruncate(descriptor, nbytes)
        mapped = mmap.mmap(descriptor, nbytes)
    except (OSError, ValueError):
        os.close(descriptor)
        raise
    tensor = torch.frombuffer(mapped, dtype=torch.uint8)
    address = tensor.data_ptr()
    _files[address] = (descriptor, nbytes)
    weakref.finalize(mapped, _forget, address)
    return tensor


def _forget(address: int) -> None:
    os.close(_files.pop(address)[0])


def _attach_host(handle: Handle) -> torch.Tensor:
    pid, descriptor = _number(handle, "pid"), _number(handle, "descriptor")
    nbytes, offset, size = (_number(handle, key) for key in ("nbytes", "offset", "size"))
    if not 0 < nbytes <= size - offset:
        raise ChannelError(f"a memory handle of {nbytes} bytes at {offset} in {size}")
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ChannelError(f"the memory of process {pid} cannot be opened: {error}") from error
    try:
        file = os.fstat(opened)
        if f"{file.st_dev}:{file.st_ino}" != handle.get("id") or file.st_size != size:
            raise ChannelError(f"the memory of process {pid} is gone: something else is there")
        mapped = mmap.mmap(opened, size)
    except (OSError, ValueError) as error:
        raise ChannelError(f"the memory of process {pid} cannot be mapped: {error}") from error
    finally:
        os.close(opened)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=offset)


def _export_cuda(tensor: torch.Tensor) -> dict[str, object]:
    (_, storage, size, start, counter, counter_offset, event, event_sync) = (
        tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    )
    return {
        "kind": "cuda",
        "node": node_id(),
        "gpu": gpu_id(tensor.device),
        "id": f"{_encode(storage)}@{start}",
        "nbytes": tensor.numel(),
        "offset": int(tensor.storage_offset()),
        "storage": _encode(storage),
        "size": size,
        "start": start,
        "counter": _encode(counter),
        "counter_offset": counter_offset,
        "event": _encode(event),
        "event_sync": bool(event_sync),
    }


def cuda_arguments(handle: Handle, device: torch.device) -> tuple[object, ...]:
    """What ``UntypedStorage._new_shared_cuda`` takes (ChannelError for a malformed handle)."""
    return (
        device.index,
        _data(handle, "storage"),
        _number(handle, "size"),
        _number(handle, "start"),
        _data(handle, "counter"),
        _number(handle, "counter_offset"),
        _data(handle, "event"),
        bool(handle.get("event_sync")),
    )


def _attach_cuda(handle: Handle, device: torch.device) -> torch.Tensor:
    arguments = cuda_arguments(handle, device)
    nbytes, offset, size = (_number(handle, key) for key in ("nbytes", "offset", "size"))
    if not 0 < nbytes <= size - offset:
        raise ChannelError(f"a memory handle of {nbytes} bytes at {offset} in {size}")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        storage = torch.UntypedStorage._new_shared_cuda(*arguments)
        whole = torch.empty(0, dtype=torch.uint8, device=device)
        return whole.set_(storage, offset, (nbytes,))  # type: ignore[call-overload, no-any-return]
    except RuntimeError as error:
        line = str(error).splitlines()[0] if str(error) else repr(error)
        raise ChannelError(f"the trainer's GPU memory cannot be mapped: {line}") from error


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _data(handle: Handle, key: str) -> bytes:
    try:
        return base64.b64decode(_text(handle, key), validate=True)
    except ValueError as error:
        raise ChannelError(f"a malformed memory handle: {key} is not base64") from error


def _text(handle: Handle, key: str) -> str:
    value = handle.get(key)
    if not isinstance(value, str):
        raise ChannelError(f"a malformed memory handle: {key} is {value!r}")
    return value


def _number(handle: Handle, key: str) -> int:
    value = handle.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ChannelError(f"a malformed memory handle: {key} is {value!r}")
    return value
