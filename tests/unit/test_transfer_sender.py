"""What a sender stages: the very bytes, whatever the strides, and nothing unfit."""

from __future__ import annotations

import pytest
import torch

from actors.local import LocalSender
from actors.transfer.base import NamedTensors, make_sender
from actors.transfer.digest import digest
from orchestrator.errors import ChannelError, ConfigError, TransferError
from orchestrator.types import TransferBackend


def test_digests_are_of_the_staged_bytes() -> None:
    weights = {"w": torch.randn(4, 6), "b": torch.arange(5, dtype=torch.int64)}
    sender = make_sender("gloo", lambda: weights.items())
    digests = sender.stage()
    for name, tensor in sender.staged():
        assert torch.equal(tensor, weights[name])
        assert digests[name] == digest(name, weights[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_strided_tensors_arrive_as_what_they_look_like(dtype: torch.dtype) -> None:
    base = (torch.randn(6, 8) * 50).to(dtype)
    views = {"transposed": base.t(), "every-second": base[::2], "column": base[:, 3]}
    sender = make_sender("gloo", lambda: views.items())
    digests = sender.stage()
    staged = dict(sender.staged())
    for name, view in views.items():
        assert torch.equal(staged[name], view)
        assert digests[name] == digest(name, view.clone(memory_format=torch.contiguous_format))


def test_training_on_does_not_change_what_is_staged() -> None:
    weight = torch.zeros(3)
    sender = make_sender("gloo", lambda: [("w", weight)])
    before = sender.stage()
    weight += 1
    assert dict(sender.staged())["w"].tolist() == [0, 0, 0]
    assert sender.stage() != before


def test_a_declared_cast_applies_to_floats_only() -> None:
    weights = {"w": torch.randn(3, 3), "ids": torch.arange(3)}
    sender = make_sender(TransferBackend.GLOO, lambda: weights.items(), wire_dtype="bfloat16")
    assert [spec.dtype for spec in sender.manifest()] == ["bfloat16", "int64"]
    sender.stage()
    assert torch.equal(dict(sender.staged())["w"], weights["w"].to(torch.bfloat16))


@pytest.mark.parametrize(
    ("tensor", "hint"),
    [
        (torch.empty(0, 4), "empty"),
        (torch.empty(3, device="meta"), "meta device"),
        (torch.eye(3).to_sparse(), "strided"),
    ],
)
def test_what_has_no_plain_bytes_is_refused_by_name(tensor: torch.Tensor, hint: str) -> None:
    sender = make_sender("gloo", lambda: [("layer.bad", tensor)])
    with pytest.raises(TransferError, match=r"layer\.bad") as caught:
        sender.manifest()
    assert hint in str(caught.value)


def test_an_empty_tensor_has_no_digest() -> None:
    with pytest.raises(TransferError, match="'w' is empty"):
        digest("w", torch.empty(0))


def test_no_weights_is_an_error() -> None:
    with pytest.raises(TransferError, match="no weights"):
        make_sender("gloo", lambda: []).manifest()


def test_weights_that_change_shape_are_refused() -> None:
    shape = [2]
    sender = make_sender("gloo", lambda: [("w", torch.zeros(shape[0]))])
    sender.stage()
    shape[0] = 3
    with pytest.raises(TransferError, match="changed shape"):
        sender.stage()
    with pytest.raises(TransferError, match="nothing is staged"):
        list(sender.staged())


def test_a_tensor_that_is_no_longer_there_is_named() -> None:
    weights = {"a": torch.zeros(1), "b": torch.zeros(1)}

    def current() -> NamedTensors:
        return list(weights.items())

    sender = make_sender("gloo", current)
    sender.manifest()
    del weights["b"]
    with pytest.raises(TransferError, match="'b' of the manifest"):
        sender.stage()


def test_sending_before_staging_or_opening_is_refused() -> None:
    sender = make_sender("gloo", lambda: [("w", torch.zeros(1))])
    with pytest.raises(TransferError, match="nothing is staged"):
        sender.send(None)  # type: ignore[arg-type]
    sender.stage()
    with pytest.raises(ChannelError, match="not open"):
        sender.send(None)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("backend", ["nccl", "native-nccl", "native-ipc"])
def test_a_gpu_backend_without_a_gpu_is_refused(backend: str) -> None:
    with pytest.raises(ChannelError, match="needs a GPU"):
        make_sender(backend, lambda: [("w", torch.zeros(1))])


def test_a_released_snapshot_is_gone_and_the_next_one_is_whole() -> None:
    weight = torch.ones(3)
    sender = make_sender("gloo", lambda: [("w", weight)])
    before = sender.stage()
    sender.release()
    sender.release()
    with pytest.raises(TransferError, match="nothing is staged"):
        list(sender.staged())
    assert sender.stage() == before


async def test_a_local_sender_refuses_another_backend_than_it_was_made_for() -> None:
    """Over gloo the report would say nccl."""
    sender = LocalSender(lambda: [("w", torch.zeros(3))])
    with pytest.raises(ConfigError, match=r"over nccl, and this sender was made for gloo"):
        await sender.listen(TransferBackend.NCCL, 2, 1.0)
