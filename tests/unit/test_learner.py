"""The policy-gradient step against numbers worked out another way."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.learner import (
    Learner,
    LearnerOptions,
    group_advantages,
    micro_batches,
    prompt_logprobs,
    token_logprobs,
    with_weights,
)
from orchestrator.errors import TrainerError, TrainingDiverged
from orchestrator.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    Rollout,
)

CPU = torch.device("cpu")


def small_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def spoil(parameter: torch.Tensor) -> None:
    """As an optimizer's step may."""
    parameter.data[0] = math.nan


def rollout(
    prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float], group: str = "g"
) -> Rollout:
    return Rollout(
        GenerationRequest("r", Prompt(tuple(prompt)), 32, group=group),
        Completion("r", "e", tuple(tokens), tuple(logprobs), (), FinishReason.LENGTH),
    )


def on_policy(model: nn.Module, prompt: Sequence[int], tokens: Sequence[int], group: str = "g"):
    with torch.no_grad():
        rows = token_logprobs(model, [[*prompt, *tokens]], CPU)[0]
    return rollout(prompt, tokens, rows[len(prompt) - 1 :].tolist(), group)


def batch_of(model: nn.Module) -> list[Rollout]:
    return [
        on_policy(model, [1, 2, 3], [4, 5], "a"),
        on_policy(model, [1, 2, 3], [6, 7, 8, 9, 10], "a"),
        on_policy(model, [11] * 9, [12], "b"),
        on_policy(model, [11] * 9, [13, 14, 15], "b"),
    ]


def learner(model: nn.Module, **options: float) -> Learner:
    return Learner(model, LearnerOptions(**{"learning_rate": 1e-2, **options}))  # type: ignore[arg-type]


def test_advantages_are_relative_to_the_group() -> None:
    assert group_advantages(["a", "b", "a", "c"], [1.0, 5.0, 0.0, 9.0]) == [0.5, 0.0, -0.5, 0.0]


def test_padding_changes_no_logprob() -> None:
    model = small_model()
    sequences = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11, 12]]
    with torch.no_grad():
        together = token_logprobs(model, sequences, CPU)
        for row, sequence in enumerate(sequences):
            logits = model(input_ids=torch.tensor([sequence])).logits[0, :-1]
            alone = [
                math.log(torch.softmax(logits[i].double(), -1)[token].item())
                for i, token in enumerate(sequence[1:])
            ]
            assert together[row, : len(alone)].tolist() == pytest.approx(alone, abs=1e-5)
    singles = prompt_logprobs(model, [*sequences, [3]], CPU)
    assert [len(row) for row in singles] == [5, 1, 3, 0]
    assert singles[2] == pytest.approx(together[2, :3].tolist(), abs=1e-5)


def test_the_gradient_is_that_of_the_formula() -> None:
    """Ratio (truncated at 2) times advantage times grad log-prob, averaged over all tokens."""
    model = small_model()
    twin = copy.deepcopy(model)
    on = on_policy(model, [1, 2, 3], [4, 5], "a")
    shifts = [0.5, -3.0, 9.0]  # ratios e^0.5, e^-3, and one far above the limit
    base = on_policy(model, [1, 2, 3], [6, 7, 8], "a")
    off = rollout(
        [1, 2, 3],
        [6, 7, 8],
        [lp - shift for lp, shift in zip(base.completion.logprobs, shifts, strict=True)],
        "a",
    )
    stats = learner(model, grad_clip=1e9).step([on, off], [1.0, 0.0], 1)

    total = torch.zeros(())
    for sequence, advantage, ratios in (
        ([1, 2, 3, 4, 5], 0.5, [1.0, 1.0]),
        ([1, 2, 3, 6, 7, 8], -0.5, [math.exp(0.5), math.exp(-3.0), 2.0]),
    ):
        logprobs = twin(input_ids=torch.tensor([sequence])).logits[0].log_softmax(-1)
        for i, ratio in enumerate(ratios):
            total = total - ratio * advantage * logprobs[2 + i, sequence[3 + i]]
    (total / 5).backward()
    norm = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None]).norm()
    assert stats.loss == pytest.approx(total.item() / 5, rel=1e-4)
    assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-6)


def test_a_step_makes_the_better_rollout_likelier() -> None:
    model = small_model()
    good, bad = on_policy(model, [1, 2], [3, 4]), on_policy(model, [1, 2], [5, 6])
    stats = learner(model).step([bad, good], [0.0, 1.0], 7)
    after = [on_policy(model, [1, 2], r.completion.token_ids) for r in (good, bad)]
    assert sum(after[0].completion.logprobs) > sum(good.completion.logprobs)
    assert sum(after[1].completion.logprobs) < sum(bad.completion.logprobs)
    assert (stats.step, stats.tokens, stats.reward, stats.rewards) == (7, 4, 0.5, (0.0, 1.0))


def test_micro_batches_change_nothing() -> None:
    whole, cut = small_model(), small_model()
    rewards = [0.0, 1.0, 0.3, 0.2]
    first = learner(whole).step(batch_of(whole), rewards, 1)
    second = learner(cut, micro_tokens=1).step(batch_of(cut), rewards, 1)
    assert second.loss == pytest.approx(first.loss, abs=1e-6)
    for a, b in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-7)


def test_micro_batches_cover_every_row_once_within_the_limit() -> None:
    rows = [rollout([1] * p, [2] * t, [0.0] * t) for p, t in ((3, 1), (2, 2), (9, 3), (1, 1))]
    assert list(micro_batches(rows, 8)) == [[0, 1], [2], [3]]
    assert list(micro_batches(rows, 10_000)) == [[0, 1, 2, 3]]


def test_equal_seeds_give_equal_weights() -> None:
    models = [small_model(5), small_model(5)]
    for model in models:
        own = learner(model)
        for step in range(3):
            own.step(batch_of(model), [0.0, 1.0, 0.5, 0.1], step)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_rollouts_without_tokens_do_not_count() -> None:
    model = small_model()
    rows = [on_policy(model, [1, 2], [3]), rollout([1, 2], [], []), on_policy(model, [1, 2], [4])]
    stats = learner(model).step(rows, [1.0, 0.0, 0.5], 1)
    assert (stats.reward, stats.tokens, stats.rewards) == (0.75, 2, (1.0, 0.0, 0.5))
    with pytest.raises(TrainerError, match="none of the 1 rollouts has a token"):
        learner(model).step(rows[1:2], [0.0], 1)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    rows = [rollout([1, 2], [3], [math.nan]), on_policy(model, [1, 2], [4])]
    with pytest.raises(TrainerError, match=r"step 4: loss nan.*lower the learning rate"):
        learner(model).step(rows, [1.0, 0.0], 4)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_weights_that_are_not_finite_after_the_step_are_the_trainers_fault() -> None:
    model = small_model()
    with pytest.raises(
        TrainingDiverged,
        match=r"diverged at step 3: .*\(inf\) is not finite; lower the .*\(1e\+30\)",
    ):
        learner(model, learning_rate=1e30).step(batch_of(model), [0.0, 1.0, 0.3, 0.2], 3)
    model = small_model()
    own = learner(model)
    next(model.parameters()).register_post_accumulate_grad_hook(spoil)
    with pytest.raises(TrainingDiverged, match=r"diverged at step 1: .*\(nan\) is not finite"):
        own.step(batch_of(model), [0.0, 1.0, 0.3, 0.2], 1)


def test_logprobs_under_other_weights_leave_the_model_as_it_is() -> None:
    model, other = small_model(1), small_model(2)
    before = copy.deepcopy(model.state_dict())
    prompts = [[1, 2, 3, 4], [5, 6]]
    borrowed = prompt_logprobs(with_weights(model, other.state_dict().items()), prompts, CPU)
    assert borrowed == prompt_logprobs(other, prompts, CPU)
    assert borrowed != prompt_logprobs(model, prompts, CPU)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_logprobs_in_the_wire_dtype_are_those_of_a_model_loaded_in_it(tmp_path: Path) -> None:
    model = small_model(1)
    small_model(2).to(torch.bfloat16).save_pretrained(tmp_path)
    other = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    borrowed = prompt_logprobs(with_weights(model, other.state_dict().items()), [[1, 2, 3]], CPU)
    assert borrowed == prompt_logprobs(other, [[1, 2, 3]], CPU)
