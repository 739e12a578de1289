"""Entry point of group ``vllm.general_plugins``: vLLM calls it in each of its processes."""

from __future__ import annotations

import sys


def register() -> None:
    """Make the receiver known to vLLM, extend its engine core, tie engine processes to their actor.

    Idempotent.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from actors import core_swap
    from actors.processes import die_with_actor

    from .names import ENGINE_NAME

    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            ENGINE_NAME, "actors.transfer.receiver", "Receiver"
        )
    # Where the engine core runs it has been imported; elsewhere nobody calls its methods.
    core = sys.modules.get("vllm.v1.engine.core")
    if core is not None:
        core_swap.install(core.EngineCoreProc, (core.EngineCoreRequestType.WAKEUP, None))
    die_with_actor()
