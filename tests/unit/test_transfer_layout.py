"""Where tensors lie, which ranks workers get, and what a manifest may contain."""

from __future__ import annotations

import itertools

import pytest
import torch

from actors.transfer.layout import (
    ALIGNMENT,
    Layout,
    differences,
    fingerprint,
    flat_bytes,
    manifest_from_wire,
    manifest_to_wire,
    schedule,
    worker_rank,
)
from orchestrator.errors import ChannelError, TransferError
from orchestrator.replica import first_ranks
from orchestrator.types import TensorSpec


def spec(name: str, dtype: str, *shape: int) -> TensorSpec:
    numel = torch.Size(shape).numel()
    return TensorSpec(name, dtype, shape, numel * getattr(torch, dtype).itemsize)


def test_replicas_with_several_workers_never_share_a_rank() -> None:
    sizes = [2, 1, 4]
    taken = [
        worker_rank(first, size, 0, rank)
        for first, size in zip(first_ranks(sizes), sizes, strict=True)
        for rank in range(size)
    ]
    assert sorted(taken) == list(range(1, 1 + sum(sizes)))


def test_data_parallel_copies_take_following_ranks() -> None:
    assert [worker_rank(3, 2, dp, rank) for dp in range(2) for rank in range(2)] == [3, 4, 5, 6]


def test_a_replica_without_workers_is_refused() -> None:
    with pytest.raises(ChannelError, match="0 workers"):
        first_ranks([1, 0])


def test_slots_are_aligned_and_do_not_overlap() -> None:
    layout = Layout.of([spec("a", "bfloat16", 3), spec("b", "float32", 5, 7), spec("c", "int8", 1)])
    assert [slot.offset % ALIGNMENT for slot in layout.slots] == [0, 0, 0]
    for before, after in zip(layout.slots, layout.slots[1:], strict=False):
        assert before.end <= after.offset
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for index, (_, view) in enumerate(layout.views(buffer), 1):
        view.fill_(index)
    values = {name: view.unique().tolist() for name, view in layout.views(buffer)}
    assert values == {"a": [1], "b": [2], "c": [3]}


def test_buckets_cover_the_buffer_once() -> None:
    layout = Layout.of([spec("a", "uint8", 1000)])
    ranges = list(layout.buckets(300))
    assert ranges[0][0] == 0 and ranges[-1][1] == layout.nbytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    assert all(end - start <= 300 for start, end in ranges)


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(TransferError, match="'a' is in the manifest twice"):
        Layout.of([spec("a", "float32", 1), spec("a", "float32", 1)])


def test_the_manifest_survives_json() -> None:
    specs = (spec("layer.0.weight", "bfloat16", 2, 3), spec("scale", "float32"))
    assert manifest_from_wire(manifest_to_wire(specs)) == specs


@pytest.mark.parametrize(
    "bad",
    [
        TensorSpec("a", "float32", (torch.tensor(2),), 8),  # type: ignore[arg-type]
        TensorSpec("a", torch.float32, (2,), 8),  # type: ignore[arg-type]
        TensorSpec("a", "float33", (2,), 8),
        TensorSpec("a", "float32", (2,), 9),
        TensorSpec("a", "float32", (0,), 0),
    ],
)
def test_what_json_or_the_receiver_would_not_understand_is_refused_at_the_sender(
    bad: TensorSpec,
) -> None:
    with pytest.raises(ChannelError):
        manifest_to_wire([bad])


def test_an_empty_manifest_is_refused_by_the_receiver() -> None:
    with pytest.raises(ChannelError, match="nothing to send"):
        manifest_from_wire([])


def test_groups_hold_whole_tensors_in_order_within_the_bucket() -> None:
    sizes = [100, 300, 64, 1000, 64, 200, 200, 200]
    layout = Layout.of([spec(f"t{i}", "uint8", size) for i, size in enumerate(sizes)])
    groups = schedule(layout, 512)
    assert [slot for group in groups for slot in group] == list(layout.slots)
    assert [len(group) for group in groups] == [3, 1, 2, 2]
    # The one that is larger than a bucket is alone; the others fit, with their padding.
    assert all(group[-1].end - group[0].offset <= 512 for group in groups if len(group) > 1)


@pytest.mark.parametrize(
    ("specs", "bucket"),
    [
        ([spec("a", "float32", 2, 3), spec("b", "float32", 4)], 257),
        ([spec("a", "float32", 3, 2), spec("b", "float32", 4)], 256),
        ([spec("a", "int32", 2, 3), spec("b", "float32", 4)], 256),
        ([spec("b", "float32", 4), spec("a", "float32", 2, 3)], 256),
        ([spec("a", "float32", 2, 3)], 256),
    ],
)
def test_the_fingerprint_is_of_all_that_must_be_agreed_on(
    specs: list[TensorSpec], bucket: int
) -> None:
    known = Layout.of([spec("a", "float32", 2, 3), spec("b", "float32", 4)])
    assert fingerprint(known, 256) == fingerprint(Layout.of(known_specs(known)), 256)
    assert fingerprint(known, 256) != fingerprint(Layout.of(specs), bucket)


def known_specs(layout: Layout) -> list[TensorSpec]:
    return [slot.spec for slot in layout.slots]


def test_differences_name_what_is_missing_unexpected_or_misshaped() -> None:
    sent = [spec("same", "float32", 1), spec("w", "bfloat16", 2, 3), spec("extra", "int8", 1)]
    expected = [spec("same", "float32", 1), spec("w", "float32", 6), spec("gone", "int8", 1)]
    assert differences(sent, expected) == (
        "1 missing: gone; 1 unexpected: extra; "
        "1 misshaped: w (bfloat16 [2, 3] sent, float32 [6] expected)"
    )
    assert differences(sent, sent) is None
    assert differences(sent, sent[::-1]) == "the order differs from same on"
    many = [spec(f"t{i}", "int8", 1) for i in range(12)]
    assert differences([], many, limit=2) == "12 missing: t0, t1 and 10 more"


def test_flat_bytes_never_copies() -> None:
    tensor = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    flat_bytes(tensor).zero_()
    assert tensor.detach().abs().sum() == 0
    assert flat_bytes(torch.tensor(1.0)).numel() == 4
    with pytest.raises(TransferError, match="only contiguous"):
        flat_bytes(torch.ones(2, 3).t())
