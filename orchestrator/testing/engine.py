"""A fake engine replica: the whole :class:`~orchestrator.protocols.Engine` in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from orchestrator.errors import (
    ChannelError,
    EngineDied,
    EngineError,
    MidflightError,
    PhaseTimeout,
    SyncError,
)
from orchestrator.protocols import Digests, FirstTokens
from orchestrator.testing import policy
from orchestrator.testing.actor import FakeActor
from orchestrator.testing.decoder import Decoder
from orchestrator.testing.requests import Freeze
from orchestrator.testing.world import FakeWorld
from orchestrator.types import (
    ChannelSpec,
    Completion,
    EngineInfo,
    EngineStatus,
    FinishReason,
    GenerationRequest,
    KVPolicy,
    PauseAck,
    PauseMode,
    PhaseTimeouts,
    PolicyVersion,
    State,
    Swapped,
    TransferStats,
    WeightUpdate,
)


class FakeEngine(FakeActor):
    """Generates, swaps and fails on virtual time. Strict: a breach of the protocol raises
    EngineError and is kept in ``world.violations``.

    Weights are loaded tensor by tensor, so that a failed update leaves them mixed. A step of
    ``token_seconds`` gives every running request a token; a pause drops the step under way.
    """

    decoder_type: type[Decoder] = Decoder
    """What writes its tokens."""

    def __init__(
        self,
        name: str,
        world: FakeWorld | None = None,
        *,
        weights: Mapping[str, bytes] | None = None,
        workers: int = 1,
        token_seconds: float = 0.01,
        start_seconds: float = 0.0,
        slots: int = 256,
        max_model_len: int = 4096,
        eos_token_id: int | None = None,
        prefix_caching: bool = True,
        logprob_offset: float = 0.0,
    ) -> None:
        super().__init__(name, world or FakeWorld())
        self.weights = dict(weights if weights is not None else policy.make_weights("base"))
        self.logprob_offset = logprob_offset
        """Added to every prompt logprob: an engine whose arithmetic differs."""
        self.workers = workers
        self._start_seconds = start_seconds
        self._token_seconds = token_seconds
        self._max_model_len = max_model_len
        self._decoder = self.decoder_type(
            policy.weights_key(self.weights),
            token_seconds=token_seconds,
            slots=slots,
            max_model_len=max_model_len,
            eos_token_id=eos_token_id,
            prefix_caching=prefix_caching,
        )
        self._started = False
        self._update: WeightUpdate | None = None
        """The update session that is open."""
        self._prefetched: tuple[WeightUpdate, dict[str, bytes]] | None = None
        self._receiving = False
        self._received = False
        self._half_applied = False
        self._digests: dict[str, Digests] = {}
        self._freezes: dict[str, Freeze] = {}

    # -- state, for tests -------------------------------------------------------------------

    @property
    def version(self) -> PolicyVersion:
        """Version that tokens written now carry."""
        return self._decoder.version

    @property
    def paused(self) -> bool:
        """Whether no token is written."""
        return self._decoder.paused

    @property
    def half_applied(self) -> bool:
        """Between ``start_update`` and a whole ``finish_update``: must not serve."""
        return self._half_applied

    @property
    def live_requests(self) -> int:
        """Requests the scheduler has."""
        return len(self._decoder.live)

    @property
    def held_requests(self) -> int:
        """Requests held back by a pause."""
        return len(self._decoder.held)

    # -- Engine -----------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Up after ``start_seconds``, with version 0."""
        async with self._call("start"):
            if self._started:
                raise self._violate("start was called twice")
            await self._sleep(self._start_seconds)
            self._started = True
            return EngineInfo(
                name=self.name,
                workers=self.workers,
                dtype="uint8",
                max_model_len=self._max_model_len,
                vocab_size=policy.VOCAB,
                pids=self.pids,
                hardware="fake",
            )

    async def generate(self, request: GenerationRequest) -> Completion:
        """One token a step. EngineError when the prompt leaves no room for a token."""
        async with self._call("generate", request):
            self._must_be_started()
            if not request.prompt.token_ids or request.max_tokens < 1:
                raise self._error(f"request {request.request_id}: empty prompt or budget")
            if len(request.prompt.token_ids) >= self._max_model_len:
                raise self._error(
                    f"request {request.request_id}: {len(request.prompt.token_ids)} prompt "
                    f"tokens, the context has {self._max_model_len}"
                )
            live = self._decoder.submit(request)
            try:
                reason = await self._wait(live.done)
            except EngineDied as error:
                if self._core_only and live.tokens:
                    error.partial = live.completion(self.name, FinishReason.ABORT)
                raise
            finally:
                self._decoder.forget(live)
            return live.completion(self.name, reason)

    async def wait_for_tokens(self, threshold: int, among: Collection[str] | None = None) -> int:
        """Ends in the step in which a live request gets its ``threshold``-th token."""
        async with self._call("wait_for_tokens", threshold, among):
            self._must_be_started()
            return await self._wait(self._decoder.threshold(threshold, among))

    async def open_channel(self, spec: ChannelSpec, first_rank: int) -> None:
        """Takes ranks ``first_rank`` and following, one a worker; waits for the whole group."""
        async with self._call("open_channel", spec, first_rank) as call:
            self._must_be_started()
            if self.channel is not None:
                raise self._violate("open_channel while a channel is open: close it first")
            channel = self.world.channels.get(spec.port)
            if channel is None:
                raise ChannelError(f"{self.name}: nobody listens at {spec.host}:{spec.port}")
            ranks = tuple(range(first_rank, first_rank + self.workers))
            try:
                joined = channel.join(self.name, ranks)
            except ChannelError as error:
                self._violate(str(error))
                raise
            self.channel = channel
            proved = False
            try:
                await self._wait(joined, on_channel=True)
                wrong = self.world.faults.marked(
                    "wrong_pattern", self.name, "open_channel", call.nth
                )
                if wrong:
                    raise ChannelError(f"{self.name}: the known pattern arrived wrong")
                proved = True
            finally:
                if not proved and self.channel is channel:
                    self._leave()

    async def pause(self, mode: PauseMode, kv: KVPolicy) -> PauseAck:
        """Immediate for keep and abort; wait lets the live requests end first."""
        async with self._call("pause", mode, kv) as call:
            self._must_be_started()
            decoder = self._decoder
            if mode is PauseMode.WAIT and not decoder.paused:
                if not await self._wait(decoder.drain()):
                    raise self._error("resumed before the pause was complete")
            elif mode is PauseMode.ABORT:
                decoder.holding = True
                decoder.end_all()
            decoder.stop()
            stale = self.world.faults.marked("stale_cache", self.name, "pause", call.nth)
            if not stale:
                decoder.new_salt()
                if kv is KVPolicy.RECOMPUTE:
                    decoder.drop_cache()
            return PauseAck(self.name, len(decoder.live))

    async def prefetch(self, update: WeightUpdate) -> TransferStats:
        """Takes every tensor of the channel and keeps it; what was kept before is dropped."""
        async with self._call("prefetch", update) as call:
            self._must_be_started()
            if not update.at_hand:
                raise self._violate(f"prefetch of {update.sync_id}, whose bytes travel later")
            if self._receiving:
                raise self._violate(f"prefetch of {update.sync_id} during a transfer")
            self._prefetched = None
            stats, found = await self._take(update, call.nth)
            self._prefetched = update, found
            return stats

    async def start_update(self, update: WeightUpdate) -> None:
        """Opens a session; one that failed is replaced."""
        async with self._call("start_update", update):
            self._must_be_started()
            if update.at_hand and not self._has(update):
                raise self._violate(f"start_update of {update.sync_id}, which was not prefetched")
            if not self._decoder.paused:
                raise self._violate(f"start_update of {update.sync_id} while tokens are written")
            if self._receiving:
                raise self._violate(f"start_update of {update.sync_id} during a transfer")
            self._update, self._received, self._half_applied = update, False, True
            freeze = self._decoder.freeze
            assert freeze is not None
            freeze.sync_id = update.sync_id
            self._freezes[update.sync_id] = freeze

    async def receive_update(self, update: WeightUpdate) -> TransferStats:
        """Loads each tensor as it comes, or what was prefetched."""
        async with self._call("receive_update", update) as call:
            self._must_be_open(update, "receive_update")
            if self._receiving:
                raise self._violate("receive_update twice at the same time")
            if update.at_hand:
                stats = await self._commit(update)
            else:
                stats, _ = await self._take(update, call.nth, self._load)
            self._received = True
            return stats

    async def finish_update(self, update: WeightUpdate) -> None:
        """The only place where the version moves."""
        async with self._call("finish_update", update):
            self._must_be_open(update, "finish_update")
            if not self._received or self._receiving:
                raise self._violate(f"finish_update of {update.sync_id} before all was received")
            self._decoder.key = policy.weights_key(self.weights)
            self._decoder.version = update.version
            self._update, self._prefetched, self._half_applied = None, None, False

    async def resume(self) -> None:
        """Refuses to serve weights that are not whole."""
        async with self._call("resume"):
            self._must_be_started()
            if self._half_applied:
                raise self._violate("resume with half-applied weights")
            self._decoder.go()

    async def swap(self, update: WeightUpdate, timeouts: PhaseTimeouts) -> Swapped:
        """The calls of each phase, one after the other: their faults strike here too."""
        async with self._call("swap", update, timeouts):
            self._must_be_started()
            if update.at_hand and not self._has(update):
                raise self._violate(f"swap to {update.sync_id}, which was not prefetched")
            began = _now()
            try:
                async with self._phase(State.PAUSING, timeouts.pausing):
                    ack = await self.pause(update.pause_mode, update.kv_policy)
            except SyncError:
                with suppress(SyncError):
                    async with self._phase(State.RESUMING, timeouts.resuming):
                        await self.resume()
                raise
            idle = _now()
            async with self._phase(State.SYNCING, timeouts.syncing):
                await self.start_update(update)
                stats = await self.receive_update(update)
                usable = _now()
                await self.finish_update(update)
            whole = _now()
            async with self._phase(State.RESUMING, timeouts.resuming):
                await self.resume()
            return Swapped(ack, stats, idle - began, usable - idle, whole - usable, _now() - whole)

    async def wait_first_tokens(self, update: WeightUpdate) -> FirstTokens:
        """Ends at once when the pause froze nothing and the engine was resumed."""
        async with self._call("wait_first_tokens", update):
            freeze = self._freezes.get(update.sync_id)
            if freeze is None:
                raise self._error(f"no pause belongs to sync {update.sync_id}")
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            freeze.waiters.append(future)
            freeze.settle()
            try:
                await self._wait(future)
            finally:
                freeze.waiters.remove(future)
            return freeze.result()

    async def digests(self, update: WeightUpdate) -> Digests:
        """SHA-256 of what arrived, a tensor that did not arrive is not in it."""
        async with self._call("digests", update):
            if update.sync_id not in self._digests:
                raise self._error(f"nothing was received for sync {update.sync_id}")
            return dict(self._digests[update.sync_id])

    async def prompt_logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[tuple[float, ...], ...]:
        """Takes one step. Held back while paused, like a request."""
        async with self._call("prompt_logprobs", prompts):
            self._must_be_started()
            while True:
                if self._decoder.paused:
                    await self._wait(self._decoder.resumed())
                await self._sleep(self._token_seconds)
                if not self._decoder.paused:
                    break
            key = self._decoder.key
            return tuple(
                tuple(p + self.logprob_offset for p in policy.prompt_logprobs(key, prompt))
                for prompt in prompts
            )

    async def status(self) -> EngineStatus:
        """As it is."""
        async with self._call("status"):
            return EngineStatus(
                name=self.name,
                version=self.version,
                paused=self.paused,
                live_requests=self.live_requests,
                held_requests=self.held_requests,
            )

    async def abort_requests(self) -> int:
        """Ends live requests; held ones stay held."""
        async with self._call("abort_requests"):
            return self._decoder.end_all()

    # -- inside -----------------------------------------------------------------------------

    @asynccontextmanager
    async def _phase(self, state: State, seconds: float) -> AsyncIterator[None]:
        budget = asyncio.timeout(seconds)
        try:
            async with budget:
                yield
        except EngineDied:
            raise  # a dead process answers nothing
        except (MidflightError, TimeoutError) as error:
            late = PhaseTimeout(state.value, seconds, f"engine {self.name}")
            raise SyncError(state.value, str(late if budget.expired() else error)) from error

    def _has(self, update: WeightUpdate) -> bool:
        return self._prefetched is not None and self._prefetched[0] == update

    async def _take(
        self,
        update: WeightUpdate,
        transfer: int,
        load: Callable[[str, bytes], None] = lambda name, data: None,
    ) -> tuple[TransferStats, dict[str, bytes]]:
        channel = self.channel
        if channel is None:
            raise ChannelError(f"{self.name}: open the channel before {update.sync_id}")
        began, found = _now(), dict[str, bytes]()
        self._receiving = True
        whole = False
        try:
            for index in range(len(channel.spec.tensors)):
                name, data = await self._receive(index, transfer)
                if data is not None:
                    found[name] = data
                    load(name, data)
            whole = True
        finally:
            self._receiving = False
            self._digests[update.sync_id] = policy.digests(found)
            if not whole:
                channel.break_off(self.name)
        return TransferStats(sum(map(len, found.values())), _now() - began), found

    async def _commit(self, update: WeightUpdate) -> TransferStats:
        if self._prefetched is None or not self._has(update):
            raise ChannelError(f"{self.name} left its channel, and with it {update.sync_id}")
        began, found = _now(), self._prefetched[1]
        for name, data in found.items():
            await self._sleep(self.world.commit_seconds)
            self._load(name, data)
        return TransferStats(sum(map(len, found.values())), _now() - began)

    def _leave(self) -> None:
        self._prefetched = None
        super()._leave()

    async def _receive(self, index: int, transfer: int) -> tuple[str, bytes | None]:
        faults, channel = self.world.faults, self.channel
        failure = faults.at_tensor(self.name, index, transfer)
        if failure is not None:
            raise failure.error or self._error(f"injected fault at tensor {index}")
        if channel is None:
            raise ChannelError(f"{self.name} left its transfer channel")
        name, data = await self._wait(channel.enter(self.name, None), on_channel=True)
        return name, faults.on_wire(self.name, name, transfer, data)

    def _load(self, name: str, data: bytes) -> None:
        have = self.weights.get(name)
        if have is None or len(have) != len(data):
            size = "not in this model" if have is None else f"{len(have)} bytes here"
            raise self._error(f"tensor {name} ({len(data)} bytes) is {size}")
        self.weights[name] = data

    def _must_be_started(self) -> None:
        if not self._started:
            raise self._violate("not started")

    def _must_be_open(self, update: WeightUpdate, method: str) -> None:
        if self._update is None:
            raise self._violate(f"{method} of {update.sync_id} before start_update")
        if self._update != update:
            raise self._violate(
                f"{method} of {update.sync_id} in the session of {self._update.sync_id}"
            )

    def _on_gone(self) -> None:
        self._decoder.shut()

    def _error(self, message: str) -> EngineError:
        return EngineError(self.name, message)

    def _died(self, message: str) -> EngineDied:
        return EngineDied(self.name, message)


def _now() -> float:
    return asyncio.get_running_loop().time()
