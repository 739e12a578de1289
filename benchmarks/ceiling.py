"""The physical ceiling of a swap, measured in the same run: raw broadcast and memory copy.

Two processes that do nothing else move the same number of bytes over the same backend. No
controller can be faster than this on this machine at this moment.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any

import torch

TIMEOUT = timedelta(seconds=120)


def raw_broadcast(backend: str, nbytes: int, repeats: int = 20) -> list[float]:
    """Seconds until ``nbytes`` have arrived, at the receiver; one a repeat, first one dropped.

    ``backend``: ``gloo`` (CPU memory) or ``nccl`` (two GPUs).
    """
    context = multiprocessing.get_context("spawn")
    answers: Queue[Any] = context.Queue()
    ports: Queue[int] = context.Queue()
    processes = [
        context.Process(
            target=_rank, args=(rank, backend, nbytes, repeats + 1, ports, answers), daemon=True
        )
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    try:
        found = answers.get(timeout=TIMEOUT.total_seconds())
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    if isinstance(found, str):
        raise RuntimeError(f"the raw {backend} broadcast failed: {found}")
    return [float(s) for s in found][1:]


def _rank(
    rank: int, backend: str, nbytes: int, repeats: int, ports: Queue[int], answers: Queue[Any]
) -> None:
    import torch.distributed

    dist: Any = torch.distributed  # its stores are not in torch's type stubs
    try:
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ports.put(store.port)
        else:
            port = ports.get(timeout=TIMEOUT.total_seconds())
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=TIMEOUT)
        data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter()
            dist.broadcast(data, 0)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        dist.barrier()
        if rank == 1:
            answers.put(seconds)
        dist.destroy_process_group()
    except Exception as error:
        answers.put(f"rank {rank}: {type(error).__name__}: {error}")


def memory_copy(nbytes: int, device: str = "cpu", repeats: int = 20) -> list[float]:
    """Seconds to copy ``nbytes`` from memory to memory on ``device``; first one dropped."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def summary(seconds: list[float], nbytes: int) -> dict[str, float]:
    """Median seconds and the bandwidth that means."""
    median = statistics.median(seconds)
    return {"p50_s": median, "best_s": min(seconds), "gb_per_s": nbytes / median / 1e9}
