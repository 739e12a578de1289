"""A whole swap inside vLLM's engine core: nothing is asked or answered between pause and resume.

The plugin gives these to ``EngineCoreProc`` as two more of its utility methods, so the engine core
runs them in its one loop, between two steps:

``midflight_swap``      pause; when the last step that was under way is out, apply the update at
                        every worker, set the version, resume. Answered once, with what it took or
                        with the phase that failed.
                        Where the KV cache stays, one worker has the bytes and its copies are only
                        queued, nothing has to be waited for: the device makes them behind the step
                        that it was given, and before the next. What that step writes is still
                        labelled with the old version.
``midflight_withdraw``  for a swap that takes too long: take it back if nothing was applied yet. The
                        scheduler is paused after it in any case.

Both answers are plain data. ``time.perf_counter`` counts from one point for all processes of a
machine (CLOCK_MONOTONIC), so the caller may compare ``resumed_at`` with its own.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from .transfer.wire_errors import in_words, must_be_well

Answer = dict[str, Any]


def install(core_class: Any, wakeup: object) -> None:
    """Add the methods to vLLM's class. Idempotent. ``wakeup``: an input that asks for nothing."""
    core_class.midflight_wakeup = wakeup
    core_class.midflight_swap = midflight_swap
    core_class.midflight_withdraw = midflight_withdraw


class _Pending:
    """The swap that waits for the engine core to be idle."""

    def __init__(self, sync_id: str, version: str, asked_at: float) -> None:
        self.sync_id, self.version = sync_id, version
        self.began = asked_at
        self.answer: Future[Answer] = Future()

    def done(
        self, requests: int, spent: tuple[float, float, float, float], resumed_at: float
    ) -> None:
        """``spent``: seconds of quiesce, transfer, finalize and resume."""
        phases = dict(zip(("quiesce", "transfer", "finalize", "resume"), spent, strict=True))
        self.answer.set_result({"requests": requests, **phases, "resumed_at": resumed_at})

    def failed(self, phase: str, error: BaseException | None) -> None:
        reason = "" if error is None else in_words(error)
        self.answer.set_result({"failed": phase, "reason": reason})


def midflight_swap(
    core: Any, mode: str, clear_cache: bool, sync_id: str, version: str, asked_at: float
) -> Any:
    """Pause, apply, resume. ``asked_at``: when the caller asked, by ``perf_counter``.

    Future of ``requests`` in flight, the seconds of each phase and ``resumed_at``;

    or of ``failed``, a state, and ``reason``. PAUSING: it was told to go on as it was. SYNCING: the
    weights may be mixed and the scheduler stays paused. RESUMING: applied, but still paused.
    """
    swap = core.midflight_pending = _Pending(sync_id, version, asked_at)
    if mode == "keep" and not clear_cache and _between_steps(core, swap):
        return swap.answer
    try:
        pausing = core.pause_scheduler(mode, clear_cache)
    except Exception as error:
        core.resume_scheduler()
        swap.failed("PAUSING", error)
        return swap.answer
    if pausing is None:
        _commit(core, swap)
    else:
        pausing.add_done_callback(lambda paused: _commit(core, swap, paused))
    return swap.answer


def _between_steps(core: Any, swap: _Pending) -> bool:
    """Swap without a wait for the step under way; False, and nothing done, where that cannot be."""
    if (
        core.vllm_config.parallel_config.world_size > 1
        # Somebody has paused it: to queue copies would resume nothing.
        or core.is_scheduler_paused()
        # Labels of the swap before are still being set.
        or "_attach_weight_version" in vars(core)
        # Steps under way may be dropped there, and would be counted.
        or getattr(core, "enable_fault_tolerance", False)
    ):
        return False
    requests = sum(core.scheduler.get_request_counts())
    began = time.perf_counter()
    try:
        if _ask_workers(core, "midflight_replay", swap.sync_id) != [True]:
            return False
        _label(core, swap.version)
    except Exception as error:
        core.pause_scheduler("keep", False)
        swap.failed("SYNCING", error)
        return True
    ended = time.perf_counter()
    swap.done(requests, (began - swap.began, ended - began, 0.0, 0.0), ended)
    return True


def _ask_workers(core: Any, method: str, sync_id: str) -> list[Any]:
    answers = list(core.model_executor.collective_rpc(method, args=(sync_id,)))
    must_be_well(answers)
    return answers


def _label(core: Any, version: str) -> None:
    """Set the version behind the steps under way: their outputs are still to be labelled."""
    under_way = len(core.batch_queue or ())
    if not under_way:
        core.set_weight_version(version)
        return
    attach = core._attach_weight_version

    def attach_and_count(outputs: Any) -> None:
        nonlocal under_way
        attach(outputs)
        under_way -= 1
        if not under_way:
            del core._attach_weight_version
            core.set_weight_version(version)

    core._attach_weight_version = attach_and_count


def _commit(core: Any, swap: _Pending, paused: Future[None] | None = None) -> None:
    if swap.answer.done():  # withdrawn
        return
    try:
        _run(core, swap, paused)
    finally:
        # The loop that called us looks for input next, not for work, and would wait for it.
        core.input_queue.put_nowait(core.midflight_wakeup)


def _run(core: Any, swap: _Pending, paused: Future[None] | None) -> None:
    idle = time.perf_counter()
    problem = None if paused is None else paused.exception()
    if problem is not None:
        core.resume_scheduler()
        swap.failed("PAUSING", problem)
        return
    requests = sum(core.scheduler.get_request_counts())
    try:
        _ask_workers(core, "midflight_apply", swap.sync_id)
        usable = time.perf_counter()
        core.set_weight_version(swap.version)
    except Exception as error:
        swap.failed("SYNCING", error)
        return
    whole = time.perf_counter()
    try:
        core.resume_scheduler()
    except Exception as error:
        swap.failed("RESUMING", error)
        return
    resumed = time.perf_counter()
    spent = (idle - swap.began, usable - idle, whole - usable, resumed - whole)
    swap.done(requests, spent, resumed)


def midflight_withdraw(core: Any, sync_id: str) -> bool:
    """Whether nothing of the swap was applied, nor will be. The scheduler is paused then and else.

    ``midflight_swap`` has been answered when this is.
    """
    swap: _Pending | None = getattr(core, "midflight_pending", None)
    if swap is not None and swap.sync_id == sync_id and not swap.answer.done():
        swap.failed("PAUSING", None)
        return True
    core.pause_scheduler("keep", False)
    if swap is None or swap.sync_id != sync_id:  # its call never came here
        return True
    return bool(swap.answer.result().get("failed") == "PAUSING")
