"""The trainer's side of a weight transfer, whatever carries the bytes.

A sender snapshots the trainer's weights into one flat buffer (:meth:`Sender.stage`), off the
critical path, and later sends exactly those bytes (:meth:`Sender.send`), so the trainer may go
on training in between. Everything here blocks: call it from a worker thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

import torch

from orchestrator.errors import ChannelError, TransferError
from orchestrator.types import ChannelSpec, TensorSpec, TransferBackend, TransferStats, WeightUpdate

from . import memory
from .digest import Digester, check_tensor, digester
from .layout import Layout, dtype_name, dtype_of, view

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Checkpoint-format names with their tensors; tied duplicates left out."""


class Sender(ABC):
    """Rank 0 of a channel.

    One caller at a time, except :meth:`close`, which may be called from any thread at any time.
    """

    backend: TransferBackend

    def __init__(self, weights: Callable[[], NamedTensors], *, wire_dtype: str | None = None):
        """``weights`` yields the same names, dtypes and shapes on every call.

        ``wire_dtype``: declared cast of floating-point tensors on the way ("bfloat16");
        None sends them as they are. TransferError for a dtype that is not floating point.
        """
        self._weights = weights
        self._wire_dtype: torch.dtype | None = None
        if wire_dtype is not None:
            self._wire_dtype = dtype_of(wire_dtype)
            if not self._wire_dtype.is_floating_point:
                raise TransferError(f"wire dtype {wire_dtype} is not a floating-point dtype")
        self._layout: Layout | None = None
        self._buffer: torch.Tensor | None = None
        self._digester: Digester | None = None
        self._staged = False
        self._home = torch.device("cpu")

    @property
    def description(self) -> str:
        """What carries the bytes, with its version if it has one; the backend until it is open."""
        return self.backend.value

    @property
    def wire_dtype(self) -> str | None:
        """The declared cast, or None."""
        return None if self._wire_dtype is None else dtype_name(self._wire_dtype)

    def manifest(self) -> tuple[TensorSpec, ...]:
        """What will be sent, in order. Computed once; TransferError names an unfit tensor."""
        return tuple(slot.spec for slot in self._layout_once().slots)

    def stage(self) -> dict[str, str]:
        """Snapshot the weights as they are now; digest of each tensor's staged bytes.

        The buffer is allocated on the first call and then reused. TransferError if a tensor's
        shape or dtype is not the manifest's; the previous snapshot is gone then.
        """
        layout = self._layout_once()
        buffer = self._buffer
        if buffer is None:
            buffer = self._buffer = self._allocate(layout.nbytes)
        self._staged = False
        self._settle()  # the trainer may compute on any stream, and what it computes is copied
        expected = iter(layout.slots)
        with torch.no_grad():
            for name, tensor in self._weights():
                slot = next(expected, None)
                spec = self._spec(name, tensor)
                if slot is None or slot.spec != spec:
                    raise TransferError(
                        f"the weights changed shape since the manifest was made: got {spec}, "
                        f"expected {None if slot is None else slot.spec}. Open a new channel"
                    )
                # copy_ gathers any strides and casts to the view's dtype.
                view(buffer, slot).copy_(tensor)
        missing = next(expected, None)
        if missing is not None:
            raise TransferError(f"tensor {missing.spec.name!r} of the manifest was not yielded")
        self._settle()
        if self._digester is None:
            self._digester = digester(layout.views(buffer))
        digests = self._digester.digests()
        self._staged = True
        return digests

    def staged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the staged bytes in wire dtype. Do not write to them (TransferError if none)."""
        return self._layout_once().views(self._staged_buffer())

    def release(self) -> None:
        """Free the staging buffer; the next :meth:`stage` allocates it again. Idempotent.

        For a trainer that gives its memory away between syncs. Not while a swap is under way.
        """
        self._buffer = self._digester = None
        self._staged = False

    @abstractmethod
    def listen(self, world_size: int, timeout_s: float, host: str = "127.0.0.1") -> ChannelSpec:
        """Open the rendezvous on ``host`` for ``world_size`` ranks; a former channel is closed.

        ``host`` must be reachable by the engines: this node's address, or loopback if they all
        are on this node. ``timeout_s`` bounds every later collective.
        """

    @abstractmethod
    def open(self, spec: ChannelSpec) -> None:
        """Join as rank 0 and send the known pattern. Returns when every rank has proved it.

        ChannelError, saying which rank and why, if one has not.
        """

    @abstractmethod
    def send(self, update: WeightUpdate) -> TransferStats:
        """Send the staged bytes to every rank (TransferError; ChannelError if not open).

        The seconds end when this side has handed over its last byte.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the channel; a send blocked in another thread fails at once. Idempotent."""

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """The flat staging buffer: zeroed, so that its padding is the same every time.

        ChannelError if there is no memory for it.
        """
        memory.must_have_room(nbytes, torch.device("cpu"), memory.SNAPSHOT)
        return torch.zeros(nbytes, dtype=torch.uint8)

    def _settle(self) -> None:  # noqa: B027 - a hook, host copies need nothing
        """Wait until the device of the weights is done with all that was queued on it."""

    def _spec(self, name: str, tensor: torch.Tensor) -> TensorSpec:
        check_tensor(name, tensor)
        dtype = tensor.dtype
        if self._wire_dtype is not None and dtype.is_floating_point:
            dtype = self._wire_dtype
        return TensorSpec(
            name, dtype_name(dtype), tuple(tensor.shape), tensor.numel() * dtype.itemsize
        )

    def _layout_once(self) -> Layout:
        if self._layout is None:
            specs: list[TensorSpec] = []
            for name, tensor in self._weights():
                if not specs:
                    self._home = tensor.device
                specs.append(self._spec(name, tensor))
            layout = Layout.of(specs)
            if not layout.slots:
                raise TransferError("there are no weights to send: the trainer yielded none")
            self._layout = layout
        return self._layout

    def _staged_buffer(self) -> torch.Tensor:
        if self._buffer is None or not self._staged:
            raise TransferError("nothing is staged: call stage() before sending")
        return self._buffer


class Stopwatch:
    """Wall-clock seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def stats(self, nbytes: int) -> TransferStats:
        """``nbytes`` moved until now."""
        return TransferStats(nbytes, time.perf_counter() - self._start)


def make_sender(
    backend: TransferBackend | str,
    weights: Callable[[], NamedTensors],
    *,
    wire_dtype: str | None = None,
) -> Sender:
    """The sender for ``backend`` (ChannelError for one this machine cannot run)."""
    kind = TransferBackend(backend)
    if kind is TransferBackend.GLOO:
        from .gloo import GlooSender

        return GlooSender(weights, wire_dtype=wire_dtype)
    if kind is TransferBackend.IPC:
        from .ipc import IpcSender

        return IpcSender(weights, wire_dtype=wire_dtype)
    if not torch.cuda.is_available():
        raise ChannelError(f"backend {kind.value} needs a GPU and torch sees none: use gloo")
    if kind in (TransferBackend.NCCL, TransferBackend.NATIVE_NCCL):
        from . import nccl_check

        nccl_check.description()  # now, not when the engines are up
    if kind is TransferBackend.NCCL:
        from .nccl import NcclSender

        return NcclSender(weights, wire_dtype=wire_dtype)
    from .baseline import NativeIpcSender, NativeNcclSender

    native = NativeNcclSender if kind is TransferBackend.NATIVE_NCCL else NativeIpcSender
    return native(weights, wire_dtype=wire_dtype)
