"""The simulated data plane: the public fakes, with seconds from a cost model and planned faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import cast

from orchestrator.simulate.costs import CostModel
from orchestrator.simulate.decoder import CountingDecoder
from orchestrator.simulate.faults import DECODING, Fault, FaultKind
from orchestrator.simulate.meter import Meter, metered
from orchestrator.testing import Call, FakeEngine, FakeTrainer, FakeWorld, When, policy
from orchestrator.testing.actor import FakeActor
from orchestrator.types import (
    PhaseTimeouts,
    Rollout,
    Swapped,
    TrainStats,
    WeightUpdate,
)

TENSORS = {"embed": 16, "layers.0": 16, "layers.1": 16, "head": 16}
"""Bytes that stand for the model's. Their seconds are the model's."""
_PARTS_OF_SWAP = frozenset({"pause", "start_update", "receive_update", "finish_update", "resume"})
_NO_LIMIT = 1 << 30


def make_world(costs: CostModel) -> FakeWorld:
    """A wire and a device memory of the model's speed."""
    return FakeWorld(
        tensor_seconds=costs.wire_s / len(TENSORS),
        commit_seconds=costs.commit_s / len(TENSORS),
        keep_log=False,
    )


class _Simulated(FakeActor):
    """``armed`` faults strike in the next call of their moment."""

    meter: Meter
    injector: Injector
    armed: list[Fault]
    called: Callable[[Call], None] = staticmethod(lambda call: None)
    """Told of each call that begins."""

    def _begin(self, method: str, args: tuple[object, ...]) -> Call:
        call = super()._begin(method, args)
        self.called(call)
        return call

    def die_in(self, seconds: float, fault: Fault) -> None:
        """The process is gone in ``seconds``, unless it is before."""
        asyncio.get_running_loop().call_later(seconds, self._die, fault)

    def _die(self, fault: Fault) -> None:
        if self.death is None:
            self.injector.struck.append(fault)
            self.kill("crashed (simulated)")
        else:
            self.injector.left.append(fault)

    def _end(self, call: Call) -> None:
        super()._end(call)
        if call.error is None and call.ended is not None:
            self.meter.took(call.method, call.ended - call.at)


class SimulatedEngine(_Simulated, FakeEngine):
    """An engine of ``costs``."""

    decoder_type = CountingDecoder

    def __init__(
        self,
        name: str,
        world: FakeWorld,
        costs: CostModel,
        seed: int,
        meter: Meter,
        injector: Injector,
    ) -> None:
        self._rng = random.Random(f"{seed}/{name}")
        super().__init__(
            name,
            world,
            weights=policy.make_weights("base", TENSORS),
            token_seconds=costs.decode_step_s,
            start_seconds=costs.engine_start_s * self._rng.uniform(0.9, 1.1),
            slots=_NO_LIMIT,
            max_model_len=_NO_LIMIT,
            prefix_caching=False,
        )
        self.meter, self.injector, self.armed = meter, injector, []
        self._costs = costs
        self._in_one_call = False

    @property
    def tokens_written(self) -> int:
        """Tokens of requests that have left, aborted and lost ones too."""
        return cast(CountingDecoder, self._decoder).written

    @property
    def serves(self) -> bool:
        """It is up and writes tokens."""
        return self._started and not self.paused

    async def swap(self, update: WeightUpdate, timeouts: PhaseTimeouts) -> Swapped:
        """As in the base; its parts are not calls of the controller."""
        self._in_one_call = True
        try:
            return await super().swap(update, timeouts)
        finally:
            self._in_one_call = False

    # -- inside -----------------------------------------------------------------------------

    async def _strike(self, call: Call, when: When) -> None:
        if when is When.BEFORE:
            on_channel = call.method in ("prefetch", "receive_update")
            seconds = self._seconds(call.method)
            for fault in [f for f in self.armed if f.moment == call.method]:
                if fault.kind is FaultKind.FLIP:
                    continue  # see _receive
                self.armed.remove(fault)
                whole = self._whole(call.method, seconds)
                if fault.kind is FaultKind.CRASH:
                    self.die_in(fault.share * whole, fault)
                    continue
                self.injector.struck.append(fault)
                if fault.kind is FaultKind.HANG:
                    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    await self._wait(never, on_channel=on_channel)
                seconds += (fault.factor - 1) * whole
            await self._sleep(seconds, on_channel=on_channel)
        await super()._strike(call, when)

    async def _receive(self, index: int, transfer: int) -> tuple[str, bytes | None]:
        name, data = await super()._receive(index, transfer)
        for fault in self.armed:
            if fault.kind is FaultKind.FLIP and index == int(fault.share * len(TENSORS)):
                assert data is not None
                self.armed.remove(fault)
                self.injector.struck.append(fault)
                return name, bytes((data[0] ^ 1,)) + data[1:]
        return name, data

    def _seconds(self, method: str) -> float:
        if self._in_one_call and method in _PARTS_OF_SWAP:
            return self._costs.in_one_call(method, self._rng)
        return self._costs.of_call(method, self._rng)

    def _whole(self, method: str, seconds: float) -> float:
        """Of the call with what the fake takes for it."""
        if method == "prefetch" or (method == "receive_update" and self._prefetched is None):
            return seconds + self._costs.wire_s
        return seconds + (self._costs.commit_s if method == "receive_update" else 0.0)


class SimulatedTrainer(_Simulated, FakeTrainer):
    """A trainer of ``costs``; a new one goes on from the weights of ``checkpoint``."""

    def __init__(
        self,
        name: str,
        world: FakeWorld,
        costs: CostModel,
        seed: int,
        meter: Meter,
        injector: Injector,
        checkpoint: SimulatedTrainer | None = None,
    ) -> None:
        self._rng = random.Random(f"{seed}/{name}")
        super().__init__(
            world,
            name=name,
            initial=policy.make_weights("base", TENSORS),
            weights=checkpoint.weights if checkpoint else policy.make_weights("tuned", TENSORS),
            train_seconds=costs.train_s,
        )
        self.meter, self.injector, self.armed = meter, injector, []
        self._costs = costs

    async def train(self, batch: Sequence[Rollout], step: int) -> TrainStats:
        """As in the base, about the batch's size only."""
        async with self._call("train", batch, step):
            self._must_be_started()
            self.injector.begin_step(step)
            seconds = self._costs.varied(self._costs.train_s, self._rng)
            await self._sleep(seconds)
            self.weights = policy.next_weights(self.weights, (step,))
            tokens = sum(len(rollout.completion.token_ids) for rollout in batch)
            return TrainStats(step, 1.0 / step, 0.0, 1.0, tokens, seconds, (0.0,) * len(batch))

    async def _strike(self, call: Call, when: When) -> None:
        if when is When.BEFORE:
            seconds = self._costs.of_call(call.method, self._rng)
            for fault in [f for f in self.armed if f.moment == call.method]:
                self.armed.remove(fault)
                self.die_in(fault.share * seconds, fault)
            await self._sleep(seconds, on_channel=call.method == "send")
        await super()._strike(call, when)


class Injector:
    """Deals the planned faults out to whoever lives when their step begins."""

    def __init__(self, planned: Sequence[Sequence[Fault]], costs: CostModel) -> None:
        self.planned = sum(map(len, planned))
        self.engines: list[SimulatedEngine] = []
        """By slot: the first engine of each, or what has replaced it."""
        self.trainer: SimulatedTrainer | None = None
        self.struck: list[Fault] = []
        self.left: list[Fault] = []
        """Those that met nobody yet."""
        self._planned = planned
        self._costs = costs
        self._dealt = 0

    def add(self, engine: SimulatedEngine) -> None:
        """A first engine, or one that replaces the dead one of its slot."""
        slot = slot_of(engine.name)
        if slot < len(self.engines):
            self.left += self.engines[slot].armed
            self.engines[slot] = engine
        else:
            self.engines.append(engine)

    def begin_step(self, step: int) -> None:
        """Deal out the faults of ``step``, and earlier ones whose victim died before."""
        if step <= self._dealt:  # a step that is done again
            return
        due = self.left
        self.left = []
        for engine in self.engines:
            if engine.death is not None:
                due += engine.armed
                engine.armed = []
        due += [fault for faults in self._planned[self._dealt : step] for fault in faults]
        self._dealt = step
        for fault in due:
            self._deal(fault)

    def _deal(self, fault: Fault) -> None:
        victim: _Simulated | None = self.trainer
        if fault.kind is not FaultKind.TRAINER_CRASH:
            slots = len(self.engines)
            order = (self.engines[(fault.slot + n) % slots] for n in range(slots))
            victim = next((e for e in order if e.death is None and e.serves), None)
        if victim is None or victim.death is not None:
            self.left.append(fault)
        elif fault.moment == DECODING:
            victim.die_in(fault.share * self._costs.train_s, fault)
        else:
            victim.armed.append(fault)


def slot_of(name: str) -> int:
    """``engine-3`` and what replaces it, ``engine-3.r1``, are in slot 3."""
    return int(name.partition("-")[2].partition(".")[0])


_EVERY_CALL = ("start", "open_channel", "close_channel", "wait_dead", "aclose")
metered(
    SimulatedEngine,
    *_EVERY_CALL,
    "generate",
    "wait_for_tokens",
    "prefetch",
    "pause",
    "start_update",
    "receive_update",
    "finish_update",
    "resume",
    "swap",
    "wait_first_tokens",
    "digests",
    "prompt_logprobs",
    "status",
    "abort_requests",
)
metered(
    SimulatedTrainer,
    *_EVERY_CALL,
    "listen",
    "stage",
    "send",
    "train",
    "reference_logprobs",
    "save_checkpoint",
)
