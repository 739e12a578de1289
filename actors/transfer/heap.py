"""The C heap of a worker that computes on the CPU."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return free pages to the system; nothing where the C library is not glibc.

    oneDNN's kernels, made in the middle of a prefill, stay between its buffers, and the next
    prefill finds no gap that is large enough: the heap grows though little of it is used.
    Locks the heap for milliseconds, and what was free has to be faulted in again: not in a pause.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
