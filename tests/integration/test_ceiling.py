"""The benchmark's ceilings, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def ceiling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ceiling

    return ceiling


def test_one_pair_of_processes_measures_every_size(ceiling: Any) -> None:
    found = ceiling.raw_broadcast("gloo", 1_000_000, [1_000, 300_000, 1_000_000], repeats=3)
    assert list(found) == [1_000, 300_000, 1_000_000]
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in found.values())
    assert min(found[1_000]) > min(found[1_000_000])  # a thousand broadcasts against one


def test_a_rank_that_fails_says_why(ceiling: Any) -> None:
    with pytest.raises(RuntimeError, match="the raw gloo broadcast failed: rank"):
        ceiling.raw_broadcast("gloo", 1_000, [0])


def test_the_best_size_is_the_ceiling(ceiling: Any) -> None:
    found = ceiling.best(
        {
            "64 MiB": {"p50_s": 0.3, "best_s": 0.2, "gb_per_s": 1.0},
            "whole": {"p50_s": 0.4, "best_s": 0.1, "gb_per_s": 0.8},
        }
    )
    assert (found["bucket"], found["p50_s"]) == ("64 MiB", 0.3)
    assert list(found["by_bucket"]) == ["64 MiB", "whole"]


def test_sizes_that_the_weights_do_not_fill_are_left_out(
    ceiling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def measured(backend: str, nbytes: int, buckets: list[int]) -> dict[int, list[float]]:
        asked[:] = buckets
        return {size: [1.0] for size in buckets}

    monkeypatch.setattr(ceiling, "raw_broadcast", measured)
    assert list(ceiling.broadcasts("nccl", 100 << 20)["by_bucket"]) == ["4 MiB", "64 MiB", "whole"]
    assert asked == [4 << 20, 64 << 20, 100 << 20]
    assert list(ceiling.broadcasts("gloo", 100 << 20)["by_bucket"]) == ["whole"]


def test_there_is_no_peer_copy_without_two_gpus(
    ceiling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceiling.torch.cuda, "device_count", lambda: 1)
    assert ceiling.peer_copy(10) is None
    assert len(ceiling.memory_copy(1000, repeats=2)) == 2


def test_shares_are_those_of_the_fastest_size(ceiling: Any) -> None:
    import results

    seconds = {"p50": None}
    phases = {"transfer": {"p50": 0.02}, "prefetch": {"p50": 0.04}}
    whole = {"p50_s": 0.012, "best_s": 0.01, "gb_per_s": 1.0}
    small = {**whole, "p50_s": 0.01}
    ceilings = {
        "memory_copy": {**whole, "p50_s": 0.002},
        "nccl_broadcast": ceiling.best({"64 MiB": small, "whole": whole}),
    }
    note = "this project's cycle"
    methods = [
        {"name": n, "backend": n, "note": note, "requests": 1, "stall_s": seconds, "phases": p}
        for n, p in (
            ("nccl", {**phases, "prefetch": {"p50": 0.0}}),
            ("staged-nccl", phases),
        )
    ]
    assert results.ratios(methods, ceilings) == {
        "ceiling's share of the transfer, nccl, 1 requests": pytest.approx(0.5),
        "ceiling's share of the transfer, staged-nccl, 1 requests": pytest.approx(0.1),
        "ceiling's share of the prefetch, staged-nccl, 1 requests": pytest.approx(0.25),
    }
