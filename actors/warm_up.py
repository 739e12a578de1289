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

from orchestrator.types import FinishReason, KVPolicy, PauseMode

from . import vllm_compat

LARGEST = 2048
"""Tokens of a step; more of them take the same kernels."""
SCORED = 1024
"""Tokens of a step whose prompts' logprobs are asked for, as the canary does: vLLM computes logits
of at most so many at a time (``v1/worker/gpu/sample/prompt_logprob.py``)."""


def step_sizes(most: int) -> tuple[int, ...]:
    """Numbers of tokens up to ``most``, ascending, whose steps together need every kernel."""
    most = min(most, LARGEST)
    ends = [1 << power for power in range(2, LARGEST.bit_length()) if 1 << power < most] + [most]
    sizes = {1, most - most % 16, *(size for end in ends for size in (end - 1, end))}
    return tuple(sorted(size for size in sizes if size > 0))


def lengths(requests: int) -> tuple[int, ...]:
    """Tokens that each of so many requests writes, for a step of each size: all begin together."""
    sizes = step_sizes(requests)
    return tuple(sum(size > place for size in sizes) for place in range(requests))


async def warm_up(llm: Any) -> int:
    """Compute prompts in steps of each size, then decode with each number of requests.

    Returns how many requests that took (UnexpectedAnswer if one did not run to its end). Nobody
    else can use their KV cache.
    """
    limits = vllm_compat.limits(llm)
    longest, served = limits.max_model_len - 1, 0
    if longest < 1:
        return 0
    most = min(limits.max_num_batched_tokens, limits.max_num_seqs * longest)
    for size in step_sizes(most):
        served += await _together(llm, f"step-{size}", _cut(size, longest), None)
    tokens = [min(length, longest) for length in lengths(limits.max_num_seqs)]
    return served + await _together(llm, "decode", [1] * limits.max_num_seqs, tokens)


def _cut(size: int, most: int) -> list[int]:
    """``size`` tokens as prompts of at most ``most``."""
    whole, rest = divmod(size, most)
    return [most] * whole + [rest] * bool(rest)


async def _together(
    llm: Any, name: str, prompts: Sequence[int], tokens: Sequence[int] | None
) -> int:
    """Requests that begin in one step: prompts of so many tokens, and what each writes.

    ``tokens`` None: one each, and the prompts are scored if they are not too many.
    """
    score = tokens is None and sum(prompts) <= SCORED
    streams = []
    try:
        await vllm_compat.pause(llm, PauseMode.KEEP, KVPolicy.KEEP)
        try:
            for place, prompt in enumerate(prompts):
                writes = 1 if tokens is None else tokens[place]
                # vLLM warns of random sampling without a seed.
                sampled = vllm_compat.sampling(writes, 1.0, place, True)
                params = vllm_compat.scoring() if score else sampled
                request_id = f"warm-up-{name}-{place}"
                ids = [0] * prompt
                streams.append(await vllm_compat.submit(llm, request_id, ids, params, request_id))
        finally:
            await vllm_compat.resume(llm)
        for ended in await asyncio.gather(*(stream.listen() for stream in streams)):
            reason = ended.outputs[0].finish_reason
            if reason not in (FinishReason.LENGTH, FinishReason.STOP):
                raise vllm_compat.UnexpectedAnswer(f"{ended.request_id} ended with {reason!r}")
    finally:
        await asyncio.gather(*(stream.close() for stream in streams))
    return len(streams)
