"""A copy beside decoding: what the kernel takes, and what is left to torch; no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch

from actors.transfer import beside, runs


@pytest.mark.parametrize("nbytes", [0, 5, 16, (3 << 20) + 7])
def test_all_bytes_are_copied_by_a_few_programs_and_the_tail_by_torch(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_kernel: list[int] = []

    class HostRuns:
        def __init__(self, pairs: Sequence[runs.Pair], tile: int) -> None:
            self.rows = runs.cut(pairs, tile).tolist()

        def run(self, programs: int) -> None:
            assert programs == beside.PROGRAMS
            for target, source, words in self.rows:
                ctypes.memmove(target, source, 4 * words)
                by_kernel.append(4 * words)

    monkeypatch.setattr(runs, "usable", lambda device: True)
    monkeypatch.setattr(runs, "Runs", HostRuns)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    target = torch.zeros(nbytes + 64, dtype=torch.uint8)
    beside.copy_beside(target[:nbytes], source)
    assert torch.equal(target[:nbytes], source)
    assert not target[nbytes:].any()
    assert sum(by_kernel) == nbytes - nbytes % 16


def test_without_the_kernel_torch_copies_all() -> None:
    source = torch.arange(100, dtype=torch.uint8)
    target = torch.zeros_like(source)
    beside.copy_beside(target, source)
    assert torch.equal(target, source)
