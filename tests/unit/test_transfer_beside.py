"""A copy beside decoding: its pieces and its rests; no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.transfer import beside
from orchestrator.errors import ChannelError

PIECE = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "PIECE", PIECE)


def test_nothing_rests_without_a_gpu() -> None:
    source = torch.randint(0, 256, (5 * PIECE,), dtype=torch.uint8)
    target = torch.zeros_like(source)

    def rest(seconds: float) -> None:
        pytest.fail("there is no GPU to leave to others")

    beside.copy_beside(target, source, rest)
    assert torch.equal(target, source)


@pytest.mark.parametrize("nbytes", [0, 5, PIECE, PIECE + 1, 3 * PIECE + 7])
def test_all_bytes_are_copied_with_rests_between(nbytes: int) -> None:
    source = torch.randint(1, 256, (nbytes,), dtype=torch.uint8)
    target = torch.zeros(nbytes + PIECE, dtype=torch.uint8)
    at_rest: list[int] = []

    def rest(seconds: float) -> None:
        assert seconds == beside.REST_S
        at_rest.append(int(target.count_nonzero()))

    beside.in_pieces(target[:nbytes], source, rest)
    assert at_rest == list(range(PIECE, nbytes, PIECE))
    assert torch.equal(target[:nbytes], source)
    assert not target[nbytes:].any()


def test_a_channel_closed_meanwhile_ends_it() -> None:
    source = torch.ones(3 * PIECE, dtype=torch.uint8)
    target = torch.zeros_like(source)

    def rest(seconds: float) -> None:
        raise ChannelError("the channel was closed")

    with pytest.raises(ChannelError, match="closed"):
        beside.in_pieces(target, source, rest)
    assert target.sum() == PIECE


def test_on_a_gpu_what_was_queued_is_waited_for_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[torch.device] = []

    def mark(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    def closed(*_: object) -> None:
        raise ChannelError("the channel was closed")

    monkeypatch.setattr(beside, "mark", mark)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(beside, "in_pieces", lambda *_: None)
    beside.copy_beside(on_gpu, on_gpu, closed)
    monkeypatch.setattr(beside, "in_pieces", closed)
    with pytest.raises(ChannelError, match="closed"):
        beside.copy_beside(on_gpu, on_gpu, closed)
    assert waited == [on_gpu.device] * 2
