"""Which requests warm an engine up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import vllm_compat
from actors.engine_settings import EngineSettings
from actors.warm_up import lengths, step_sizes, warm_up

# vLLM 0.33, _BATCH_INVARIANT_MATMUL_TUNED_CONFIGS: tiles by the tokens of a step, up to each.
RANGES = (1, 4, 8, 16, 32, 64, 256, 512, 1024, 2048)


def kernel(tokens: int) -> tuple[int, bool, bool]:
    """What Triton compiles by: vLLM's tiles, and what it knows of the number itself."""
    largest = next((most for most in RANGES if most >= tokens), RANGES[-1])
    return largest, tokens % 16 == 0, tokens == 1


@given(st.integers(1, 5000))
def test_the_sizes_need_each_kernel_that_a_smaller_step_may_need(most: int) -> None:
    sizes = step_sizes(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] <= most
    assert {kernel(size) for size in sizes} == {kernel(size) for size in range(1, most + 1)}


@given(st.integers(1, 300))
def test_as_many_requests_as_of_each_size_decode_together(requests: int) -> None:
    left, seen = list(lengths(requests)), set()
    while left:
        seen.add(len(left))
        left = [tokens - 1 for tokens in left if tokens > 1]
    assert seen == set(step_sizes(requests))


@pytest.mark.parametrize("changed", [{"cpu": True}, {"batch_invariant": False}, {"swaps": False}])
def test_only_an_engine_whose_requests_would_wait_is_warmed_up(changed: dict[str, Any]) -> None:
    usual = {"cpu": False, "batch_invariant": True, "swaps": True}
    assert EngineSettings(model="m", **usual).warms_up
    assert not EngineSettings(model="m", **(usual | changed)).warms_up


async def test_prompts_are_computed_one_by_one_and_every_request_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple[str, int]] = []
    open_now: set[str] = set()
    salts: list[str] = []

    async def submit(llm: Any, name: str, ids: list[int], params: Any, salt: str) -> Any:
        assert name not in open_now
        open_now.add(name)
        salts.append(salt)
        log.append((name, len(open_now)))

        async def listen() -> None:
            await asyncio.sleep(0)

        async def close() -> None:
            open_now.remove(name)

        return SimpleNamespace(listen=listen, close=close)

    monkeypatch.setattr(vllm_compat, "submit", submit)
    monkeypatch.setattr(vllm_compat, "sampling", lambda *asked: asked)
    assert await warm_up(None, 512, 13) == len(step_sizes(511)) + 13
    assert not open_now and len(set(salts)) == len(salts) == len(log)
    assert [count for name, count in log if "prompt" in name] == [1] * len(step_sizes(511))
    assert [count for name, count in log if "decode" in name] == list(range(1, 14))
