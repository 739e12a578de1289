"""The physical ceiling of a swap, measured in the same run: raw broadcasts and copies.

Two processes that do nothing else move the same number of bytes over the same backend. No
controller can be faster than this on this machine at this moment.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.queues import Queue
from typing import Any

import torch

TIMEOUT = timedelta(seconds=120)
BUCKETS_MIB = (4, 64, 256, 1024)
"""Sizes of one broadcast between GPUs that are tried, beside one broadcast of it all."""


def raw_broadcast(
    backend: str, nbytes: int, buckets: Sequence[int], repeats: int = 20
) -> dict[int, list[float]]:
    """Seconds until ``nbytes`` have arrived, at the receiver, by size of one broadcast in bytes.

    ``backend``: ``gloo`` (CPU memory) or ``nccl`` (two GPUs). The first of ``repeats`` + 1 is
    dropped. One pair of processes measures all ``buckets``. RuntimeError with a rank's reason,
    ``queue.Empty`` after two minutes of silence.
    """
    context = multiprocessing.get_context("spawn")
    answers: Queue[Any] = context.Queue()
    ports: Queue[int] = context.Queue()
    rest = (backend, nbytes, tuple(buckets), repeats + 1, ports, answers)
    processes = [context.Process(target=_rank, args=(rank, *rest), daemon=True) for rank in (0, 1)]
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
    return {int(bucket): [float(s) for s in seconds][1:] for bucket, seconds in found.items()}


def _rank(
    rank: int,
    backend: str,
    nbytes: int,
    buckets: Sequence[int],
    repeats: int,
    ports: Queue[int],
    answers: Queue[Any],
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

        def once(parts: Sequence[torch.Tensor]) -> float:
            dist.barrier()
            began = time.perf_counter()
            for part in parts:
                dist.broadcast(part, 0)
            if device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        found = {}
        for bucket in buckets:
            parts = [data[start : start + bucket] for start in range(0, nbytes, bucket)]
            found[bucket] = [once(parts) for _ in range(repeats)]
        dist.barrier()
        if rank == 1:
            answers.put(found)
        dist.destroy_process_group()
    except Exception as error:
        answers.put(f"rank {rank}: {type(error).__name__}: {error}")


def broadcasts(backend: str, nbytes: int) -> dict[str, Any]:
    """The summary of the best size of one broadcast, as ``bucket``, and of all ``by_bucket``.

    A size is ``whole`` or in MiB. Raises what :func:`raw_broadcast` raises.
    """
    sizes = {nbytes: "whole"}
    if backend == "nccl":
        known = {mib << 20: f"{mib} MiB" for mib in BUCKETS_MIB if mib << 20 < nbytes}
        sizes = {**known, **sizes}
    measured = raw_broadcast(backend, nbytes, list(sizes))
    found = {name: summary(measured[size], nbytes) for size, name in sizes.items()}
    return best(found)


def best(by_bucket: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The fastest of ``by_bucket``, with its name and all of them."""
    name = min(by_bucket, key=lambda bucket: by_bucket[bucket]["p50_s"])
    return {**by_bucket[name], "bucket": name, "by_bucket": dict(by_bucket)}


def memory_copy(nbytes: int, device: str = "cpu", repeats: int = 20) -> list[float]:
    """Seconds to copy ``nbytes`` from memory to memory on ``device``; first one dropped."""
    return _copies(nbytes, device, device, repeats)


def peer_copy(nbytes: int, repeats: int = 20) -> dict[str, Any] | None:
    """The summary of copying ``nbytes`` from GPU 0 to GPU 1; None without a second one.

    ``peer_access``: whether they reach each other's memory; else the copy goes over the host.
    """
    if torch.cuda.device_count() < 2:
        return None
    reach = bool(torch.cuda.can_device_access_peer(1, 0))
    seconds = _copies(nbytes, "cuda:0", "cuda:1", repeats)
    return {**summary(seconds, nbytes), "peer_access": reach}


def _copies(nbytes: int, source: str, target: str, repeats: int) -> list[float]:
    sent = torch.zeros(nbytes, dtype=torch.uint8, device=source)
    arrived = torch.empty(nbytes, dtype=torch.uint8, device=target)
    settle = _settle(source, target)
    seconds = []
    for _ in range(repeats + 1):
        settle()
        began = time.perf_counter()
        arrived.copy_(sent)
        settle()
        seconds.append(time.perf_counter() - began)
    del sent, arrived
    if source != "cpu":
        torch.cuda.empty_cache()  # the broadcasts' processes need room on the same GPUs
    return seconds[1:]


def _settle(*devices: str) -> Callable[[], None]:
    gpus = [device for device in dict.fromkeys(devices) if device != "cpu"]

    def settle() -> None:
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    return settle


def summary(seconds: Sequence[float], nbytes: int) -> dict[str, float]:
    """Median seconds and the bandwidth that means."""
    median = statistics.median(seconds)
    return {"p50_s": median, "best_s": min(seconds), "gb_per_s": nbytes / median / 1e9}
