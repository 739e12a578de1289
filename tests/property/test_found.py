"""Histories that random search found to go wrong once, shrunk; each is one that must not again."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator import KVPolicy, PauseMode, RecoveryOptions, TransferBackend
from orchestrator.testing import run
from orchestrator.testing.faults import When
from tests.harness import DIGEST
from tests.property.test_controller import (
    CallFault,
    Fault,
    Scenario,
    TimedFault,
    WireFault,
    check_the_end,
    prepare,
)

GLOO = (TransferBackend.GLOO, False)
STAGED = (TransferBackend.GLOO, True)
IPC = (TransferBackend.IPC, False)


def call(
    actor: str, method: str, when: When, kind: str, nth: int | None = 1, seconds: float = 0.02
) -> CallFault:
    return CallFault(actor, method, nth, when, kind, seconds)


FOUND: dict[str, tuple[int, tuple[TransferBackend, bool], tuple[Fault, ...]]] = {
    "a replica that does not leave its group is asked again before another is opened": (
        1,
        GLOO,
        (
            call("trainer", "send", When.BEFORE, "fail"),
            call("engine-0", "close_channel", When.BEFORE, "fail"),
        ),
    ),
    "a channel is not opened for nobody": (
        1,
        GLOO,
        (
            call("engine-0", "resume", When.BEFORE, "fail"),
            call("engine-0", "close_channel", When.BEFORE, "die"),
        ),
    ),
    "nothing is resynced any more while the run is being ended": (
        1,
        STAGED,
        (
            call("trainer", "close_channel", When.AFTER, "interrupt"),
            WireFault("blank", "*", "layers.1", None),
        ),
    ),
    "a rendezvous that fails after it was opened is closed": (
        3,
        IPC,
        (
            call("trainer", "send", When.AFTER, "fail"),
            call("trainer", "listen", When.AFTER, "fail", nth=2),
        ),
    ),
    "a trainer that never leaves its group is an error, not a second group": (
        3,
        GLOO,
        (
            WireFault("drop", "engine-1", "head", 1),
            call("trainer", "close_channel", When.BEFORE, "fail", nth=None),
        ),
    ),
    "probes of a swap that is proved again have names of their own": (
        2,
        GLOO,
        (
            call("engine-0", "resume", When.AFTER, "delay", seconds=4.0),
            call("engine-0", "resume", When.AFTER, "delay", seconds=4.0),
        ),
    ),
    "the last replica dies while the other is being replaced": (
        2,
        GLOO,
        (TimedFault("kill", "engine-1", 0.3), call("engine-0", "finish_update", When.AFTER, "die")),
    ),
}


@pytest.mark.parametrize("mode", PauseMode)
@pytest.mark.parametrize("replacing", [False, True])
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_ends_clean_and_says_how(
    name: str, replacing: bool, mode: PauseMode
) -> None:
    engines, route, faults = FOUND[name]
    scenario = Scenario(
        engines,
        2,
        mode,
        KVPolicy.RECOMPUTE,
        route,
        DIGEST,
        1,
        None,
        0.1,
        0.0,
        faults,
        RecoveryOptions(attempts=3, backoff_s=0.2, backoff_max_s=1.0),
        replacing,
        False,
    )

    async def main() -> None:
        async def work() -> None:
            async with rig.orchestrator as o:
                await o.run(scenario.steps)

        rig = prepare(scenario, lambda: job.cancel())
        job = asyncio.create_task(work(), name="host")
        (result,) = await asyncio.gather(job, return_exceptions=True)
        check_the_end(rig, result)

    run(main())
