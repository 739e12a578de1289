"""The engine actor: one vLLM replica that generates and swaps its weights while doing so.

All state lives in one home loop (see ``home``); engine calls are raced against the death of
the engine core's processes, because after a SIGKILL vLLM answers nothing and fails nothing.

Weights are in one of three states: *clean* (a committed version), *receiving* (between
``start_update`` and ``finish_update``) and *dirty* (an update failed). Only clean weights are
ever resumed; a dirty replica becomes clean by a whole new update.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from orchestrator.errors import ChannelError, EngineDied, EngineError, MidflightError, TransferError
from orchestrator.protocols import FirstTokens
from orchestrator.types import (
    ChannelSpec,
    Completion,
    EngineInfo,
    EngineStatus,
    FinishReason,
    GenerationRequest,
    KVPolicy,
    OpContext,
    PauseAck,
    PauseMode,
    PolicyVersion,
    TransferStats,
    WeightUpdate,
)

from . import vllm_compat
from .engine_settings import EngineSettings
from .home import HomeLoop, at_home
from .ledger import Ledger, Live
from .processes import (
    ACTOR_ENV,
    free_shared_memory,
    gone,
    kill,
    shared_memory,
    tree,
    unlink,
)
from .reporting import ActorReporter, Record, redirect_output
from .texts import cut_text
from .transfer.channel import Channel
from .transfer.inbox import Invitation
from .transfer.rendezvous import Rendezvous
from .transfer.wire_errors import from_wire

T = TypeVar("T")
GRACE_S = 3.0
"""What vLLM may take to leave a GPU before its processes are killed. On a CPU they are killed
at once: they hold nothing but memory, and never end within seconds by themselves."""


class EngineActor:
    """Mirrors :class:`orchestrator.protocols.Engine`; each call names its operation first."""

    def __init__(self, name: str, settings: EngineSettings) -> None:
        self.name = name
        self.settings = settings
        self.home = HomeLoop(f"engine-{name}")
        self._reporter = ActorReporter(name)
        if settings.log_path is not None:
            redirect_output(settings.log_path)
        self._llm: Any = None
        self._tokenizer: Any = None
        self._ledger = Ledger()
        self._held: dict[str, asyncio.Future[bool]] = {}
        self._streams: dict[str, vllm_compat.Stream] = {}
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._submitting = 0
        self._submitted: asyncio.Future[None] | None = None
        self._paused = False
        self._ack: PauseAck | None = None
        self._weights = "clean"
        self._why_dirty = ""
        self._version = PolicyVersion(0)
        self._epoch = 0
        self._channel: Channel | None = None
        self._spec: ChannelSpec | None = None
        self._first_rank = -1
        self._calls = 0
        self._control = asyncio.Lock()
        self._dead: asyncio.Future[str] = self.home.loop.create_future()
        self._watcher: asyncio.Task[None] | None = None
        self._logged_parameters = False

    # life

    @at_home
    async def start(self, ctx: OpContext) -> EngineInfo:
        """Bring vLLM up. Blocks no loop; EngineError with vLLM's reason if it fails."""
        with self._reporter.op(ctx):
            settings = self.settings
            os.environ.update(
                vllm_compat.engine_environment(
                    cpu=settings.cpu,
                    offline=settings.offline,
                    threads=settings.compute_threads,
                    batch_invariant=settings.batch_invariant,
                )
            )
            os.environ[ACTOR_ENV] = str(os.getpid())
            began = time.perf_counter()
            try:
                self._llm = await asyncio.to_thread(vllm_compat.make_llm, settings.arguments())
            except Exception as error:
                raise EngineError(
                    self.name,
                    f"vLLM did not start: {type(error).__name__}: {error}"
                    + (f" (its output: {settings.log_path})" if settings.log_path else ""),
                ) from None
            self._reporter.forward_logger("vllm")
            self._watcher = asyncio.create_task(self._watch_core(vllm_compat.core_pids(self._llm)))
            self._tokenizer = self._llm.get_tokenizer()
            facts = vllm_compat.model_facts(self._llm)
            info = EngineInfo(
                name=self.name,
                workers=facts["workers"],
                dtype=facts["dtype"],
                max_model_len=facts["max_model_len"],
                vocab_size=facts["vocab_size"],
                pids=tuple(p.pid for p in tree(os.getpid())),
                node_ip=_node_ip(),
                packages=vllm_compat.packages(),
                hardware=vllm_compat.hardware(),
            )
            self._reporter.info(
                "engine up",
                seconds=round(time.perf_counter() - began, 3),
                model=settings.model,
                dtype=info.dtype,
                workers=info.workers,
            )
            return info

    async def next_events(self) -> list[Record]:
        """Wait for log records of this actor."""
        return await self._reporter.next_events()

    @at_home
    async def watch(self) -> str:
        """Wait until the engine core is gone; returns why. Event-driven."""
        return await asyncio.shield(self._dead)

    @at_home
    async def aclose(self, ctx: OpContext) -> None:
        """Stop vLLM and its processes. Idempotent. The actor itself is of no use afterwards."""
        if self._watcher is not None:
            self._watcher.cancel()
        llm, self._llm = self._llm, None
        if not self._dead.done():
            self._dead.set_result("it was closed")
        own = [p for p in tree(os.getpid()) if p.pid != os.getpid()]
        self._reporter.stop_forwarding()
        if llm is not None:
            vllm_compat.fail_requests(llm, EngineDied(self.name, "it was closed"))
            if not self.settings.cpu:
                await asyncio.to_thread(vllm_compat.shutdown, llm, GRACE_S)
        shared = shared_memory(tree(os.getpid()))
        await asyncio.to_thread(kill, own)
        await asyncio.to_thread(free_shared_memory)
        unlink(shared)

    # requests

    @at_home
    async def generate(self, ctx: OpContext, request: GenerationRequest) -> Completion:
        """Run ``request`` to its end; held back while the replica is paused."""
        task = asyncio.current_task()
        rid = request.request_id
        if rid in self._tasks:
            raise EngineError(self.name, f"request {rid!r} is already running")
        assert task is not None
        self._tasks[rid] = task
        try:
            with self._reporter.op(ctx):
                return await self._generate(request)
        finally:
            self._tasks.pop(rid, None)

    @at_home
    async def cancel_request(self, request_id: str) -> None:
        """End a request whose caller is gone; returns when nothing of it is left."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    @at_home
    async def wait_for_tokens(
        self, ctx: OpContext, threshold: int, among: Collection[str] | None = None
    ) -> int:
        """Wait until a live request (of ``among``) has ``threshold`` tokens; how many live."""
        return await self._or_death(self._ledger.wait_for_tokens(threshold, among))

    @at_home
    async def abort_requests(self, ctx: OpContext) -> int:
        """End every request, held ones too, with what it has; how many there were."""
        streams, held = list(self._streams.values()), list(self._held.values())
        for future in held:
            if not future.done():
                future.set_result(False)
        for stream in streams:
            await self._or_death(stream.abort())
        return len(streams) + len(held)

    @at_home
    async def prompt_logprobs(
        self, ctx: OpContext, prompts: Sequence[Sequence[int]]
    ) -> tuple[tuple[float, ...], ...]:
        """Log-probability of each prompt token but the first, under the current weights."""
        return tuple(await asyncio.gather(*(self._score(list(p)) for p in prompts)))

    # the swap

    @at_home
    async def open_channel(self, ctx: OpContext, spec: ChannelSpec, first_rank: int) -> None:
        """Join the transfer group with all workers; the known pattern must arrive."""
        with self._reporter.op(ctx):
            async with self._control:
                llm = self._running()
                if spec.backend is not self.settings.backend:
                    raise ChannelError(
                        f"engine {self.name} was started for "
                        f"{self.settings.backend or 'no swaps'}, the channel is {spec.backend}"
                    )
                # vLLM calls a paused engine sleeping too.
                if not self._paused and await self._or_death(llm.is_sleeping()):
                    raise ChannelError(f"engine {self.name} sleeps: wake it up before a swap")
                self._channel = None
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
                    await self._or_death(
                        vllm_compat.open_receivers(llm, {"invitation": invitation})
                    )
                except MidflightError:
                    self._channel = None
                    raise
                self._reporter.info(
                    "channel open", backend=spec.backend.value, rank=first_rank, bytes=spec.nbytes
                )

    @at_home
    async def close_channel(self, ctx: OpContext) -> None:
        """Leave the group. Idempotent."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        # Over the store first: a worker that sits in a transfer answers no RPC until it fails.
        await asyncio.to_thread(channel.close, f"engine {self.name} left")
        if self._llm is not None and not self._dead.done():
            await self._or_death(self._llm.collective_rpc("midflight_close"))

    @at_home
    async def pause(self, ctx: OpContext, mode: PauseMode, kv: KVPolicy) -> PauseAck:
        """Return when nothing is scheduled any more. Idempotent."""
        with self._reporter.op(ctx):
            async with self._control:
                llm = self._running()
                if self._ack is not None:
                    return self._ack
                self._paused = True
                # A request on its way into the engine would carry the old version's cache salt.
                while self._submitting:
                    self._submitted = asyncio.get_running_loop().create_future()
                    await self._submitted
                await self._or_death(vllm_compat.pause(llm, mode, kv))
                await self._deliver()
                swap = self._ledger.freeze(ctx.sync_id or "")
                self._ack = PauseAck(self.name, len(self._ledger.live))
                self._reporter.info(
                    "paused",
                    mode=mode.value,
                    kv=kv.value,
                    requests=self._ack.requests_in_flight,
                    writing=len(swap.frozen),
                )
                return self._ack

    @at_home
    async def start_update(self, ctx: OpContext, update: WeightUpdate) -> None:
        """From here on the weights are not to be served."""
        with self._reporter.op(ctx):
            async with self._control:
                llm = self._running()
                if self._ack is None:
                    raise EngineError(self.name, "an update needs a paused replica: pause it first")
                if self._channel is None:
                    raise ChannelError(f"engine {self.name} has no open channel")
                if self._weights != "clean":
                    await self._or_death(llm.collective_rpc("midflight_forget"))
                self._weights = "receiving"
                self._epoch += 1
                with self._dirty_on_error(f"update {update.sync_id} did not start"):
                    await self._or_death(llm.start_weight_update())

    @at_home
    async def receive_update(self, ctx: OpContext, update: WeightUpdate) -> TransferStats:
        """Receive every tensor and load it. Returns when the data is usable."""
        with self._reporter.op(ctx):
            async with self._control:
                llm, spec = self._running(), self._receiving(update)
                began = time.perf_counter()
                with self._dirty_on_error(f"update {update.sync_id} did not arrive"):
                    await self._or_death(vllm_compat.receive(llm, {"sync_id": update.sync_id}))
                return TransferStats(spec.nbytes, time.perf_counter() - began)

    @at_home
    async def finish_update(self, ctx: OpContext, update: WeightUpdate) -> None:
        """Finalise; tokens written from now on carry ``update.version``."""
        with self._reporter.op(ctx):
            async with self._control:
                llm = self._running()
                self._receiving(update)
                with self._dirty_on_error(f"update {update.sync_id} was not finished"):
                    await self._or_death(llm.finish_weight_update(str(update.version)))
                self._weights, self._version = "clean", update.version

    @at_home
    async def resume(self, ctx: OpContext) -> None:
        """Let requests go on. Idempotent. EngineError if the weights are not a whole version."""
        with self._reporter.op(ctx):
            async with self._control:
                llm = self._running()
                if self._weights != "clean":
                    raise EngineError(
                        self.name,
                        f"its weights are half applied ({self._why_dirty or 'update under way'}): "
                        "it may only serve after a whole new update",
                    )
                if not self._paused:
                    return
                if self._ledger.swap is not None:
                    self._ledger.swap.resumed(time.perf_counter())
                await self._or_death(vllm_compat.resume(llm))
                self._paused, self._ack = False, None
                for future in self._held.values():
                    if not future.done():
                        future.set_result(True)

    @at_home
    async def wait_first_tokens(self, ctx: OpContext, update: WeightUpdate) -> FirstTokens:
        """Wait until every request that was writing at the pause has written again or ended."""
        swap = self._ledger.swap
        if swap is None or swap.sync_id != update.sync_id:
            raise EngineError(self.name, f"it was not paused for {update.sync_id}")
        return await self._or_death(swap.first_tokens())

    @at_home
    async def digests(self, ctx: OpContext, update: WeightUpdate) -> dict[str, str]:
        """Digests of the staged bytes; the same on all workers, else TransferError."""
        if self._channel is None:
            raise ChannelError(f"engine {self.name} has no open channel")
        meeting, first_rank = self._channel.meeting, self._first_rank
        self._calls += 1
        key = f"digest/{self.name}/{self._calls}"
        llm = self._running()
        await self._or_death(llm.collective_rpc("midflight_digest", args=(key,)))
        workers = vllm_compat.model_facts(llm)["workers"]
        answers: dict[int, dict[str, str]] = {}
        for rank in range(first_rank, first_rank + workers):
            text = await self._or_death(asyncio.to_thread(meeting.take, f"{key}/{rank}"))
            answer = json.loads(text)
            if "error" in answer:
                raise TransferError(f"rank {rank} could not digest: {answer['error']}")
            answers[rank] = answer["digests"]
        first = answers[first_rank]
        for rank, found in answers.items():
            differing = [name for name in first if found.get(name) != first[name]]
            if differing or len(found) != len(first):
                raise TransferError(
                    f"ranks {first_rank} and {rank} of engine {self.name} received different "
                    f"bytes: {', '.join(differing[:8])}"
                )
        return first

    @at_home
    async def status(self, ctx: OpContext) -> EngineStatus:
        """How the replica is now. Asks nobody, so it answers also while an update runs."""
        return EngineStatus(
            self.name, self._version, self._paused, len(self._ledger.live), len(self._held)
        )

    # inside

    async def _generate(self, request: GenerationRequest) -> Completion:
        params = vllm_compat.sampling(
            request.max_tokens, request.temperature, request.seed, request.ignore_eos
        )
        if not self._logged_parameters:
            self._logged_parameters = True
            self._reporter.info("sampling parameters", parameters=repr(params))
        prompt = request.prompt.token_ids
        live = Live(request)
        stream = await self._submit(request.request_id, prompt, params)
        if stream is None:
            return Completion(request.request_id, self.name, (), (), (), FinishReason.ABORT)
        self._ledger.add(live)
        self._streams[request.request_id] = stream
        final: Any = None
        try:
            async for output in self._outputs(stream):
                piece = output.outputs[0]
                ids = list(piece.token_ids)
                if ids:
                    chosen = vllm_compat.chosen_logprobs(ids, piece.logprobs)
                    self._ledger.wrote(live, ids, chosen, time.perf_counter())
                final = piece
            return self._completion(live, final)
        except (MidflightError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise self._translate(error) from None
        finally:
            self._streams.pop(request.request_id, None)
            self._ledger.remove(live)
            if not self._dead.done():
                await stream.close()

    async def _outputs(self, stream: vllm_compat.Stream) -> Any:
        # No race with death per token: the watcher puts the error into every open stream.
        async for output in stream.outputs():
            yield output

    def _completion(self, live: Live, final: Any) -> Completion:
        found = vllm_compat.spans(final.weight_versions, len(live.token_ids))
        text = ""
        pieces: tuple[str, ...] = ()
        if self._tokenizer is not None:
            text, pieces = cut_text(
                self._decode, live.request.prompt.token_ids, live.token_ids, [s.end for s in found]
            )
        return Completion(
            request_id=live.request.request_id,
            engine=self.name,
            token_ids=tuple(live.token_ids),
            logprobs=tuple(live.logprobs),
            spans=found,
            finish_reason=vllm_compat.finish_reason(final.finish_reason),
            text=text,
            span_texts=pieces,
            stalls=live.stalls(),
        )

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    async def _score(self, prompt: list[int]) -> tuple[float, ...]:
        self._calls += 1
        name = f"score-{self._calls}"
        stream = await self._submit(name, prompt, vllm_compat.scoring(), salt=name)
        if stream is None:
            raise EngineError(self.name, "the replica was told to end its requests")
        try:
            logprobs: Any = None
            async for output in self._outputs(stream):
                logprobs = output.prompt_logprobs
            return vllm_compat.prompt_logprobs(prompt, logprobs)
        except (MidflightError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise self._translate(error) from None
        finally:
            if not self._dead.done():
                await stream.close()

    async def _submit(
        self, request_id: str, prompt: Sequence[int], params: Any, salt: str | None = None
    ) -> vllm_compat.Stream | None:
        """Hand a request to vLLM, after the pause if there is one; None if ended before that."""
        while self._paused:
            go = self._held[request_id] = asyncio.get_running_loop().create_future()
            try:
                if not await self._or_death(_value(go)):
                    return None
            finally:
                self._held.pop(request_id, None)
        llm = self._running()
        self._submitting += 1
        # Keyed by what the cache was computed with, so that no version reuses another's.
        salt = salt or f"{self._version}.{self._epoch}"
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
            raise self._translate(error) from None
        finally:
            self._submitting -= 1
            if not self._submitting and self._submitted is not None:
                if not self._submitted.done():
                    self._submitted.set_result(None)
                self._submitted = None

    async def _deliver(self) -> None:
        """Let outputs written before the pause reach their requests. Takes no time, only turns."""
        for _ in range(10_000):
            if not vllm_compat.undelivered(self._llm):
                break
            await asyncio.sleep(0)
        for _ in range(4):  # output handler, collector, request, its caller
            await asyncio.sleep(0)

    def _running(self) -> Any:
        if self._dead.done():
            raise EngineDied(self.name, self._dead.result())
        if self._llm is None:
            raise EngineError(self.name, "it was not started, or is closed")
        return self._llm

    def _receiving(self, update: WeightUpdate) -> ChannelSpec:
        if self._channel is None or self._spec is None:
            raise ChannelError(f"engine {self.name} has no open channel")
        if self._weights != "receiving":
            raise TransferError(
                f"engine {self.name} is not in an update ({self._weights}"
                f"{': ' + self._why_dirty if self._why_dirty else ''}): start {update.sync_id} anew"
            )
        return self._spec

    def _dirty_on_error(self, why: str) -> _Dirty:
        return _Dirty(self, why)

    async def _or_death(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` unless the engine core dies first; errors become ours."""
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
            raise self._translate(error) from None
        finally:
            if not task.done():
                task.cancel()

    def _translate(self, error: Exception) -> MidflightError:
        if self._dead.done():
            return EngineDied(self.name, self._dead.result())
        text = str(error)
        if (ours := from_wire(text)) is not None:
            return ours
        return EngineError(self.name, f"{type(error).__name__}: {text}")

    async def _watch_core(self, pids: tuple[int, ...]) -> None:
        pid = await gone(pids)
        cause = f"its engine core (pid {pid}) is gone"
        if not self._dead.done():
            self._dead.set_result(cause)
        self._reporter.error("engine core died", pid=pid)
        if self._llm is not None:
            vllm_compat.fail_requests(self._llm, EngineDied(self.name, cause))


class _Dirty:
    """Marks the weights dirty if the block does not end well, cancellation included."""

    def __init__(self, actor: EngineActor, why: str) -> None:
        self._actor, self._why = actor, why

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._actor._weights = "dirty"
            self._actor._why_dirty = f"{self._why}: {error or type(error).__name__}"
            self._actor._reporter.error("update failed", reason=self._actor._why_dirty)


async def _value(future: asyncio.Future[T]) -> T:
    return await future


def _node_ip() -> str:
    import ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"
