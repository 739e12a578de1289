"""The requests of a replica, from their arrival to their completion, over every pause."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from orchestrator.errors import EngineDied, EngineError, MidflightError
from orchestrator.protocols import FirstTokens
from orchestrator.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    KVPolicy,
    PauseAck,
    PauseMode,
    PolicyVersion,
    TokenSpan,
    WeightUpdate,
)

from . import vllm_compat
from .core import Core
from .gate import Gate
from .ledger import Ledger, Live, Swap
from .reporting import ActorReporter
from .texts import cut_text
from .weights import Weights


class Requests:
    """Hands requests to vLLM, unless the replica is paused, and follows them to their end."""

    def __init__(self, core: Core, weights: Weights, reporter: ActorReporter) -> None:
        self._core = core
        self._weights = weights
        self._reporter = reporter
        self.ledger = Ledger()
        self._gate = Gate()
        self._ack: PauseAck | None = None
        self._streams: dict[str, vllm_compat.Stream] = {}
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._scores = 0
        self._logged_parameters = False

    @property
    def paused(self) -> bool:
        """Whether a pause was begun and not ended; it may not have taken hold."""
        return self._gate.is_shut

    @property
    def idle(self) -> bool:
        """Whether nothing is scheduled: the pause has taken hold."""
        return self._ack is not None

    @property
    def running(self) -> int:
        """Requests that vLLM has."""
        return len(self.ledger.live)

    @property
    def held(self) -> int:
        """Requests that wait for the end of the pause."""
        return self._gate.held

    # their life

    async def generate(self, request: GenerationRequest) -> Completion:
        """Run ``request`` to its end; held back while the replica is paused."""
        task = asyncio.current_task()
        rid = request.request_id
        if rid in self._tasks:
            raise EngineError(self._core.name, f"request {rid!r} is already running")
        assert task is not None
        self._tasks[rid] = task
        try:
            return await self._generate(request)
        finally:
            self._tasks.pop(rid, None)

    async def cancel(self, request_id: str) -> None:
        """End a request whose caller is gone; returns when nothing of it is left."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def abort_all(self) -> int:
        """End every request, held ones too, with what it has; how many there were."""
        streams = list(self._streams.values())
        held = self._gate.send_away()
        for stream in streams:
            await self._core.or_death(stream.abort())
        return len(streams) + held

    async def score(self, prompt: list[int]) -> tuple[float, ...]:
        """Log-probability of each prompt token but the first, under the current weights."""
        self._scores += 1
        name = f"score-{self._scores}"
        stream = await self._submit(name, prompt, vllm_compat.scoring(), salt=name)
        if stream is None:
            raise EngineError(self._core.name, "the replica was told to end its requests")
        async with self._closing(stream):
            final = await stream.listen()
            return vllm_compat.prompt_logprobs(prompt, final.prompt_logprobs)

    async def wait_for_tokens(self, threshold: int, among: Collection[str] | None) -> int:
        """Wait until a live request (of ``among``) has ``threshold`` tokens; how many live."""
        return await self._core.or_death(self.ledger.wait_for_tokens(threshold, among))

    # the pause

    async def pause(self, mode: PauseMode, kv: KVPolicy, sync_id: str) -> PauseAck:
        """Return when nothing is scheduled any more. Idempotent."""
        llm = self._core.running()
        if self._ack is not None:
            return self._ack
        # A request on its way into the engine would carry the old version's cache salt. Costs
        # nothing when none is: no round trip, only those that are half-way are waited for.
        await self._gate.shut()
        await self._core.or_death(vllm_compat.pause(llm, mode, kv))
        await _deliver(llm)
        swap = self.ledger.freeze(sync_id)
        self._ack = PauseAck(self._core.name, self.running)
        self._reporter.info(
            "paused",
            mode=mode.value,
            kv=kv.value,
            requests=self._ack.requests_in_flight,
            writing=len(swap.frozen),
        )
        return self._ack

    async def resume(self) -> None:
        """Let requests go on. Idempotent. EngineError if the weights are not a whole version."""
        llm = self._core.running()
        self._weights.must_be_whole()
        if not self.paused:
            return
        self.ledger.resumed(time.perf_counter())
        await self._core.or_death(vllm_compat.resume(llm))
        self._ack = None
        self._gate.open()

    async def first_tokens(self, sync_id: str) -> FirstTokens:
        """Wait until every request that was writing at the pause has written again or ended."""
        swap = self.ledger.swap
        if swap is None or swap.sync_id != sync_id:
            raise EngineError(self._core.name, f"it was not paused for {sync_id}")
        return await self._core.or_death(swap.first_tokens())

    # a swap inside the engine core

    async def hold(self) -> None:
        """Hold new requests back, and wait for those that are on their way to the engine."""
        await self._gate.shut()

    def expect(self, update: WeightUpdate) -> Swap:
        """The engine core is about to swap."""
        return self.ledger.expect(update.sync_id, update.version, time.perf_counter())

    def swapped(self, swap: Swap, resumed_at: float, in_flight: int) -> PauseAck:
        """It has; requests go on. ``resumed_at``: of the engine core, ``perf_counter`` seconds."""
        swap.settle(self.ledger.live.values(), resumed_at)
        self._ack = None  # of a pause before
        self._gate.open()
        self._reporter.info("swapped", requests=in_flight, writing=len(swap.frozen))
        return PauseAck(self._core.name, in_flight)

    def not_swapped(self, swap: Swap) -> None:
        """It has not; the requests are held until :meth:`resume`."""
        self.ledger.forget(swap)

    # inside

    async def _generate(self, request: GenerationRequest) -> Completion:
        params = vllm_compat.sampling(
            request.max_tokens, request.temperature, request.seed, request.ignore_eos
        )
        if not self._logged_parameters:
            self._logged_parameters = True
            self._reporter.info("sampling parameters", parameters=repr(params))
        rid, live = request.request_id, Live(request)
        stream = await self._submit(rid, request.prompt.token_ids, params)
        if stream is None:
            return Completion(rid, self._core.name, (), (), (), FinishReason.ABORT)
        try:
            async with self._closing(stream):
                self.ledger.add(live)
                self._streams[rid] = stream
                try:
                    # No race with death: the core puts the error into every open stream.
                    final = (await stream.listen(partial(self._wrote, live))).outputs[0]
                    found = vllm_compat.spans(final.weight_versions, len(live.token_ids))
                    reason = vllm_compat.finish_reason(final.finish_reason)
                    return self._completion(live, found, reason)
                finally:
                    self._streams.pop(rid, None)
                    self.ledger.remove(live)
        except EngineDied as error:
            raise self._cut(live, stream, error) from None

    def _wrote(self, live: Live, output: Any, version: PolicyVersion | None) -> None:
        part = output.outputs[0]
        ids = list(part.token_ids)
        if ids:
            chosen = vllm_compat.chosen_logprobs(ids, part.logprobs)
            self.ledger.wrote(live, ids, chosen, time.perf_counter(), version)

    def _cut(self, live: Live, stream: vllm_compat.Stream, error: EngineDied) -> EngineDied:
        """``error`` with what ``live`` had, as far as it is certain which versions wrote it."""
        died = copy.copy(error)  # one error was given to all requests
        if live.token_ids:
            with suppress(Exception):  # the death is what has to be told
                found = stream.spans(len(live.token_ids))
                died.partial = self._completion(live, found, FinishReason.ABORT)
        return died

    def _completion(
        self, live: Live, found: tuple[TokenSpan, ...], reason: FinishReason
    ) -> Completion:
        tokenizer = self._core.tokenizer
        text = ""
        pieces: tuple[str, ...] = ()
        if tokenizer is not None:
            text, pieces = cut_text(
                lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
                live.request.prompt.token_ids,
                live.token_ids,
                [span.end for span in found],
            )
        return Completion(
            request_id=live.request.request_id,
            engine=self._core.name,
            token_ids=tuple(live.token_ids),
            logprobs=tuple(live.logprobs),
            spans=found,
            finish_reason=reason,
            text=text,
            span_texts=pieces,
            stalls=tuple(live.stalls),
        )

    async def _submit(
        self, request_id: str, prompt: Sequence[int], params: Any, salt: str | None = None
    ) -> vllm_compat.Stream | None:
        """Hand a request to vLLM, after the pause if there is one; None if ended before that."""
        while self._gate.is_shut:
            with self._gate.holding(request_id) as go:
                if not await self._core.or_death(go):
                    return None
        llm = self._core.running()
        with self._gate.entering():
            salt = salt or self._weights.cache_salt
            task = asyncio.ensure_future(vllm_compat.submit(llm, request_id, prompt, params, salt))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                # vLLM would run on what was handed over half-way: see it through, then end it.
                await asyncio.wait({task})
                if not task.cancelled() and task.exception() is None:
                    await task.result().close()
                raise
            except Exception as error:
                raise self._core.translate(error) from None

    @asynccontextmanager
    async def _closing(self, stream: vllm_compat.Stream) -> AsyncIterator[None]:
        """Around the reading of ``stream``: errors become ours, and it ends with the block."""
        try:
            yield
        except (MidflightError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise self._core.translate(error) from None
        finally:
            if not self._core.dead:
                await stream.close()


async def _deliver(llm: Any) -> None:
    """Let outputs written before the pause reach their requests. Takes no time, only turns.

    Needed: a token delivered after the resume would pass for the first one after the swap, and a
    request whose first token is on its way for one that had not begun.
    """
    for _ in range(10_000):
        if not vllm_compat.undelivered(llm):
            break
        await asyncio.sleep(0)
    for _ in range(4):  # output handler, collector, request, its caller
        await asyncio.sleep(0)
