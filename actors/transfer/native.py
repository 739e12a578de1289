"""GPU transports behind the same sender and inbox: NCCL between GPUs, CUDA IPC on one GPU.

Both stage into one flat buffer on the trainer's GPU, so that a transfer is a few large copies
and the digests are of the very bytes that travel. Importing this needs no GPU; using it does.
"""

from __future__ import annotations

import base64
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import torch

from orchestrator.errors import ChannelError
from orchestrator.types import ChannelSpec, TransferBackend

from .channel import Channel
from .gloo import LinkSender
from .inbox import Inbox
from .link import BrokenLink, Link, Wait
from .rendezvous import Rendezvous, node_id, pattern


class NcclLink(Link):
    """vLLM's NCCL communicator on a stream of its own.

    A communicator that could not load NCCL is refused: vLLM would turn every broadcast into a
    no-op and call it success.
    """

    def __init__(
        self, meeting: Rendezvous, rank: int, world_size: int, device: torch.device
    ) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._device = device
        self._lock = threading.Lock()
        self._comm: Any = None
        try:
            if rank == 0:
                unique = bytes(NCCLLibrary().ncclGetUniqueId().internal)
                meeting.put("nccl", base64.b64encode(unique).decode())
            else:
                unique = base64.b64decode(meeting.read("nccl"))
            comm = PyNcclCommunicator.from_unique_id_bytes(unique, rank, world_size, device)
        except ChannelError:
            raise
        except Exception as error:
            raise ChannelError(
                f"rank {rank} cannot use NCCL: {type(error).__name__}: {error}. vLLM 0.32 and "
                "later need NCCL 2.29.7 or later"
            ) from error
        if comm.disabled or not comm.available:
            raise ChannelError(
                f"rank {rank}: NCCL is disabled in this process (VLLM_DISABLE_PYNCCL?), nothing "
                "would be sent: enable it or use another backend"
            )
        self._comm = comm
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def broadcast(self, buffer: torch.Tensor) -> Wait:
        with self._lock:
            if self._comm is None or self._comm.disabled:
                raise BrokenLink("the NCCL communicator was closed")
            with torch.cuda.device(self._device):
                # What wrote (or last read) the buffer may still run on the caller's stream.
                self._stream.wait_stream(torch.cuda.current_stream())
                self._comm.broadcast(buffer, src=0, stream=self._stream)
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record(self._stream)

        def wait() -> None:
            with torch.cuda.device(self._device):
                done.synchronize()
            # An aborted broadcast also completes; its data is garbage.
            if self._comm is None:
                raise BrokenLink("the NCCL communicator was closed during a broadcast")

        return wait

    def close(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.destroy()


class SharedMemory(Link):
    """No link: the receivers map the sender's buffer, which is complete when it is staged."""

    def broadcast(self, buffer: torch.Tensor) -> Wait:
        return lambda: None

    def close(self) -> None:
        pass


class GpuSender(LinkSender):
    """Stages on the current CUDA device."""

    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device())

    def _settle(self) -> None:
        torch.cuda.synchronize(self._device())

    def _pattern(self, nonce: str) -> torch.Tensor:
        return pattern(nonce).to(self._device())


class NcclSender(GpuSender):
    """Rank 0 of an NCCL group; each engine worker on a GPU of its own."""

    backend = TransferBackend.NCCL

    def _connect(self, channel: Channel, spec: ChannelSpec) -> Link:
        return NcclLink(channel.meeting, 0, spec.world_size, self._device())


class NcclInbox(Inbox):
    """Receives into a buffer on the model's GPU."""

    @property
    def device(self) -> torch.device:
        return self.target

    def connect(self) -> Link:
        return NcclLink(self.channel.meeting, self.rank, self.invitation.world_size, self.target)


class IpcSender(GpuSender):
    """Shares its staging buffer with engines on the same GPU."""

    backend = TransferBackend.IPC

    def _extra(self, nonce: str) -> dict[str, object]:
        if self._buffer is None:
            self._buffer = self._allocate(self._layout_once().nbytes)
        self._shared_pattern = self._pattern(nonce)
        self._settle()
        return {
            "gpu": _uuid(self._device()),
            "buffer": _export(self._buffer),
            "pattern": _export(self._shared_pattern),
        }

    def _connect(self, channel: Channel, spec: ChannelSpec) -> Link:
        return SharedMemory()


class IpcInbox(Inbox):
    """Loads from the sender's memory, mapped into this process."""

    @property
    def device(self) -> torch.device:
        return self.target

    def connect(self) -> Link | None:
        return None

    def allocate(self, nbytes: int) -> torch.Tensor:
        extra = self.invitation.extra
        if extra.get("node") != node_id() or extra.get("gpu") != _uuid(self.target):
            raise ChannelError(
                f"backend ipc needs the trainer and this worker on one GPU: the trainer is on "
                f"{extra.get('gpu')}, this worker on {_uuid(self.target)}. Use nccl"
            )
        mapped = _import(str(extra["buffer"]), self.target)
        if mapped.numel() != nbytes:
            raise ChannelError(f"the mapped buffer has {mapped.numel()} bytes, not {nbytes}")
        return mapped

    def receive_pattern(self) -> torch.Tensor:
        return _import(str(self.invitation.extra["pattern"]), self.target).cpu()

    def arrive(self) -> Iterator[int]:
        if self.channel.closed is not None:
            raise ChannelError(f"the channel was closed: {self.channel.closed}")
        yield self.layout.nbytes


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _export(tensor: torch.Tensor) -> str:
    """CUDA IPC handle as plain text; the tensor must outlive its users."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return base64.b64encode(pickle.dumps(arguments)).decode()


def _import(handle: str, device: torch.device) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(pickle.loads(base64.b64decode(handle)))
    arguments[6] = device.index  # the sender's number of this GPU may differ
    tensor: torch.Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return tensor
