"""What vLLM says of each token it chose, taken from its own container."""

from __future__ import annotations

import pytest

from actors.vllm_compat import UnexpectedAnswer, chosen_logprobs


def test_the_chosen_token_of_each_position_is_taken() -> None:
    from vllm.logprobs import FlatLogprobs

    flat = FlatLogprobs()
    for chosen, other in ((7, 3), (7, 9), (2, 5)):  # as vLLM appends them, the chosen one first
        flat.append_fast([chosen, other], [-chosen / 8, -0.5], [4, 1], [None, None])
    assert chosen_logprobs([7, 7, 2], flat) == [-0.875, -0.875, -0.25]
    assert chosen_logprobs([2], flat[-1:]) == [-0.25]
    assert chosen_logprobs([], None) == []
    gap, end = FlatLogprobs(), FlatLogprobs()
    gap.append(None)
    gap.append_fast([7], [-1.0], [1], [None])
    end.append_fast([7], [-1.0], [1], [None])
    end.append(None)
    wrong = [([7, 7], flat), ([7, 7, 3], flat), ([7], None), ([7], flat[:0]), ([7], [{7: -1.0}])]
    for tokens, said in [*wrong, ([7, 7], gap), ([7, 7], end)]:
        with pytest.raises(UnexpectedAnswer, match=f"{len(tokens)} tokens came without"):
            chosen_logprobs(tokens, said)
