"""How the ranks of a channel meet, agree and prove themselves, over one store.

::

    sender (hosts the store)             every worker rank
    ────────────────────────             ─────────────────
                                         manifest fits this engine?  -> ready/<rank>
    all ready?             -> go
                           both build the link (gloo, NCCL, mapped memory)
    known pattern          ~~~~~~~~~~~>  equal, bit for bit?         -> proof/<rank>
    all proved?            -> open

Each answer is ``ok`` or the reason why not, so that one rank's refusal reaches all others at
once instead of leaving them in a rendezvous until it times out. The store takes a free port by
itself: no port is picked first and lost to someone else.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence

import torch

from actors.nodes import is_loopback, network_id
from orchestrator.errors import ChannelError

from .store import StoreClient, StoreServer

PATTERN_BYTES = 1 << 20
_OK = b"ok"


def pattern(nonce: str) -> torch.Tensor:
    """The known pattern: 1 MiB of pseudo-random uint8 derived from ``nonce``."""
    raw = bytearray(hashlib.shake_256(nonce.encode()).digest(PATTERN_BYTES))
    return torch.frombuffer(raw, dtype=torch.uint8)


def local_address(host: str, port: int) -> str:
    """The address of this node from which ``host`` is reached."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # UDP: picks a route, sends nothing
        return str(probe.getsockname()[0])


class Rendezvous:
    """One rank's connection to the channel's store. Thread-safe."""

    def __init__(self, client: StoreClient, server: StoreServer | None = None) -> None:
        self.client = client
        self._server = server

    @classmethod
    def host(cls, host: str, nonce: str, timeout_s: float) -> Rendezvous:
        """Start a store on a free port (ChannelError if ``host`` is not of this machine)."""
        server = StoreServer(host, nonce)
        return cls(StoreClient(host, server.port, nonce, timeout_s), server)

    @classmethod
    def join(
        cls, host: str, port: int, nonce: str, timeout_s: float, sender_network: str
    ) -> Rendezvous:
        """The store of :meth:`host`, seen from a worker (ChannelError if it cannot be reached).

        ``sender_network``: where the host's loopback is, see :func:`actors.nodes.network_id`.
        """
        if is_loopback(host) and sender_network != network_id():
            raise ChannelError(
                f"the sender advertises {host}, but it runs on another machine: give it its "
                "node's address"
            )
        return cls(StoreClient(host, port, nonce, timeout_s))

    @property
    def port(self) -> int:
        """Where the store listens."""
        return self.client.port

    def say(self, key: str, problem: str | None = None) -> None:
        """Answer ``key``: ok, or the reason why not."""
        self.client.set(key, _OK if problem is None else problem.encode())

    def hear(self, keys: Sequence[str], patience: float = 1.0) -> None:
        """Wait until every key is answered; ChannelError with the first reason, if any.

        ``patience``: in timeouts. Who waits for the judge waits longer than the judge.
        """
        answers = self.client.get(keys, patience * self.client.timeout_s)
        for key, answer in zip(keys, answers, strict=True):
            if answer != _OK:
                _, asked, rank = key.partition("/")
                who = f"rank {rank}" if asked else "the sender"
                raise ChannelError(f"{who}: {answer.decode(errors='replace')}")

    def put(self, key: str, value: str) -> None:
        """Publish ``value``."""
        self.client.set(key, value.encode())

    def read(self, key: str) -> str:
        """Wait for what was :meth:`put`; others may read it too."""
        return self.client.get([key])[0].decode()

    def take(self, key: str) -> str:
        """Wait for what was :meth:`put` as long as the channel is open, and forget it.

        The caller has the deadline: it closes the channel.
        """
        return self.client.get([key], timeout_s=None, pop=True)[0].decode()

    def closed(self) -> str:
        """Wait until a member closes the channel, or its host is gone; returns why."""
        return self.client.wait_closed()

    def stop(self) -> None:
        """The host's last call: late comers are refused from now on. Idempotent."""
        if self._server is not None:
            self._server.stop()

    def close(self, reason: str) -> None:
        """Close the channel for all members. Idempotent."""
        if self._server is not None:
            self._server.close(reason)
        else:
            self.client.close(reason)


def ready_keys(world_size: int) -> list[str]:
    """One a worker: its manifest check."""
    return [f"ready/{rank}" for rank in range(1, world_size)]


def proof_keys(world_size: int) -> list[str]:
    """One a worker: what it saw of the pattern."""
    return [f"proof/{rank}" for rank in range(1, world_size)]
