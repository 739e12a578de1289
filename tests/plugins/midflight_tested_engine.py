"""The real engine actor, with calls that a CPU's engine is never asked for by itself."""

from __future__ import annotations

from actors import vllm_compat
from actors.engine import EngineActor
from actors.home import at_home
from actors.warm_up import warm_up
from orchestrator.types import OpContext


class TestedEngineActor(EngineActor):
    """See the module."""

    @at_home
    async def warm_up(self, ctx: OpContext, max_num_seqs: int) -> int:
        """As at the start of an engine on a GPU; how many requests."""
        length = vllm_compat.model_facts(self._llm)["max_model_len"]
        return await self._core.or_death(warm_up(self._llm, length, max_num_seqs))
