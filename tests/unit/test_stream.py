"""Tokens are taken where vLLM hands them out: what goes wrong there ends one request, not all."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.vllm_compat import Stream
from orchestrator.types import PolicyVersion


class FakeLLM:
    """What a Stream knows of ``AsyncLLM``, and the collector of its one request."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(weight_version_starts=[("default", 0)])
        self.output_processor = SimpleNamespace(request_states={"r": self.state})
        self.collector: Any = SimpleNamespace(request_id="r", output=None, close=lambda: None)
        self.aborted: list[str] = []

    async def abort(self, request_id: str, internal: bool) -> None:
        self.aborted.append(request_id)


def output(token: int, finished: bool = False) -> Any:
    return SimpleNamespace(token=token, finished=finished)


async def test_outputs_are_heard_as_they_come_with_their_versions() -> None:
    llm, heard = FakeLLM(), cast(list[tuple[int, PolicyVersion | None]], [])
    stream = Stream(llm, llm.collector)
    llm.collector.output = output(1)  # came before anybody listened
    last = asyncio.ensure_future(stream.listen(lambda o, v: heard.append((o.token, v))))
    await asyncio.sleep(0)
    llm.collector.put(output(2))
    llm.state.weight_version_starts.append(("3", 2))
    llm.collector.put(output(3, finished=True))
    llm.collector.put(output(4))
    assert heard == [(1, 0), (2, 0), (3, 3)]
    assert (await last).token == 3
    await stream.close()
    assert llm.aborted == []


@pytest.mark.parametrize("ours", [True, False])
async def test_an_error_ends_the_request_and_nothing_else(ours: bool) -> None:
    llm = FakeLLM()
    stream = Stream(llm, llm.collector)

    def hear(output: Any, version: PolicyVersion | None) -> None:
        raise KeyError("no such token")

    last = asyncio.ensure_future(stream.listen(hear))
    await asyncio.sleep(0)
    llm.collector.put(output(1) if ours else KeyError("no such token"))
    with pytest.raises(KeyError, match="no such token"):
        await last
    await stream.close()
    assert llm.aborted == ["r"]


async def test_a_request_that_is_left_is_aborted_once() -> None:
    llm = FakeLLM()
    stream = Stream(llm, llm.collector)
    last = asyncio.ensure_future(stream.listen())
    await asyncio.sleep(0)
    last.cancel()
    await asyncio.wait({last})
    await stream.close()
    await stream.close()
    assert llm.aborted == ["r"]
    assert "put" not in vars(llm.collector), "it still holds the stream"
