"""ipc on one GPU and nccl between two, each worker in a process of its own; no vLLM engine."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest
import torch

from actors.transfer.base import make_sender
from actors.transfer.inbox import Inbox, Invitation
from actors.transfer.ipc import IpcInbox
from actors.transfer.layout import Layout
from actors.transfer.nccl import NcclInbox
from actors.transfer.plan import Copy, LoadPlan, Region
from orchestrator.types import (
    ChannelSpec,
    KVPolicy,
    PauseMode,
    PolicyVersion,
    TransferBackend,
    WeightUpdate,
)

WAIT_S = 120.0
GPUS = torch.cuda.device_count()
INBOXES: dict[TransferBackend, type[Inbox]] = {
    TransferBackend.IPC: IpcInbox,
    TransferBackend.NCCL: NcclInbox,
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 1, reason="torch sees no GPU"),
]


def anything(layout: Layout) -> None:
    """An engine that takes whatever comes."""


def _worker(pipe: Connection, spec: ChannelSpec, gpu: int) -> None:
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    inbox = INBOXES[spec.backend](Invitation.of(spec, 1), 1, anything, device)
    a = torch.zeros(6 << 20, dtype=torch.bfloat16, device=device)
    b = torch.zeros(1 << 20, device=device)
    copies = (
        Copy("a", Region.whole((6 << 20,)), torch.bfloat16, True, a),
        Copy("b", Region.whole((1 << 20,)), torch.bfloat16, True, b),
    )
    plan = cast(LoadPlan, type("Plan", (), {"copies": copies}))
    while pipe.recv():
        if spec.backend is TransferBackend.NCCL and not inbox.at_hand:
            inbox.deliver(plan, "s1")
        else:
            inbox.fetch()
            a.copy_(inbox.views()["a"])
            b.copy_(inbox.views()["b"])
        torch.cuda.synchronize()
        pipe.send([a.cpu().float().sum().item(), b.sum().item(), a[-1].item(), b[-1].item()])


@contextmanager
def worker(spec: ChannelSpec, gpu: int) -> Iterator[tuple[Callable[[], Any], Connection]]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=_worker, args=(theirs, spec, gpu))
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


def arrives(backend: TransferBackend, gpu: int, staged: bool, *, release: bool = False) -> None:
    """A-B-A through a worker on ``gpu``; the trainer is on GPU 0."""
    weights = {
        "a": torch.zeros(6 << 20, dtype=torch.bfloat16, device="cuda:0"),
        "b": torch.zeros(1 << 20, dtype=torch.bfloat16, device="cuda:0"),
    }
    sender = make_sender(backend, weights.items)
    spec = replace(sender.listen(2, WAIT_S), staged=staged)
    update = WeightUpdate(
        sync_id="s1",
        from_version=PolicyVersion(0),
        version=PolicyVersion(1),
        step=1,
        backend=backend,
        pause_mode=PauseMode.KEEP,
        kv_policy=KVPolicy.RECOMPUTE,
        staged=staged,
    )
    with worker(spec, gpu) as (hear, tell):
        sender.open(spec)
        for value in (1.0, 2.0, 1.0):
            weights["a"].fill_(value)
            weights["b"].fill_(value / 2)
            sender.stage()
            weights["a"].fill_(-1)  # what is staged stays
            tell.send(True)
            sender.send(update)
            assert hear() == [value * (6 << 20), value / 2 * (1 << 20), value, value / 2]
            if release:
                sender.release()
        sender.close()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("release", [False, True])
def test_ipc_on_one_gpu(staged: bool, release: bool) -> None:
    arrives(TransferBackend.IPC, 0, staged, release=release)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("staged", [False, True])
def test_nccl_between_two_gpus(staged: bool) -> None:
    arrives(TransferBackend.NCCL, 1, staged)
