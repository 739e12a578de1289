"""Faults for the fakes: what goes wrong, at whom, at which call. Deterministic.

A rule names an actor (``"*"``: any), a method of the protocols and the number of the call
(from 1; None: every call), and strikes before or after the method's effect. Wire rules name
a tensor and a receiver. :attr:`Faults.unused` lists the rules that never struck, so that a
test can prove its fault was real.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class When(StrEnum):
    """Relative to the effect of the method."""

    BEFORE = "before"
    AFTER = "after"


class Gate:
    """A call that is held. The test waits for it with :meth:`reached`."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._released = False
        self._held: list[asyncio.Future[None]] = []

    async def reached(self) -> None:
        """Wait until a call is held here."""
        await self._reached.wait()

    @property
    def waiting(self) -> int:
        """Calls held now."""
        return sum(not f.done() for f in self._held)

    def release(self) -> None:
        """Let the held calls and all later ones go on."""
        self._released = True
        for future in self._held:
            if not future.done():
                future.set_result(None)

    def hold(self) -> asyncio.Future[None]:
        """The future that the held call waits for (the fakes' side)."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reached.set()
        if self._released:
            future.set_result(None)
        self._held.append(future)
        return future


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise ``error`` (None: the actor's own kind of error)."""

    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Delay:
    """Take ``seconds`` longer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Block:
    """Wait for ``gate``; also ends when the actor dies or is closed."""

    gate: Gate


@dataclass(frozen=True, slots=True)
class Die:
    """The actor's process is gone; ``core``: an engine's core alone."""

    reason: str
    core: bool = False


@dataclass(frozen=True, slots=True)
class Hook:
    """Call a function of the test."""

    function: Callable[[], object]


Action = Fail | Delay | Block | Die | Hook


@dataclass(slots=True)
class _Rule:
    what: str
    actor: str
    key: str
    """Method, or tensor for a wire rule."""
    nth: int | None
    struck: int = field(default=0, kw_only=True)

    def matches(self, actor: str, key: str, nth: int) -> bool:
        hit = self.actor in ("*", actor) and self.key in ("*", key) and self.nth in (None, nth)
        self.struck += hit
        return hit


@dataclass(slots=True)
class _CallRule(_Rule):
    when: When
    action: Action


@dataclass(slots=True)
class _WireRule(_Rule):
    change: Callable[[bytes], bytes | None]


@dataclass(slots=True)
class _TensorRule(_Rule):
    tensor: int
    error: BaseException | None


class Faults:
    """The rules of one test. Without rules nothing fails."""

    def __init__(self) -> None:
        self._calls: list[_CallRule] = []
        self._wire: list[_WireRule] = []
        self._tensors: list[_TensorRule] = []
        self._marks: list[_Rule] = []
        self._counts: Counter[tuple[str, str]] = Counter()

    # -- rules ------------------------------------------------------------------------------

    def fail(
        self,
        actor: str,
        method: str,
        *,
        call: int | None = 1,
        when: When | str = When.BEFORE,
        error: BaseException | None = None,
    ) -> None:
        """``method`` raises ``error``, or an EngineError/TrainerError that says ``injected``."""
        self._add(actor, method, call, when, Fail(error))

    def delay(
        self,
        actor: str,
        method: str,
        seconds: float,
        *,
        call: int | None = 1,
        when: When | str = When.BEFORE,
    ) -> None:
        """``method`` takes ``seconds`` of virtual time longer."""
        self._add(actor, method, call, when, Delay(seconds))

    def block(
        self, actor: str, method: str, *, call: int | None = 1, when: When | str = When.BEFORE
    ) -> Gate:
        """``method`` hangs until the gate is released, the call cancelled or the actor closed.

        A call that uses the channel also ends when the actor leaves the channel.
        """
        gate = Gate()
        self._add(actor, method, call, when, Block(gate))
        return gate

    def die(
        self,
        actor: str,
        method: str,
        *,
        call: int | None = 1,
        when: When | str = When.BEFORE,
        reason: str = "killed by a fault",
        core: bool = False,
    ) -> None:
        """The actor dies in ``method``: every call it has pending raises, ``wait_dead`` returns.

        ``core``: as in :meth:`FakeActor.kill`.
        """
        self._add(actor, method, call, when, Die(reason, core))

    def hook(
        self,
        actor: str,
        method: str,
        function: Callable[[], object],
        *,
        call: int | None = 1,
        when: When | str = When.BEFORE,
    ) -> None:
        """Call ``function()`` there, for instance to cancel a task at exactly that moment."""
        self._add(actor, method, call, when, Hook(function))

    def flip_bit(
        self, tensor: str, *, bit: int = 0, receiver: str = "*", transfer: int | None = None
    ) -> None:
        """One bit of ``tensor`` arrives inverted. ``transfer`` counts those of a receiver."""

        def flip(data: bytes) -> bytes:
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << (bit % 8)
            return bytes(changed)

        self._wire.append(_WireRule(f"flip_bit {bit}", receiver, tensor, transfer, flip))

    def drop(self, tensor: str, *, receiver: str = "*", transfer: int | None = None) -> None:
        """``tensor`` never arrives and nobody says so."""
        self._wire.append(_WireRule("drop", receiver, tensor, transfer, lambda _: None))

    def blank(self, *, receiver: str = "*", transfer: int | None = None) -> None:
        """Every tensor arrives as zeros and success is reported (a disabled communicator)."""
        self._wire.append(_WireRule("blank", receiver, "*", transfer, lambda d: bytes(len(d))))

    def fail_at_tensor(
        self,
        receiver: str,
        tensor: int,
        *,
        transfer: int | None = 1,
        error: BaseException | None = None,
    ) -> None:
        """The receiver raises when it should take tensor number ``tensor`` (from 0) off the wire.

        In ``prefetch`` for updates that are at hand, else in ``receive_update``.
        """
        self._tensors.append(
            _TensorRule("fail_at_tensor", receiver, "receive_update", transfer, tensor, error)
        )

    def wrong_pattern(self, actor: str, *, call: int | None = 1) -> None:
        """The known pattern arrives wrong at ``actor`` when the channel is opened."""
        self._marks.append(_Rule("wrong_pattern", actor, "open_channel", call))

    def stale_cache(self, actor: str, *, call: int | None = None) -> None:
        """The cache reset of ``pause`` does nothing and nobody says so."""
        self._marks.append(_Rule("stale_cache", actor, "pause", call))

    # -- what the fakes ask -----------------------------------------------------------------

    def count(self, actor: str, method: str) -> int:
        """Register a call; returns its number, from 1."""
        self._counts[actor, method] += 1
        return self._counts[actor, method]

    def actions(self, actor: str, method: str, call: int, when: When) -> list[Action]:
        """What happens to that call, in the order the rules were made."""
        return [r.action for r in self._calls if r.when is when and r.matches(actor, method, call)]

    def on_wire(self, receiver: str, tensor: str, transfer: int, data: bytes) -> bytes | None:
        """What arrives of ``data``; None when nothing does."""
        received: bytes | None = data
        for rule in self._wire:
            if received is not None and rule.matches(receiver, tensor, transfer):
                received = rule.change(received)
        return received

    def at_tensor(self, receiver: str, tensor: int, transfer: int) -> Fail | None:
        """Whether the receiver fails before it takes that tensor."""
        for rule in self._tensors:
            if rule.tensor == tensor and rule.matches(receiver, "receive_update", transfer):
                return Fail(rule.error)
        return None

    def marked(self, what: str, actor: str, method: str, call: int) -> bool:
        """Whether a rule of kind ``what`` strikes that call."""
        return any(r.matches(actor, method, call) for r in self._marks if r.what == what)

    @property
    def unused(self) -> tuple[str, ...]:
        """Rules that never struck."""
        rules: list[_Rule] = [*self._calls, *self._wire, *self._tensors, *self._marks]
        return tuple(f"{r.what} {r.actor}.{r.key}" for r in rules if not r.struck)

    def _add(
        self, actor: str, method: str, call: int | None, when: When | str, action: Action
    ) -> None:
        kind = type(action).__name__.lower()
        self._calls.append(_CallRule(kind, actor, method, call, When(when), action))
