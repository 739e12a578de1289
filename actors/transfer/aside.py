"""Work that a worker does on a thread of its own while its model goes on decoding.

On a GPU the work has a stream of its own too. It begins when the device has done what the model's
stream was given before, and counts as done when the device is done with it: whoever uses its
result needs no event.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from orchestrator.errors import ChannelError

from .waiting import mark

Answer = dict[str, object]


class Aside:
    """One piece of work at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._thread: threading.Thread | None = None

    def start(
        self,
        name: str,
        work: Callable[[], Answer | None],
        done: Callable[[Answer], None] | None = None,
    ) -> None:
        """Run ``work``, after the work before it; returns at once.

        ``done`` gets its answer, or ``{"error": words}``.
        """
        before = self._thread
        queued = None
        if self._device.type == "cuda":
            queued = mark(self._device)

        def run() -> None:
            if before is not None:
                before.join()
            answer: Answer
            try:
                with self._own_stream(queued):
                    answer = work() or {}
            except Exception as error:
                answer = {"error": str(error) or type(error).__name__}
            if done is not None:
                with contextlib.suppress(ChannelError):  # closed: whoever asked is told so
                    done(answer)

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until nothing runs. What blocks in a channel ends when that is closed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    @contextlib.contextmanager
    def _own_stream(self, queued: torch.cuda.Event | None) -> Iterator[None]:
        if queued is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # What is read, overwritten or unmapped here may be in use by a copy that was only queued.
        queued.synchronize()
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            # Also after a failure: it may still write somewhere.
            with torch.cuda.stream(self._stream):
                mark(self._device).synchronize()
