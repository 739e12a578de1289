"""Faults in a real engine's receiver. Active where this folder is on PYTHONPATH.

A fault is set in the environment of the engine's processes, or, for engines that are already
running, as lines ``NAME=value`` in the file named by ``MIDFLIGHT_TEST_FAULT_FILE``, which is
read at each use:

- ``MIDFLIGHT_TEST_FLIP_BIT=tensor.name``: one bit of that tensor arrives wrong.
- ``MIDFLIGHT_TEST_FLIP_LIVE=parameter.name``: one bit of that parameter of the model flips after
  an update was applied by the load plan.
- ``MIDFLIGHT_TEST_FAIL_TENSOR=tensor.name``: loading that tensor raises.
- ``MIDFLIGHT_TEST_DROP_TENSOR=tensor.name``: that tensor is received and not loaded.
- ``MIDFLIGHT_TEST_BAD_PATTERN=1``: one bit of the known pattern arrives wrong.
- ``MIDFLIGHT_TEST_KILL_WORKER=tensor.name``: the worker is SIGKILLed while loading it.
- ``MIDFLIGHT_TEST_KILL_CORE=tensor.name``: its parent, the engine core, is.
- ``MIDFLIGHT_TEST_HOLD=port``: before it receives, the worker connects there and waits until
  the connection is closed.
- ``MIDFLIGHT_TEST_STUCK_CACHE=1``: resetting the prefix cache does nothing and reports failure.
- ``MIDFLIGHT_TEST_PLAIN_WEIGHTS=1``: linear layers keep their weights as they are, as on a GPU,
  instead of packing them for the CPU (environment only: it is asked when the engine starts).
- ``MIDFLIGHT_TEST_ASLEEP=1``: the engine core says that it sleeps.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def fault(name: str) -> str:
    """The fault's value; empty when it is not set."""
    key = f"MIDFLIGHT_TEST_{name}"
    file = os.environ.get("MIDFLIGHT_TEST_FAULT_FILE")
    if file and Path(file).exists():
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{key}="):
                return line.split("=", 1)[1]
    return os.environ.get(key, "")


def faulty_receiver() -> type[Any]:
    """The product's receiver with faults in what it receives."""
    import torch

    from actors.transfer.inbox import Inbox
    from actors.transfer.receiver import INBOXES, Receiver
    from orchestrator.types import TransferBackend

    class FaultyInbox(Inbox):
        def fetch(self) -> None:
            super().fetch()
            if name := fault("FLIP_BIT"):
                self.views()[name].view(torch.uint8).view(-1)[0] ^= 1

        def tensors(self, sync_id: str) -> Iterator[tuple[str, torch.Tensor]]:
            if port := fault("HOLD"):
                with socket.create_connection(("127.0.0.1", int(port))) as holder:
                    holder.recv(1)
            for name, tensor in super().tensors(sync_id):
                if name == fault("FLIP_BIT") and not self.at_hand:
                    tensor.view(torch.uint8).view(-1)[0] ^= 1
                if name == fault("FAIL_TENSOR"):
                    raise RuntimeError(f"injected fault at {name}")
                if name == fault("KILL_WORKER"):
                    os.kill(os.getpid(), signal.SIGKILL)
                if name == fault("KILL_CORE"):
                    os.kill(os.getppid(), signal.SIGKILL)
                if name != fault("DROP_TENSOR"):
                    yield name, tensor

        def receive_pattern(self) -> torch.Tensor:
            arrived = super().receive_pattern()
            if fault("BAD_PATTERN"):
                arrived[12345] ^= 1
            return arrived

    class FaultyReceiver(Receiver):
        inboxes = INBOXES | {TransferBackend.GLOO: FaultyInbox}

        def replay(self, sync_id: str) -> bool:
            replayed = super().replay(sync_id)
            if replayed and (name := fault("FLIP_LIVE")):
                self.model.get_parameter(name).data.view(torch.uint8).view(-1)[0] ^= 1
            return replayed

    return FaultyReceiver


def faulty_core() -> None:
    """Faults in the engine core, around what vLLM itself does."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.engine.core import EngineCore

    reset, asleep = BlockPool.reset_prefix_cache, EngineCore.is_sleeping

    def reset_prefix_cache(pool: Any) -> bool:
        return False if fault("STUCK_CACHE") else bool(reset(pool))

    def is_sleeping(core: Any) -> bool:
        return bool(fault("ASLEEP")) or bool(asleep(core))

    BlockPool.reset_prefix_cache = reset_prefix_cache
    EngineCore.is_sleeping = is_sleeping


def register() -> None:
    """Put the faulty receiver in the place of the product's."""
    if fault("PLAIN_WEIGHTS"):
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from actors.transfer.plugin import register as register_product

    register_product()
    WeightTransferEngineFactory._registry["midflight"] = faulty_receiver
    faulty_core()
