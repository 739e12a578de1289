"""The life of a run: the task that hosts it, its tasks in the background, and its one end.

A task in the background that fails ends the run: the host is cancelled, and what failed is raised
where the run is left. A host that waits in ``sync`` gets it raised there; if it goes on all the
same, its next wait is cancelled. Nothing idles on after a task died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from orchestrator.errors import Closed, MidflightError
from orchestrator.tasks import first_error, settle, uninterrupted
from orchestrator.types import Outcome

Release = Callable[[BaseException | None, bool], Awaitable[list[str]]]
"""Lets go of everything, given what ended the run and whether that is a failure; what may be
left."""
INSIST_S = 1.0
"""Between cancels of a host that has been told what failed and does not leave."""


class Life:
    """See the module."""

    def __init__(
        self, release: Release, blame: Callable[[BaseException], BaseException | None]
    ) -> None:
        """``blame``: what is really behind an error; None if that is about to be told."""
        self._release_all, self._blame = release, blame
        self._host: asyncio.Task[Any] | None = None
        self._background: list[asyncio.Task[None]] = []
        self._fatal: BaseException | None = None
        self._unreleased: list[str] = []
        self._cancels = 0
        self._interrupted = False
        self._left = False
        self._told = False
        self._releasing: asyncio.Task[None] | None = None
        self.closing = False
        """Everything is being released."""

    @property
    def over(self) -> bool:
        """It has ended, or is about to."""
        return self.closing or self._interrupted or self._fatal is not None

    def begin(self) -> None:
        """The current task hosts the run (Closed if it had a host before)."""
        if self._host is not None or self.closing:
            raise Closed("an Orchestrator is entered once; make a new one")
        self._host = asyncio.current_task()

    def watch(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """Run in the background; its failure ends the run."""
        task = asyncio.create_task(coroutine, name=name)
        self._background = [known for known in self._background if not known.done()]
        self._background.append(task)
        task.add_done_callback(self.ended)

    def ended(self, task: asyncio.Task[Any]) -> None:
        """A task in the background has ended."""
        error = None if task.cancelled() else task.exception()
        if error is None or self._fatal is not None or self.closing:
            return
        if (behind := self._blame(error)) is not None:
            self.fail(behind)

    def fail(self, error: BaseException) -> None:
        """End the run with ``error``."""
        if self._fatal is None and not self.closing:
            self._fatal = error
            self._cancel_host()

    def raise_fatal(self) -> None:
        """Raise what ended the run, if something failed."""
        if self._fatal is not None:
            raise self._fatal from self._fatal.__cause__

    def tell(self) -> None:
        """Raise what the current task was cancelled for, if it is the host of a run that failed.

        Once: the next wait of the host is cancelled again, so that it cannot go on for ever.
        """
        mine = asyncio.current_task() is self._host
        if self._fatal is None or self._told or self._left or not mine:
            return
        self._told = True
        self._cancel_host()
        self._background.append(asyncio.create_task(self._insist(), name="insist"))
        self.raise_fatal()

    async def _insist(self) -> None:
        """Cancel the host until it leaves: before Python 3.13 a TaskGroup that already ends takes
        a cancel for its own, and nothing tells that it did.
        """
        while not self.closing:
            await asyncio.sleep(INSIST_S)
            if not self.closing:
                self._cancel_host()

    async def heed(self) -> None:
        """Let a cancel of the host come through when the run is over.

        Without a wait a loop that tries again and again would block everybody.
        """
        if self.over:
            await asyncio.sleep(0)

    def interrupt(self) -> None:
        """End the run now, without an error. Idempotent."""
        if not self._interrupted and not self._left and self._host is not None:
            self._interrupted = True
            self._cancel_host()

    def _cancel_host(self) -> None:
        assert self._host is not None
        self._cancels += 1
        self._host.cancel()

    async def leave(self, error: BaseException | None) -> BaseException | None:
        """Release everything; the error that mattered, if any. ``error``: the host's own."""
        assert self._host is not None
        try:
            await self.release(error)
        except asyncio.CancelledError as late:
            if error is None or isinstance(error, Closed):
                error = late
        self._left = True
        for _ in range(self._cancels):
            self._host.uncancel()
        if isinstance(error, BaseExceptionGroup):
            error = first_error(error)
        # The host was cancelled because of it; an error of the host's own says more.
        if self._fatal is not None and (
            error is None or _is_cancel(error) or isinstance(error, Closed)
        ):
            error = self._fatal
        if error is None and self._unreleased:
            error = MidflightError(
                f"the run is done, but something of it may be left: {'; '.join(self._unreleased)}. "
                "Look for its processes"
            )
        return error

    async def release(self, error: BaseException | None = None) -> None:
        """Release everything, once; who comes second, or is cancelled, waits for the end too."""
        await uninterrupted(self._released(error))

    async def _released(self, error: BaseException | None) -> None:
        if self._releasing is None:
            self.closing = True
            self._releasing = asyncio.create_task(self._let_go(error), name="release")
        await asyncio.wait([self._releasing])
        self._releasing.result()

    async def _let_go(self, error: BaseException | None) -> None:
        failed = self._fatal is not None or not (error is None or _is_cancel(error))
        try:
            self._unreleased = await self._release_all(error, failed)
        finally:
            await settle(self._background)


def outcome_of(error: BaseException | None) -> Outcome:
    """How a run ended that was left with ``error``."""
    if error is None:
        return Outcome.COMPLETED
    return Outcome.INTERRUPTED if _is_cancel(error) else Outcome.FAILED


def _is_cancel(error: BaseException) -> bool:
    return isinstance(error, (asyncio.CancelledError, KeyboardInterrupt))
