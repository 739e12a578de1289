"""Public fakes for tests of anything built on midflight: an engine, a trainer, faults, a clock.

::

    world = FakeWorld()
    trainer, engines = FakeTrainer(world), [FakeEngine("engine-0", world)]
    world.faults.fail_at_tensor("engine-0", 2)
    run(my_test(trainer, engines))          # virtual time; a hang raises Deadlock at once
    assert not world.violations and not world.faults.unused

Only the standard library and midflight's leaves are imported here.
"""

from orchestrator.testing import policy
from orchestrator.testing.channel import FakeChannel
from orchestrator.testing.clock import (
    Deadlock,
    VirtualLoop,
    all_blocked,
    assert_no_leaked_tasks,
    run,
)
from orchestrator.testing.engine import FakeEngine
from orchestrator.testing.faults import Faults, Gate, When
from orchestrator.testing.trainer import FakeTrainer, fake_engine_factory
from orchestrator.testing.world import Call, FakeWorld

__all__ = [
    "FakeWorld",
    "FakeEngine",
    "FakeTrainer",
    "FakeChannel",
    "policy",
    "fake_engine_factory",
    "Call",
    "Faults",
    "Gate",
    "When",
    "VirtualLoop",
    "Deadlock",
    "run",
    "all_blocked",
    "assert_no_leaked_tasks",
]
