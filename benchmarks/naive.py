"""The way that published examples swap weights, as the baseline.

Pause through vLLM's public call (which ends with a sleep of 20 ms), sleep after pausing so that
the pause "takes hold" (5 s), then one remote call a step, each awaited before the next. The
transport is the same as ours, so only the control differs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from actors.engine import EngineActor
from actors.home import at_home
from actors.ledger import Live, Swap
from orchestrator.cycle import stall_stats
from orchestrator.fleet import Fleet
from orchestrator.protocols import WeightSender
from orchestrator.types import (
    KVPolicy,
    OpContext,
    PauseAck,
    PauseMode,
    PhaseSeconds,
    PolicyVersion,
    StallStats,
    WeightUpdate,
)

SLEEP_S = 5.0
OUTPUTS = 3
"""Usual from the asking for a swap to the first token after it: two steps are under way."""


class Moment(Swap):
    """At which nothing is swapped: who has written ``OUTPUTS`` times since has gone through."""

    def __init__(self, live: Iterable[Live], now: float) -> None:
        super().__init__("nothing", live, asked_at=now)
        self._left = dict.fromkeys(self.frozen, OUTPUTS)

    def _is_first(self, live: Live, version: PolicyVersion | None) -> bool:
        if live in self._left:
            self._left[live] -= 1
        return self._left.get(live) == 0

    def _is_under_way(self, live: Live, version: PolicyVersion | None) -> bool:
        return live in self._left


class BenchmarkEngineActor(EngineActor):
    """An engine actor that can also pause the public way, and be watched while nothing is done."""

    @at_home
    async def pause_publicly(self, ctx: OpContext, mode: PauseMode, kv: KVPolicy) -> None:
        """``AsyncLLM.pause_generation``, its sleep included."""
        await self._llm.pause_generation(
            mode=mode.value, clear_cache=kv is KVPolicy.RECOMPUTE or mode is not PauseMode.KEEP
        )

    @at_home
    async def nothing_swapped(self, ctx: OpContext) -> tuple[float, ...]:
        """What a swap that does nothing would have cost each request that writes now."""
        ledger = self._requests.ledger
        moment = Moment(ledger.live.values(), time.perf_counter())
        ledger.follow(moment)
        return (await self._core.or_death(moment.first_tokens())).stalls

    @at_home
    async def written(self, ctx: OpContext) -> tuple[float, int]:
        """Now (``perf_counter``), and the tokens of all requests until now."""
        return time.perf_counter(), self._requests.ledger.written


@dataclass(frozen=True, slots=True)
class NaiveSwap:
    """What one naive swap took."""

    seconds: PhaseSeconds
    stall_s: StallStats
    stalls: tuple[float, ...]
    acks: tuple[PauseAck, ...]


async def naive_swap(
    fleet: Fleet, sender: WeightSender, update: WeightUpdate, sleep_s: float = SLEEP_S
) -> NaiveSwap:
    """One swap of every replica, one call after the other."""
    now = asyncio.get_running_loop().time
    began = now()
    for replica in fleet.serving:
        await replica.engine.pause_publicly(  # type: ignore[attr-defined]
            update.pause_mode, update.kv_policy
        )
    # The replica's own books: idempotent in vLLM, it is paused already.
    acks = tuple(await fleet.pause(update.pause_mode, update.kv_policy))
    await asyncio.sleep(sleep_s)
    paused = now()
    if update.at_hand:
        await fleet.prefetch(update, sender)  # inside the pause, as everything here
        await fleet.start_update(update)
        await fleet.receive_update(update)
    else:
        await fleet.start_update(update)
        await fleet.transfer(update, sender)
    moved = now()
    await fleet.finish_update(update)
    fleet.commit(update.version)
    finished = now()
    await fleet.resume()
    resumed = now()
    firsts = await fleet.first_tokens(update)
    stalls = tuple(s for f in firsts for s in f.stalls)
    return NaiveSwap(
        PhaseSeconds(
            quiesce=paused - began,
            transfer=moved - paused,
            finalize=finished - moved,
            resume=resumed - finished,
            first_token=min((f.seconds for f in firsts if f.seconds is not None), default=None),
        ),
        stall_stats(stalls),
        stalls,
        acks,
    )
