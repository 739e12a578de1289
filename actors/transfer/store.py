"""The small key-value store over which the ranks of one channel meet.

Instead of torch's TCPStore, which asks DNS for the name of each peer (5 s each where reverse
lookups go unanswered), has waits that nothing can end, and tells nobody that its host died:
here a closed channel or a dead host ends every wait at once, with the reason.

One request a connection: a length, then JSON. Values are bytes (base64 on the wire).
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import struct
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from orchestrator.errors import ChannelError

_LENGTH = struct.Struct("!I")
_BACKLOG = 1024
_ANSWER_S = 10.0
"""What a store may take to answer beyond the time it was told to wait."""


class StoreServer:
    """Lives in the sender's process; listens on a free port of ``host``."""

    def __init__(self, host: str, token: str) -> None:
        """ChannelError if ``host`` is not an address of this machine."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ChannelError(
                f"cannot host the channel on {host}: {error}. Give an address of this machine "
                "that the engines can reach"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._token = token
        self._values: dict[str, str] = {}
        self._closed: str | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, name="store", daemon=True).start()

    def close(self, reason: str) -> None:
        """End every wait with ``reason``, and tell it to those who come later. Idempotent."""
        with self._changed:
            if self._closed is None:
                self._closed = reason
                self._changed.notify_all()

    def stop(self) -> None:
        """Close, and stop listening too. Idempotent."""
        self.close("the sender left")
        # Not close(): that would leave accept() sleeping on a descriptor that gets reused.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    return
                threading.Thread(
                    target=self._serve, args=(connection,), name="store-peer", daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            request = _receive(connection)
            if request.get("token") == self._token:
                _send(connection, self._answer(request))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "close":
            self.close(request["reason"])
            return {}
        if request["op"] == "set":
            with self._changed:
                self._values.update(request["values"])
                self._changed.notify_all()
                return {} if self._closed is None else {"closed": self._closed}
        keys: list[str] = request["keys"]
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed is not None or all(key in self._values for key in keys),
                request["timeout"],
            )
            if self._closed is not None:
                return {"closed": self._closed}
            if missing := [key for key in keys if key not in self._values]:
                return {"missing": missing}
            take = self._values.pop if request["pop"] else self._values.__getitem__
            return {"values": [take(key) for key in keys]}


class StoreClient:
    """Thread-safe: each call has a connection of its own. ChannelError when closed or gone."""

    def __init__(self, host: str, port: int, token: str, timeout_s: float) -> None:
        self.host, self.port, self._token = host, port, token
        self.timeout_s = timeout_s

    def set(self, key: str, value: bytes) -> None:
        """Publish ``value``."""
        self._ask({"op": "set", "values": {key: base64.b64encode(value).decode()}})

    def get(
        self, keys: Sequence[str], timeout_s: float | None = -1.0, pop: bool = False
    ) -> list[bytes]:
        """Wait until all ``keys`` are set; their values. ``pop`` also forgets them.

        ChannelError that names those missing after ``timeout_s`` (the client's own by default;
        None waits as long as the channel is open).
        """
        limit = self.timeout_s if timeout_s == -1.0 else timeout_s
        answer = self._ask({"op": "get", "keys": list(keys), "timeout": limit, "pop": pop})
        if "missing" in answer:
            raise ChannelError(f"no answer from {', '.join(answer['missing'])} within {limit:g} s")
        return [base64.b64decode(value) for value in answer["values"]]

    def close(self, reason: str) -> None:
        """Close the channel for all; a store that is gone already is fine."""
        with contextlib.suppress(ChannelError):
            self._ask({"op": "close", "reason": reason})

    def wait_closed(self) -> str:
        """Wait until the channel is closed or its host is gone; returns why."""
        try:
            self.get(["never"], timeout_s=None)
        except Closed as closed:
            return closed.reason
        except ChannelError as error:
            return str(error)
        return "unreachable"

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            with socket.create_connection((self.host, self.port), timeout=self.timeout_s) as peer:
                # The server keeps the time; its death, or that it does not answer, ends the wait.
                waits = request.get("timeout", 0.0)
                peer.settimeout(None if waits is None else waits + _ANSWER_S)
                _keep_alive(peer)
                _send(peer, {**request, "token": self._token})
                answer = _receive(peer)
        except (OSError, EOFError, ValueError) as error:
            raise ChannelError(
                f"the sender's end of the channel at {self.host}:{self.port} is gone "
                f"({type(error).__name__}: {error})"
            ) from None
        if "closed" in answer:
            raise Closed(answer["closed"])
        return answer


class Closed(ChannelError):
    """The channel was closed by one of its members."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the channel was closed: {reason}")
        self.reason = reason


_torch: Any = torch.distributed  # Store is not in its type stubs


class TorchStore(_torch.Store):  # type: ignore[misc]
    """A StoreClient as what torch's process groups rendezvous over."""

    def __init__(self, client: StoreClient) -> None:
        super().__init__()
        self._client = client

    def set(self, key: str, value: str | bytes) -> None:
        self._client.set(f"torch/{key}", value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._client.get([f"torch/{key}"])[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = -1.0 if timeout is None else timeout.total_seconds()
        self._client.get([f"torch/{key}" for key in keys], seconds)


def _keep_alive(peer: socket.socket) -> None:
    """Notice within half a minute that the other machine is gone without a word."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    peer.sendall(_LENGTH.pack(len(data)) + data)


def _receive(peer: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size))
    message = json.loads(_exactly(peer, length))
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = peer.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError("connection closed")
        data += piece
    return bytes(data)
