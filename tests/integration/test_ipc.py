"""The ipc channel over host memory: real processes, the code that GPUs run."""

from __future__ import annotations

import gc
import json
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest
import torch

from actors.transfer import beside, ipc
from actors.transfer.base import make_sender
from actors.transfer.inbox import Accept, Invitation
from actors.transfer.ipc import IpcInbox, IpcSender
from actors.transfer.layout import Layout
from actors.transfer.plan import LoadPlan
from orchestrator.errors import ChannelError, TransferError
from orchestrator.types import (
    ChannelSpec,
    KVPolicy,
    PauseMode,
    PolicyVersion,
    TransferBackend,
    WeightUpdate,
)

TIMEOUT_S = 30.0
WAIT_S = 60.0
SOON_S = 5.0
UPDATE = WeightUpdate(
    sync_id="s1",
    from_version=PolicyVersion(0),
    version=PolicyVersion(1),
    step=1,
    backend=TransferBackend.IPC,
    pause_mode=PauseMode.KEEP,
    kv_policy=KVPolicy.RECOMPUTE,
)
CPU = torch.device("cpu")


def anything(layout: Layout) -> None:
    """An engine that takes whatever comes."""


def join(spec: ChannelSpec, rank: int, accept: Accept = anything) -> IpcInbox:
    return IpcInbox(Invitation.of(spec, 1), rank, accept, CPU)


def fetched(inbox: IpcInbox) -> dict[str, torch.Tensor]:
    inbox.fetch()
    return {name: tensor.clone() for name, tensor in inbox.views().items()}


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Group:
    """A sender of one tensor ``w`` and its inboxes in this process."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        workers: int = 1,
        *,
        staged: bool = False,
        accept: Accept = anything,
    ) -> None:
        self._accept = accept
        self.weights = {"w": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16)}
        sender = make_sender("ipc", self.weights.items)
        assert isinstance(sender, IpcSender)
        self.sender, self._threads, self._workers, self._staged = sender, threads, workers, staged
        self.open()

    def open(self) -> None:
        spec = replace(self.sender.listen(self._workers + 1, TIMEOUT_S), staged=self._staged)
        joining = [
            self._threads.submit(join, spec, rank + 1, self._accept)
            for rank in range(self._workers)
        ]
        self.sender.open(spec)
        self.spec = spec
        self.inboxes = [future.result(TIMEOUT_S) for future in joining]

    def holds(self, value: float) -> bool:
        """Whether every worker gets ``value``, which is what is staged."""
        self.sender.send(UPDATE)
        seen = [fetched(inbox) for inbox in self.inboxes]
        return all((s["w"] == value).all() and (s["b"] == 1).all() for s in seen)

    def stage(self, value: float) -> None:
        self.weights["w"].fill_(value)
        self.sender.stage()


def test_a_b_a_is_seen_by_every_worker_and_mapped_once(threads: ThreadPoolExecutor) -> None:
    group = Group(threads, 3)
    assert group.sender.description == "mapped memory"
    mapped = []
    for value in (1.0, 2.0, 1.0):
        group.stage(value)
        group.weights["w"].fill_(-1)  # the trainer goes on: what is staged stays
        assert group.holds(value)
        mapped.append([inbox.refresh() for inbox in group.inboxes])
    assert all(one is two for one, two in zip(mapped[0], mapped[2], strict=True))
    group.sender.close()


def test_memory_that_moved_is_mapped_again_and_the_old_one_dropped(
    threads: ThreadPoolExecutor,
) -> None:
    group = Group(threads)
    group.stage(1.0)
    assert group.holds(1.0)
    inbox = group.inboxes[0]
    before = inbox.refresh()
    group.sender.release()
    with pytest.raises(ChannelError, match="shares no memory now: stage"):
        inbox.refresh()
    assert inbox.source().numel() == 0
    with pytest.raises(TransferError, match="nothing is staged"):
        group.sender.send(UPDATE)
    group.stage(2.0)
    assert group.holds(2.0)
    assert inbox.refresh() is not before
    group.sender.close()


def mapped_files() -> int:
    with open("/proc/self/maps") as lines:
        return sum("memfd:midflight" in line for line in lines)


def test_twenty_releases_leave_one_buffer(threads: ThreadPoolExecutor) -> None:
    group = Group(threads)
    gc.collect()  # what other tests left
    counts = []
    for value in range(20):
        group.stage(float(value))
        assert group.holds(float(value))
        counts.append(mapped_files())
        group.sender.release()
    assert max(counts[1:]) == counts[0], counts
    group.sender.close()


def test_a_second_channel_shares_the_same_snapshot(threads: ThreadPoolExecutor) -> None:
    group = Group(threads)
    group.stage(3.0)
    assert group.holds(3.0)
    group.open()
    assert group.holds(3.0)
    group.sender.close()


def test_staged_the_worker_has_a_copy_of_its_own(threads: ThreadPoolExecutor) -> None:
    group = Group(threads, staged=True)
    inbox = group.inboxes[0]
    own = inbox.buffer()
    assert own.numel() == inbox.layout.nbytes
    group.stage(1.0)
    assert group.holds(1.0)
    group.stage(2.0)
    assert (inbox.views()["w"] == 1.0).all()
    assert group.holds(2.0) and inbox.buffer() is own
    group.sender.close()


def test_a_copy_that_rests_goes_on_after_it_and_ends_when_the_channel_is_closed(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where pieces are copied with rests between."""
    group = Group(threads, staged=True)
    (inbox,) = group.inboxes
    monkeypatch.setattr(ipc, "copy_beside", beside.in_pieces)
    monkeypatch.setattr(beside, "PIECE", inbox.layout.nbytes // 4)
    monkeypatch.setattr(beside, "REST_S", 0.001)
    group.stage(1.0)
    assert group.holds(1.0)
    monkeypatch.setattr(beside, "REST_S", 3 * SOON_S)
    resting, rest = threading.Event(), inbox.channel.rest

    def seen(seconds: float) -> None:
        resting.set()
        rest(seconds)

    monkeypatch.setattr(inbox.channel, "rest", seen)
    group.stage(2.0)
    fetching = threads.submit(inbox.fetch)
    assert resting.wait(WAIT_S)
    group.sender.close()
    with pytest.raises(ChannelError, match=r"closed|gone"):
        fetching.result(SOON_S)


def test_until_a_plan_is_trusted_the_worker_has_a_copy_too(threads: ThreadPoolExecutor) -> None:
    group = Group(threads, accept=lambda layout: True)
    (inbox,) = group.inboxes
    group.stage(1.0)
    assert group.holds(1.0)
    group.stage(2.0)
    assert (inbox.views()["w"] == 1.0).all()  # as loaded, whatever the sender has now
    inbox.trust_plan(cast(LoadPlan, object()))
    assert group.holds(2.0)
    group.stage(3.0)
    assert (inbox.views()["w"] == 3.0).all()
    assert inbox._buffer is None
    group.sender.close()


def test_before_anything_is_staged_there_is_nothing_to_map(threads: ThreadPoolExecutor) -> None:
    group = Group(threads)
    with pytest.raises(ChannelError, match="shares no memory now"):
        group.inboxes[0].fetch()
    group.sender.close()
    group.stage(1.0)  # a closed channel does not matter to staging
    with pytest.raises(ChannelError, match=r"closed|gone"):
        group.inboxes[0].fetch()


@pytest.mark.parametrize(
    "word",
    [
        "no json",
        "[]",
        json.dumps({"generation": 9, "handles": ["text"]}),
        json.dumps({"generation": 9, "handles": [{"kind": "host"}]}),
        json.dumps({"generation": 9, "handles": []}),
    ],
)
def test_a_malformed_word_about_the_memory_is_a_channel_error(
    threads: ThreadPoolExecutor, word: str
) -> None:
    group = Group(threads)
    group.stage(1.0)
    group.inboxes[0].channel.meeting.put("memory", word)
    with pytest.raises(ChannelError):
        group.inboxes[0].refresh()
    group.sender.close()


def error_of(future: Future[Any]) -> str:
    error = future.exception(TIMEOUT_S)
    assert isinstance(error, ChannelError)
    return str(error)


def test_memory_of_another_machine_is_refused_before_the_channel_opens(
    threads: ThreadPoolExecutor,
) -> None:
    sender = make_sender("ipc", lambda: [("w", torch.ones(3))])
    spec = sender.listen(2, TIMEOUT_S)
    patterns: Any = spec.extra["patterns"]
    away = replace(
        spec, extra={**spec.extra, "patterns": [{**patterns[0], "node": "another-node"}]}
    )
    joining = threads.submit(join, away, 1)
    with pytest.raises(ChannelError, match="memory is shared on one device only"):
        sender.open(spec)
    assert "another-node" in error_of(joining)


def test_memory_that_is_not_the_pattern_is_refused(threads: ThreadPoolExecutor) -> None:
    sender = make_sender("ipc", lambda: [("w", torch.ones(3))])
    spec = sender.listen(2, TIMEOUT_S)
    assert isinstance(sender, IpcSender) and sender._shared_pattern is not None
    sender._shared_pattern[99] ^= 1
    joining = threads.submit(join, spec, 1)
    with pytest.raises(ChannelError, match="1 of 1048576 bytes of the known pattern"):
        sender.open(spec)
    assert "known pattern" in error_of(joining)


def _worker(pipe: Connection, spec: ChannelSpec) -> None:
    inbox = join(spec, 1)
    while pipe.recv():
        pipe.send({name: tensor.tolist() for name, tensor in fetched(inbox).items()})


@contextmanager
def worker(spec: ChannelSpec) -> Iterator[tuple[Callable[[], Any], Connection]]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=_worker, args=(theirs, spec))
    child.start()
    theirs.close()

    def hear() -> Any:
        assert ours.poll(WAIT_S), "the worker says nothing"
        return ours.recv()

    try:
        yield hear, ours
    finally:
        child.kill()
        child.join()


def test_a_worker_in_another_process_follows_the_trainers_memory() -> None:
    weights = {"w": torch.arange(5.0)}
    sender = make_sender("ipc", weights.items)
    spec = sender.listen(2, WAIT_S)
    with worker(spec) as (hear, tell):
        sender.open(spec)
        for number in range(4):
            weights["w"].fill_(number)
            sender.stage()
            tell.send(True)
            assert hear() == {"w": [float(number)] * 5}
            if number == 1:
                sender.release()
        sender.close()
