"""What may be repeated, and that the fleet does it."""

from __future__ import annotations

import pytest

from orchestrator import Engine, EngineError, Resumable, SwapDone, SwapFailed, Trainer
from orchestrator.operations import RETRY, Retry
from orchestrator.testing import FakeWorld
from tests.harness import DIGEST, drive, make_rig
from tests.unit.test_recovery import TRIES


def test_every_call_of_the_protocols_has_a_class() -> None:
    methods = {
        name
        for protocol in (Engine, Trainer, Resumable)
        for name in dir(protocol)
        if not name.startswith("_") and callable(getattr(protocol, name))
    }
    assert methods == set(RETRY)


@pytest.mark.parametrize("method", ["pause", "resume", "digests"])
async def test_a_safe_call_is_made_again_and_nobody_notices(method: str) -> None:
    rig = make_rig(FakeWorld(), 2, validation=DIGEST, recovery=TRIES)
    assert RETRY[method] is Retry.SAFE
    rig.world.faults.fail("engine-1", method, error=EngineError("engine-1", "a hiccup"))
    assert await drive(rig, 2) is None
    rig.assert_invariants()
    assert len(rig.world.calls(method, "engine-1")) == 3
    assert rig.of(SwapFailed) == []
    assert len(rig.of(SwapDone)) == 2


@pytest.mark.parametrize("method", ["start_update", "receive_update", "finish_update"])
async def test_no_other_call_is_repeated_as_it_is(method: str) -> None:
    rig = make_rig(FakeWorld(), 2, validation=DIGEST, recovery=TRIES)
    rig.world.faults.fail("engine-1", method, error=EngineError("engine-1", "a hiccup"))
    assert await drive(rig, 2) is None
    rig.assert_invariants()
    (failed,) = rig.of(SwapFailed)
    assert "a hiccup" in str(failed.error)
    ids = [c.args[0].sync_id for c in rig.world.calls(method, "engine-1")]  # type: ignore[attr-defined]
    assert len(ids) == len(set(ids)), "a try has an id of its own"
