"""The nccl backend's sender and inbox over a gloo link: what does not need a GPU of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from actors.transfer import nccl, nccl_check
from actors.transfer.channel import Channel
from actors.transfer.inbox import Inbox, Invitation
from actors.transfer.layout import Layout
from actors.transfer.link import GlooLink, Link
from actors.transfer.nccl import NcclInbox, NcclSender
from actors.transfer.plan import Copy, LoadPlan, Region
from orchestrator.errors import ChannelError
from orchestrator.types import (
    ChannelSpec,
    KVPolicy,
    PauseMode,
    PolicyVersion,
    TransferBackend,
    WeightUpdate,
)

TIMEOUT_S = 30.0
BUCKET = 2048
CPU = torch.device("cpu")
UPDATE = WeightUpdate(
    sync_id="s1",
    from_version=PolicyVersion(0),
    version=PolicyVersion(1),
    step=1,
    backend=TransferBackend.NCCL,
    pause_mode=PauseMode.KEEP,
    kv_policy=KVPolicy.RECOMPUTE,
)


class GlooForNccl(NcclSender):
    bucket_bytes = BUCKET

    def _device(self) -> torch.device:
        return CPU

    def _settle(self) -> None: ...

    def _connect(self, channel: Channel, spec: ChannelSpec) -> Link:
        return GlooLink(channel.meeting, 0, spec.world_size, spec.timeout_s, spec.host)


class GlooInbox(NcclInbox):
    bucket_bytes = BUCKET

    def connect(self) -> Link:
        return cast(Link, Inbox.connect(self))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """UUIDs: of the trainer's GPU, then of the workers', in the order they are asked for."""
    ids = ["GPU-trainer"]
    monkeypatch.setattr(nccl, "gpu_id", lambda device: ids.pop(0) if ids else "GPU-worker")
    monkeypatch.setattr(nccl_check, "description", lambda: "NCCL 2.29.7")
    return ids


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def anything(layout: Layout) -> None:
    """An engine that takes whatever comes."""


WEIGHTS = {
    "q": torch.zeros(8, 16),
    "k": torch.zeros(4, 16),
    "cast": torch.zeros(6, 6, dtype=torch.bfloat16),
    "large": torch.zeros(64, 16),
    "half": torch.zeros(10, 16),
    "two": torch.zeros(4, 4),
    "unused": torch.zeros(100),
}


class Model:
    """Half of a model: fused, cast and sliced, as a plan would see it."""

    def __init__(self) -> None:
        self.qk = torch.zeros(12, 16)
        self.cast = torch.zeros(6, 6)
        self.large = torch.zeros(64, 16)
        self.half = torch.zeros(5, 16)
        self.two = torch.zeros(8, 4)
        whole = Region.whole

        def copy(name: str, target: torch.Tensor, source: Region | None = None) -> Copy:
            tensor = WEIGHTS[name]
            region = source or whole(tuple(tensor.shape))
            return Copy(name, region, tensor.dtype, source is None, target)

        copies = (
            copy("q", self.qk[:8]),
            copy("k", self.qk[8:]),
            copy("cast", self.cast),
            copy("large", self.large),
            copy("half", self.half, Region(80, (5, 16), (16, 1))),
            copy("two", self.two[:4]),
            copy("two", self.two[4:]),
        )
        self.plan = cast(LoadPlan, type("Plan", (), {"copies": copies}))

    def right(self) -> bool:
        w = WEIGHTS
        return (
            torch.equal(self.qk, torch.cat([w["q"], w["k"]]))
            and torch.equal(self.cast, w["cast"].float())
            and torch.equal(self.large, w["large"])
            and torch.equal(self.half, w["half"][5:])
            and torch.equal(self.two, torch.cat([w["two"], w["two"]]))
        )


def joined(threads: ThreadPoolExecutor, sender: NcclSender, workers: int) -> list[GlooInbox]:
    spec = sender.listen(workers + 1, TIMEOUT_S)
    joining = [
        threads.submit(GlooInbox, Invitation.of(spec, 1), rank + 1, anything, CPU)
        for rank in range(workers)
    ]
    sender.open(spec)
    return [future.result(TIMEOUT_S) for future in joining]


def test_by_plan_every_worker_receives_into_its_weights(
    threads: ThreadPoolExecutor, gpus: list[str]
) -> None:
    sender = GlooForNccl(WEIGHTS.items)
    inboxes = joined(threads, sender, 3)
    models = [Model() for _ in inboxes]
    for _ in range(3):
        for tensor in WEIGHTS.values():
            tensor.normal_()
        sender.stage()
        delivering = [
            threads.submit(inbox.deliver, model.plan, "s1")
            for inbox, model in zip(inboxes, models, strict=True)
        ]
        sender.send(UPDATE)
        for future in delivering:
            future.result(TIMEOUT_S)
        assert all(model.right() for model in models)
    for inbox in inboxes:
        # The bucket is as large as what one group passes on, no whole buffer was allocated.
        assert inbox._bucket is not None and 0 < inbox._bucket.numel() <= BUCKET
        assert inbox._buffer is None
    sender.close()


def test_without_a_plan_the_same_groups_fill_the_buffer(
    threads: ThreadPoolExecutor, gpus: list[str]
) -> None:
    sender = GlooForNccl(WEIGHTS.items)
    inboxes = joined(threads, sender, 2)
    for tensor in WEIGHTS.values():
        tensor.normal_()
    sender.stage()

    def receive(inbox: Inbox) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in inbox.tensors("s1")}

    receiving = [threads.submit(receive, inbox) for inbox in inboxes]
    sender.send(UPDATE)
    for future in receiving:
        received = future.result(TIMEOUT_S)
        assert received.keys() == WEIGHTS.keys()
        assert all(torch.equal(received[name], WEIGHTS[name]) for name in WEIGHTS)
    sender.close()


def test_a_worker_that_leaves_fails_the_sender_and_the_other_workers(
    threads: ThreadPoolExecutor, gpus: list[str]
) -> None:
    sender = GlooForNccl({"w": torch.zeros(32 << 20)}.items)
    inboxes = joined(threads, sender, 2)
    sender.stage()
    plan: Any = type("Plan", (), {"copies": ()})
    delivering = threads.submit(inboxes[1].deliver, plan, "s1")
    sending = threads.submit(sender.send, UPDATE)
    inboxes[0].leave("rank one is gone")
    for future in (sending, delivering):
        error = future.exception(TIMEOUT_S)
        assert isinstance(error, ChannelError)
    assert "rank one is gone" in str(sending.exception())
    with pytest.raises(ChannelError, match="closed"):
        inboxes[1].deliver(plan, "s1")
    sender.close()


def test_trainer_and_worker_on_one_gpu_are_refused(
    threads: ThreadPoolExecutor, gpus: list[str]
) -> None:
    gpus[:] = ["GPU-1", "GPU-1", "GPU-1"]
    sender = GlooForNccl(WEIGHTS.items)
    with pytest.raises(ChannelError, match=r"both on GPU GPU-1.*use backend ipc"):
        joined(threads, sender, 1)


def test_ranks_that_nccl_is_set_up_unlike_for_are_refused(
    threads: ThreadPoolExecutor, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [{"NCCL_PROTO": "LL"}, {}]
    monkeypatch.setattr(nccl_check, "settings", lambda: told.pop(0))
    sender = GlooForNccl(WEIGHTS.items)
    with pytest.raises(ChannelError, match="NCCL_PROTO is LL at the trainer and unset here"):
        joined(threads, sender, 1)


def test_the_bucket_is_there_before_the_first_pause_that_needs_it(
    threads: ThreadPoolExecutor, gpus: list[str]
) -> None:
    sender = GlooForNccl(WEIGHTS.items)
    (inbox,) = joined(threads, sender, 1)
    model = Model()
    inbox.trust_plan(model.plan)
    bucket = inbox._bucket
    assert bucket is not None and bucket.numel() > 0
    sender.stage()
    delivering = threads.submit(inbox.deliver, model.plan, "s1")
    sender.send(UPDATE)
    delivering.result(TIMEOUT_S)
    assert inbox._bucket is bucket
    sender.close()


def test_a_new_plan_gets_new_places(threads: ThreadPoolExecutor, gpus: list[str]) -> None:
    sender = GlooForNccl(WEIGHTS.items)
    (inbox,) = joined(threads, sender, 1)
    for model in (Model(), Model()):
        for tensor in WEIGHTS.values():
            tensor.normal_()
        sender.stage()
        delivering = threads.submit(inbox.deliver, model.plan, "s1")
        sender.send(UPDATE)
        delivering.result(TIMEOUT_S)
        assert model.right()
    sender.close()


def test_a_trainer_without_nccl_says_so_before_it_listens(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise ChannelError("found no NCCL library")

    monkeypatch.setattr(nccl_check, "description", none)
    with pytest.raises(ChannelError, match="found no NCCL"):
        GlooForNccl(WEIGHTS.items).listen(2, TIMEOUT_S)
