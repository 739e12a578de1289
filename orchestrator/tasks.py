"""Waiting for several things at once without leaving anything behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from orchestrator.errors import MidflightError, PhaseTimeout

T = TypeVar("T")


def first_error(group: BaseException) -> BaseException:
    """The most telling leaf of an exception group: ours before others, never a mere cancel."""
    leaves: list[BaseException] = []

    def walk(error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                walk(inner)
        else:
            leaves.append(error)

    walk(group)
    ours = [e for e in leaves if isinstance(e, MidflightError)]
    other = [e for e in leaves if not isinstance(e, asyncio.CancelledError)]
    return (ours or other or leaves)[0]


async def all_or_first_error(aws: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; on the first error the others are cancelled and it is raised alone."""
    coroutines = list(aws)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(c) for c in coroutines]
    except BaseExceptionGroup as error:
        raise first_error(error) from None
    return [t.result() for t in tasks]


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # the caller has the one that matters


async def settle(tasks: Iterable[asyncio.Task[Any]], *, cancel: bool = True) -> None:
    """Wait until every task has ended, cancelled first if asked; their errors are theirs."""
    every = list(tasks)
    for task in every:
        task.add_done_callback(_retrieve)  # also if this wait is cancelled itself
    pending = [t for t in every if not t.done()]
    if cancel:
        for task in pending:
            task.cancel()
    if pending:
        await asyncio.wait(pending)


class Closable(Protocol):
    """Whatever has something to release."""

    async def aclose(self) -> None: ...


async def close_within(what: Closable, seconds: float) -> None:
    """Close ``what``; after ``seconds`` the call is cancelled. Its errors are its own."""
    closing = asyncio.ensure_future(what.aclose())
    try:
        await asyncio.wait([closing], timeout=seconds)
    finally:
        await settle([closing])


async def uninterrupted(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end even if the caller is cancelled meanwhile; then the cancel goes on.

    For clean-up that has a deadline of its own: a cancel must not leave it half done.
    """
    task = asyncio.ensure_future(coroutine)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not task.cancelled():
            task.exception()  # retrieved: the cancel outranks it
        raise asyncio.CancelledError
    return task.result()


@asynccontextmanager
async def deadline(
    phase: str, seconds: float, waiting_for: Callable[[], str] = str
) -> AsyncIterator[None]:
    """Raise PhaseTimeout when the block takes longer; an inner TimeoutError passes through."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if scope.expired():
            raise PhaseTimeout(str(phase), seconds, waiting_for()) from error
        raise
