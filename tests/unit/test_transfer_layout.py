"""Where tensors lie, which ranks workers get, and what a manifest may contain."""

from __future__ import annotations

import itertools

import pytest
import torch

from actors.transfer.layout import (
    ALIGNMENT,
    Layout,
    manifest_from_wire,
    manifest_to_wire,
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
