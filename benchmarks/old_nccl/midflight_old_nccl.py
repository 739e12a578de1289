"""A vLLM plugin for measuring on machines whose NCCL is older than vLLM wants. See README.md."""

from __future__ import annotations

import logging

UNUSED = ("ncclCommSuspend", "ncclCommResume", "ncclCommQueryProperties")
"""What vLLM binds, what came with NCCL 2.29, and what no transfer of weights calls."""


def register() -> None:
    """Have vLLM bind NCCL without them, in this process. Idempotent."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    NCCLLibrary.exported_functions = [
        function for function in NCCLLibrary.exported_functions if function.name not in UNUSED
    ]
    logging.getLogger("vllm.midflight_old_nccl").warning(
        "vLLM binds NCCL without %s: for measurements only", ", ".join(UNUSED)
    )
