"""The engine's side: the vLLM weight-transfer engine that receives over a channel of ours.

vLLM makes one in every worker process (registered by ``plugin.register``). Which backend it
receives over is the channel's; the next channel may have another. The worker extension calls it,
in this order::

    init_transfer_engine   check the manifest, record the load plan, join, prove the channel
    start_prefetch         (at hand) fetch the bytes while decoding goes on
    replay                 put them where the plan says, one batch of copies; or, without one:
    start_weight_update      vLLM's layerwise reload begins: the weights are not to be served
    update_weights           load every tensor
    finish_weight_update     layerwise reload ends; refused unless every weight was loaded
    start_digest           later, on a thread

Errors cross vLLM's RPC as text: see ``wire_errors``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from orchestrator.errors import ChannelError, TransferError
from orchestrator.types import TransferBackend

from . import heap, runs, tiles, vllm_model
from .baseline import NativeInbox, NativeIpcInbox, NativeNcclInbox
from .inbox import Inbox, Invitation, accept_dtypes
from .ipc import IpcInbox
from .layout import Layout, dtype_name, flat_bytes, worker_rank
from .nccl import NcclInbox
from .planned import Planned
from .wire_errors import wire_errors

_COMPARED_BYTES = 64 << 20


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Fields of an Invitation."""

    invitation: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which update this is; its tensors are the channel's manifest."""

    sync_id: str


INBOXES: dict[TransferBackend, type[Inbox]] = {
    TransferBackend.GLOO: Inbox,
    TransferBackend.NCCL: NcclInbox,
    TransferBackend.IPC: IpcInbox,
    TransferBackend.NATIVE_NCCL: NativeNcclInbox,
    TransferBackend.NATIVE_IPC: NativeIpcInbox,
}


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """One worker's. Not thread-safe: vLLM calls it from one thread."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    inboxes = INBOXES

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._arguments = args
        self._inbox: Inbox | None = None
        # LoRA state is derived from the weights, and vLLM renews it with a reload.
        lora = getattr(self.vllm_config, "lora_config", None) is not None
        self._planned = Planned(self.model, "the engine serves LoRA adapters" if lora else "")
        self._expected: set[str] = set()
        self._tied: dict[str, str] = {}
        """Parameter names, and in _tied_names the checkpoint's: a reload hides both."""
        self._tied_names: dict[str, str] = {}
        self._reloading = False
        self._loaded = False
        self._current = ""
        self._copied: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

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

        inbox_cls = self.inboxes[TransferBackend(invitation.backend)]

        # Now: the first time a kernel is compiled, which takes seconds.
        runs.usable(self.device)
        tiles.usable(self.device)

        def accept(layout: Layout) -> bool:
            accept_dtypes(holds, main, declared, layout)
            if self._reloading:
                self._planned.forget("a failed update left the model half-loaded")
            else:
                self._planned.record(layout)
                self._planned.must_fit(layout)
            return self._planned.proven is None and not issubclass(inbox_cls, NativeInbox)

        inbox = self._inbox = inbox_cls(invitation, rank, accept, self.device)
        plan = self._planned.proven
        if plan is not None and not isinstance(inbox, NativeInbox):
            inbox.trust_plan(plan)

    @wire_errors
    def start_weight_update(self) -> None:
        """Begin layerwise reload. A former, failed update is forgotten first."""
        self._opened().aside.finish()
        if not self._reloading:
            self._tied = vllm_model.tied_parameters(self.model)
            names = [slot.spec.name for slot in self._opened().layout.slots]
            self._tied_names = vllm_model.tied_names(self.model, names)
        vllm_model.begin_reload(self.model, self.model_config, interrupted=self._reloading)
        self._reloading, self._loaded = True, False
        self._expected = {name for name, _ in self.model.named_parameters()} - set(self._tied)

    @wire_errors
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load every tensor; returns when the data is usable.

        Not the base's: that one synchronises an accelerator even where there is none.
        """
        self.receive_weights(self.parse_update_info(update_info))
        self._synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """See :meth:`update_weights`. On any error the channel is left, so that peers fail too."""
        if not self._reloading:
            raise TransferError(f"update {update_info.sync_id} was not started")
        self._loaded = False
        try:
            self._load(self._opened(), update_info.sync_id)
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
        self._must_agree()
        vllm_model.end_reload(self.model, self.model_config)
        vllm_model.refresh_tied(self.model, self._tied)
        self._reloading = self._loaded = False
        self._synchronize()
        inbox = self._opened()
        if isinstance(inbox, NativeInbox):
            return
        self._planned.record(inbox.layout)  # anew where the weights have moved or were half-loaded
        if self._planned.wants_proof:
            self._planned.prove(inbox.views())
            if (plan := self._planned.proven) is not None:
                inbox.trust_plan(plan)

    def shutdown(self) -> None:
        """Leave the channel."""
        self.leave("the engine shuts down")

    # for the worker extension

    @wire_errors
    def start_prefetch(self, sync_id: str, key: str) -> None:
        """See :meth:`Inbox.start_prefetch`."""
        self._opened().start_prefetch(sync_id, key, self._planned.proven)

    @wire_errors
    def replay(self, sync_id: str) -> bool:
        """Apply the update by the load plan; False, and nothing done, where there is none yet.

        Of an update that is at hand the copies are only queued on the device, before whatever the
        model does next; else they are there on return. On any error the channel is left.
        """
        inbox = self._opened()
        inbox.aside.finish()
        self._copied = None
        plan = self._planned.proven
        if plan is None or self._reloading or isinstance(inbox, NativeInbox):
            if not inbox.holds:
                raise TransferError(
                    "the model's parameters have moved since the load plan was made: open the "
                    "channel again"
                )
            return False
        try:
            with self._timing():
                inbox.deliver(plan, sync_id)
            if not inbox.at_hand:
                self._synchronize()
        except TransferError as error:
            self.leave(str(error))
            raise
        except Exception as error:
            problem = TransferError(f"replaying the load plan failed: {error}")
            self.leave(str(problem))
            raise problem from error
        return True

    @property
    def at_hand(self) -> bool:
        """Updates come before they are applied."""
        return self._opened().at_hand

    def device_seconds(self) -> float | None:
        """What the copies of the last :meth:`replay` took there; waits for their end. None: CPU."""
        if self._copied is None:
            return None
        began, ended = self._copied
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def forget(self) -> None:
        """The update is over, unfinished; what the model holds now is not to be served."""
        self._loaded = False

    def leave(self, reason: str) -> None:
        """Close the channel for all its members. Idempotent."""
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            try:
                self.device_seconds()  # its memory may still be read
            finally:
                inbox.leave(f"rank {inbox.rank}: {reason}")

    @wire_errors
    def start_digest(self, key: str) -> None:
        """Digest what the model holds, or, where no plan says where that is, what arrived."""
        inbox, planned = self._opened(), self._planned
        if self.device.type == "cpu":
            heap.give_back()  # the prefill that follows a swap is over

        live = planned.proven is not None or isinstance(inbox, NativeInbox)
        if live:
            inbox.start_digest(key, planned.parts, planned.unused, self.describe())
        else:
            inbox.start_digest(key, how=self.describe())

    def describe(self) -> str:
        """How updates are applied here, in words."""
        if isinstance(self._inbox, NativeInbox):
            return "vLLM's own transfer and layerwise reload"
        return self._planned.describe()

    def _opened(self) -> Inbox:
        if self._inbox is None:
            raise ChannelError("no channel is open at this worker: open one (again)")
        return self._inbox

    @contextlib.contextmanager
    def _timing(self) -> Iterator[None]:
        """Note what is queued on the model's stream by the block."""
        if self.device.type != "cuda":
            yield
            return
        began, ended = torch.cuda.Event(True), torch.cuda.Event(True)  # type: ignore[no-untyped-call]
        began.record()
        try:
            yield
        finally:  # what was queued before an error runs all the same
            ended.record()
            self._copied = began, ended

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()

    def _load(self, inbox: Inbox, sync_id: str) -> None:
        loaded: set[str] | None = None
        if isinstance(inbox, NativeInbox):
            inbox.load(self._arguments, sync_id)
        else:
            with vllm_model.loading_context():
                loaded = self.model.load_weights(self._noted(inbox, sync_id))
        missing = set(vllm_model.incomplete_parameters(self.model, self._tied))
        if loaded is not None:
            missing |= self._expected - set(loaded)
        if missing:
            raise TransferError(
                f"{len(missing)} parameters of the engine were not or not wholly sent: "
                f"{_some(missing)}. The trainer's checkpoint names must cover the engine's model"
            )

    def _must_agree(self) -> None:
        """TransferError if two tensors came for one weight and differ: one would be lost."""
        inbox = self._opened()
        if isinstance(inbox, NativeInbox):
            return
        came = inbox.views()
        for name, first in self._tied_names.items():
            if not _same_bits(came[name], came[first]):
                raise TransferError(
                    f"{name} and {first} came with different values, and the engine's config ties "
                    "them to one weight: tie them in the trainer too, or untie the engine's"
                )

    def _noted(self, inbox: Inbox, sync_id: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in inbox.tensors(sync_id):
            self._current = name
            yield name, tensor


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    # In pieces: on a GPU a comparison takes as much memory again.
    pieces = [torch.split(flat_bytes(tensor), _COMPARED_BYTES) for tensor in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(*pieces, strict=True))


def _some(names: set[str], limit: int = 8) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
