"""One side of an open channel: its rendezvous, its link, and how it ends.

When any member leaves, or the sender's process dies, every member's pending operation fails at
once with the reason: each watches the key ``closed`` of the channel's store on a connection of
its own, and waits for the link on a thread that can be left behind.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError

from orchestrator.errors import ChannelError

from .link import Link, Wait
from .rendezvous import Rendezvous


class Channel:
    """Made as soon as the store is reachable; the link comes later. Thread-safe."""

    def __init__(self, meeting: Rendezvous) -> None:
        self.meeting = meeting
        self.link: Link | None = None
        self._telling = meeting.second()
        self._closed: Future[str] = Future()
        threading.Thread(
            target=self._watch, args=(meeting.second(),), name="channel-watch", daemon=True
        ).start()

    @property
    def closed(self) -> str | None:
        """Why the channel is closed; None while it is not."""
        return self._closed.result() if self._closed.done() else None

    def run(self, wait: Wait) -> None:
        """Run a blocking ``wait``; ChannelError at once when the channel is closed meanwhile.

        The wait itself cannot be interrupted: its thread stays behind until the peers are
        gone or the link's timeout ends it. What it was filling must not be used again.
        """
        done: Future[None] = Future()

        def work() -> None:
            try:
                wait()
            except BaseException as error:
                reason = self._telling.why_closed()
                _fail(done, error if reason is None else _closed(reason))
            else:
                with contextlib.suppress(InvalidStateError):
                    done.set_result(None)

        def stop(closed: Future[str]) -> None:
            _fail(done, _closed(closed.result()))

        threading.Thread(target=work, name="channel-wait", daemon=True).start()
        self._closed.add_done_callback(stop)
        done.result()

    def close(self, reason: str) -> None:
        """Leave, and let the other members know why. Idempotent, from any thread."""
        # Words first: a peer whose link breaks looks for them.
        with contextlib.suppress(ChannelError):  # nobody is left to be told
            self._telling.say("closed", reason)
        self._end(reason)

    def _end(self, reason: str) -> None:
        with contextlib.suppress(InvalidStateError):
            self._closed.set_result(reason)
        if self.link is not None:
            self.link.close()

    def _watch(self, meeting: Rendezvous) -> None:
        self._end(meeting.closed())


def _closed(reason: str) -> ChannelError:
    return ChannelError(f"the channel was closed: {reason}")


def _fail(future: Future[None], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
