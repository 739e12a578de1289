"""The gloo channel between real sockets: threads and processes as ranks, no vLLM."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch

from actors.nodes import network_id
from actors.transfer.base import Sender, make_sender
from actors.transfer.digest import Part, whole
from actors.transfer.inbox import Accept, Inbox, Invitation, accept_dtypes
from actors.transfer.layout import Layout
from actors.transfer.link import BrokenLink
from actors.transfer.rendezvous import Rendezvous
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
SOON_S = 5.0
"""Well below TIMEOUT_S: what must not have waited for it."""
MIB = 1 << 20
UPDATE = WeightUpdate(
    sync_id="s1",
    from_version=PolicyVersion(0),
    version=PolicyVersion(1),
    step=1,
    backend=TransferBackend.GLOO,
    pause_mode=PauseMode.KEEP,
    kv_policy=KVPolicy.RECOMPUTE,
)


def anything(layout: Layout) -> None:
    """An engine that takes whatever comes."""


def join(spec: ChannelSpec, rank: int, accept: Accept = anything) -> Inbox:
    return Inbox(Invitation.of(spec, 1), rank, accept, torch.device("cpu"))


def receive(inbox: Inbox) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in inbox.tensors("s1")}


@contextmanager
def soon() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON_S


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Group:
    """A sender and its receivers, joined."""

    def __init__(self, sender: Sender, receivers: int, threads: ThreadPoolExecutor) -> None:
        self.sender, self._threads = sender, threads
        self.spec = sender.listen(receivers + 1, TIMEOUT_S)
        joining = [threads.submit(join, self.spec, rank + 1) for rank in range(receivers)]
        sender.open(self.spec)
        self.inboxes = [future.result(TIMEOUT_S) for future in joining]

    def swap(self) -> list[dict[str, torch.Tensor]]:
        receiving = [self._threads.submit(receive, inbox) for inbox in self.inboxes]
        self.sender.send(UPDATE)
        return [future.result(TIMEOUT_S) for future in receiving]

    def digests(self, key: str) -> list[dict[str, str]]:
        reader = Rendezvous.join(
            self.spec.host, self.spec.port, self.spec.nonce, TIMEOUT_S, network_id()
        )
        for inbox in self.inboxes:
            inbox.start_digest(key)
        shapes = {spec.name: spec.shape for spec in self.spec.tensors}
        found = []
        for inbox in self.inboxes:
            answer = json.loads(reader.take(f"{key}/{inbox.rank}"))
            parts = {name: Part.of_wire(part) for name, part in answer["parts"].items()}
            found.append(whole("one", shapes, {inbox.rank: parts}))
        return found


def error_of(future: Future[Any]) -> BaseException:
    error = future.exception(TIMEOUT_S)
    assert error is not None
    return error


def test_a_b_a_arrives_bit_for_bit_at_every_rank(threads: ThreadPoolExecutor) -> None:
    torch.manual_seed(0)
    base = torch.randn(300, 400)
    a = {"t": base.t(), "half": base[::2].to(torch.bfloat16), "ids": torch.arange(7)}
    b = {name: tensor + 1 for name, tensor in a.items()}
    now = [a]
    sender = make_sender("gloo", lambda: now[0].items())
    group = Group(sender, 3, threads)
    seen = []
    for number, weights in enumerate((a, b, a)):
        now[0] = weights
        sent = sender.stage()
        for received in group.swap():
            assert received.keys() == weights.keys()
            assert all(torch.equal(received[name], weights[name]) for name in weights)
        assert group.digests(f"digest/{number}") == [sent] * 3
        seen.append(sent)
    assert seen[0] == seen[2]
    assert all(seen[0][name] != seen[1][name] for name in a)
    sender.close()


def test_many_buckets_arrive_whole(threads: ThreadPoolExecutor) -> None:
    # Over two bucket borders; the second tensor straddles one.
    weights = {"a": torch.randint(256, (20 * MIB,), dtype=torch.uint8), "b": torch.randn(12 * MIB)}
    sender = make_sender("gloo", weights.items)
    group = Group(sender, 2, threads)
    sender.stage()
    for received in group.swap():
        assert all(torch.equal(received[name], weights[name]) for name in weights)
    sender.close()


def test_a_fetch_that_fails_is_not_covered_by_the_one_before_it(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender("gloo", lambda: {"w": torch.ones(4)}.items())
    inbox = Group(sender, 1, threads).inboxes[0]
    started, go = threading.Event(), threading.Event()

    def slowly() -> None:
        started.set()
        assert go.wait(TIMEOUT_S)

    def broken() -> None:
        raise TransferError("it broke")

    monkeypatch.setattr(inbox, "fetch", slowly)
    inbox.start_prefetch("s1", "one")
    assert started.wait(TIMEOUT_S)
    monkeypatch.setattr(inbox, "fetch", broken)
    inbox.start_prefetch("s1", "two")
    go.set()
    inbox.aside.finish()
    assert inbox.fetched is None
    sender.close()


def test_what_goes_wrong_while_a_worker_gets_ready_reaches_every_side(
    threads: ThreadPoolExecutor,
) -> None:
    def confused(layout: Layout) -> None:
        raise KeyError("inv_freq")

    sender = make_sender("gloo", lambda: {"w": torch.ones(4)}.items())
    spec = sender.listen(2, TIMEOUT_S)
    joining = threads.submit(join, spec, 1, confused)
    with soon(), pytest.raises(ChannelError, match="inv_freq"):
        sender.open(spec)
    assert "KeyError: 'inv_freq'" in str(error_of(joining))
    assert isinstance(error_of(joining), ChannelError)
    sender.close()


def test_a_wrong_pattern_is_refused_on_every_side(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Inbox.receive_pattern

    def at_rank_two(inbox: Inbox) -> torch.Tensor:
        arrived = honest(inbox)
        if inbox.rank == 2:
            arrived[77] ^= 1
        return arrived

    monkeypatch.setattr(Inbox, "receive_pattern", at_rank_two)
    sender = make_sender("gloo", lambda: [("w", torch.zeros(3))])
    spec = sender.listen(3, TIMEOUT_S)
    joining = [threads.submit(join, spec, rank) for rank in (1, 2)]
    with soon():
        with pytest.raises(ChannelError, match=r"1 of 1048576 bytes of the known pattern"):
            sender.open(spec)
        assert all(isinstance(error_of(future), ChannelError) for future in joining)


def test_two_dtypes_without_a_declared_cast_are_refused_before_any_link(
    threads: ThreadPoolExecutor,
) -> None:
    sender = make_sender("gloo", lambda: [("w", torch.zeros(3))])
    spec = sender.listen(3, TIMEOUT_S)

    def bfloat16_engine(layout: Layout) -> None:
        accept_dtypes({"w": "bfloat16"}, "bfloat16", None, layout)

    joining = [threads.submit(join, spec, 1), threads.submit(join, spec, 2, bfloat16_engine)]
    with soon():
        with pytest.raises(ChannelError, match=r"'w' is float32 on the wire.*bfloat16"):
            sender.open(spec)
        assert all("float32" in str(error_of(future)) for future in joining)


@pytest.mark.parametrize(
    ("declared", "wire", "fine"),
    [
        (None, "bfloat16", True),
        ("bfloat16", "bfloat16", True),
        (None, "float32", False),
        ("float16", "float16", False),
        (None, "int64", True),
    ],
)
def test_which_dtypes_a_bfloat16_engine_takes(declared: str | None, wire: str, fine: bool) -> None:
    sender = make_sender("gloo", lambda: [("w", torch.zeros(2, dtype=getattr(torch, wire)))])
    layout = Layout.of(sender.manifest())
    if fine:
        accept_dtypes({}, "bfloat16", declared, layout)
    else:
        with pytest.raises(ChannelError, match="bfloat16"):
            accept_dtypes({}, "bfloat16", declared, layout)


def test_metadata_that_is_not_plain_is_refused_before_anybody_waits() -> None:
    sender = make_sender("gloo", lambda: [("w", torch.zeros(3))])
    spec = replace(sender.listen(2, TIMEOUT_S), extra={"shape": (1, 2)})
    with pytest.raises(ChannelError, match="not plain data"):
        Invitation.of(spec, 1)
    sender.close()


def test_a_receiver_that_fails_frees_the_blocked_sender_with_its_words(
    threads: ThreadPoolExecutor,
) -> None:
    sender = make_sender("gloo", lambda: [("w", torch.zeros(64 * MIB))])
    group = Group(sender, 2, threads)
    sender.stage()
    sending = threads.submit(sender.send, UPDATE)
    healthy = threads.submit(receive, group.inboxes[1])
    with soon():
        group.inboxes[0].leave("tensor two does not fit")
        assert "tensor two does not fit" in str(error_of(sending))
        assert isinstance(error_of(healthy), ChannelError)
    with pytest.raises(ChannelError, match="does not fit"):
        sender.send(UPDATE)


def test_closing_frees_a_send_that_nobody_receives(threads: ThreadPoolExecutor) -> None:
    sender = make_sender("gloo", lambda: [("w", torch.zeros(64 * MIB))])
    group = Group(sender, 1, threads)
    sender.stage()
    sending = threads.submit(sender.send, UPDATE)
    with soon():
        sender.close()
        sender.close()
        assert "closed" in str(error_of(sending)) or "not open" in str(error_of(sending))
        with pytest.raises(ChannelError):
            receive(group.inboxes[0])


def test_a_closed_link_is_broken_so_that_the_reason_is_asked_for(
    threads: ThreadPoolExecutor,
) -> None:
    """Who closed it knows why: ``Channel.run`` gives those words for a broken link only."""
    sender: Any = make_sender("gloo", {"w": torch.zeros(3)}.items)
    Group(sender, 1, threads)
    link = sender._channel.link
    link.close()
    with pytest.raises(BrokenLink):
        link.broadcast(torch.zeros(1, dtype=torch.uint8))


def test_nobody_joins(threads: ThreadPoolExecutor) -> None:
    sender = make_sender("gloo", lambda: [("w", torch.zeros(3))])
    spec = sender.listen(3, 1.0)
    joining = threads.submit(join, spec, 1)
    with pytest.raises(ChannelError, match=r"no answer from ready/2 within 1 s"):
        sender.open(spec)
    assert isinstance(error_of(joining), ChannelError)


def test_a_new_channel_closes_the_stale_one(threads: ThreadPoolExecutor) -> None:
    weights = {"w": torch.randn(5)}
    sender = make_sender("gloo", weights.items)
    stale = Group(sender, 1, threads)
    fresh = Group(sender, 1, threads)
    with soon(), pytest.raises(ChannelError):
        receive(stale.inboxes[0])
    sender.stage()
    assert torch.equal(fresh.swap()[0]["w"], weights["w"])
    sender.close()


def test_a_rank_outside_the_group_is_refused(threads: ThreadPoolExecutor) -> None:
    sender = make_sender("gloo", lambda: [("w", torch.zeros(3))])
    spec = sender.listen(2, TIMEOUT_S)
    with pytest.raises(ChannelError, match="rank 2 is outside the group of 2"):
        join(spec, 2)
    sender.close()


def test_loopback_of_another_machine_is_refused() -> None:
    meeting = Rendezvous.host("127.0.0.1", "nonce", TIMEOUT_S)
    with pytest.raises(ChannelError, match="another machine"):
        Rendezvous.join("127.0.0.1", meeting.port, "nonce", TIMEOUT_S, "some-other-node")


def test_an_address_that_is_not_ours_is_refused() -> None:
    sender = make_sender("gloo", lambda: [("w", torch.zeros(3))])
    with pytest.raises(ChannelError, match="host the channel on"):
        sender.listen(2, 1.0, "192.0.2.254")


def test_channels_at_the_same_time_take_ports_of_their_own(threads: ThreadPoolExecutor) -> None:
    senders = [make_sender("gloo", {"w": torch.full((5,), float(i))}.items) for i in range(3)]
    groups = [Group(sender, 1, threads) for sender in senders]
    assert len({group.spec.port for group in groups}) == 3
    for number, group in enumerate(groups):
        group.sender.stage()
        assert group.swap()[0]["w"].tolist() == [float(number)] * 5
        group.sender.close()


def test_a_port_that_cannot_be_had_is_said_and_later_ones_work(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*args: object, **kwargs: object) -> socket.socket:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    weights = {"w": torch.ones(5)}
    sender = make_sender("gloo", weights.items)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_server", taken)
        with pytest.raises(ChannelError, match=r"cannot host the channel on 127\.0\.0\.1.*in use"):
            sender.listen(2, TIMEOUT_S)
    group = Group(sender, 1, threads)
    sender.stage()
    assert torch.equal(group.swap()[0]["w"], weights["w"])
    sender.close()


def test_twenty_channels_leave_no_socket_behind(threads: ThreadPoolExecutor) -> None:
    me = psutil.Process()
    sender = make_sender("gloo", lambda: [("w", torch.zeros(1000))])
    counts = []
    for _ in range(20):
        group = Group(sender, 2, threads)
        sender.stage()
        group.swap()
        sender.close()
        del group
        counts.append(len(me.net_connections(kind="inet")))
    # One that stays behind each time would make 19 more.
    assert counts[-1] < counts[0] + 10, counts


def _receiver_process(pipe: Connection, spec: ChannelSpec, rank: int) -> None:
    inbox = join(spec, rank)
    pipe.send(inbox.rank)
    threading.Event().wait()


def _sender_process(pipe: Connection) -> None:
    sender = make_sender("gloo", lambda: [("w", torch.ones(64 * MIB))])
    spec = sender.listen(2, TIMEOUT_S)
    pipe.send(spec)
    sender.open(spec)
    sender.stage()
    threading.Event().wait()


@contextmanager
def process(target: Callable[..., None], *args: object) -> Iterator[tuple[int, Connection]]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=target, args=(theirs, *args))
    child.start()
    try:
        assert child.pid is not None
        yield child.pid, ours
    finally:
        child.kill()
        child.join()


def test_a_killed_receiver_frees_the_sender(threads: ThreadPoolExecutor) -> None:
    sender = make_sender("gloo", lambda: [("w", torch.ones(64 * MIB))])
    spec = sender.listen(2, TIMEOUT_S)
    with process(_receiver_process, spec, 1) as (pid, pipe):
        sender.open(spec)
        assert pipe.recv() == 1
        sender.stage()
        sending = threads.submit(sender.send, UPDATE)
        with soon():
            os.kill(pid, 9)
            assert isinstance(error_of(sending), ChannelError)
    sender.close()


def test_a_killed_sender_frees_the_receivers(threads: ThreadPoolExecutor) -> None:
    with process(_sender_process) as (pid, pipe):
        inbox = join(pipe.recv(), 1)
        receiving = threads.submit(receive, inbox)
        with soon():
            os.kill(pid, 9)
            assert isinstance(error_of(receiving), ChannelError)
