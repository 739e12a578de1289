"""vLLM's own engines behind our channel: its code runs, the calls of a device are stood in for."""

from __future__ import annotations

import base64
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from actors.transfer.baseline import NativeIpcInbox, NativeNcclInbox
from actors.transfer.layout import Layout
from orchestrator.errors import TransferError
from orchestrator.types import TensorSpec, TransferBackend

LAYOUT = Layout.of([TensorSpec("a", "float32", (2, 3), 24), TensorSpec("b", "bfloat16", (5,), 10)])
VALUES = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
GPU = torch.device("cuda", 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        self.loaded.update(weights)


def arguments(model: Model) -> tuple[Any, ...]:
    """What vLLM makes a weight-transfer engine with."""
    return None, SimpleNamespace(parallel_config=None, model_config=None), GPU, model


def named(uuid: str) -> Callable[[object], SimpleNamespace]:
    return lambda device: SimpleNamespace(uuid=uuid)


def test_vllm_maps_a_handle_a_parameter_from_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import ipc_engine

    def rebuild(*arguments: Any) -> torch.Tensor:
        assert len(arguments) == 15 and arguments[6] == 2
        found: torch.Tensor = VALUES[arguments[7].decode()]
        assert (arguments[1], arguments[5]) == (found.shape, found.dtype)
        return found

    class Inbox(NativeIpcInbox):
        def __init__(self) -> None:
            self.layout, self.target = LAYOUT, GPU

        def handles(self, sync_id: str) -> list[dict[str, object]]:
            return [
                {
                    "storage": base64.b64encode(name.encode()).decode(),
                    "size": 128,
                    "start": 0,
                    "offset": 64 * index,
                    "counter": "",
                    "counter_offset": 0,
                    "event": "",
                    "event_sync": False,
                }
                for index, name in enumerate(VALUES)
            ]

    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.cuda, "get_device_properties", named("GPU-7"))
    model = Model()
    Inbox().load(arguments(model), "s1")
    assert model.loaded.keys() == VALUES.keys()
    assert all(torch.equal(model.loaded[name], VALUES[name]) for name in VALUES)


def test_vllm_receives_packed_broadcasts_with_the_agreed_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    seen: dict[str, Any] = {}

    def consume(*, iterator: Any, post_unpack_func: Any, **more: Any) -> None:
        seen.update(more, asked=list(iterator))
        post_unpack_func(list(VALUES.items()))

    class Inbox(NativeNcclInbox):
        bucket_bytes = 4096
        left = False

        def __init__(self) -> None:
            # On the host: there is no stream to wait for.
            self.layout, self.target = LAYOUT, torch.device("cpu")

        @property
        def link(self) -> Any:
            if self.left:
                raise TransferError("the channel was closed")
            return SimpleNamespace(communicator="communicator")

    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_consumer", consume)
    model, inbox = Model(), Inbox()
    inbox.load(arguments(model), "s1")
    assert model.loaded.keys() == VALUES.keys()
    assert seen["group"] == "communicator" and seen["buffer_size_bytes"] == 4096
    assert seen["asked"] == [("a", ([2, 3], torch.float32)), ("b", ([5], torch.bfloat16))]

    # An aborted broadcast completes as any other: only the channel tells.
    def aborted(**_: Any) -> None:
        inbox.left = True

    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_consumer", aborted)
    with pytest.raises(TransferError, match="closed"):
        inbox.load(arguments(model), "s2")


def test_vllm_finds_the_receiver_and_it_an_inbox_for_every_backend() -> None:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from actors.transfer import plugin
    from actors.transfer.names import ENGINE_NAME
    from actors.transfer.receiver import Receiver

    plugin.register()
    assert WeightTransferEngineFactory._registry[ENGINE_NAME]() is Receiver
    assert Receiver.inboxes.keys() == set(TransferBackend)
