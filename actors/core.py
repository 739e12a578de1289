"""vLLM's engine core: brought up, watched, closed.

After a SIGKILL of the core's processes vLLM answers nothing and fails nothing: every call to it
is raced against their death.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from orchestrator.errors import EngineDied, EngineError, MidflightError
from orchestrator.types import EngineInfo

from . import hardware, vllm_compat
from .engine_settings import EngineSettings
from .nodes import ray_node
from .processes import (
    ACTOR_ENV,
    ProcessId,
    free_shared_memory,
    gone,
    kill,
    shared_memory,
    tree,
    unlink,
)
from .reporting import ActorReporter
from .scratch import SCRATCH_ENV, make_scratch, remove_scratch
from .transfer.wire_errors import from_wire
from .warm_up import warm_up

T = TypeVar("T")
GRACE_S = 3.0
"""What vLLM may take to leave a GPU before its processes are killed. On a CPU they are killed
at once: they hold nothing but memory, and never end within seconds by themselves."""

WARM_UP_S = 240.0
"""What the warm-up may take. A cold one, of fewer steps than now, took 29 s on an H200."""
GO_ON_S = 10.0
"""What an engine may take to go on after a warm-up that failed."""


class Core:
    """One ``AsyncLLM`` and its processes. Lives in ``loop``; made on any thread."""

    def __init__(
        self,
        name: str,
        settings: EngineSettings,
        reporter: ActorReporter,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.name = name
        self.tokenizer: Any = None
        """vLLM's, once the core is up; None if it has none."""
        self._settings = settings
        self._reporter = reporter
        self._llm: Any = None
        self._started: tuple[ProcessId, ...] = ()
        """This process and its descendants when vLLM was up."""
        self._dead: asyncio.Future[str] = loop.create_future()
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        """Bring vLLM up. Blocks no loop; EngineError with vLLM's reason if it fails."""
        settings = self._settings
        cores = settings.extra.get("data_parallel_size", 1)
        if cores != 1:
            raise EngineError(
                self.name,
                f"data_parallel_size {cores}: a replica has one engine core, else its parts would "
                "swap at different steps. Start more replicas instead (--engines)",
            )
        if settings.missing:
            raise EngineError(
                self.name,
                f"there is no model folder {settings.model} on its node ({hardware.node_ip()}): "
                "every node of the cluster needs it at this path, shared or as a copy",
            )
        os.environ.update(
            vllm_compat.engine_environment(
                cpu=settings.cpu,
                uni=settings.executor_backend == "uni",
                offline=settings.offline,
                threads=settings.compute_threads,
                batch_invariant=settings.batch_invariant,
            )
        )
        if settings.executor_backend == "ray":
            os.environ["VLLM_RAY_PER_WORKER_GPUS"] = str(settings.worker_gpus)
        else:  # vLLM copies its variables to Ray's workers, and the folder is not on their nodes
            os.environ.update(await asyncio.to_thread(make_scratch))
        os.environ[ACTOR_ENV] = str(os.getpid())
        began = time.perf_counter()
        # Of the time that importing vLLM takes the collector has a fifth, and all of it stays.
        gc.disable()
        try:
            self._llm = await asyncio.to_thread(vllm_compat.make_llm, settings.arguments())
        except Exception as error:
            raise EngineError(
                self.name,
                f"vLLM did not start: {type(error).__name__}: {error}{self._see_log()}",
            ) from None
        finally:
            gc.enable()
        self._reporter.forward_logger("vllm")
        self._watcher = asyncio.create_task(self._watch(vllm_compat.core_pids(self._llm)))
        self.tokenizer = self._llm.get_tokenizer()
        facts = vllm_compat.model_facts(self._llm)
        self._started = tree(os.getpid())
        if settings.warms_up:
            await self._warm_up()
        # What was imported stays: a collector that walks through it stops all requests for long.
        gc.collect()
        gc.freeze()
        info = EngineInfo(
            name=self.name,
            workers=facts["workers"],
            dtype=facts["dtype"],
            max_model_len=facts["max_model_len"],
            vocab_size=facts["vocab_size"],
            pids=tuple(p.pid for p in self._started),
            node_ip=hardware.node_ip(),
            packages=vllm_compat.packages(),
            hardware=vllm_compat.hardware(),
        )
        self._reporter.info(
            "engine up",
            seconds=round(time.perf_counter() - began, 3),
            model=settings.model,
            dtype=info.dtype,
            workers=info.workers,
            node=ray_node(),
        )
        return info

    async def _warm_up(self) -> None:
        """An engine that could not be warmed up serves all the same, and a warning says so.

        EngineError if its scheduler cannot be told to go on then.
        """
        began = time.perf_counter()
        work = asyncio.create_task(warm_up(self.running()))
        try:
            async with asyncio.timeout(WARM_UP_S):
                requests = await self.or_death(work)
        except EngineDied:
            raise
        except (MidflightError, TimeoutError) as error:
            reason = str(error) or f"it took more than {WARM_UP_S:g} s"
            await self._go_on_unwarmed(work, reason)
            return
        seconds = round(time.perf_counter() - began, 3)
        self._reporter.info("engine warmed up", seconds=seconds, requests=requests)

    async def _go_on_unwarmed(self, work: asyncio.Task[int], reason: str) -> None:
        await asyncio.wait({work}, timeout=GO_ON_S)  # it ends its requests
        try:
            # A warm-up holds the scheduler paused now and then; a paused one would serve nobody.
            async with asyncio.timeout(GO_ON_S):
                await self.or_death(vllm_compat.resume(self.running()))
        except TimeoutError:
            raise EngineError(
                self.name,
                f"its warm-up failed ({reason}), and then its scheduler did not go on within "
                f"{GO_ON_S:g} s{self._see_log()}",
            ) from None
        self._reporter.warning(
            "engine not warmed up",
            message=f"{reason}: its first steps of each size will be slow{self._see_log()}",
        )

    @property
    def dead(self) -> bool:
        """Whether its processes are gone, or it was closed."""
        return self._dead.done()

    @property
    def up(self) -> bool:
        """Whether it was started and can be called."""
        return self._llm is not None and not self.dead

    async def wait_dead(self) -> str:
        """Wait until the core is gone; returns why. Event-driven."""
        return await asyncio.shield(self._dead)

    def running(self) -> Any:
        """The ``AsyncLLM`` (EngineDied, or EngineError if it was not started)."""
        if self._dead.done():
            raise EngineDied(self.name, self._dead.result())
        if self._llm is None:
            raise EngineError(self.name, "it was not started, or is closed")
        return self._llm

    async def or_death(self, work: Awaitable[T]) -> T:
        """Await ``work``, which is cancelled if the core dies first; errors become ours."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._dead}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EngineDied(self.name, self._dead.result())
        except (MidflightError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise self.translate(error) from None
        finally:
            if not task.done():
                task.cancel()

    def translate(self, error: Exception) -> MidflightError:
        """An error of vLLM's as ours: the core's death, what a worker raised, or EngineError."""
        if self._dead.done():
            return EngineDied(self.name, self._dead.result())
        text = str(error)
        if (ours := from_wire(text)) is not None:
            return ours
        if type(error).__name__ == "EngineDeadError":
            return EngineDied(self.name, f"its engine core failed{self._see_log()}")
        return EngineError(self.name, f"{type(error).__name__}: {text}")

    def _see_log(self) -> str:
        log = self._settings.log_path
        return f" (its output: {log})" if log else ""

    async def close(self) -> None:
        """Stop vLLM, fail its requests, remove its processes and files. Idempotent."""
        if self._watcher is not None:
            self._watcher.cancel()
        llm, self._llm = self._llm, None
        if not self._dead.done():
            self._dead.set_result("it was closed")
        # Those that were started too: a worker whose engine core is gone is no child any more, and
        # takes seconds to end by itself.
        own = [p for p in {*self._started, *tree(os.getpid())} if p.pid != os.getpid()]
        self._reporter.stop_forwarding()
        if llm is not None:
            vllm_compat.fail_requests(llm, EngineDied(self.name, "it was closed"))
            if not self._settings.cpu:
                await asyncio.to_thread(vllm_compat.shutdown, llm, GRACE_S)
        shared = shared_memory(tree(os.getpid()))
        await asyncio.to_thread(kill, own)
        await asyncio.to_thread(free_shared_memory)
        unlink(shared)
        await asyncio.to_thread(remove_scratch, os.environ.get(SCRATCH_ENV))

    async def _watch(self, pids: tuple[int, ...]) -> None:
        pid = await gone(pids)
        cause = f"its engine core (pid {pid}) is gone"
        if not self._dead.done():
            self._dead.set_result(cause)
        self._reporter.error("engine core died", pid=pid)
        if self._llm is not None:
            vllm_compat.fail_requests(self._llm, EngineDied(self.name, cause))
