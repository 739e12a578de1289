"""Prompts in, versioned rollouts out, bounded at both ends.

``RolloutSource.run`` keeps up to ``max_in_flight`` requests generating. It waits for: a free
request slot and buffer credit for a whole group; unblocked by requests ending and by
:meth:`RolloutSource.take`. ``take`` waits for: whole groups; unblocked by requests ending.

Credit is taken when a group is admitted, not when it is finished: a finished rollout never
waits for room, so requests and the consumer cannot wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.errors import Closed, ConfigError, StaleRollout
from orchestrator.options import GenerationOptions
from orchestrator.staleness import consume
from orchestrator.tasks import settle
from orchestrator.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    PolicyVersion,
    Prompt,
    RequestKind,
    Rollout,
)

Generate = Callable[[GenerationRequest], Awaitable[Completion]]


@dataclass(frozen=True, slots=True)
class SourceState:
    """Where a :class:`RolloutSource` is; another one starts from it.

    Every group number is in exactly one place: consumed before, ``unfinished``, ``waiting``, or
    ``next_group`` and above.
    """

    next_group: int
    """Number of the next group to be admitted; its prompt is this modulo the prompts."""
    unfinished: tuple[int, ...] = ()
    """Admitted, not whole: to be generated again, with the same request ids and seeds."""
    waiting: tuple[tuple[Rollout, ...], ...] = ()
    """Whole groups nobody has taken, oldest first."""
    group_size: int | None = None
    """With ``seed`` it makes the requests' seeds; None: not known."""
    seed: int | None = None


@dataclass(slots=True)
class _Group:
    number: int
    size: int
    done: list[Rollout] = field(default_factory=list)


class RolloutSource:
    """Owns every rollout request and the buffer of finished ones.

    ``generate`` runs one request; ``version`` is the newest published policy;
    ``on_finished`` and ``on_consumed(rollout, accepted)`` are told of each rollout once, the latter
    again where :meth:`judge_again` finds it staler; of those that wait in ``start``, the state to
    go on from, ``on_finished`` was told before.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        options: GenerationOptions,
        generate: Generate,
        version: Callable[[], PolicyVersion],
        on_finished: Callable[[Rollout], None] = lambda rollout: None,
        on_consumed: Callable[[Rollout, bool], None] = lambda rollout, accepted: None,
        start: SourceState | None = None,
    ) -> None:
        if not prompts:
            raise ValueError("no prompts: rollouts need at least one")
        for size in ("max_tokens", "group_size", "prompts_per_step", "max_in_flight"):
            if getattr(options, size) < 1:
                raise ValueError(f"{size} is {getattr(options, size)}: it must be 1 or more")
        if options.buffer_size < options.group_size * options.prompts_per_step:
            raise ValueError(
                f"buffer_size {options.buffer_size} holds less than one batch "
                f"({options.prompts_per_step} groups of {options.group_size})"
            )
        self.prompts = tuple(prompts)
        self._options = options
        self._generate = generate
        self._version = version
        self._on_finished = on_finished
        self._on_consumed = on_consumed
        self._slots = asyncio.Semaphore(options.max_in_flight)
        start = start or SourceState(0)
        same_requests(start, options)
        self._next = start.next_group
        self._again = deque(start.unfinished)
        self._groups: dict[str, _Group] = {}
        self._ready: deque[list[Rollout]] = deque(list(group) for group in start.waiting)
        # Below 0 where more groups wait than a smaller buffer has room for.
        self._room = options.buffer_size // options.group_size - len(self._ready)
        self._credit = asyncio.Semaphore(max(0, self._room))
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: Exception | None = None
        self._failed = asyncio.Event()
        self._stopped = False
        self._closed = False
        self.discarded = 0
        """Rollouts refused as too stale so far."""

    @property
    def in_flight(self) -> int:
        """Requests generating now."""
        return len(self._tasks)

    def state(self) -> SourceState:
        """Where it is now. A group of which a request still runs counts as not begun."""
        return SourceState(
            self._next,
            tuple(sorted([*(g.number for g in self._groups.values()), *self._again])),
            tuple(tuple(group) for group in self._ready),
            self._options.group_size,
            self._options.seed,
        )

    def _requests(self, n: int) -> list[GenerationRequest]:
        o = self._options
        return [
            GenerationRequest(
                request_id=f"r{n}.{i}",
                prompt=self.prompts[n % len(self.prompts)],
                max_tokens=o.max_tokens,
                temperature=o.temperature,
                # One stream of seeds a run: no two samples share one.
                seed=(o.seed << 32) + n * o.group_size + i,
                kind=RequestKind.ROLLOUT,
                group=f"g{n}",
            )
            for i in range(o.group_size)
        ]

    def _admit(self) -> list[GenerationRequest]:
        self._room -= 1
        if self._again:
            number = self._again.popleft()
        else:
            number, self._next = self._next, self._next + 1
        requests = self._requests(number)
        self._groups[requests[0].group] = _Group(number, len(requests))
        return requests

    async def run(self) -> None:
        """Submit groups until cancelled; raises what a request failed with."""
        submit = asyncio.create_task(self._submit(), name="rollout-submit")
        failed = asyncio.create_task(self._failed.wait(), name="rollout-failed")
        try:
            await asyncio.wait([submit, failed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await settle([submit, failed])
        if self._error is not None:
            raise self._error
        submit.result()

    async def _submit(self) -> None:
        while True:
            await self._credit.acquire()
            for request in self._admit():
                await self._slots.acquire()
                if self._stopped:
                    return
                task = asyncio.create_task(self._one(request), name=request.request_id)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _one(self, request: GenerationRequest) -> None:
        try:
            completion = await self._generate(request)
        except Exception as error:
            async with self._changed:
                self._error = self._error or error
                self._failed.set()
                self._changed.notify_all()
        else:
            rollout = Rollout(request, completion)
            self._on_finished(rollout)
            async with self._changed:
                group = self._groups[request.group]
                group.done.append(rollout)
                if len(group.done) == group.size:
                    del self._groups[request.group]
                    self._ready.append(sorted(group.done, key=lambda r: r.request.request_id))
                    self._changed.notify_all()
        finally:
            self._slots.release()

    async def take(self, groups: int) -> list[Rollout]:
        """The next ``groups`` whole groups, oldest first, with their staleness.

        A group with a rollout beyond ``max_staleness`` is discarded whole and does not count:
        group-relative advantages need all of it. Raises what a request failed with.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(self._settled(groups))
                if self._error is not None:
                    raise self._error
                if len(self._ready) < groups:
                    raise Closed("no more rollouts: the orchestrator was closed")
            # No await from here on: what is held in between would be in nobody's state.
            waiting = [self._ready.popleft() for _ in range(groups)]
            # Judged together and last: a swap may have been published while waiting.
            waiting = [fresh for group in waiting if (fresh := self._judge(group))]
            if len(waiting) == groups:
                break
            self._ready.extendleft(reversed(waiting))
        for group in waiting:
            self._give_room()
            for rollout in group:
                self._on_consumed(rollout, True)
        return [rollout for group in waiting for rollout in group]

    def _settled(self, groups: int) -> Callable[[], bool]:
        return lambda: len(self._ready) >= groups or self._error is not None or self._closed

    def _judge(self, group: list[Rollout]) -> list[Rollout] | None:
        if all(r.completion.finish_reason is not FinishReason.ABORT for r in group):
            try:
                return [consume(r, self._version(), self._options.max_staleness) for r in group]
            except StaleRollout:
                pass
        self.discarded += len(group)
        self._give_room()
        for rollout in group:
            self._on_consumed(rollout, False)
        return None

    def judge_again(self, rollout: Rollout) -> Rollout | None:
        """One that was taken, with its staleness now; None, and told as refused, if that is too
        much: a swap may have been published since its group was taken.
        """
        try:
            fresh = consume(rollout, self._version(), self._options.max_staleness)
        except StaleRollout:
            self.discarded += 1
            self._on_consumed(replace(rollout, staleness=None), False)
            return None
        if fresh.staleness != rollout.staleness:
            self._on_consumed(fresh, True)
        return fresh

    def _give_room(self) -> None:
        self._room += 1
        if self._room > 0:
            self._credit.release()

    async def idle(self) -> None:
        """Wait until no request runs and, for lack of room, none will before the next take."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._groups and self._room <= 0)

    def stop(self) -> None:
        """Submit nothing from now on: a request that ends must not make room for another."""
        self._stopped = True

    async def drain(self, seconds: float) -> None:
        """Wait for running requests to end (they were aborted); cancel what has not by then."""
        self.stop()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=seconds)
        await settle(set(self._tasks))
        async with self._changed:
            self._closed = True
            self._changed.notify_all()


def same_requests(start: SourceState, options: GenerationOptions) -> None:
    """ConfigError where a group made again would not be the group it was."""
    for name in ("group_size", "seed"):
        was, now = getattr(start, name), getattr(options, name)
        if was is not None and was != now:
            raise ConfigError(
                f"{name} was {was} when the checkpoint was written and is {now} now: the same "
                f"requests cannot be made again. Leave {name} as it was, or start a new run"
            )
