"""Which requests warm an engine up."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import core, vllm_compat
from actors.engine_settings import EngineSettings
from actors.reporting import ActorReporter
from actors.warm_up import LARGEST, lengths, step_sizes, warm_up
from orchestrator.errors import EngineDied, EngineError
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

    def __init__(
        self, context: int = 512, requests: int = 13, batched: int = 8192, ends: str = "length"
    ) -> None:
        self.limits = vllm_compat.Limits(context, requests, batched)
        self.steps: list[list[tuple[int, tuple[Any, ...]]]] = []
        """Of each request: its prompt's tokens, and what was asked for."""
        self.open: set[str] = set()
        self.salts: list[str] = []
        self.refused_at: int | None = None
        self.may_be_cut = False
        self.step_s = 1.0
        self.stuck = False
        self._ends = ends
        self.paused = False
        self._waiting: list[tuple[int, tuple[Any, ...]]] = []

    async def pause(self, mode: PauseMode, kv: KVPolicy) -> None:
        assert not self.paused and not self.open
        assert (mode, kv) == (PauseMode.KEEP, KVPolicy.KEEP)
        self.paused = True

    async def resume(self) -> None:
        if self.stuck:
            await asyncio.sleep(1e6)
        self.paused = False
        self.steps.append(self._waiting)
        self._waiting = []

    async def submit(self, name: str, ids: list[int], params: tuple[Any, ...], salt: str) -> Any:
        assert self.paused and name not in self.open
        if len(self.salts) == self.refused_at:
            raise RuntimeError("no")
        self.open.add(name)
        self.salts.append(salt)
        self._waiting.append((len(ids), params))
        ended = False

        async def listen() -> Any:
            nonlocal ended
            assert not self.paused
            await asyncio.sleep(self.step_s)
            ended = True
            return SimpleNamespace(
                request_id=name, outputs=[SimpleNamespace(finish_reason=self._ends)]
            )

        async def close() -> None:
            assert ended or self.may_be_cut, "closed before its end"
            self.open.remove(name)

        return SimpleNamespace(listen=listen, close=close)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pause", "resume", "submit"):
        monkeypatch.setattr(
            vllm_compat, name, lambda llm, *args, name=name: getattr(llm, name)(*args)
        )
    monkeypatch.setattr(vllm_compat, "limits", lambda llm: llm.limits)
    monkeypatch.setattr(vllm_compat, "sampling", lambda *asked: asked)
    monkeypatch.setattr(vllm_compat, "scoring", tuple)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("context", "requests", "batched", "most"),
    [
        (512, 13, 8192, 2048),
        (4096, 64, 8192, 2048),
        (4096, 64, 1000, 1000),
        (40, 3, 8192, 117),
        (2, 1, 64, 1),
    ],
)
async def test_every_size_is_a_step_of_its_own_where_the_engine_has_room(
    context: int, requests: int, batched: int, most: int
) -> None:
    llm = FakeLLM(context, requests, batched)
    served = await warm_up(llm)
    *prefills, decoding = llm.steps
    assert [sum(prompt for prompt, _ in step) for step in prefills] == list(step_sizes(most))
    for step in prefills:
        assert all(prompt < context for prompt, _ in step)
        scored = sum(prompt for prompt, _ in step) <= 1024
        for place, (_, asked) in enumerate(step):
            assert asked == (() if scored else (1, 1.0, place, True))
    longest = context - 1
    assert [asked for _, asked in decoding] == [
        (min(tokens, longest), 1.0, place, True) for place, tokens in enumerate(lengths(requests))
    ]
    assert served == len(llm.salts) == len(set(llm.salts)) and not llm.open


@pytest.mark.usefixtures("vllm")
async def test_an_engine_that_can_write_nothing_is_asked_for_nothing() -> None:
    llm = FakeLLM(context=1)
    assert await warm_up(llm) == 0 and not llm.steps


@pytest.mark.usefixtures("vllm")
async def test_a_request_that_vllm_refuses_leaves_no_other_open() -> None:
    llm = FakeLLM()
    llm.refused_at, llm.may_be_cut = 30, True
    with pytest.raises(RuntimeError, match="no"):
        await warm_up(llm)
    assert len(llm.salts) == 30 and not llm.open and not llm.paused


@pytest.mark.usefixtures("vllm")
async def test_a_request_that_does_not_run_to_its_end_is_said() -> None:
    with pytest.raises(vllm_compat.UnexpectedAnswer, match="warm-up-step-1-0 ended with 'abort'"):
        await warm_up(FakeLLM(ends="abort"))


class Started:
    """A core whose vLLM starts at once and is a :class:`FakeLLM`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: FakeLLM, **changed: Any) -> None:
        facts = {"dtype": "bfloat16", "max_model_len": 512, "vocab_size": 9, "workers": 1}
        for name, value in {
            "make_llm": llm,
            "engine_environment": {},
            "core_pids": (),
            "model_facts": facts,
            "packages": {},
            "hardware": "none",
        }.items():
            monkeypatch.setattr(vllm_compat, name, lambda *_, value=value, **__: value)

        async def watch(*_: Any) -> None:
            """Nothing of it runs."""

        monkeypatch.setattr(core.Core, "_watch", watch)
        monkeypatch.setattr(core, "make_scratch", dict)
        monkeypatch.setattr(core.gc, "freeze", lambda: None)
        monkeypatch.setenv(core.ACTOR_ENV, "")
        llm.get_tokenizer = lambda: None  # type: ignore[attr-defined]
        usual: dict[str, Any] = {"cpu": False, "batch_invariant": True, "swaps": True}
        settings = EngineSettings(model="none", log_path="engine.log", **(usual | changed))
        self.reporter = ActorReporter("e")
        self.core = core.Core("e", settings, self.reporter, asyncio.get_running_loop())

    async def events(self) -> list[str]:
        return [str(record["event"]) for record in await self.reporter.next_events()]


@pytest.mark.usefixtures("vllm")
async def test_an_engine_is_up_when_it_has_been_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM()
    started = Started(monkeypatch, llm)
    await started.core.start()
    assert len(llm.steps) == len(step_sizes(LARGEST)) + 1
    assert await started.events() == ["engine warmed up", "engine up"]


@pytest.mark.usefixtures("vllm")
async def test_a_cpu_engine_is_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM()
    started = Started(monkeypatch, llm, cpu=True)
    await started.core.start()
    assert not llm.steps and await started.events() == ["engine up"]


@pytest.mark.usefixtures("vllm")
async def test_an_engine_that_cannot_be_warmed_up_is_up_and_says_what_failed_and_where_to_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = FakeLLM(ends="error")
    started = Started(monkeypatch, llm)
    await started.core.start()
    warning, up = await started.reporter.next_events()
    assert (warning["level"], warning["event"]) == ("warning", "engine not warmed up")
    assert re.search(r"'error'.*first steps.*engine\.log", str(warning["message"]))
    assert up["event"] == "engine up" and not llm.open and not llm.paused


@pytest.mark.usefixtures("vllm")
async def test_a_warm_up_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM()
    llm.step_s, llm.may_be_cut = 1e6, True
    started = Started(monkeypatch, llm)
    await started.core.start()
    warning, up = await started.reporter.next_events()
    assert "more than 240 s" in str(warning["message"]) and up["event"] == "engine up"
    assert not llm.open and not llm.paused


@pytest.mark.usefixtures("vllm")
async def test_an_engine_whose_scheduler_stays_paused_is_not_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = FakeLLM()
    llm.stuck = llm.may_be_cut = True
    started = Started(monkeypatch, llm)
    with pytest.raises(
        EngineError, match=r"more than 240 s.*did not go on within 10 s.*engine\.log"
    ):
        await started.core.start()


@pytest.mark.usefixtures("vllm")
async def test_an_engine_that_dies_meanwhile_is_dead_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = FakeLLM()
    llm.may_be_cut = True
    started = Started(monkeypatch, llm)
    task = asyncio.create_task(started.core.start())
    await asyncio.sleep(3)  # in its third step
    started.core._dead.set_result("killed")
    with pytest.raises(EngineDied, match="killed"):
        await task
    await asyncio.sleep(1)
    assert not llm.open
