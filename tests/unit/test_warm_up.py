"""Which requests warm an engine up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import vllm_compat
from actors.engine_settings import EngineSettings
from actors.warm_up import LARGEST, lengths, step_sizes, warm_up
from orchestrator.types import KVPolicy, PauseMode

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


class FakeLLM:
    """Notes what a step would be given: all that was submitted while paused begins together."""

    def __init__(self, fails: int = -1) -> None:
        self.steps: list[list[tuple[int, int]]] = []
        self.open: set[str] = set()
        self.salts: list[str] = []
        self._fails = fails
        self._paused = False
        self._waiting: list[tuple[int, int]] = []

    async def pause(self, mode: PauseMode, kv: KVPolicy) -> None:
        assert not self._paused and not self.open
        assert (mode, kv) == (PauseMode.KEEP, KVPolicy.KEEP)
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self.steps.append(self._waiting)
        self._waiting = []

    async def submit(self, name: str, ids: list[int], params: tuple[Any, ...], salt: str) -> Any:
        assert self._paused and name not in self.open
        if len(self.salts) == self._fails:
            raise RuntimeError("no")
        self.open.add(name)
        self.salts.append(salt)
        self._waiting.append((len(ids), params[0] if params else 0))

        async def listen() -> None:
            assert not self._paused

        async def close() -> None:
            self.open.remove(name)

        return SimpleNamespace(listen=listen, close=close)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pause", "resume", "submit"):
        monkeypatch.setattr(
            vllm_compat, name, lambda llm, *args, name=name: getattr(llm, name)(*args)
        )
    monkeypatch.setattr(vllm_compat, "sampling", lambda *asked: asked)
    monkeypatch.setattr(vllm_compat, "scoring", tuple)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("context", "requests"), [(512, 13), (4096, 64), (40, 3)])
async def test_every_size_is_a_step_of_its_own_where_the_engine_has_room(
    context: int, requests: int
) -> None:
    llm = FakeLLM()
    served = await warm_up(llm, context, requests)
    *steps, decoding = llm.steps
    scored = [step[0][0] for step in steps if step[0][1] == 0]
    assert scored == [size for size in step_sizes(LARGEST) if size <= min(256, context - 1)]
    prefills = [step for step in steps if step[0][1]]
    sizes = [size for size in step_sizes(LARGEST) if size <= requests * (context - 1)]
    assert [sum(prompt for prompt, _ in step) for step in prefills] == sizes
    assert all(prompt < context and tokens == 1 for step in prefills for prompt, tokens in step)
    assert [tokens for _, tokens in decoding] == [min(n, context - 1) for n in lengths(requests)]
    assert served == len(llm.salts) == len(set(llm.salts)) and not llm.open


@pytest.mark.usefixtures("vllm")
async def test_a_request_that_vllm_refuses_leaves_no_other_open() -> None:
    llm = FakeLLM(fails=30)
    with pytest.raises(RuntimeError, match="no"):
        await warm_up(llm, 512, 13)
    assert len(llm.salts) == 30 and not llm.open
