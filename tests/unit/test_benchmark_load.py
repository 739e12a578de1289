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


Slot = tuple[float, float, int]
"""Tokens a second, seconds, swaps."""


async def slots_of(slots: dict[str, Sequence[Slot]]) -> Any:
    import load

    clock, tokens = 0.0, 0

    async def written() -> list[tuple[float, int]]:
        return [(clock, tokens)]

    found = load.Slots(written)
    for kind, values in slots.items():
        for value in values:

            async def decode(value: Slot = value) -> int:
                nonlocal clock, tokens
                speed, seconds, swaps = value
                clock, tokens = clock + seconds, tokens + round(seconds * speed)
                return swaps

            await found.measure(kind, decode)
    return found.result("without", ("swapping", "staging"))


def equal(*speeds: float) -> list[Slot]:
    return [(speed, 2.0, 0) for speed in speeds]


@pytest.mark.usefixtures("benchmarks")
async def test_a_share_is_of_the_sums_and_its_error_is_zero_only_without_noise() -> None:
    noisy = await slots_of({"without": equal(100, 50), "swapping": equal(90, 60)})
    assert noisy["tokens_per_s"] == {"without": 75, "swapping": 75, "staging": None}
    assert noisy["share"] == {"swapping": 1.0, "staging": None}
    assert noisy["share_error"]["swapping"] > 0.1
    steady = await slots_of({"without": equal(100, 50), "swapping": equal(90, 45)})
    assert steady["share"]["swapping"] == pytest.approx(0.9)
    assert steady["share_error"]["swapping"] == pytest.approx(0)
    none = await slots_of({"without": equal(0, 0), "swapping": equal(1, 1)})
    assert none["share"]["swapping"] is None


@pytest.mark.usefixtures("benchmarks")
async def test_a_swap_costs_the_decoding_that_its_slots_lack_however_long_they_are() -> None:
    def slot(seconds: float, swaps: int) -> Slot:
        return 10_000 * (seconds - 0.3 * swaps) / seconds, seconds, swaps

    without = [(10_000.0, 1.0, 0)] * 3
    found = await slots_of({"without": without, "swapping": [slot(1, 2), slot(2.2, 3), slot(1, 1)]})
    assert found["swaps"] == {"swapping": 6, "staging": 0}
    assert found["swap_costs_s"]["swapping"] == pytest.approx(0.3, abs=1e-4)
    assert found["swap_costs_error_s"]["swapping"] == pytest.approx(0, abs=1e-4)
    assert found["swap_costs_s"]["staging"] is found["swap_costs_error_s"]["staging"] is None
    noisy = await slots_of({"without": without, "swapping": [slot(1, 2), (5000, 1, 2), slot(1, 1)]})
    assert noisy["swap_costs_error_s"]["swapping"] > 0.01


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
