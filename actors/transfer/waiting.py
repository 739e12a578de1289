"""Waits for a GPU that sleep: torch's own keep a processor busy, beside a thread that decodes."""

from __future__ import annotations

import torch


def mark(device: torch.device) -> torch.cuda.Event:
    """Of what the current stream of ``device``, a GPU, was given until now; wait for it asleep."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a copy on the host, when its device is done with it; itself, if it is there."""
    if tensor.device.type != "cuda":
        return tensor
    # Pinned, or the copy itself would wait, in the driver.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    mark(tensor.device).synchronize()
    return host
