"""The actor's side of a swap that the engine core makes by itself, see ``core_swap``.

Whatever happens, the weights end as one of: the new version, the old one, or dirty.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from orchestrator.errors import MidflightError, PhaseTimeout, SyncError, words
from orchestrator.tasks import settle, uninterrupted
from orchestrator.types import PhaseTimeouts, State, Swapped, WeightUpdate

from . import vllm_compat
from .core import Core
from .in_flight import Requests
from .transfer.wire_errors import from_wire
from .weights import Weights


async def swap(
    core: Core, weights: Weights, requests: Requests, update: WeightUpdate, timeouts: PhaseTimeouts
) -> Swapped:
    """Pause, apply what was prefetched, set the version and resume.

    SyncError names the phase that failed; in PAUSING the replica was told to go on as it was. A
    cancel takes the swap back, or leaves the weights dirty; requests are held after it.
    """
    held = False
    try:
        async with asyncio.timeout(timeouts.pausing):
            weights.must_have(update)
            held = True
            await requests.hold()
        weights.start(update)
    except Exception as error:
        if held:
            await _go_on(requests, timeouts)
        raise _failure(core, State.PAUSING, error, timeouts) from error
    expected = requests.expect(update)
    try:
        answer = await _ask(core, update, timeouts)
    except asyncio.CancelledError:
        requests.not_swapped(expected)
        await uninterrupted(_stop(core, weights, update, timeouts))
        raise
    except Exception as error:
        requests.not_swapped(expected)
        weights.spoiled(f"update {update.sync_id}: {str(error) or type(error).__name__}")
        raise _failure(core, State.SYNCING, error, timeouts) from error
    failed, reason = answer.get("failed"), answer.get("reason", "")
    if (ours := from_wire(reason)) is not None:
        reason = str(ours)
    if failed == State.RESUMING:
        weights.applied(update, 0.0)
    elif failed:
        requests.not_swapped(expected)
    if failed == State.SYNCING:
        weights.spoiled(f"update {update.sync_id} did not arrive: {reason}")
    if failed == State.PAUSING:
        weights.take_back()
        await _go_on(requests, timeouts)
    if failed:
        why = reason or str(PhaseTimeout(failed, timeouts.pausing, _named(core)))
        raise SyncError(failed, f"{_named(core)}: {why}") from ours
    stats = weights.applied(update, answer["transfer"])
    if answer["paused"]:
        try:
            async with asyncio.timeout(timeouts.resuming):
                await requests.resume()
        except Exception as error:
            raise _failure(core, State.RESUMING, error, timeouts) from error
    ack = requests.swapped(expected, answer["resumed_at"], answer["requests"])
    return Swapped(
        ack,
        stats,
        quiesce=answer["quiesce"],
        transfer=answer["transfer"],
        finalize=answer["finalize"],
        resume=answer["resume"],
    )


async def _ask(core: Core, update: WeightUpdate, timeouts: PhaseTimeouts) -> dict[str, Any]:
    """The engine core's answer. One that is not idle in time is asked to give up.

    TimeoutError if it says nothing at all; whatever ends it.
    """
    llm = core.running()
    call = asyncio.ensure_future(
        core.or_death(
            vllm_compat.swap(
                llm, update.pause_mode, update.kv_policy, update.sync_id, update.version
            )
        )
    )
    try:
        await asyncio.wait({call}, timeout=timeouts.pausing)
        withdrawn = not call.done()
        if withdrawn:
            # One loop there: if this is answered, so is the swap, one way or the other.
            async with asyncio.timeout(timeouts.syncing):
                await core.or_death(vllm_compat.withdraw(llm, update.sync_id))
                await asyncio.wait({call})
        return {**call.result(), "paused": withdrawn}
    finally:
        await settle([call])


async def _stop(
    core: Core, weights: Weights, update: WeightUpdate, timeouts: PhaseTimeouts
) -> None:
    """After a cancel: nothing may go on under weights that nobody has taken over."""
    untouched = False
    seconds = min(timeouts.resuming, timeouts.stopping / 2)
    with contextlib.suppress(Exception):
        async with asyncio.timeout(seconds):
            llm = core.running()
            untouched = await core.or_death(vllm_compat.withdraw(llm, update.sync_id))
    if untouched:
        weights.take_back()
    else:
        weights.spoiled(f"update {update.sync_id} was cancelled")


async def _go_on(requests: Requests, timeouts: PhaseTimeouts) -> None:
    """Resume; the failure before it outranks what this may raise: its caller resumes once more."""
    with contextlib.suppress(MidflightError, TimeoutError):
        async with asyncio.timeout(timeouts.resuming):
            await requests.resume()


def _failure(core: Core, state: State, error: Exception, timeouts: PhaseTimeouts) -> SyncError:
    if isinstance(error, TimeoutError):
        before = timeouts.pausing if state is State.SYNCING else 0.0
        seconds = before + timeouts.of(state)
        return SyncError(state.value, str(PhaseTimeout(state.value, seconds, _named(core))))
    return SyncError(state.value, words(error))


def _named(core: Core) -> str:
    return f"engine {core.name}"
