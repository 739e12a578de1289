"""Entry point of group ``vllm.general_plugins``: vLLM calls it in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Make the receiver known to vLLM and tie engine processes to their actor. Idempotent."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from actors.processes import die_with_actor

    from .names import ENGINE_NAME

    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            ENGINE_NAME, "actors.transfer.receiver", "Receiver"
        )
    die_with_actor()
