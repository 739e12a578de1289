"""The real controller over a simulated data plane, on a virtual clock.

::

    result = simulate(Scenario(engines=512, steps=100, faults=parse_faults("crash=300,flip=1%")))

Engines and trainer are the public fakes of :mod:`orchestrator.testing`; what their calls take comes
from a :class:`CostModel`. The same scenario gives the same trace. ``docs/scaling.md`` says what is
counted.
"""

from orchestrator.simulate.costs import CostModel
from orchestrator.simulate.faults import FaultKind, FaultRule, parse_faults
from orchestrator.simulate.result import SimulationResult
from orchestrator.simulate.run import Scenario, simulate

__all__ = [
    "CostModel",
    "FaultKind",
    "FaultRule",
    "Scenario",
    "SimulationResult",
    "parse_faults",
    "simulate",
]
