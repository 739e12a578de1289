"""Arithmetic of the benchmark's throughput slots and of its control."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.ledger import Ledger, Live
from orchestrator.types import GenerationRequest, Prompt


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    for name in ("load", "naive"):
        monkeypatch.delitem(sys.modules, name, raising=False)


async def slots_of(speeds: dict[str, Sequence[float]], swaps: int = 0) -> Any:
    import load

    clock, tokens = 0.0, 0

    async def written() -> list[tuple[float, int]]:
        return [(clock, tokens)]

    slots = load.Slots(written)
    for kind, values in speeds.items():
        for value in values:

            async def decode(value: float = value) -> int:
                nonlocal clock, tokens
                clock, tokens = clock + 2.0, tokens + int(2 * value)
                return swaps

            await slots.measure(kind, decode)
    return slots.result("without", ("swapping", "staging"))


@pytest.mark.usefixtures("benchmarks")
async def test_a_share_is_of_the_sums_and_its_error_is_zero_only_without_noise() -> None:
    noisy = await slots_of({"without": (100, 50), "swapping": (90, 60)})
    assert noisy["tokens_per_s"] == {"without": 75, "swapping": 75, "staging": None}
    assert noisy["share"] == {"swapping": 1.0, "staging": None}
    assert noisy["share_error"]["swapping"] > 0.1
    steady = await slots_of({"without": (100, 50), "swapping": (90, 45)})
    assert steady["share"]["swapping"] == pytest.approx(0.9)
    assert steady["share_error"]["swapping"] == pytest.approx(0)
    assert (await slots_of({"without": (0, 0), "swapping": (1, 1)}))["share"]["swapping"] is None


@pytest.mark.usefixtures("benchmarks")
async def test_a_swap_costs_what_its_slots_lack() -> None:
    found = await slots_of({"without": (100, 50), "swapping": (90, 45)}, swaps=4)
    assert found["swaps"] == {"swapping": 8, "staging": 0}
    assert found["swap_costs_s"]["swapping"] == pytest.approx(0.1 * 4.0 / 8)
    assert found["swap_costs_error_s"]["swapping"] == pytest.approx(0)
    assert found["swap_costs_s"]["staging"] is None
    noisy = await slots_of({"without": (100, 50), "swapping": (90, 60)}, swaps=4)
    error = noisy["share_error"]["swapping"] * 4.0 / 8
    assert noisy["swap_costs_error_s"]["swapping"] == pytest.approx(error)


@pytest.mark.usefixtures("benchmarks")
async def test_the_control_sees_what_a_swap_would_be_charged() -> None:
    import naive

    ledger = Ledger()
    live = Live(GenerationRequest("r", Prompt((1,)), 100))
    ledger.add(live)

    def write(*times: float) -> None:
        for at in times:
            ledger.wrote(live, [7], [-1.0], at)

    write(1.0, 1.1, 1.2)
    moment = naive.Moment(ledger.live.values(), 1.25)
    ledger.follow(moment)
    write(1.3, 1.9)
    assert not moment.all_seen
    write(2.0)
    assert (await moment.first_tokens()).stalls == pytest.approx((0.5,))
    assert ledger.swap is None
    write(9.0)
    assert len(live.stalls) == 1
