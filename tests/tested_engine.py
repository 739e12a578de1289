"""The real engine actor, with calls that a CPU's engine is never asked for by itself."""

from __future__ import annotations

from actors.engine import EngineActor
from actors.home import at_home
from orchestrator.types import OpContext


class TestedEngineActor(EngineActor):
    """See the module."""

    @at_home
    async def warm_up(self, ctx: OpContext) -> None:
        """As at the start of an engine on a GPU."""
        await self._core._warm_up()
