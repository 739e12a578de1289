"""Memory shared between real processes by plain data."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from actors.transfer import memory
from orchestrator.errors import ChannelError

WAIT_S = 60.0
NBYTES = 3 << 20
CPU = torch.device("cpu")
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda", 0),
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
        ],
    ),
]


@contextmanager
def process(
    target: Callable[..., None], *args: object
) -> Iterator[tuple[Any, Callable[[], Any], Connection]]:
    """A child, what it says (with a deadline), and the way to tell it something."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=target, args=(theirs, *args))
    child.start()
    theirs.close()

    def hear() -> Any:
        assert ours.poll(WAIT_S), "the other process says nothing"
        return ours.recv()

    try:
        yield child, hear, ours
    finally:
        child.kill()
        child.join()


def _owner(pipe: Connection, device: torch.device) -> None:
    buffer = memory.allocate(NBYTES, device)
    buffer.copy_(torch.arange(NBYTES, dtype=torch.int64).remainder(251))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    parts = (buffer, buffer[64:192])
    pipe.send([json.dumps(memory.export(part)) for part in parts])
    while (value := pipe.recv()) is not None:
        buffer.fill_(value)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        pipe.send("filled")


@pytest.mark.parametrize("device", DEVICES)
def test_another_process_sees_every_byte_and_every_change(device: torch.device) -> None:
    with process(_owner, device) as (_, hear, tell):
        whole, part = [json.loads(text) for text in hear()]
        mapped, slice_ = memory.attach(whole, device), memory.attach(part, device)
        expected = torch.arange(NBYTES, dtype=torch.int64).remainder(251).to(torch.uint8)
        assert torch.equal(mapped.cpu(), expected)
        assert torch.equal(slice_.cpu(), expected[64:192])
        assert memory.identity(whole) != memory.identity(part)
        tell.send(7)
        assert hear() == "filled"
        assert (mapped == 7).all() and (slice_ == 7).all()


@pytest.mark.parametrize("device", DEVICES)
def test_two_buffers_have_two_identities(device: torch.device) -> None:
    one, two = memory.allocate(64, device), memory.allocate(64, device)
    assert memory.identity(memory.export(one)) != memory.identity(memory.export(two))


def shared_here() -> set[str]:
    """Files of shared memory that have a name, and mapped ones of ours that have none."""
    with open("/proc/self/maps") as lines:
        mapped = {line.split()[0] for line in lines if "memfd:midflight" in line}
    return mapped | set(os.listdir("/dev/shm"))


def test_nothing_stays_when_both_sides_let_go() -> None:
    gc.collect()
    before = shared_here()
    with process(_owner, CPU) as (_, hear, tell):
        mapped = memory.attach(json.loads(hear()[0]), CPU)
        assert len(shared_here() - before) == 1
        own = memory.allocate(NBYTES, CPU)
        again = memory.attach(memory.export(own), CPU)
        assert torch.equal(own, again)
        tell.send(None)
        del mapped, own, again
    gc.collect()
    assert shared_here() == before


def test_a_descriptor_is_closed_with_its_buffer() -> None:
    buffer = memory.allocate(64, CPU)
    descriptor = memory.export(buffer)["descriptor"]
    assert isinstance(descriptor, int)
    os.fstat(descriptor)
    view = buffer[3:5]
    del buffer
    gc.collect()
    os.fstat(descriptor)  # a view is enough to keep it
    del view
    gc.collect()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_a_killed_owner_leaves_nothing_but_what_is_mapped() -> None:
    gc.collect()
    before = shared_here()
    with process(_owner, CPU) as (child, hear, _):
        handle = json.loads(hear()[0])
        mapped = memory.attach(handle, CPU)
        os.kill(child.pid, signal.SIGKILL)
        child.join(WAIT_S)
        assert int(mapped[5]) == 5  # still there, and no SIGBUS
        with pytest.raises(ChannelError, match=f"process {child.pid} cannot be opened"):
            memory.attach(handle, CPU)
        del mapped
    gc.collect()
    assert shared_here() == before


def test_a_descriptor_that_means_something_else_now_is_noticed() -> None:
    one, other = memory.allocate(64, CPU), memory.allocate(64, CPU)
    handle = memory.export(one)
    with pytest.raises(ChannelError, match="something else is there"):
        memory.attach({**handle, "descriptor": memory.export(other)["descriptor"]}, CPU)
    with pytest.raises(ChannelError, match="something else is there"):
        memory.attach({**handle, "size": 1 << 40, "nbytes": 1 << 40}, CPU)


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "pickle"},
        {"kind": None},
        {"pid": "1"},
        {"pid": -1},
        {"descriptor": True},
        {"descriptor": 10**6},
        {"nbytes": 0},
        {"nbytes": 65},
        {"offset": 60},
        {"offset": 1.5},
        {"node": "elsewhere"},
    ],
)
def test_a_malformed_handle_is_a_channel_error(bad: dict[str, object]) -> None:
    handle = {**memory.export(memory.allocate(64, CPU)), **bad}
    with pytest.raises(ChannelError):
        memory.attach(handle, CPU)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({"storage": "no base64!"}, "storage is not base64"),
        ({"counter": 5}, "counter is 5"),
        ({"start": -1}, "start is -1"),
        ({"event": None}, "event is None"),
    ],
)
def test_a_malformed_cuda_handle_is_a_channel_error(bad: dict[str, object], problem: str) -> None:
    handle = {
        "storage": "AAAA",
        "size": 64,
        "start": 0,
        "counter": "AAAA",
        "counter_offset": 0,
        "event": "AAAA",
        "event_sync": True,
    }
    assert memory.cuda_arguments(handle, torch.device("cuda", 3)) == (
        *(3, b"\0\0\0", 64, 0, b"\0\0\0", 0, b"\0\0\0", True),
    )
    with pytest.raises(ChannelError, match=problem):
        memory.cuda_arguments({**handle, **bad}, torch.device("cuda", 0))


def test_the_trainers_gpu_and_a_worker_on_the_cpu_share_nothing() -> None:
    handle = {**memory.export(memory.allocate(64, CPU)), "kind": "cuda", "gpu": "GPU-1234"}
    with pytest.raises(ChannelError, match=r"weights are on GPU GPU-1234.*this worker is on cpu"):
        memory.attach(handle, CPU)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(8, dtype=torch.uint8), torch.zeros(2), torch.zeros(2, 2, dtype=torch.uint8)],
)
def test_only_flat_bytes_that_were_allocated_for_it_are_exported(tensor: torch.Tensor) -> None:
    with pytest.raises(ChannelError):
        memory.export(tensor)


def test_memory_that_there_is_not_is_refused() -> None:
    with pytest.raises(ChannelError, match=r"^the trainer's snapshot .* takes 1152921504\.61 GB"):
        memory.allocate(1 << 60, CPU)
