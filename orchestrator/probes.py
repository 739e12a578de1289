"""Greedy requests that run across a swap: what a fresh engine can continue.

A sampled request cannot be replayed from its middle; a greedy one can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from orchestrator.fleet import Fleet
from orchestrator.tasks import settle
from orchestrator.types import GenerationRequest, PolicyVersion, Prompt, RequestKind, Rollout

Probe = asyncio.Task[Rollout]

REMEMBERED = 64
"""Prefixes whose names must not come again; a run uses two a step."""


class Probes:
    """Owns the running probes. ``on_ended`` is told of each task, also of one that failed:
    nobody may be waiting for it."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        fleet: Fleet,
        on_finished: Callable[[Rollout], None],
        on_ended: Callable[[Probe], None],
    ) -> None:
        self.prompts = tuple(prompts)
        self.running: set[Probe] = set()
        self._max_tokens = max_tokens
        self._fleet = fleet
        self._on_finished, self._on_ended = on_finished, on_ended
        self._rounds: dict[str, int] = {}

    def launch(self, prefix: str, prompts: Sequence[Prompt] | None = None) -> list[Probe]:
        """One probe a prompt; their ids start with ``prefix`` and are new, also when it is not."""
        chosen = self.prompts if prompts is None else prompts
        nth = self._rounds[prefix] = self._rounds.pop(prefix, 0) + 1
        while len(self._rounds) > REMEMBERED:
            del self._rounds[next(iter(self._rounds))]
        again = f"~{nth}" if nth > 1 else ""
        return [self._launch(f"{prefix}{i}{again}", prompt) for i, prompt in enumerate(chosen)]

    def _launch(self, request_id: str, prompt: Prompt) -> Probe:
        request = GenerationRequest(
            request_id,
            prompt,
            max_tokens=self._max_tokens,
            temperature=0.0,
            kind=RequestKind.PROBE,
        )

        async def probe() -> Rollout:
            rollout = Rollout(request, await self._fleet.generate(request))
            self._on_finished(rollout)
            return rollout

        task = asyncio.create_task(probe(), name=request_id)
        self.running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: Probe) -> None:
        self.running.discard(task)
        self._on_ended(task)

    async def until_long_enough(
        self, probes: Sequence[Probe], tokens: int, idle: Callable[[], Awaitable[None]]
    ) -> None:
        """Wait until one of ``probes`` (with none: any request) has ``tokens`` tokens.

        Returns too when there is nothing to wait for: all probes ended early or, without
        probes, ``idle`` says that no request is live and none will come.
        """
        if tokens <= 0:
            return
        # Probes get their replica in the first turn of their tasks, before this wait starts.
        among = {p.get_name() for p in probes} or None
        waits = [asyncio.ensure_future(self._fleet.wait_for_tokens(tokens, among))]
        if not probes:
            waits.append(asyncio.ensure_future(idle()))
        try:
            while not any(w.done() for w in waits) and not (
                probes and all(p.done() for p in probes)
            ):
                alive = [p for p in probes if not p.done()]
                await asyncio.wait([*waits, *alive], return_when=asyncio.FIRST_COMPLETED)
            for task in (*waits, *probes):
                if task.done():
                    task.result()
        finally:
            await settle(waits)


def wrote_under(rollouts: Sequence[Rollout], version: PolicyVersion) -> bool:
    """Whether any of ``rollouts`` ends with tokens of ``version``."""
    return any(r.completion.spans and r.completion.spans[-1].version == version for r in rollouts)
