"""Whether a Triton kernel of ours runs on a device and is right there: asked before it is used.

Triton comes with every build of torch for GPUs. It needs a C compiler the first time it runs on a
machine; without one torch's own operations do the work, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch


def runs_right(device: torch.device, what: str, attempt: Callable[[], bool]) -> bool:
    """``attempt`` uses the kernel and says whether its result is right. False on a CPU."""
    if device.type != "cuda":
        return False
    try:
        problem = "" if attempt() else "its result is wrong"
    except Exception as error:
        problem = (f"{type(error).__name__}: {error}").splitlines()[0]
    if problem:
        logging.getLogger(__name__).warning(
            "%s by torch's own operations, which takes longer: the Triton kernel does not run on "
            "%s (%s)",
            what,
            device,
            problem,
        )
    return not problem
