"""Our errors through vLLM's RPC, which only carries an exception's text."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from orchestrator.errors import ChannelError, TransferError

P = ParamSpec("P")
R = TypeVar("R")

_KINDS: dict[str, type[TransferError]] = {
    "TransferError": TransferError,
    "ChannelError": ChannelError,
}
_MARK = re.compile(r"<midflight (\w+)>(.*?)</midflight>", re.DOTALL)


class WireError(Exception):
    """A transfer error whose text :func:`from_wire` turns back into what it was."""


def wire_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Raise every TransferError of ``method`` as a WireError."""

    @functools.wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except TransferError as error:
            kind = type(error).__name__
            raise WireError(f"<midflight {kind}>{error}</midflight>") from error

    return wrapped


def from_wire(text: str) -> TransferError | None:
    """The error that was raised behind the RPC, if ``text`` carries one."""
    match = _MARK.search(text)
    if match is None:
        return None
    return _KINDS.get(match[1], TransferError)(match[2])
