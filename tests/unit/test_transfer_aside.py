"""What work on a worker's second stream waits for; no GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.transfer import aside
from actors.transfer.aside import Answer, Aside


class Gpu:
    """Stand-ins for torch.cuda: what is queued on a stream runs when an event after it is waited
    for, and not before.
    """

    device = torch.device("cuda", 0)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._current = threading.local()
        self._queues: dict[Any, list[Callable[[], object]]] = {}
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(aside, "mark", self.mark)

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before = self._queue()
        self._current.queue = self._queues.setdefault(stream, [])
        try:
            yield
        finally:
            self._current.queue = before

    def _queue(self) -> list[Callable[[], object]]:
        """Each thread begins on the default stream."""
        default = self._queues.setdefault(None, [])
        found: list[Callable[[], object]] = getattr(self._current, "queue", default)
        return found

    def launch(self, kernel: Callable[[], object]) -> None:
        self._queue().append(kernel)

    def mark(self, device: torch.device) -> SimpleNamespace:
        assert device == self.device
        queue = self._queue()
        last = queue[-1:]

        def synchronize() -> None:
            while last and last[0] in queue:
                queue.pop(0)()

        return SimpleNamespace(synchronize=synchronize)

    def drain(self) -> None:
        for queue in self._queues.values():
            while queue:
                queue.pop(0)()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_prefetch_leaves_the_buffer_to_the_copies_that_were_queued_before(gpu: Gpu) -> None:
    buffer, model = torch.ones(8), torch.zeros(8)
    worker = Aside(gpu.device)
    answers: list[Answer] = []

    def prefetch() -> None:
        buffer.fill_(2.0)  # from the host, as gloo does: no stream orders it

    with gpu.stream("the model's"):
        gpu.launch(lambda: model.copy_(buffer))
        worker.start("prefetch", prefetch, answers.append)
    worker.finish()
    gpu.drain()
    assert answers == [{}]
    assert buffer.tolist() == [2.0] * 8
    assert model.tolist() == [1.0] * 8, "the commit read bytes of the next update"


@pytest.mark.parametrize("fails", [False, True])
def test_work_counts_as_done_when_its_stream_is(gpu: Gpu, fails: bool) -> None:
    target = torch.zeros(8)
    seen: list[tuple[Answer, float]] = []
    worker = Aside(gpu.device)

    def work() -> None:
        gpu.launch(lambda: target.fill_(3.0))
        if fails:
            raise ValueError("half-way")

    worker.start("test", work, lambda answer: seen.append((answer, float(target.sum()))))
    worker.finish()
    assert seen == [({"error": "half-way"} if fails else {}, 24.0)]
