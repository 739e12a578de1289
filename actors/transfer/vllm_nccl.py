"""NCCL as vLLM loads it, and vLLM's own packed transfer.

Nothing here imports vLLM before it is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def nccl_wrapper() -> Any:
    """The module with ``NCCLLibrary`` and ``find_nccl_library``, as vLLM's plugins leave it."""
    from vllm.distributed.device_communicators import pynccl_wrapper
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # vLLM's own processes have done so; a trainer's has not
    return pynccl_wrapper


def shared_nccl_env() -> contextlib.AbstractContextManager[None]:
    """Around what NCCL does for a group with other processes.

    Without the settings that vLLM pins for its own groups, which would differ from the trainer's:
    as far as this NCCL can be told to read them again (2.29.7 or later).
    """
    try:
        from vllm.utils.nccl import unpinned_nccl_env
    except ImportError:
        return contextlib.nullcontext()
    return unpinned_nccl_env()  # type: ignore[no-any-return]


def nccl_unique_id() -> bytes:
    """A new identity for a group of NCCL ranks."""
    return bytes(nccl_wrapper().NCCLLibrary().ncclGetUniqueId().internal)


def nccl_communicator(unique_id: bytes, rank: int, world_size: int, device: torch.device) -> Any:
    """A ``PyNcclCommunicator``; blocks until all ranks are there. It may be ``disabled``."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    with shared_nccl_env():
        return PyNcclCommunicator.from_unique_id_bytes(unique_id, rank, world_size, device)


def send_packed(
    communicator: Any,
    device: torch.device,
    tensors: Iterator[tuple[str, torch.Tensor]],
    buffer_bytes: int,
) -> None:
    """vLLM's own packed broadcast from rank 0; returns when all has left."""
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    with torch.cuda.device(device):
        packed_nccl_broadcast_producer(
            iterator=tensors,
            group=communicator,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=buffer_bytes,
        )
