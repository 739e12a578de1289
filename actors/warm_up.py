"""Requests that make an engine compile its kernels before anybody waits for them.

vLLM's batch-invariant matrix products (``model_executor/determinism`` there) are compiled by Triton
when a step first has their number of tokens: other tiles for each range of numbers up to 2,048,
other code for multiples of 16. A swap that computes the KV cache again brings new numbers, and all
requests would wait for the compiler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from orchestrator.types import KVPolicy, PauseMode

from . import vllm_compat

LARGEST = 2048
"""Tokens of a step; more of them take the same kernels."""
_SCORED = 256
"""Tokens of the longest prompt whose own logprobs are asked for, as the canary does."""
_STEPS = 2
"""With each number of requests."""


def step_sizes(most: int) -> tuple[int, ...]:
    """Numbers of tokens up to ``most``, ascending, whose steps together need every kernel."""
    most = min(most, LARGEST)
    ends = [1 << power for power in range(2, LARGEST.bit_length()) if 1 << power < most] + [most]
    sizes = {1, most - most % 16, *(size for end in ends for size in (end - 1, end))}
    return tuple(sorted(size for size in sizes if size > 0))


def lengths(requests: int) -> tuple[int, ...]:
    """Tokens that each of so many requests writes, all begun together, for every step size."""
    sizes = step_sizes(requests)
    return tuple(_STEPS * sum(size > place for size in sizes) for place in range(requests))


async def warm_up(llm: Any, max_model_len: int, max_num_seqs: int) -> int:
    """Compute prompts in steps of each size, then decode with each number of requests.

    Returns how many requests that took. Nobody else can use their KV cache.
    """
    served = 0
    for size in step_sizes(LARGEST):
        prompts = _cut(size, max_model_len - 1)
        if len(prompts) <= max_num_seqs:
            served += await _together(llm, f"step-{size}", prompts, [1] * len(prompts))
        if len(prompts) == 1 and size <= _SCORED:
            served += await _together(llm, f"score-{size}", prompts, None)
    tokens = [min(length, max_model_len - 1) for length in lengths(max_num_seqs)]
    return served + await _together(llm, "decode", [1] * max_num_seqs, tokens)


def _cut(size: int, most: int) -> list[int]:
    """``size`` tokens as prompts of at most ``most``."""
    whole, rest = divmod(size, most)
    return [most] * whole + [rest] * bool(rest)


async def _together(
    llm: Any, name: str, prompts: Sequence[int], tokens: Sequence[int] | None
) -> int:
    """Requests that begin in one step: prompts of so many tokens, and what each writes.

    ``tokens`` None: the prompts are only scored.
    """
    streams = []
    try:
        await vllm_compat.pause(llm, PauseMode.KEEP, KVPolicy.KEEP)
        for place, prompt in enumerate(prompts):
            # vLLM warns of random sampling without a seed.
            params = (
                vllm_compat.scoring()
                if tokens is None
                else vllm_compat.sampling(tokens[place], 1.0, place, True)
            )
            request_id = f"warm-up-{name}-{place}"
            ids = [0] * prompt
            streams.append(await vllm_compat.submit(llm, request_id, ids, params, request_id))
        await vllm_compat.resume(llm)
        await asyncio.gather(*(stream.listen() for stream in streams))
    finally:
        await asyncio.gather(*(stream.close() for stream in streams))
    return len(streams)
