"""Both sides of a channel mean the same tensors and the same buckets, or say what differs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from actors.transfer.base import make_sender
from actors.transfer.inbox import Inbox, Invitation
from actors.transfer.layout import Layout
from orchestrator.errors import ChannelError
from orchestrator.types import ChannelSpec, TensorSpec

TIMEOUT_S = 30.0
WEIGHTS = {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(5)}


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def anything(layout: Layout) -> None:
    """An engine that takes whatever comes."""


class OtherBuckets(Inbox):
    bucket_bytes = 1 << 20


def refusal(
    threads: ThreadPoolExecutor, told: dict[str, object], inbox: type[Inbox] = Inbox
) -> tuple[str, str]:
    """What sender and worker say when the worker was told something else."""
    sender = make_sender("gloo", WEIGHTS.items)
    spec = sender.listen(2, TIMEOUT_S)
    other: ChannelSpec = replace(spec, **told)  # type: ignore[arg-type]
    joining = threads.submit(inbox, Invitation.of(other, 1), 1, anything, torch.device("cpu"))
    with pytest.raises(ChannelError) as caught:
        sender.open(spec)
    error = joining.exception(TIMEOUT_S)
    assert isinstance(error, ChannelError)
    return str(caught.value), str(error)


def test_buckets_of_two_sizes_are_refused_with_both(threads: ThreadPoolExecutor) -> None:
    for words in refusal(threads, {}, OtherBuckets):
        assert "the sender uses buckets of 33554432 bytes, this worker of 1048576" in words


def test_names_that_differ_are_listed_by_kind(threads: ThreadPoolExecutor) -> None:
    told = (
        TensorSpec("a", "float32", (3, 2), 24),
        TensorSpec("c", "float32", (5,), 20),
        TensorSpec("d", "float32", (5,), 20),
    )
    for words in refusal(threads, {"tensors": told}):
        assert (
            "1 missing: d; 1 unexpected: b; "
            "1 misshaped: a (float32 [2, 3] sent, float32 [3, 2] expected)" in words
        )


def test_another_order_is_noticed(threads: ThreadPoolExecutor) -> None:
    sender = make_sender("gloo", WEIGHTS.items)
    told = tuple(reversed(sender.manifest()))
    for words in refusal(threads, {"tensors": told}):
        assert "the order differs from a on" in words
