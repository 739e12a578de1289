"""vLLM's own paths without a GPU: what their two sides say to each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from actors.transfer import memory, nccl, nccl_check, vllm_nccl
from actors.transfer.baseline import (
    PACKED_BYTES,
    NativeIpcInbox,
    NativeIpcSender,
    NativeNcclInbox,
    NativeNcclSender,
    rebuild_arguments,
)
from actors.transfer.inbox import Inbox, Invitation
from actors.transfer.layout import Layout
from actors.transfer.link import Link, Pending
from actors.transfer.nccl import NcclLink
from orchestrator.errors import ChannelError
from orchestrator.types import (
    ChannelSpec,
    KVPolicy,
    PauseMode,
    PolicyVersion,
    TransferBackend,
    WeightUpdate,
)

TIMEOUT_S = 30.0
CPU = torch.device("cpu")
UPDATE = WeightUpdate(
    sync_id="s1",
    from_version=PolicyVersion(0),
    version=PolicyVersion(1),
    step=1,
    backend=TransferBackend.NATIVE_IPC,
    pause_mode=PauseMode.KEEP,
    kv_policy=KVPolicy.RECOMPUTE,
)
WEIGHTS = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def anything(layout: Layout) -> None:
    """An engine that takes whatever comes."""


def join_ipc(spec: ChannelSpec, rank: int) -> NativeIpcInbox:
    return NativeIpcInbox(Invitation.of(spec, 1), rank, anything, CPU)


def test_handles_of_each_update_are_plain_data_for_each_worker(
    threads: ThreadPoolExecutor,
) -> None:
    sender = NativeIpcSender(WEIGHTS.items)
    spec = sender.listen(3, TIMEOUT_S)
    joining = [threads.submit(join_ipc, spec, rank) for rank in (1, 2)]
    sender.open(spec)
    inboxes = [future.result(TIMEOUT_S) for future in joining]
    first = None
    for sync_id in ("s1", "s2"):
        sender.stage()
        asking: list[Future[list[dict[str, object]]]] = [
            threads.submit(inbox.handles, sync_id) for inbox in inboxes
        ]
        sender.send(replace(UPDATE, sync_id=sync_id))
        for future in asking:
            handles = future.result(TIMEOUT_S)
            assert json.loads(json.dumps(handles)) == handles
            for (name, tensor), handle in zip(WEIGHTS.items(), handles, strict=True):
                raw = memory.attach(handle, CPU)
                assert torch.equal(raw.view(tensor.dtype).view(tensor.shape), tensor), name
        # Every version has a new buffer: exports of a memory last as long as it.
        assert first != handles[0]["id"]
        first = handles[0]["id"]
    sender.close()
    with pytest.raises(ChannelError):
        inboxes[0].handles("s3")


def test_what_torch_needs_to_rebuild_a_tensor_is_made_of_plain_data() -> None:
    layout = Layout.of(NativeIpcSender(WEIGHTS.items).manifest())
    handle: dict[str, object] = {
        "storage": "aGFuZGxl",
        "size": 4096,
        "start": 512,
        "counter": "Y291bnQ=",
        "counter_offset": 3,
        "event": "ZXZlbnQ=",
        "event_sync": True,
        "offset": 128,
    }
    assert rebuild_arguments(layout.slots[1], handle, torch.device("cuda", 1)) == (
        *(torch.Tensor, torch.Size([5]), (1,), 64, torch.storage.TypedStorage, torch.bfloat16),
        *(1, b"handle", 4096, 512, False, b"count", 3, b"event", True),
    )
    for bad in ({"offset": 127}, {"offset": "0"}, {"storage": 7}):
        with pytest.raises(ChannelError):
            rebuild_arguments(layout.slots[1], {**handle, **bad}, torch.device("cuda", 1))


def test_vllms_own_paths_refuse_to_stage(threads: ThreadPoolExecutor) -> None:
    sender = NativeIpcSender(WEIGHTS.items)
    spec = sender.listen(2, TIMEOUT_S)
    joining = threads.submit(join_ipc, replace(spec, staged=True), 1)
    with pytest.raises(ChannelError, match="cannot stage"):
        sender.open(spec)
    assert isinstance(joining.exception(TIMEOUT_S), ChannelError)


class HalfLink(NcclLink):
    """An NCCL link whose only broadcast, the pattern, is handed over in ``wire``."""

    def __init__(self, wire: Future[torch.Tensor], rank: int) -> None:
        self._wire, self._rank, self.communicator, self.device = wire, rank, "communicator", CPU
        self.description = "NCCL 2.29.7"

    def broadcast(self, buffer: torch.Tensor) -> Pending:
        if self._rank == 0:
            self._wire.set_result(buffer)
        else:
            buffer.copy_(self._wire.result(TIMEOUT_S))
        return Pending(lambda: None)

    def close(self) -> None: ...


def test_packed_broadcasts_get_what_is_staged_and_the_agreed_buffer_size(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire: Future[torch.Tensor] = Future()
    sent: list[Any] = []

    class Sender(NativeNcclSender):
        def _device(self) -> torch.device:
            return CPU

        def _settle(self) -> None: ...

        def _connect(self, channel: object, spec: ChannelSpec) -> Link:
            return HalfLink(wire, 0)

    class Receiver(NativeNcclInbox):
        def connect(self) -> Link:
            return HalfLink(wire, self.rank)

    def send_packed(communicator: object, device: object, tensors: Any, buffer_bytes: int) -> None:
        sent.append((communicator, device, dict(tensors), buffer_bytes))

    monkeypatch.setattr(nccl_check, "description", lambda: "NCCL 2.29.7")
    uuids = ["GPU-trainer"]
    monkeypatch.setattr(nccl, "gpu_id", lambda device: uuids.pop() if uuids else "GPU-worker")
    monkeypatch.setattr(vllm_nccl, "send_packed", send_packed)
    sender = Sender(WEIGHTS.items)
    spec = sender.listen(2, TIMEOUT_S)
    joining: Future[Inbox] = threads.submit(
        cast(Any, Receiver), Invitation.of(spec, 1), 1, anything, CPU
    )
    sender.open(spec)
    inbox = joining.result(TIMEOUT_S)
    assert cast(NativeNcclInbox, inbox).link.communicator == "communicator"
    assert inbox.bucket_bytes == PACKED_BYTES == spec.extra["bucket_bytes"]
    sender.stage()
    sender.send(UPDATE)
    ((communicator, device, tensors, buffer_bytes),) = sent
    assert (communicator, device, buffer_bytes) == ("communicator", CPU, PACKED_BYTES)
    assert all(torch.equal(tensors[name], WEIGHTS[name]) for name in WEIGHTS)
    sender.close()
