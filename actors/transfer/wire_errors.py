"""Our errors through vLLM's RPC, which only carries an exception's text.

A worker's are answers like others (``answered``, ``must_be_well``): vLLM's MultiprocExecutor stops
reading at the first answer that is an exception, and takes those of the ranks behind it for answers
of the next call (vllm/v1/executor/multiproc_executor.py, ``collective_rpc``).
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from orchestrator.errors import ChannelError, TransferError

P = ParamSpec("P")
R = TypeVar("R")

_KINDS: dict[str, type[TransferError]] = {
    "TransferError": TransferError,
    "ChannelError": ChannelError,
}
_RAISED = "midflight raised"
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


def answered(method: Callable[P, R]) -> Callable[P, R | dict[str, str]]:
    """Return what ``method`` raises, for :func:`must_be_well`; its trace goes to the log."""

    @functools.wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R | dict[str, str]:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            logging.getLogger("vllm.midflight").exception("%s failed", method.__name__)
            return {_RAISED: in_words(error)}

    return wrapped


def in_words(error: BaseException) -> str:
    """The error with its kind, which the text of a WireError has already."""
    return str(error) if isinstance(error, WireError) else f"{type(error).__name__}: {error}"


def must_be_well(answers: Sequence[Any]) -> None:
    """WireError with the first rank's reason, if any of the workers' ``answers`` is one."""
    for answer in answers:
        if isinstance(answer, dict) and _RAISED in answer:
            raise WireError(answer[_RAISED])


def from_wire(text: str) -> TransferError | None:
    """The error that was raised behind the RPC, if ``text`` carries one."""
    match = _MARK.search(text)
    if match is None:
        return None
    return _KINDS.get(match[1], TransferError)(match[2])
