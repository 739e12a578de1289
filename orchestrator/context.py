"""Which operation the current task works on. Child tasks inherit it.

Set around every phase by the cycle; read by the log processors and by the adapters, which
send it along with each call so that lines from inside the actors carry it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from orchestrator.types import OpContext

_NONE = OpContext()
_current: ContextVar[OpContext] = ContextVar("midflight_op")


def current_op() -> OpContext:
    """The operation of the running task."""
    return _current.get(_NONE)


@contextmanager
def operation(**changes: object) -> Iterator[OpContext]:
    """Within the block the current operation has ``changes`` (fields of OpContext)."""
    op = replace(current_op(), **changes)  # type: ignore[arg-type]
    token = _current.set(op)
    try:
        yield op
    finally:
        _current.reset(token)
