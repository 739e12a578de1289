"""A trainer in this very process as the sender of a channel.

For an embedding trainer that owns its model: no Ray actor, no copy of the loop. The weights
come from a callable, so a sharded model can gather there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actors.transfer.base import NamedTensors, make_sender
from orchestrator.errors import ConfigError
from orchestrator.protocols import Digests
from orchestrator.types import (
    ChannelSpec,
    PolicyVersion,
    TransferBackend,
    TransferStats,
    WeightUpdate,
)


class LocalSender:
    """:class:`orchestrator.protocols.WeightSender` over ``weights``.

    ``weights`` yields checkpoint-format names with their tensors, tied duplicates left out, the
    same ones on every call. It is called in a worker thread by :meth:`stage`: do not change the
    model while ``sync()`` stages. ``host`` must be reachable by the engines.
    """

    def __init__(
        self,
        weights: Callable[[], NamedTensors],
        *,
        backend: TransferBackend = TransferBackend.GLOO,
        wire_dtype: str | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._sender = make_sender(backend, weights, wire_dtype=wire_dtype)
        self._backend = TransferBackend(backend)
        self._host = host

    async def listen(
        self, backend: TransferBackend, world_size: int, timeout_s: float
    ) -> ChannelSpec:
        """See the protocol. ConfigError for another backend than this sender was made for."""
        if backend is not self._backend:
            raise ConfigError(
                f"swaps are asked for over {backend.value}, and this sender was made for "
                f"{self._backend.value}: give SwapOptions and LocalSender the same backend"
            )
        return await asyncio.to_thread(self._sender.listen, world_size, timeout_s, self._host)

    async def open_channel(self, spec: ChannelSpec) -> None:
        """See the protocol."""
        await asyncio.to_thread(self._sender.open, spec)

    async def close_channel(self) -> None:
        """See the protocol."""
        await asyncio.to_thread(self._sender.close)

    async def stage(self, version: PolicyVersion) -> Digests:
        """See the protocol."""
        return await asyncio.to_thread(self._sender.stage)

    async def send(self, update: WeightUpdate) -> TransferStats:
        """See the protocol."""
        return await asyncio.to_thread(self._sender.send, update)

    async def wait_dead(self) -> str:
        """Never returns: this process is the sender."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def aclose(self) -> None:
        """See the protocol."""
        await self.close_channel()
