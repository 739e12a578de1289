"""A copy of the weights that does not fit is refused with the numbers, on the host and on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from actors.transfer import memory
from actors.transfer.base import make_sender
from actors.transfer.inbox import Inbox, Invitation
from actors.transfer.ipc import IpcInbox
from orchestrator.errors import ChannelError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NEEDED = 3_440_000_000
TIMEOUT_S = 30.0


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What is free on the host and on the GPU; tests may change it."""
    free = SimpleNamespace(host=0, gpu=0, cached=0)

    def empty_cache() -> None:
        free.gpu, free.cached = free.gpu + free.cached, 0

    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=free.host, total=24 * 10**9)
    )
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free.gpu, 80 * 10**9))
    return free


@pytest.mark.parametrize(
    ("device", "told"),
    [
        (
            CPU,
            "a copy takes 3.44 GB, 2.50 of 24 GB are free on cpu: free some, start fewer engines "
            "on this machine or take a smaller model",
        ),
        (
            GPU,
            "a copy takes 3.44 GB, 2.50 of 80 GB are free on cuda:0: "
            "lower --gpu-memory-utilization",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    free: SimpleNamespace, device: torch.device, told: str
) -> None:
    place, other = ("host", "gpu") if device is CPU else ("gpu", "host")
    setattr(free, other, 1 << 60)
    setattr(free, place, 2_500_000_000)
    with pytest.raises(ChannelError) as caught:
        memory.must_have_room(NEEDED, device, "a copy")
    assert str(caught.value) == told


@pytest.mark.parametrize(("device", "place"), [(CPU, "host"), (GPU, "gpu")])
def test_what_fits_to_the_byte_is_taken(
    free: SimpleNamespace, device: torch.device, place: str
) -> None:
    setattr(free, place, NEEDED)
    memory.must_have_room(NEEDED, device, "a copy")
    setattr(free, place, NEEDED - 1)
    with pytest.raises(ChannelError):
        memory.must_have_room(NEEDED, device, "a copy")


def test_what_torch_keeps_of_a_former_buffer_is_free(free: SimpleNamespace) -> None:
    free.cached = NEEDED
    memory.must_have_room(NEEDED, GPU, "a copy")


@pytest.mark.parametrize(
    ("inbox_class", "device", "place"),
    [(Inbox, CPU, "cpu"), (Inbox, GPU, "cpu"), (IpcInbox, CPU, "cpu"), (IpcInbox, GPU, "cuda:0")],
)
def test_no_worker_allocates_a_copy_that_does_not_fit(
    free: SimpleNamespace, inbox_class: type[Inbox], device: torch.device, place: str
) -> None:
    inbox = inbox_class.__new__(inbox_class)
    inbox.target = device
    with pytest.raises(
        ChannelError, match=rf"^a copy of the weights \(staged .* are free on {place}: "
    ):
        inbox.allocate(64)


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_no_trainer_takes_a_snapshot_that_does_not_fit(free: SimpleNamespace, backend: str) -> None:
    sender = make_sender(backend, lambda: [("w", torch.ones(3))])
    with pytest.raises(ChannelError, match=r"^the trainer's snapshot .* 0\.00 of 24 GB are free"):
        sender.stage()
    free.host = 1 << 20
    sender.stage()
    assert dict(sender.staged())["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("backend", "inbox_class"), [("gloo", Inbox), ("ipc", IpcInbox)])
def test_a_staged_channel_without_memory_is_refused_when_it_opens(
    free: SimpleNamespace, backend: str, inbox_class: type[Inbox]
) -> None:
    free.host = 64 << 20
    sender = make_sender(backend, lambda: [("w", torch.ones(3))])
    spec = replace(sender.listen(2, TIMEOUT_S), staged=True)
    free.host = 0
    with ThreadPoolExecutor(1) as threads:
        invitation = Invitation.of(spec, 1)
        joining = threads.submit(inbox_class, invitation, 1, lambda layout: None, CPU)
        with pytest.raises(ChannelError, match=r"staged transfers .* are free on cpu: free some"):
            sender.open(spec)
        assert isinstance(joining.exception(TIMEOUT_S), ChannelError)
    sender.close()
