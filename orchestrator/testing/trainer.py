"""A fake trainer: the whole :class:`~orchestrator.protocols.Trainer` in memory."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.errors import ChannelError, TrainerDied, TrainerError
from orchestrator.protocols import Digests, EngineFactory
from orchestrator.testing import policy
from orchestrator.testing.actor import FakeActor
from orchestrator.testing.channel import FakeChannel
from orchestrator.testing.engine import FakeEngine
from orchestrator.testing.world import FakeWorld
from orchestrator.types import (
    ChannelSpec,
    PolicyVersion,
    Rollout,
    TrainerInfo,
    TrainStats,
    TransferBackend,
    TransferStats,
    WeightUpdate,
)


class FakeTrainer(FakeActor):
    """Every train step changes every tensor, as a function of the batch's tokens.

    ``initial``: what the engines were started with; it differs from ``weights``, as a base
    model does from a tuned one.
    """

    def __init__(
        self,
        world: FakeWorld | None = None,
        *,
        name: str = "trainer",
        initial: Mapping[str, bytes] | None = None,
        weights: Mapping[str, bytes] | None = None,
        train_seconds: float = 0.1,
    ) -> None:
        super().__init__(name, world or FakeWorld())
        self.initial = dict(initial if initial is not None else policy.make_weights("base"))
        self.weights = dict(weights if weights is not None else policy.make_weights("tuned"))
        self.staged: dict[str, bytes] | None = None
        """What the next send carries."""
        self.staged_version: PolicyVersion | None = None
        self.step = 0
        """Of the last train step."""
        self._train_seconds = train_seconds
        self._started = False
        self._sending = False
        self._port: int | None = None

    async def start(self) -> TrainerInfo:
        """At once."""
        async with self._call("start"):
            if self._started:
                raise self._violate("start was called twice")
            self._started = True
            return TrainerInfo(self.pids)

    async def train(self, batch: Sequence[Rollout], step: int) -> TrainStats:
        """Takes ``train_seconds``. A rollout's reward is its share of even tokens."""
        async with self._call("train", batch, step):
            self._must_be_started()
            if not batch:
                raise self._error(f"step {step}: the batch is empty")
            began = _now()
            await self._sleep(self._train_seconds)
            tokens = [t for rollout in batch for t in rollout.completion.token_ids]
            self.weights = policy.next_weights(self.weights, tokens)
            self.step = step
            rewards = tuple(_reward(rollout) for rollout in batch)
            return TrainStats(
                step=step,
                loss=1.0 / step if step else 1.0,
                reward=sum(rewards) / len(rewards),
                grad_norm=1.0,
                tokens=len(tokens),
                seconds=_now() - began,
                rewards=rewards,
            )

    async def listen(
        self, backend: TransferBackend, world_size: int, timeout_s: float
    ) -> ChannelSpec:
        """Opens a port of the world for the engines to join."""
        async with self._call("listen", backend, world_size, timeout_s):
            self._must_be_started()
            if self._port is not None:
                raise self._violate("listen while a channel is open: close it first")
            if world_size < 2:
                raise self._violate(f"a group of {world_size} has nobody to send to")
            port = self.world.next_port()
            spec = ChannelSpec(
                backend=backend,
                host="fake",
                port=port,
                world_size=world_size,
                nonce=f"{self.name}:{port}",
                tensors=policy.specs(self.weights),
                timeout_s=timeout_s,
            )
            self._port = port
            self.world.channels[port] = FakeChannel(spec, self.world.tensor_seconds)
            return spec

    async def open_channel(self, spec: ChannelSpec) -> None:
        """Rank 0; waits for the whole group."""
        async with self._call("open_channel", spec) as call:
            self._must_be_started()
            channel = self.world.channels.get(spec.port)
            if channel is None or self._port != spec.port:
                raise self._violate(f"open_channel of {spec.host}:{spec.port} before listen")
            if self.channel is not None:
                raise self._violate("open_channel while a channel is open: close it first")
            self.channel = channel
            proved = False
            try:
                await self._wait(channel.join(self.name, (0,)), on_channel=True)
                if self.world.faults.marked("wrong_pattern", self.name, "open_channel", call.nth):
                    raise ChannelError(f"{self.name}: the known pattern did not come back")
                proved = True
            finally:
                if not proved and self.channel is channel:
                    self._leave()

    async def stage(self, version: PolicyVersion) -> Digests:
        """Later train steps do not change what was staged."""
        async with self._call("stage", version):
            self._must_be_started()
            if self._sending:
                raise self._violate(f"stage of version {version} during a send")
            self.staged, self.staged_version = dict(self.weights), version
            return policy.digests(self.staged)

    async def send(self, update: WeightUpdate) -> TransferStats:
        """Blocks tensor by tensor until every receiver has it."""
        async with self._call("send", update):
            if self.staged is None or self.staged_version != update.version:
                raise self._violate(
                    f"send of version {update.version}, staged is {self.staged_version}"
                )
            channel = self.channel
            if channel is None:
                raise ChannelError(f"{self.name}: open the channel before send")
            if self._sending:
                raise self._violate("send twice at the same time")
            self._receivers_first(channel, update)
            began = _now()
            self._sending = True
            whole = False
            try:
                for item in self.staged.items():
                    await self._wait(channel.enter(self.name, item), on_channel=True)
                whole = True
            finally:
                self._sending = False
                if not whole:
                    channel.break_off(self.name)
            return TransferStats(sum(map(len, self.staged.values())), _now() - began)

    async def reference_logprobs(
        self, prompts: Sequence[Sequence[int]], *, initial: bool = False
    ) -> tuple[tuple[float, ...], ...]:
        """Of the staged weights, or of ``initial``; TrainerError when nothing was staged."""
        async with self._call("reference_logprobs", prompts, initial):
            self._must_be_started()
            weights = self.initial if initial else self._must_be_staged()
            key = policy.weights_key(weights)
            return tuple(policy.prompt_logprobs(key, prompt) for prompt in prompts)

    async def save_checkpoint(self, name: str) -> str:
        """Path for :func:`fake_engine_factory`."""
        async with self._call("save_checkpoint", name):
            path = f"fake://{name}"
            self.world.checkpoints[path] = dict(self._must_be_staged())
            return path

    async def save_state(self, path: str) -> None:
        """One small JSON file in the folder ``path``; a crash leaves the one before."""
        async with self._call("save_state", path):
            self._must_be_started()
            data = {
                "step": self.step,
                "version": self.staged_version,
                "weights": {name: data.hex() for name, data in self.weights.items()},
            }
            _write(Path(path), json.dumps(data))

    async def load_state(self, path: str) -> None:
        """TrainerError when there is none, or one of other tensors."""
        async with self._call("load_state", path):
            self._must_be_started()
            try:
                data: dict[str, Any] = json.loads((Path(path) / "state.json").read_text())
                weights = {name: bytes.fromhex(text) for name, text in data["weights"].items()}
                step = int(data["step"])
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise self._error(f"no state in {path}: {error}") from None
            sizes = {name: len(data) for name, data in self.weights.items()}
            if sizes != {name: len(data) for name, data in weights.items()}:
                raise self._error(f"the state in {path} is of other tensors")
            self.weights, self.step = weights, step

    # -- inside -----------------------------------------------------------------------------

    def _receivers_first(self, channel: FakeChannel, update: WeightUpdate) -> None:
        """A sender that enters a collective before its receivers were told may wait for ever."""
        told = self.world.told.get(update.sync_id, set())
        untold = [n for n in channel.members if n != self.name and n not in told]
        if untold:
            self.world.violations.append(
                f"{self.name}: send of {update.sync_id} before "
                f"{'prefetch' if update.at_hand else 'receive_update'} of " + ", ".join(untold)
            )

    def _leave(self) -> None:
        if self._port is not None:
            self.world.channels.pop(self._port, None)
            self._port = None
        super()._leave()

    def _on_gone(self) -> None:
        if self._port is not None:
            self.world.channels.pop(self._port, None)
            self._port = None

    def _must_be_started(self) -> None:
        if not self._started:
            raise self._violate("not started")

    def _must_be_staged(self) -> dict[str, bytes]:
        if self.staged is None:
            raise self._error("nothing was staged")
        return self.staged

    def _error(self, message: str) -> TrainerError:
        return TrainerError(f"{self.name}: {message}")

    def _died(self, message: str) -> TrainerDied:
        return TrainerDied(f"{self.name}: {message}")


def fake_engine_factory(
    trainer: FakeTrainer, *, start_seconds: float = 0.0, token_seconds: float = 0.01
) -> EngineFactory:
    """Makes engines from the checkpoints of ``trainer``'s world (the fresh check)."""

    async def make(path: str) -> FakeEngine:
        weights = trainer.world.checkpoints.get(path)
        if weights is None:
            raise TrainerError(f"no checkpoint at {path}")
        return FakeEngine(
            f"fresh:{path}",
            trainer.world,
            weights=weights,
            start_seconds=start_seconds,
            token_seconds=token_seconds,
        )

    return make


def _reward(rollout: Rollout) -> float:
    tokens = rollout.completion.token_ids
    return sum(t % 2 == 0 for t in tokens) / len(tokens) if tokens else 0.0


def _write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".state.json"
    temporary.write_text(text)
    os.replace(temporary, folder / "state.json")


def _now() -> float:
    return asyncio.get_running_loop().time()
