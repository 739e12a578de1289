"""The table that the copy kernel works by, read as the kernel reads it; no GPU."""

from __future__ import annotations

import ctypes

import pytest
import torch

from actors.transfer import runs


def test_runs_cover_every_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "TILE", 256)
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for count, dtype in ((8, torch.bfloat16), (128, torch.bfloat16), (1000, torch.float32)):
        source = torch.randn(count, generator=generator).to(dtype)
        pairs.append((torch.zeros_like(source), source))
        assert runs.fits(*pairs[-1])
    copied = 0
    for target, source, words in runs.cut(pairs).tolist():
        assert target % 16 == source % 16 == words % 4 == 0 and 0 < 4 * words <= 256
        ctypes.memmove(target, source, 4 * words)
        copied += 4 * words
    assert copied == sum(target.numel() * target.element_size() for target, _ in pairs)
    assert all(torch.equal(target, source) for target, source in pairs)


def test_what_is_no_run_is_left_to_torch() -> None:
    a, b = torch.zeros(8, 8), torch.ones(8, 8)
    assert runs.fits(a, b)
    assert not runs.fits(a, b.to(torch.bfloat16))
    assert not runs.fits(a[:, :4], b[:, :4])
    assert not runs.fits(a.view(-1)[1:9], b.view(-1)[:8])
    assert not runs.fits(a.view(-1)[:7], b.view(-1)[:7])
    assert not runs.usable(torch.device("cpu"))
