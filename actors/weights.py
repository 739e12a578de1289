"""The weights a replica serves, and the channel that new ones arrive over.

They are in one of these states: *clean* (a committed version), *receiving* and *received*
(between ``start`` and ``finish``) and *dirty* (an update failed). Only clean weights are ever
served; dirty ones become clean by a whole new update.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Literal

from orchestrator.errors import ChannelError, EngineError, TransferError
from orchestrator.types import (
    ChannelSpec,
    PolicyVersion,
    TransferStats,
    WeightUpdate,
)

from . import vllm_compat
from .core import Core
from .reporting import ActorReporter
from .transfer.channel import Channel
from .transfer.digest import Part, whole
from .transfer.inbox import Invitation
from .transfer.rendezvous import Rendezvous

_State = Literal["clean", "receiving", "received", "dirty"]


class Weights:
    """Weights of one replica. Its caller runs one of the changing calls at a time."""

    def __init__(self, core: Core, swaps: bool, reporter: ActorReporter) -> None:
        self.version = PolicyVersion(0)
        """Last version that arrived whole."""
        self._core = core
        self._swaps = swaps
        self._reporter = reporter
        self._state: _State = "clean"
        self._why_dirty = ""
        self._before: tuple[_State, str] = ("clean", "")
        self._epoch = 0
        self._session = ""
        self._channel: Channel | None = None
        self._spec: ChannelSpec | None = None
        self._first_rank = -1
        self._fetched = ""
        self._asked = 0
        self._how: list[str] = []

    @property
    def cache_salt(self) -> str:
        """Names what a KV cache is computed with, so that no version reuses another's."""
        return f"{self.version}.{self._epoch}"

    def must_be_whole(self) -> None:
        """EngineError unless the weights are clean."""
        if self._state != "clean":
            raise EngineError(
                self._core.name,
                f"its weights are half applied ({self._why_dirty or 'update under way'}): "
                "it may only serve after a whole new update",
            )

    # the channel

    async def open_channel(self, spec: ChannelSpec, first_rank: int, *, paused: bool) -> None:
        """Join the transfer group with all workers; the known pattern must arrive."""
        llm, name = self._core.running(), self._core.name
        if not self._swaps:
            raise ChannelError(f"engine {name} was started without swaps: start it with them")
        # vLLM calls a paused engine sleeping too.
        if not paused and await self._core.or_death(llm.is_sleeping()):
            raise ChannelError(f"engine {name} sleeps: wake it up before a swap")
        self._channel, self._fetched = None, ""
        invitation = asdict(Invitation.of(spec, first_rank))
        meeting = await asyncio.to_thread(
            Rendezvous.join,
            spec.host,
            spec.port,
            spec.nonce,
            spec.timeout_s,
            str(spec.extra.get("node", "")),
        )
        self._channel, self._spec, self._first_rank = Channel(meeting), spec, first_rank
        try:
            await self._at_workers("midflight_open", invitation)
            await self._tell_how()
        except BaseException as error:
            # Over the store: a rank that waits for another one there answers no RPC.
            channel, self._channel = self._channel, None
            await asyncio.to_thread(channel.close, f"engine {name} could not join: {error}")
            raise
        self._reporter.info(
            "channel open", backend=spec.backend.value, rank=first_rank, bytes=spec.nbytes
        )

    async def _tell_how(self) -> None:
        self._applied_by(await self._at_workers("midflight_describe"))

    def _applied_by(self, how: list[str]) -> None:
        """Log how the workers apply updates, when that has changed."""
        if how != self._how:
            self._how = how
            self._reporter.info("updates are applied by", workers=sorted(set(how)))

    async def close_channel(self) -> None:
        """Leave the group. Idempotent; ends a transfer that is under way."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        # Over the store first: a worker that sits in a transfer answers no RPC until it fails.
        await asyncio.to_thread(channel.close, f"engine {self._core.name} left")
        if self._core.up:
            await self._at_workers("midflight_close")

    def _open(self) -> Channel:
        if self._channel is None:
            raise ChannelError(f"engine {self._core.name} has no open channel")
        return self._channel

    # one update

    async def prefetch(self, update: WeightUpdate) -> TransferStats:
        """Fetch the bytes of ``update`` while decoding goes on; they are there on return."""
        self._open()
        assert self._spec is not None
        self._fetched = ""
        began = time.perf_counter()
        await self._ask("prefetch", "midflight_prefetch", update.sync_id)
        self._fetched = update.sync_id
        return TransferStats(self._spec.nbytes, time.perf_counter() - began)

    def must_have(self, update: WeightUpdate) -> None:
        """TransferError if ``update`` should be at hand and is not, ChannelError if closed."""
        self._open()
        if update.at_hand and self._fetched != update.sync_id:
            raise TransferError(
                f"update {update.sync_id} is not at hand at engine {self._core.name}: prefetch it"
            )

    def start(self, update: WeightUpdate) -> None:
        """From here on the weights are not to be served. The workers are not told yet."""
        self._core.running()
        self.must_have(update)
        self._before = (self._state, self._why_dirty)
        self._session = update.sync_id
        self._state = "receiving"
        self._epoch += 1

    def take_back(self) -> None:
        """Nothing of what was started was applied: the weights are as they were."""
        self._state, self._why_dirty = self._before

    def applied(self, update: WeightUpdate, seconds: float) -> TransferStats:
        """The engine core has applied what was started, and set the version, in ``seconds``."""
        spec = self._receiving(update)
        self._state, self.version = "clean", update.version
        return TransferStats(spec.nbytes, seconds)

    def spoiled(self, why: str) -> None:
        """What was started was applied in part, or nobody knows."""
        self._state, self._why_dirty = "dirty", why
        self._reporter.error("update failed", reason=why)

    async def device_seconds(self) -> float | None:
        """What the last copy took on the devices, where that is known; waits for its end."""
        found = await self._at_workers("midflight_device_seconds")
        return max((seconds for seconds in found if seconds is not None), default=None)

    async def receive(self, update: WeightUpdate) -> TransferStats:
        """Receive every tensor, if it was not prefetched, and load it; usable on return."""
        spec = self._receiving(update)
        began = time.perf_counter()
        with self._dirty_on_error(f"update {update.sync_id} did not arrive"):
            await self._at_workers("midflight_apply", update.sync_id)
            self._state = "received"
        return TransferStats(spec.nbytes, time.perf_counter() - began)

    async def finish(self, update: WeightUpdate) -> None:
        """Tokens written from now on carry ``update.version``."""
        llm = self._core.running()
        self._of_this_session(update)
        if self._state != "received":
            self._receiving(update)  # says what is wrong, unless nothing was received
            raise TransferError(f"engine {self._core.name} has not received {update.sync_id}")
        with self._dirty_on_error(f"update {update.sync_id} was not finished"):
            await self._core.or_death(vllm_compat.set_version(llm, update.version))
        self._state, self.version = "clean", update.version

    async def digests(self) -> dict[str, str]:
        """Digests of what the workers hold, by checkpoint tensor; TransferError if they differ."""
        self._open()
        assert self._spec is not None
        shapes = {spec.name: spec.shape for spec in self._spec.tensors}
        answers = await self._ask("digest", "midflight_digest")
        self._applied_by([answer["how"] for answer in answers.values()])
        parts = {
            rank: {name: Part.of_wire(part) for name, part in answer["parts"].items()}
            for rank, answer in answers.items()
        }
        unused = set.intersection(*(set(answer["unused"]) for answer in answers.values()))
        return await asyncio.to_thread(whole, self._core.name, shapes, parts, unused)

    async def _at_workers(self, method: str, *args: Any) -> list[Any]:
        llm = self._core.running()
        return await self._core.or_death(vllm_compat.ask_workers(llm, method, *args))

    async def _ask(self, what: str, method: str, *args: str) -> dict[int, dict[str, Any]]:
        """Have every worker do something on a thread, while it decodes; the answer of each rank.

        TransferError with a rank's reason; ChannelError when the channel is closed meanwhile.
        """
        meeting, first_rank = self._open().meeting, self._first_rank
        self._asked += 1
        key = f"{what}/{self._core.name}/{self._asked}"
        llm = self._core.running()
        await self._at_workers(method, *args, key)
        answers: dict[int, dict[str, Any]] = {}
        for rank in range(first_rank, first_rank + vllm_compat.model_facts(llm)["workers"]):
            text = await self._core.or_death(asyncio.to_thread(meeting.take, f"{key}/{rank}"))
            answers[rank] = json.loads(text)
            if "error" in answers[rank]:
                raise TransferError(f"{what} failed at rank {rank}: {answers[rank]['error']}")
        return answers

    def _of_this_session(self, update: WeightUpdate) -> None:
        """A call that comes late, of a try that was given up, must not end the one of today."""
        if self._session and update.sync_id != self._session:
            raise TransferError(
                f"engine {self._core.name} is in update {self._session}, not {update.sync_id}: "
                "start it anew"
            )

    def _receiving(self, update: WeightUpdate) -> ChannelSpec:
        self._open()
        self._of_this_session(update)
        assert self._spec is not None
        if self._state != "receiving":
            raise TransferError(
                f"engine {self._core.name} is not in an update ({self._state}"
                f"{': ' + self._why_dirty if self._why_dirty else ''}): start {update.sync_id} anew"
            )
        return self._spec

    @contextlib.contextmanager
    def _dirty_on_error(self, why: str) -> Iterator[None]:
        """Mark the weights dirty if the block does not end well, cancellation included."""
        try:
            yield
        except BaseException as error:
            self.spoiled(f"{why}: {str(error) or type(error).__name__}")
            raise
