"""Requests that make an engine compile its kernels before anybody waits for them.

vLLM's batch-invariant matrix products (``model_executor/determinism`` there) are compiled by Triton
when a step first has their number of tokens: other tiles for each range of numbers up to 2,048,
other code for multiples of 16. A swap that computes the KV cache again brings new numbers, and all
requests would wait for the compiler.
"""

from __future__ import annotations

import asyncio
from typing import Any

from . import vllm_compat

LARGEST = 2048
"""Tokens of a step; more of them take the same kernels."""
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
    """Compute prompts of each size, then decode with each number of requests; how many requests.

    Nobody else can use their KV cache.
    """
    prompts = step_sizes(max_model_len - 1)
    for size in prompts:  # one by one: each is a step of its own
        await _request(llm, f"prompt-{size}", size, 1)
    together = lengths(max_num_seqs)
    longest = max_model_len - 1
    await asyncio.gather(
        *(
            _request(llm, f"decode-{place}", 1, min(length, longest))
            for place, length in enumerate(together)
        )
    )
    return len(prompts) + len(together)


async def _request(llm: Any, name: str, prompt: int, tokens: int) -> None:
    params = vllm_compat.sampling(tokens, 1.0, None, True)
    stream = await vllm_compat.submit(
        llm, f"warm-up-{name}", [0] * prompt, params, f"warm-up-{name}"
    )
    try:
        await stream.listen()
    finally:
        await stream.close()
