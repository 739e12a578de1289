"""The trainer's side over gloo, and what it shares with other broadcast links."""

from __future__ import annotations

import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable

import torch

from actors.nodes import network_id
from orchestrator.errors import ChannelError
from orchestrator.types import ChannelSpec, TransferBackend, TransferStats, WeightUpdate

from . import agreement
from .base import NamedTensors, Sender, Stopwatch
from .channel import Channel
from .layout import manifest_to_wire
from .link import GlooLink, Link, Wait
from .rendezvous import Rendezvous, pattern, proof_keys, ready_keys

BUCKET_BYTES = 32 << 20
"""One broadcast carries at most this; receivers load a bucket while the next one travels."""


class LinkSender(Sender):
    """A sender over a broadcast :class:`Link`; subclasses make the link."""

    bucket_bytes = BUCKET_BYTES
    """Receivers must use the same."""

    def __init__(self, weights: Callable[[], NamedTensors], *, wire_dtype: str | None = None):
        super().__init__(weights, wire_dtype=wire_dtype)
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._opened: ChannelSpec | None = None

    @abstractmethod
    def _connect(self, channel: Channel, spec: ChannelSpec) -> Link:
        """Build the link; blocks until all ranks are there."""

    def _extra(self, nonce: str, world_size: int) -> dict[str, object]:
        """Backend-specific plain data for the receivers."""
        return {}

    @property
    def description(self) -> str:
        link = None if self._channel is None else self._channel.link
        return super().description if link is None else link.description

    def _pattern(self, nonce: str) -> torch.Tensor:
        return pattern(nonce)

    def listen(self, world_size: int, timeout_s: float, host: str = "127.0.0.1") -> ChannelSpec:
        if world_size < 2:
            raise ChannelError(f"world size {world_size}: a channel needs at least one worker")
        self.close()
        manifest = self.manifest()
        manifest_to_wire(manifest)
        nonce = secrets.token_hex(16)
        extra = self._extra(nonce, world_size)
        meeting = Rendezvous.host(host, nonce, timeout_s)
        spec = ChannelSpec(
            backend=self.backend,
            host=host,
            port=meeting.port,
            world_size=world_size,
            nonce=nonce,
            tensors=manifest,
            timeout_s=timeout_s,
            extra={
                "node": network_id(),
                "wire_dtype": self.wire_dtype,
                "bucket_bytes": self.bucket_bytes,
                **extra,
            },
        )
        agreement.offer(meeting, self._layout_once(), self.bucket_bytes)
        with self._lock:
            self._channel, self._opened = Channel(meeting), spec
        return spec

    def open(self, spec: ChannelSpec) -> None:
        channel = self._channel
        if channel is None or self._opened is None or self._opened.nonce != spec.nonce:
            raise ChannelError("this channel is not the one that listens: call listen() first")
        try:
            channel.run(lambda: self._handshake(channel, spec))
        except ChannelError as error:
            channel.close(str(error))
            raise

    def _handshake(self, channel: Channel, spec: ChannelSpec) -> None:
        meeting, world = channel.meeting, spec.world_size
        try:
            meeting.hear(ready_keys(world))
        except ChannelError as error:
            meeting.say("go", str(error))
            raise
        meeting.say("go")
        channel.link = self._connect(channel, spec)
        channel.link.broadcast(self._pattern(spec.nonce))()
        try:
            meeting.hear(proof_keys(world))
        except ChannelError as error:
            meeting.say("open", str(error))
            raise
        meeting.say("open")

    def send(self, update: WeightUpdate) -> TransferStats:
        buffer = self._staged_buffer()
        channel = self._channel
        if channel is None or channel.link is None:
            raise ChannelError("the channel is not open: call listen() and open() first")
        if channel.closed is not None:
            raise ChannelError(f"the channel was closed: {channel.closed}")
        watch = Stopwatch()
        link, layout = channel.link, self._layout_once()
        try:
            self._transmit(channel, link, buffer, update)
        except ChannelError as error:
            # A broken group is broken for all: closing it frees ranks that still wait.
            channel.close(str(error))
            raise
        return watch.stats(sum(slot.spec.nbytes for slot in layout.slots))

    def _transmit(
        self, channel: Channel, link: Link, buffer: torch.Tensor, update: WeightUpdate
    ) -> None:
        """Hand ``buffer`` over to every rank; returns when this side is done with it."""
        ranges = self._layout_once().buckets(self.bucket_bytes)

        def broadcast_all() -> None:
            pending: Wait | None = None
            for start, end in ranges:
                following = link.broadcast(buffer[start:end])
                if pending is not None:
                    pending()
                pending = following
            if pending is not None:
                pending()

        channel.run(broadcast_all)

    def close(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close("the sender left")
            channel.meeting.stop()


class GlooSender(LinkSender):
    """Rank 0 over gloo; works on any machine."""

    backend = TransferBackend.GLOO

    def _connect(self, channel: Channel, spec: ChannelSpec) -> Link:
        return GlooLink(channel.meeting, 0, spec.world_size, spec.timeout_s, spec.host)
