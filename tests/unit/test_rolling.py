"""Rolling swaps: some replicas are swapped while requests go on at the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator import (
    ConfigError,
    RecoveryOptions,
    ReplicaAdmitted,
    RolloutFinished,
    State,
    StateChanged,
    Strategy,
    SwapDone,
    TransferBackend,
)
from orchestrator.testing import FakeWorld
from tests.harness import DIGEST, SWAP, Rig, drive, make_rig

ROLLING = replace(SWAP, strategy=Strategy.ROLLING, staged=True)


def paused_at_once(rig: Rig) -> int:
    """The most replicas that were between pause and resume at a time, from the world's log."""
    edges = [(c.seq, 1) for c in rig.world.calls("pause")]
    edges += [(c.ended_seq, -1) for c in rig.world.calls("resume") if c.ended_seq is not None]
    most = now = 0
    for _, change in sorted(edges):
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize("backend", [TransferBackend.GLOO, TransferBackend.IPC])
@pytest.mark.parametrize("most", [1, 2])
async def test_no_more_replicas_than_allowed_are_out(backend: TransferBackend, most: int) -> None:
    swap = replace(
        ROLLING, backend=backend, staged=backend is TransferBackend.GLOO, max_unavailable=most
    )
    rig = make_rig(FakeWorld(), 4, swap=swap, validation=DIGEST)
    assert await drive(rig, 3) is None
    rig.assert_invariants()
    assert paused_at_once(rig) == most
    assert len(rig.of(SwapDone)) == 3
    path = [e.target for e in rig.of(StateChanged)]
    assert path.count(State.PAUSING) == 3 * (4 // most)
    for swap_done in rig.of(SwapDone):
        assert swap_done.report.ok and len(swap_done.report.checks[0].detail["engines"]) == 4  # type: ignore[arg-type]


async def test_staleness_counts_from_the_version_that_was_published_first() -> None:
    rig = make_rig(FakeWorld(), 3, swap=ROLLING, validation=DIGEST)
    assert await drive(rig, 4) is None
    rig.assert_invariants()
    for event in rig.of(RolloutFinished):
        assert all(span.version <= event.op.version for span in event.rollout.completion.spans)


async def test_a_death_in_the_second_group_costs_only_that_replica() -> None:
    rig = make_rig(
        FakeWorld(),
        3,
        swap=ROLLING,
        validation=DIGEST,
        recovery=RecoveryOptions(attempts=3, backoff_s=0.1),
        replacing=True,
    )
    rig.world.faults.die("engine-1", "receive_update", call=2)
    assert await drive(rig, 4) is None
    rig.assert_invariants()
    assert [e.report.update.version for e in rig.of(SwapDone)] == [1, 2, 3, 4]
    assert rig.of(ReplicaAdmitted)[-1].engine == "engine-1.r1"


def test_rolling_needs_the_bytes_before_the_pause() -> None:
    with pytest.raises(ConfigError, match="use a staged backend or ipc"):
        make_rig(FakeWorld(), 2, swap=replace(ROLLING, staged=False))
