"""Options of an embedding trainer: what cannot be is refused at once, with the value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from orchestrator.errors import ConfigError
from orchestrator.options import (
    GenerationOptions,
    RecoveryOptions,
    SwapOptions,
    ValidationOptions,
)
from orchestrator.scheduler import Orchestrator
from orchestrator.testing import FakeEngine, FakeTrainer, FakeWorld
from orchestrator.types import PauseMode, Prompt, Strategy, TransferBackend


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SwapOptions(pause_mode=wrong("freeze")), "pause_mode is 'freeze': it must be one"),
        (lambda: SwapOptions(backend=wrong("pigeon")), "one of gloo, nccl, ipc, native-nccl"),
        (
            lambda: SwapOptions(max_unavailable=0),
            "max_unavailable is 0: it must be a whole number, 1",
        ),
        (lambda: SwapOptions(pause_after_tokens=-1), "pause_after_tokens is -1"),
        (lambda: RecoveryOptions(attempts=-1), "attempts is -1: it must be a whole number, 0"),
        (lambda: RecoveryOptions(min_engines=0), "min_engines is 0"),
        (lambda: RecoveryOptions(backoff_s=float("nan")), "backoff_s is nan"),
        (lambda: GenerationOptions(max_tokens=0), "max_tokens is 0"),
        (lambda: GenerationOptions(max_tokens=wrong("8")), "max_tokens is '8'"),
        (lambda: GenerationOptions(group_size=wrong(2.0)), "group_size is 2.0: it must be a whole"),
        (lambda: GenerationOptions(temperature=wrong("hot")), "temperature is 'hot'"),
        (lambda: GenerationOptions(max_staleness=-1), "max_staleness is -1"),
        (lambda: ValidationOptions(min_pass_rate=1.5), "min_pass_rate is 1.5"),
        (lambda: replace(ValidationOptions(), fresh_every=-1), "fresh_every is -1"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def wrong(value: Any) -> Any:
    """Of a type that a checker would refuse."""
    return value


def test_members_may_be_given_by_their_value() -> None:
    options = SwapOptions(backend=wrong("ipc"), pause_mode=wrong("wait"), strategy=wrong("rolling"))
    assert options.backend is TransferBackend.IPC and options.pause_mode is PauseMode.WAIT
    assert options.strategy is Strategy.ROLLING


def test_numbers_may_be_of_any_kind() -> None:
    options = GenerationOptions(max_tokens=wrong(np.int64(8)), temperature=wrong(np.float32(0.5)))
    assert (type(options.max_tokens), type(options.temperature)) == (int, float)
    assert replace(options, group_size=128).group_size == 128


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompts: rollouts need at least one"),
        (["hello"], r"prompts\[0\] is 'hello': it must be a Prompt"),
        ([Prompt((1, 2)), Prompt(())], r"prompts\[1\] is Prompt\(token_ids=\(\)"),
        ([Prompt(wrong("hi"), wrong((1, 2)))], r"prompts\[0\] is Prompt\(token_ids='hi'"),
    ],
)
async def test_prompts_that_are_none_are_refused(prompts: list[Any], message: str) -> None:
    world = FakeWorld()
    with pytest.raises(ConfigError, match=message):
        Orchestrator([FakeEngine(world, "engine-0")], FakeTrainer(world), prompts=prompts)
