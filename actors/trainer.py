"""The trainer: a plain class that the adapters run as a Ray actor.

Heavy work runs in threads, so the actor answers at any time, from whichever event loop::

    work      start, train, stage, reference_logprobs,    one after the other: one model
              save_state, load_state
    link      listen, open_channel, send                  may block in a collective
    files     save_checkpoint                             reads the staged bytes
    control   close_channel, aclose                       breaks what blocks in ``link``

``stage`` freezes the weights; ``send``, ``save_checkpoint`` and ``reference_logprobs`` read
the frozen bytes while ``train`` goes on changing the live ones. ``stage`` waits for readers.
Nothing here imports torch until :meth:`TrainerActor.start`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from actors import hardware
from actors.nodes import check_address, node_address, ray_node
from actors.reporting import ActorReporter, Record, redirect_output
from actors.rewards import DEFAULT_REWARD, get_reward
from orchestrator.errors import ConfigError, MidflightError, TrainerError
from orchestrator.types import (
    ChannelSpec,
    OpContext,
    PolicyVersion,
    Rollout,
    TrainStats,
    TransferBackend,
    TransferStats,
    WeightUpdate,
)

if TYPE_CHECKING:
    from torch import nn

    from actors.learner import Learner
    from actors.transfer.base import NamedTensors, Sender

P = ParamSpec("P")
R = TypeVar("R")

STAGE_WAIT_S = 300.0
"""How long ``stage`` waits for a send or a save that still reads the former bytes."""


class TrainerActor:
    """Implements :class:`orchestrator.protocols.Trainer`, with an OpContext first in each call.

    Errors are MidflightError kinds; anything unexpected arrives as TrainerError with its
    kind and words.
    """

    def __init__(
        self,
        *,
        trainer_path: str,
        engine_path: str,
        run_dir: str,
        backend: TransferBackend,
        learning_rate: float,
        grad_clip: float = 1.0,
        reward: str = DEFAULT_REWARD,
        seed: int = 0,
        wire_dtype: str | None = None,
        device: str | None = None,
        threads: int | None = None,
        host: str = "127.0.0.1",
        log_path: str | None = None,
        name: str = "trainer",
    ) -> None:
        """``device``: torch's name; None: ``cuda`` for a GPU backend, else ``cpu``.

        ``wire_dtype``: declared cast to the engines' dtype. ``host``: where the channel
        listens, reachable by the engines; ``auto``: this node's address as Ray knows it.
        ``log_path``: where this process's output goes.
        """
        if log_path is not None:
            redirect_output(log_path)
        self._reporter = ActorReporter(name)
        self._trainer_path, self._engine_path = Path(trainer_path), Path(engine_path)
        self._run_dir = Path(run_dir)
        self._backend = TransferBackend(backend)
        self._learning_rate, self._grad_clip = learning_rate, grad_clip
        self._reward = get_reward(reward)
        self._seed, self._wire_dtype = seed, wire_dtype
        gpu = self._backend is not TransferBackend.GLOO
        self._device = device or ("cuda" if gpu else "cpu")
        self._threads = threads
        self._ask_ray = host == "auto"
        self._host = node_address() if self._ask_ray else host
        self._pools = {
            pool: ThreadPoolExecutor(1, f"{name}-{pool}", initializer=self._set_threads)
            for pool in ("work", "link", "files", "control")
        }
        self._staged = _StagedGuard()
        self._staged_version: PolicyVersion | None = None
        self._step = 0
        self._closed: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._model: nn.Module | None = None
        self._learner: Learner | None = None
        self._weights: Callable[[], NamedTensors] | None = None
        self._sender: Sender | None = None

    async def start(self, ctx: OpContext) -> dict[str, Any]:
        """Load the model; returns ``pid``, ``node_ip``, ``packages``, ``hardware``, ..."""
        return await self._run(ctx, "work", self._start)

    async def listen(
        self, ctx: OpContext, backend: TransferBackend, world_size: int, timeout_s: float
    ) -> ChannelSpec:
        """Open the rendezvous; any former channel is closed.

        With another backend than before, what was staged is gone.
        """
        self._started(self._sender)
        if backend is not self._backend:
            await self.close_channel(ctx)
            await self._run(ctx, "work", self._use, TransferBackend(backend))
        sender = self._started(self._sender)
        spec = await self._run(ctx, "link", sender.listen, world_size, timeout_s, self._host)
        with self._reporter.op(ctx):
            self._reporter.info("channel listens", host=spec.host, port=spec.port)
        return spec

    async def open_channel(self, ctx: OpContext, spec: ChannelSpec) -> None:
        """Join as rank 0 and prove the channel."""
        sender = self._started(self._sender)
        await self._run(ctx, "link", sender.open, spec)
        with self._reporter.op(ctx):
            self._reporter.info("channel proved", over=sender.description)

    async def close_channel(self, ctx: OpContext) -> None:
        """Leave the channel; a blocked open or send fails. Idempotent."""
        if self._sender is not None:
            await self._run(ctx, "control", self._sender.close)

    async def stage(self, ctx: OpContext, version: PolicyVersion) -> dict[str, str]:
        """Freeze the live weights as ``version``; digest of each tensor."""
        return await self._run(ctx, "work", self._stage, version)

    async def send(self, ctx: OpContext, update: WeightUpdate) -> TransferStats:
        """Send the frozen weights, which must be ``update.version`` (TrainerError)."""
        return await self._run(ctx, "link", self._send, update)

    async def train(self, ctx: OpContext, batch: Sequence[Rollout], step: int) -> TrainStats:
        """Judge ``batch`` and make one optimizer step on it."""
        return await self._run(ctx, "work", self._train, batch, step)

    async def reference_logprobs(
        self, ctx: OpContext, prompts: Sequence[Sequence[int]], initial: bool = False
    ) -> tuple[tuple[float, ...], ...]:
        """Log-probability of each prompt token but the first, under the frozen weights.

        ``initial``: under the engines' first checkpoint, loaded and dropped again.
        """
        return await self._run(ctx, "work", self._reference, prompts, initial)

    async def save_checkpoint(self, ctx: OpContext, name: str) -> str:
        """Save the frozen weights in the run's folder ``checkpoints/name``; its path."""
        return await self._run(ctx, "files", self._save, name)

    async def save_state(self, ctx: OpContext, path: str) -> None:
        """Save weights, optimizer and random number generators into the folder ``path``."""
        await self._run(ctx, "work", self._save_state, path)

    async def load_state(self, ctx: OpContext, path: str) -> None:
        """Go on from what was saved (TrainerError when it does not fit: nothing was changed)."""
        await self._run(ctx, "work", self._load_state, path)

    async def next_events(self) -> list[Record]:
        """Wait for records of this actor; returns all there are."""
        return await self._reporter.next_events()

    async def watch(self) -> str:
        """Return when the trainer was closed, never before."""
        return await asyncio.shield(asyncio.wrap_future(self._closed))

    async def aclose(self, ctx: OpContext) -> None:
        """Close the channel, drop the model, end the threads. Idempotent."""
        if self._closed.done():
            return
        try:
            await self.close_channel(ctx)
        finally:
            self._closed.set_result("closed")
            for pool in self._pools.values():
                pool.shutdown(wait=False, cancel_futures=True)
            self._model = self._learner = self._sender = None

    async def _run(
        self, ctx: OpContext, pool: str, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        if self._closed.done():
            raise TrainerError("it was closed; start another one")

        def guarded() -> R:
            try:
                return work(*args, **kwargs)
            except MidflightError:
                raise
            except Exception as error:
                name = getattr(work, "__name__", "work").lstrip("_")
                raise TrainerError(f"{name} failed: {type(error).__name__}: {error}") from error

        with self._reporter.op(ctx):
            context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pools[pool], context.run, guarded)

    def _set_threads(self) -> None:
        # Torch keeps the count by thread, so each pool's thread sets its own.
        if self._threads is not None:
            import torch

            torch.set_num_threads(self._threads)

    def _started(self, part: R | None) -> R:
        if part is None:
            raise TrainerError("it is not started: call start() first")
        return part

    def _start(self) -> dict[str, Any]:
        if self._model is not None:
            raise TrainerError("it is started already")
        if self._ask_ray:
            check_address(self._host)
        import torch

        from actors.learner import Learner, LearnerOptions
        from actors.named_weights import checkpoint_names, named_weights
        from actors.transfer.base import make_sender

        begin = time.perf_counter()
        torch.manual_seed(self._seed)
        model = self._load(self._trainer_path, "float32")
        weights = named_weights(model, checkpoint_names(self._trainer_path))
        self._learner = Learner(
            model, LearnerOptions(learning_rate=self._learning_rate, grad_clip=self._grad_clip)
        )
        self._weights = weights
        self._sender = make_sender(self._backend, weights, wire_dtype=self._wire_dtype)
        self._model = model
        parameters = sum(parameter.numel() for parameter in model.parameters())
        seconds = time.perf_counter() - begin
        self._reporter.info(
            "trainer started", parameters=parameters, seconds=round(seconds, 2), node=ray_node()
        )
        return {
            "pid": os.getpid(),
            "node_ip": hardware.node_ip(),
            "parameters": parameters,
            "device": self._device,
            "packages": hardware.packages(),
            "hardware": hardware.describe(),
            "seconds": seconds,
        }

    def _load(self, folder: Path, dtype: str) -> nn.Module:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        ).to(self._device)
        return model.eval()

    def _use(self, backend: TransferBackend) -> None:
        from actors.transfer.base import make_sender

        sender = self._started(self._sender)
        with self._staged.writing(STAGE_WAIT_S):
            self._staged_version = None
            sender.release()
            self._sender = make_sender(
                backend, self._started(self._weights), wire_dtype=self._wire_dtype
            )
            self._backend = backend

    def _stage(self, version: PolicyVersion) -> dict[str, str]:
        sender = self._started(self._sender)
        with self._staged.writing(STAGE_WAIT_S):
            self._staged_version = None
            digests = sender.stage()
            self._staged_version = version
        self._reporter.info("weights staged", staged_version=version, tensors=len(digests))
        return digests

    def _send(self, update: WeightUpdate) -> TransferStats:
        sender = self._started(self._sender)
        with self._staged.reading():
            if self._staged_version != update.version:
                raise TrainerError(
                    f"version {update.version} is to be sent, version {self._staged_version} "
                    "is staged: call stage() first"
                )
            stats = sender.send(update)
        self._reporter.info("weights sent", bytes=stats.nbytes, seconds=round(stats.seconds, 4))
        return stats

    def _train(self, batch: Sequence[Rollout], step: int) -> TrainStats:
        learner = self._started(self._learner)
        rewards = [self._reward(r.request.prompt.text, r.completion.text) for r in batch]
        stats = learner.step(batch, rewards, step)
        self._step = step
        self._reporter.info(
            "trained",
            train_step=step,
            loss=stats.loss,
            reward=stats.reward,
            grad_norm=stats.grad_norm,
            tokens=stats.tokens,
            seconds=round(stats.seconds, 4),
        )
        return stats

    def _reference(
        self, prompts: Sequence[Sequence[int]], initial: bool
    ) -> tuple[tuple[float, ...], ...]:
        from actors.learner import prompt_logprobs, with_weights

        model, sender = self._started(self._model), self._started(self._sender)
        device = next(model.parameters()).device
        if not initial:
            with self._staged.reading():
                return prompt_logprobs(with_weights(model, sender.staged()), prompts, device)
        first = self._load(self._engine_path, self._wire_dtype or "float32")
        try:
            return prompt_logprobs(first, prompts, device)
        finally:
            del first
            gc.collect()

    def _save_state(self, path: str) -> None:
        from actors.state import Position, save_state

        begin = time.perf_counter()
        version = None if self._staged_version is None else int(self._staged_version)
        weights, learner = self._started(self._weights), self._started(self._learner)
        save_state(Path(path), weights(), learner, Position(self._step, version))
        seconds = time.perf_counter() - begin
        self._reporter.info("trainer state saved", path=path, seconds=round(seconds, 3))

    def _load_state(self, path: str) -> None:
        from actors.state import load_state

        weights, learner = self._started(self._weights), self._started(self._learner)
        position = load_state(Path(path), weights(), learner)
        self._step = position.step
        self._reporter.info("trainer state loaded", path=path, trained_step=position.step)

    def _save(self, name: str) -> str:
        from actors.checkpoint import write_checkpoint

        if not re.fullmatch(r"[\w][\w.-]*", name):
            raise ConfigError(f"checkpoint name {name!r}: use letters, digits, '.', '_' and '-'")
        sender = self._started(self._sender)
        with self._staged.reading():
            path = write_checkpoint(
                self._run_dir / "checkpoints" / name,
                sender.staged(),
                self._trainer_path,
                metadata={"policy_version": str(self._staged_version)},
            )
        self._reporter.info("checkpoint saved", path=str(path))
        return str(path)


class _StagedGuard:
    """Many may read the staged bytes at once; overwriting them waits until none does."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writing = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._changed:
            self._wait(lambda: not self._writing, STAGE_WAIT_S, "staging")
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextmanager
    def writing(self, timeout_s: float) -> Iterator[None]:
        with self._changed:
            self._wait(lambda: not self._readers, timeout_s, "a send or a save")
            self._writing = True
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _wait(self, free: Callable[[], bool], timeout_s: float, holder: str) -> None:
        if not self._changed.wait_for(free, timeout_s):
            raise TrainerError(f"the staged weights are in use by {holder} for {timeout_s:g} s")
