"""Requests over several replicas: each ends once, whatever becomes of the replica it began on."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from orchestrator.continuation import joined, newest, published, rest_of
from orchestrator.errors import EngineDied, EngineError
from orchestrator.protocols import Engine
from orchestrator.replica import Replica
from orchestrator.roster import Roster
from orchestrator.tasks import all_or_first_error, settle
from orchestrator.types import Completion, FinishReason, GenerationRequest, PolicyVersion


class Router(Roster):
    """Routes to the least loaded replica; continues elsewhere what a replica cannot end."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(engines)
        self._ending = False
        self._by_load: list[tuple[int, int, Replica]] = []
        """A heap of requests, place and replica: of every replica that serves the entry that is
        true, and some that were."""
        self._rank()

    async def generate(self, request: GenerationRequest) -> Completion:
        """Run ``request`` to its end, and have it wait while nobody serves but somebody may again.

        What a pause in mode ``abort``, a fence or a death cut is continued from prompt + tokens so
        far, within the request's own budget; :meth:`abort_requests` ends it for good, and so does
        the lack of a replica that serves, now or later.
        """
        done: Completion | None = None
        part = request
        deaths: list[str] = []
        while True:
            replica = self._least_loaded()
            if replica is None:
                if self.heals and not self._ending:
                    await self.changed()
                    continue
                if done is None and not self._ending:
                    self._must_serve()
                return _ended(request, done)
            answer = await self._answer(replica, part)
            if replica.lost is not None:
                deaths.append(f"{replica.name}: {replica.lost}")
                if len(deaths) > self.patience and not self._ending:
                    raise EngineDied(
                        replica.name,
                        f"{len(deaths)} replicas died with request {request.request_id} running, "
                        f"the first {deaths[0]}. Look at its prompt: {request.prompt.text[:80]!r}",
                    )
            if answer is None:
                if self._ending:
                    return _ended(request, done)
                continue
            done = joined(done, answer)
            left = request.max_tokens - len(done.token_ids)
            if done.finish_reason is not FinishReason.ABORT or self._ending:
                return done
            if left <= 0:
                return replace(done, finish_reason=FinishReason.LENGTH)
            part = rest_of(request, done)

    async def _answer(self, replica: Replica, part: GenerationRequest) -> Completion | None:
        """What ``replica`` wrote that may be used; None when nothing is known of it."""
        replica.live.add(part.request_id)
        self._loaded(replica)
        epoch = replica.epoch
        try:
            answer = await self._ask(replica, part)
        except EngineDied as error:
            if not self.heals:
                raise
            answer = getattr(error, "partial", None)
            self.lose(replica, str(error))
        finally:
            replica.live.discard(part.request_id)
            self._loaded(replica)
        if answer is None:
            return None
        if replica.swapping is not None and newest(answer) > self.version:
            # The replica goes on by itself before its swap is published.
            await asyncio.shield(replica.swapping)
        while self.heals and replica.awaiting is not None and newest(answer) >= replica.awaiting:
            await self.changed()
        trusted = self.version
        if epoch in replica.distrust:
            trusted = PolicyVersion(min(trusted, replica.distrust[epoch] - 1))
        return published(answer, trusted)

    async def _ask(self, replica: Replica, part: GenerationRequest) -> Completion | None:
        """Its answer, or None once it is lost: then a call may never end."""
        call = asyncio.ensure_future(replica.engine.generate(part))
        gone = asyncio.ensure_future(replica.gone.wait())
        try:
            await asyncio.wait([call, gone], return_when=asyncio.FIRST_COMPLETED)
            return call.result() if call.done() else None
        finally:
            await settle([call, gone])

    def _must_serve(self) -> list[Replica]:
        serving = self.serving
        if not serving:
            raise EngineError(self.names, "no replica serves; all are fenced")
        return serving

    def change(self) -> None:
        """Wake who waits for another standing."""
        self._rank()
        super().change()

    def _rank(self) -> None:
        """Place every replica that serves by its load, anew."""
        for place, replica in enumerate(self._replicas):
            replica.place = place
        self._by_load = [(len(r.live), r.place, r) for r in self._replicas if not r.fenced]
        heapify(self._by_load)

    def _loaded(self, replica: Replica) -> None:
        """``replica`` has another number of requests than before."""
        if replica.fenced:
            return
        if len(self._by_load) > 4 * len(self._replicas):
            self._rank()
        else:
            heappush(self._by_load, (len(replica.live), replica.place, replica))

    def _least_loaded(self) -> Replica | None:
        """The first of those that serve with the fewest requests."""
        heap = self._by_load
        while heap:
            load, _, replica = heap[0]
            if load == len(replica.live) and not replica.fenced:
                return replica
            heappop(heap)
        return None

    async def wait_for_tokens(self, threshold: int, among: Collection[str] | None = None) -> None:
        """Wait until a live request has ``threshold`` tokens.

        With ``among`` (request ids): one of them on every replica that runs any of them. Returns
        too when nobody is left to wait for.
        """
        if self.heals and not self.serving:
            return
        serving = self._must_serve()
        if among is not None:
            # Not a fan-out: it goes on beside those of a swap, whose deadlines name who is missing.
            wanted = frozenset(among)
            await all_or_first_error(
                self._tokens(r, threshold, wanted & r.live) for r in serving if wanted & r.live
            )
            return
        waits = [asyncio.create_task(self._tokens(r, threshold)) for r in serving]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await settle(waits)

    async def _tokens(
        self, replica: Replica, threshold: int, among: Collection[str] | None = None
    ) -> None:
        call = asyncio.ensure_future(replica.engine.wait_for_tokens(threshold, among))
        gone = asyncio.ensure_future(replica.gone.wait())
        try:
            await asyncio.wait([call, gone], return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                call.result()
        except EngineDied:
            if not self.heals:
                raise
        finally:
            await settle([call, gone])

    async def abort_requests(self) -> int:
        """End every request for good, each with what it has; returns how many.

        Fenced replicas too: what they had written before the swap is theirs to hand over. One
        that fails does not keep the others from it.
        """
        self._ending = True
        self.change()
        ended = await asyncio.gather(
            *(r.engine.abort_requests() for r in self._replicas if r.lost is None),
            return_exceptions=True,
        )
        return sum(count for count in ended if isinstance(count, int))

    async def evict_fenced(self, seconds: float) -> None:
        """End the requests of fenced replicas there, so that :meth:`generate` moves them on.

        A replica that does not answer within ``seconds`` is gone or hangs: it is lost.
        """
        fenced = [r for r in self._replicas if r.fenced and r.live and r.lost is None]
        evictions = {r.name: asyncio.ensure_future(r.engine.abort_requests()) for r in fenced}
        if evictions:
            _, late = await asyncio.wait(evictions.values(), timeout=seconds)
            await settle(evictions.values())
            if self.heals:
                for replica in fenced:
                    if evictions[replica.name] in late:
                        self.lose(replica, f"it did not end its requests within {seconds:g} s")


def _ended(request: GenerationRequest, done: Completion | None) -> Completion:
    if done is not None:
        return replace(done, finish_reason=FinishReason.ABORT)
    return Completion(request.request_id, "", (), (), (), FinishReason.ABORT)
