"""vLLM's own transfer paths as backends: the baseline that ours are measured against.

Only how the bytes move and are loaded is vLLM's: packed NCCL broadcasts through two buffers, or a
CUDA IPC handle a parameter, and ``load_weights`` under layerwise reload. The channel around it is
ours, so that the two sides agree and a known pattern has arrived before the first swap. Handles
are plain data: ``VLLM_ALLOW_INSECURE_SERIALIZATION`` stays off.

What the pattern does not prove: that vLLM's packing and unpacking put every byte of an update in
its place. Nothing of an update is kept that could be digested; the digest is of the live weights.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from orchestrator.errors import ChannelError
from orchestrator.types import TransferBackend, WeightUpdate

from . import memory, vllm_nccl
from .channel import Channel
from .inbox import Inbox
from .ipc import IpcInbox, IpcSender
from .layout import Slot, dtype_of, flat_bytes
from .link import Link
from .nccl import NcclInbox, NcclLink, NcclSender

PACKED_BYTES = 1 << 30
"""vLLM's default size of a packed buffer; each side allocates two."""


class NativeNcclSender(NcclSender):
    """Rank 0 of vLLM's packed NCCL broadcast."""

    backend = TransferBackend.NATIVE_NCCL
    bucket_bytes = PACKED_BYTES

    def _transmit(
        self, channel: Channel, link: Link, buffer: torch.Tensor, update: WeightUpdate
    ) -> None:
        assert isinstance(link, NcclLink)
        communicator, device = link.communicator, link.device
        tensors = self.staged()
        channel.run(lambda: vllm_nccl.send_packed(communicator, device, tensors, self.bucket_bytes))


class NativeIpcSender(IpcSender):
    """A CUDA IPC handle a parameter and worker, made anew for every update, as vLLM does.

    Each export of a memory lasts as long as it, so every version is staged in a new buffer.
    """

    backend = TransferBackend.NATIVE_IPC

    def stage(self) -> dict[str, str]:
        self.release()
        return super().stage()

    def _publish(self) -> None:
        """Nothing is mapped beforehand."""

    def _transmit(
        self, channel: Channel, link: Link, buffer: torch.Tensor, update: WeightUpdate
    ) -> None:
        opened = self._opened
        assert opened is not None
        for rank in range(1, opened.world_size):
            handles = [memory.export(flat_bytes(tensor)) for _, tensor in self.staged()]
            channel.meeting.put(handles_key(update.sync_id, rank), json.dumps(handles))


class NativeInbox(Inbox):
    """Joins the channel; the update itself is received and loaded by vLLM's engine."""

    def check(self) -> None:
        super().check()
        if self.invitation.staged:
            raise ChannelError("vLLM's own transfer cannot stage: use ipc, nccl or gloo, staged")

    @abstractmethod
    def load(self, arguments: Sequence[Any], sync_id: str) -> None:
        """Receive and load an update, inside a layerwise reload.

        ``arguments``: what vLLM makes a weight-transfer engine with.
        """


class NativeNcclInbox(NativeInbox, NcclInbox):
    """vLLM's engine receives with this inbox's communicator."""

    bucket_bytes = PACKED_BYTES

    def load(self, arguments: Sequence[Any], sync_id: str) -> None:
        from vllm.distributed.weight_transfer import nccl_engine

        engine = nccl_engine.NCCLWeightTransferEngine(*arguments)
        engine.packed, engine.packed_buffer_size_bytes = True, self.bucket_bytes
        engine.model_update_group = self.link.communicator
        engine.receive_weights(nccl_engine.NCCLWeightTransferUpdateInfo(**_names(self)))
        if self.target.type == "cuda":
            torch.cuda.current_stream(self.target).synchronize()
        self.link  # noqa: B018 - an aborted broadcast completes too, with garbage

    @property
    def link(self) -> NcclLink:
        """ChannelError if the channel is closed."""
        link = self._open_link()
        assert isinstance(link, NcclLink)
        return link


class NativeIpcInbox(NativeInbox, IpcInbox):
    """vLLM's engine maps the handles."""

    @property
    def holds(self) -> bool:
        return True

    @property
    def at_hand(self) -> bool:
        return False

    def load(self, arguments: Sequence[Any], sync_id: str) -> None:
        from vllm.distributed.weight_transfer import ipc_engine

        here = memory.gpu_id(self.target)
        handles = [
            {here: rebuild_arguments(slot, handle, self.target)}
            for slot, handle in zip(self.layout.slots, self.handles(sync_id), strict=True)
        ]
        engine = ipc_engine.IPCWeightTransferEngine(*arguments)
        engine.packed = False
        engine.receive_weights(
            ipc_engine.IPCWeightTransferUpdateInfo(**_names(self), ipc_handles=handles)
        )

    def handles(self, sync_id: str) -> list[dict[str, object]]:
        """One a tensor, in the manifest's order. Waits until they are sent (ChannelError)."""
        text = self.channel.meeting.take(handles_key(sync_id, self.rank))
        handles = json.loads(text)
        if not isinstance(handles, list) or len(handles) != len(self.layout.slots):
            raise ChannelError(f"not one handle for each of {len(self.layout.slots)} tensors")
        return handles


def handles_key(sync_id: str, rank: int) -> str:
    """Where the handles of an update are put for one worker."""
    return f"handles/{sync_id}/{rank}"


def rebuild_arguments(
    slot: Slot, handle: Mapping[str, object], device: torch.device
) -> tuple[object, ...]:
    """Arguments of torch's ``rebuild_cuda_tensor`` for one tensor, from plain data."""
    index, storage, size, start, counter, counter_offset, event, sync = memory.cuda_arguments(
        handle, device
    )
    dtype, shape = dtype_of(slot.spec.dtype), slot.spec.shape
    offset = handle["offset"]
    if not isinstance(offset, int) or offset % dtype.itemsize:
        raise ChannelError(f"tensor {slot.spec.name!r} is not aligned in its memory: {offset!r}")
    return (
        torch.Tensor,
        torch.Size(shape),
        torch.empty(shape, device="meta").stride(),
        offset // dtype.itemsize,
        torch.storage.TypedStorage,
        dtype,
        index,
        storage,
        size,
        start,
        False,
        counter,
        counter_offset,
        event,
        sync,
    )


def _names(inbox: Inbox) -> dict[str, Any]:
    specs = [slot.spec for slot in inbox.layout.slots]
    return {
        "names": [spec.name for spec in specs],
        "dtype_names": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }
