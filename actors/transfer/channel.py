"""One side of an open channel: its rendezvous, its link, and how it ends.

When any member leaves, or the sender's process dies, every member's pending operation fails at
once with the reason: each watches the channel's store, and waits for its link on a thread that
can be left behind.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, InvalidStateError

from orchestrator.errors import ChannelError

from .link import BrokenLink, Link, Wait
from .rendezvous import Rendezvous

_WORDS_S = 0.5
"""How long a member whose link broke waits to be told why."""


class Channel:
    """Made as soon as the store is reachable; the link comes later. Thread-safe."""

    def __init__(self, meeting: Rendezvous) -> None:
        self.meeting = meeting
        self._link: Link | None = None
        self._closed: Future[str] = Future()
        threading.Thread(target=self._watch, name="channel-watch", daemon=True).start()

    @property
    def link(self) -> Link | None:
        """What carries the bytes, once it is built."""
        return self._link

    @link.setter
    def link(self, link: Link | None) -> None:
        self._link = link
        if link is not None and self._closed.done():
            link.close()  # built too late: nobody else would

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
            except BrokenLink as error:
                with contextlib.suppress(TimeoutError):
                    _settle(done, _closed(self._closed.result(_WORDS_S)))
                _settle(done, error)
            except BaseException as error:
                _settle(done, error)
            else:
                _settle(done)

        threading.Thread(target=work, name="channel-wait", daemon=True).start()
        self._closed.add_done_callback(lambda closed: _settle(done, _closed(closed.result())))
        done.result()

    def rest(self, seconds: float) -> None:
        """Wait so long; ChannelError as soon as the channel is closed."""
        with contextlib.suppress(TimeoutError):
            raise _closed(self._closed.result(seconds))

    def close(self, reason: str) -> None:
        """Leave, and let the other members know why. Idempotent, from any thread."""
        # Words first: a peer whose link breaks looks for them.
        self.meeting.close(reason)
        self._end(reason)

    def _end(self, reason: str) -> None:
        with contextlib.suppress(InvalidStateError):
            self._closed.set_result(reason)
        if self._link is not None:
            self._link.close()

    def _watch(self) -> None:
        self._end(self.meeting.closed())


def _closed(reason: str) -> ChannelError:
    return ChannelError(f"the channel was closed: {reason}")


def _settle(future: Future[None], error: BaseException | None = None) -> None:
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
