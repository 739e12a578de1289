"""How the ranks of a channel meet, agree and prove themselves, over one TCP store.

::

    sender (hosts the store)             every worker rank
    ────────────────────────             ─────────────────
                                         manifest fits this engine?  -> ready/<rank>
    all ready?             -> go
                           both build the link (gloo, NCCL, mapped memory)
    known pattern          ~~~~~~~~~~~>  equal, bit for bit?         -> proof/<rank>
    all proved?            -> open

Each answer is ``ok`` or the reason why not, so that one rank's refusal reaches all others at
once instead of leaving them in a rendezvous until it times out. The store's server takes a
free port by itself: no port is picked first and lost to someone else.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from orchestrator.errors import ChannelError

c10d: Any = torch.distributed
"""Its stores and groups are not in torch's type stubs."""

PATTERN_BYTES = 1 << 20
_OK = b"ok"
_LOOPBACK = ("127.", "localhost", "::1")


def pattern(nonce: str) -> torch.Tensor:
    """The known pattern: 1 MiB of pseudo-random uint8 derived from ``nonce``."""
    raw = bytearray(hashlib.shake_256(nonce.encode()).digest(PATTERN_BYTES))
    return torch.frombuffer(raw, dtype=torch.uint8)


def node_id() -> str:
    """Differs between machines, even where they share a host name."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def is_loopback(host: str) -> bool:
    """Whether ``host`` only means this very machine."""
    return host.startswith(_LOOPBACK)


def local_address(host: str, port: int) -> str:
    """The address of this node from which ``host`` is reached."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # UDP: picks a route, sends nothing
        return str(probe.getsockname()[0])


class Rendezvous:
    """One rank's connection to the channel's store. Thread-safe: calls take turns."""

    def __init__(self, store: Any, timeout_s: float) -> None:
        self.store = store
        self._timeout = timedelta(seconds=timeout_s)

    @classmethod
    def host(cls, host: str, timeout_s: float) -> Rendezvous:
        """Start a server on a free port (ChannelError if ``host`` is not of this machine)."""
        try:
            store = c10d.TCPStore(
                host,
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise ChannelError(
                f"cannot host the rendezvous on {host}: {_first_line(error)}. "
                "Give an address of this machine that the engines can reach"
            ) from error
        return cls(store, timeout_s)

    @classmethod
    def join(cls, host: str, port: int, timeout_s: float, sender_node: str) -> Rendezvous:
        """Connect to the server of :meth:`host` (ChannelError if it cannot be reached)."""
        if is_loopback(host) and sender_node != node_id():
            raise ChannelError(
                f"the sender advertises {host}, but it runs on another machine: give it its "
                "node's address"
            )
        try:
            store = c10d.TCPStore(
                host,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise ChannelError(
                f"cannot reach the sender at {host}:{port}: {_first_line(error)}"
            ) from error
        return cls(store, timeout_s)

    @property
    def port(self) -> int:
        """Where the server listens."""
        return int(self.store.port)

    def second(self) -> Rendezvous:
        """Another connection to the same server, for use while this one waits."""
        return Rendezvous(self.store.clone(), self._timeout.total_seconds())

    def say(self, key: str, problem: str | None = None) -> None:
        """Answer ``key``: ok, or the reason why not. A former answer stands."""
        with self._errors(f"answer {key}"):
            # Not compare_set: it does not wake those who wait for the key.
            if not self.store.check([key]):
                self.store.set(key, problem or _OK.decode())

    def hear(self, keys: Sequence[str]) -> None:
        """Wait until every key is answered; ChannelError with the first reason, if any."""
        with self._errors(f"hear from {', '.join(keys)}"):
            try:
                self.store.wait(list(keys), self._timeout)
            except RuntimeError as error:
                silent = [key for key in keys if not self.store.check([key])]
                raise ChannelError(
                    f"no answer from {', '.join(silent) or 'the store'} within "
                    f"{self._timeout.total_seconds():g} s: {_first_line(error)}"
                ) from error
            for key in keys:
                answer = self.store.get(key)
                if answer != _OK:
                    raise ChannelError(f"{key}: {answer.decode(errors='replace')}")

    def get(self, key: str) -> str:
        """Wait for a value set with :meth:`put` (ChannelError on timeout)."""
        with self._errors(f"read {key}"):
            self.store.wait([key], self._timeout)
            return str(self.store.get(key).decode())

    def closed(self) -> str:
        """Wait until a member says ``closed``, or the store is gone; returns why."""
        try:
            self.store.wait(["closed"], timedelta(days=365))
            return str(self.store.get("closed").decode())
        except RuntimeError:
            return "the sender's process is gone"

    def why_closed(self) -> str | None:
        """What a member said when it closed the channel; None if none did, as far as we know."""
        try:
            if self.store.check(["closed"]):
                return str(self.store.get("closed").decode())
        except RuntimeError:
            pass
        return None

    def put(self, key: str, value: str) -> None:
        """Publish ``value`` under ``key``."""
        with self._errors(f"write {key}"):
            self.store.set(key, value)

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ChannelError):
                raise
            raise ChannelError(
                f"the channel's store is gone, could not {what}: {_first_line(error)}"
            ) from error


def ready_keys(world_size: int) -> list[str]:
    return [f"ready/{rank}" for rank in range(1, world_size)]


def proof_keys(world_size: int) -> list[str]:
    return [f"proof/{rank}" for rank in range(1, world_size)]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
