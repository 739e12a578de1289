"""The engine's side: vLLM weight-transfer engines that receive one flat buffer.

vLLM makes one of these in every worker process (registered by ``plugin.register``) and calls
it through the worker's RPCs, in this order::

    init_transfer_engine   check the manifest, join, receive the known pattern
    start_weight_update    vLLM's layerwise reload begins: the weights are not to be served
    update_weights         receive all buckets into the staging buffer, load from it
    finish_weight_update   layerwise reload ends; refused unless every weight was loaded
    start_digest           later, on a thread, from the staging buffer

Errors cross vLLM's RPC as text: see ``wire_errors``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from actors import vllm_compat
from orchestrator.errors import ChannelError, TransferError

from .inbox import Inbox, Invitation, accept_dtypes
from .layout import Layout, dtype_name, worker_rank
from .native import IpcInbox, NcclInbox
from .wire_errors import wire_errors


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Fields of an Invitation."""

    invitation: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which update this is; its tensors are the channel's manifest."""

    sync_id: str


class GlooReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Receives over gloo; the base of the other receivers."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    inbox_cls: type[Inbox] = Inbox

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._inbox: Inbox | None = None
        self._expected: set[str] = set()
        self._tied: dict[str, str] = {}
        self._reloading = False
        self._loaded = False
        self._current = ""

    # vLLM's lifecycle

    @wire_errors
    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the channel and prove it. Whatever was open before is closed."""
        self.leave("the engine opens another channel")
        invitation = Invitation(**init_info.invitation)
        parallel = self.parallel_config
        rank = worker_rank(
            invitation.first_rank, parallel.world_size, parallel.data_parallel_index, parallel.rank
        )
        holds = {name: dtype_name(p.dtype) for name, p in self.model.named_parameters()}
        main, declared = dtype_name(self.model_config.dtype), invitation.extra.get("wire_dtype")

        def accept(layout: Layout) -> None:
            accept_dtypes(holds, main, declared, layout)

        self._inbox = self.inbox_cls(invitation, rank, accept, self.device)

    @wire_errors
    def start_weight_update(self) -> None:
        """Begin layerwise reload. A former, failed update is forgotten first."""
        self._opened().finish_digest()
        if not self._reloading:
            self._tied = vllm_compat.tied_parameters(self.model)
        vllm_compat.begin_reload(self.model, self.model_config, interrupted=self._reloading)
        self._reloading, self._loaded = True, False
        self._expected = {name for name, _ in self.model.named_parameters()} - set(self._tied)

    @wire_errors
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive every tensor and load it; returns when the data is usable.

        Not the base's: that one synchronises an accelerator even where there is none.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See :meth:`update_weights`. On any error the channel is left, so that peers fail too."""
        if not self._reloading:
            raise TransferError(f"update {update_info.sync_id} was not started")
        self._loaded = False
        try:
            self._receive(self._opened())
        except TransferError as error:
            self.leave(str(error))
            raise
        except Exception as error:
            problem = TransferError(
                f"loading tensor {self._current!r} failed: {type(error).__name__}: {error}"
            )
            self.leave(str(problem))
            raise problem from error
        self._loaded = True

    @wire_errors
    def finish_weight_update(self) -> None:
        """End layerwise reload. TransferError unless everything was received and loaded."""
        if not self._loaded:
            raise TransferError(
                "the update did not arrive whole: only a complete new one makes the weights usable"
            )
        vllm_compat.end_reload(self.model, self.model_config)
        vllm_compat.refresh_tied(self.model, self._tied)
        self._reloading = self._loaded = False

    def shutdown(self) -> None:
        """Leave the channel."""
        self.leave("the engine shuts down")

    # for the worker extension

    def forget(self) -> None:
        """The update is over, unfinished; what the model holds now is not to be served."""
        self._loaded = False

    def leave(self, reason: str) -> None:
        """Close the channel for all its members. Idempotent."""
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            inbox.leave(f"rank {inbox.rank}: {reason}")

    @wire_errors
    def start_digest(self, key: str) -> None:
        """See :meth:`Inbox.start_digest`."""
        self._opened().start_digest(key)

    def _opened(self) -> Inbox:
        if self._inbox is None:
            raise ChannelError("no channel is open at this worker: open one (again)")
        return self._inbox

    def _receive(self, inbox: Inbox) -> None:
        with vllm_compat.loading_context():
            loaded = self.model.load_weights(self._noted(inbox))
        missing = set(vllm_compat.incomplete_parameters(self.model, self._tied))
        if loaded is not None:
            missing |= self._expected - set(loaded)
        if missing:
            raise TransferError(
                f"{len(missing)} parameters of the engine were not or not wholly sent: "
                f"{_some(missing)}. The trainer's checkpoint names must cover the engine's model"
            )

    def _noted(self, inbox: Inbox) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in inbox.tensors():
            self._current = name
            yield name, tensor


class NcclReceiver(GlooReceiver):
    """Receives over NCCL."""

    inbox_cls = NcclInbox


class IpcReceiver(GlooReceiver):
    """Loads from the trainer's memory on the same GPU."""

    inbox_cls = IpcInbox


def _some(names: set[str], limit: int = 8) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
