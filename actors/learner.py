"""The policy-gradient step. Imports torch; knows nothing of actors or channels.

Advantages are relative to the prompt's group (GRPO, arXiv:2402.03300), by its mean alone:
dividing by the group's deviation overweights groups that are nearly always right or wrong,
and averaging per sequence favours short ones (Dr. GRPO, arXiv:2503.20783), so the loss is one
mean over all tokens of the batch. Rollouts come from older policies and from several at once:
each token's gradient is weighted by the ratio of the current policy's probability to the one
it was sampled with, truncated from above (IMPALA's rho-bar, arXiv:1802.01561).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.errors import TrainerError, TrainingDiverged
from orchestrator.types import Rollout, TrainStats

Forward = Callable[..., Any]
"""Takes ``input_ids`` and ``use_cache``; returns an object with ``logits``."""


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """How a step is made."""

    learning_rate: float = 1e-6
    grad_clip: float = 1.0
    """Largest gradient norm."""
    ratio_limit: float = 2.0
    """Truncation of the importance ratio."""
    micro_tokens: int = 8192
    """Padded tokens a forward pass; bounds the memory of the logits."""


class Learner:
    """Owns the optimizer of ``model``. Not thread-safe: one worker thread calls it.

    Dropout stays off: a random mask would make the importance ratio noise.
    """

    def __init__(self, model: nn.Module, options: LearnerOptions) -> None:
        self.model = model.eval()
        self._options = options
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, batch: Sequence[Rollout], rewards: Sequence[float], step: int) -> TrainStats:
        """One optimizer step.

        ``rewards`` are in the order of ``batch``. Rollouts without tokens (ended before their
        first one) count neither in the gradient nor in the mean reward. TrainerError when no
        rollout has a token or the gradient is not finite; the weights are unchanged then.
        TrainingDiverged when the weights are not finite after the step, or too large for their
        norm: they are of no use any more.
        """
        start = time.perf_counter()
        used = [i for i, rollout in enumerate(batch) if rollout.completion.token_ids]
        if not used:
            raise TrainerError(f"step {step}: none of the {len(batch)} rollouts has a token")
        rollouts = [batch[i] for i in used]
        scores = [float(rewards[i]) for i in used]
        advantages = group_advantages([r.request.group for r in rollouts], scores)
        tokens = sum(len(r.completion.token_ids) for r in rollouts)
        self._optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for rows in micro_batches(rollouts, self._options.micro_tokens):
            part = self._loss([rollouts[i] for i in rows], [advantages[i] for i in rows]) / tokens
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.item()
        norm = nn.utils.clip_grad_norm_(self._parameters, self._options.grad_clip).item()
        if not torch.isfinite(torch.tensor([loss, norm])).all():
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainerError(
                f"step {step}: loss {loss}, gradient norm {norm}; lower the learning rate "
                f"({self._options.learning_rate:g})"
            )
        self._optimizer.step()
        with torch.no_grad():
            size = nn.utils.get_total_norm(self._parameters).item()
        if not math.isfinite(size):
            raise TrainingDiverged(
                f"training diverged at step {step}: the norm of the weights ({size}) is not "
                f"finite; lower the learning rate ({self._options.learning_rate:g})"
            )
        return TrainStats(
            step=step,
            loss=loss,
            reward=sum(scores) / len(scores),
            grad_norm=norm,
            tokens=tokens,
            seconds=time.perf_counter() - start,
            rewards=tuple(float(r) for r in rewards),
        )

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's tensors, not copied, as ``parameter.key``; empty before the first step.

        Without its hyperparameters: those are the settings' business.
        """
        state = self._optimizer.state_dict()["state"]
        return {
            f"{name}.{key}": value
            for index, name in enumerate(self._names())
            for key, value in state.get(index, {}).items()
        }

    def load_optimizer_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Put copies of what :meth:`optimizer_state` gave in place (TrainerError: none changed)."""
        indices = {name: index for index, name in enumerate(self._names())}
        state: dict[int, dict[str, Tensor]] = {}
        for full, tensor in tensors.items():
            name, _, key = full.rpartition(".")
            if name not in indices:
                raise TrainerError(f"the optimizer's state {full!r} is of no parameter here")
            parameter = self._parameters[indices[name]]
            if key != "step" and tensor.shape != parameter.shape:
                raise TrainerError(
                    f"the optimizer's state {full!r} has shape {tuple(tensor.shape)}, the "
                    f"parameter {tuple(parameter.shape)}"
                )
            state.setdefault(indices[name], {})[key] = tensor.clone()
        keys = {frozenset(entry) for entry in state.values()}
        if state and (len(state) != len(indices) or len(keys) != 1):
            raise TrainerError(
                f"the optimizer's state covers {len(state)} of {len(indices)} parameters, with "
                f"{len(keys)} kinds of entries: it is not whole"
            )
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _names(self) -> list[str]:
        return [name for name, p in self.model.named_parameters() if p.requires_grad]

    def _loss(self, rollouts: Sequence[Rollout], advantages: Sequence[float]) -> Tensor:
        """Summed over the tokens the policy wrote."""
        device = self._parameters[0].device
        sequences = [(*r.request.prompt.token_ids, *r.completion.token_ids) for r in rollouts]
        width = max(map(len, sequences)) - 1
        behaviour = torch.zeros(len(rollouts), width)
        weight = torch.zeros(len(rollouts), width)
        for row, rollout in enumerate(rollouts):
            first = len(rollout.request.prompt.token_ids) - 1
            last = first + len(rollout.completion.token_ids)
            behaviour[row, first:last] = torch.tensor(rollout.completion.logprobs)
            weight[row, first:last] = advantages[row]
        with _autocast(device):
            current = token_logprobs(self.model, sequences, device)
        ratio = (current.detach() - behaviour.to(device)).exp()
        ratio = ratio.clamp(max=self._options.ratio_limit)
        # Where the weight is 0 (prompt, padding) the ratio means nothing and may be infinite.
        return -(ratio * weight.to(device) * current).sum()


def group_advantages(groups: Sequence[str], rewards: Sequence[float]) -> list[float]:
    """Reward minus the mean of its group. A group of one has advantage 0."""
    members: defaultdict[str, list[float]] = defaultdict(list)
    for group, reward in zip(groups, rewards, strict=True):
        members[group].append(reward)
    return [
        reward - sum(members[group]) / len(members[group])
        for group, reward in zip(groups, rewards, strict=True)
    ]


def micro_batches(rollouts: Sequence[Rollout], limit: int) -> Iterator[list[int]]:
    """Consecutive rows whose padded size stays within ``limit`` tokens (one row at least)."""
    rows: list[int] = []
    width = 0
    for i, rollout in enumerate(rollouts):
        length = len(rollout.request.prompt.token_ids) + len(rollout.completion.token_ids)
        if rows and max(width, length) * (len(rows) + 1) > limit:
            yield rows
            rows, width = [], 0
        rows.append(i)
        width = max(width, length)
    if rows:
        yield rows


def token_logprobs(
    forward: Forward, sequences: Sequence[Sequence[int]], device: torch.device
) -> Tensor:
    """Log-probability of each token but the first, float32, shape (rows, longest - 1).

    Padded on the right: attention is causal, so padding reaches no real position and needs
    no mask. Entries beyond a row's own length mean nothing.
    """
    ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
    ids = ids.to(device)
    logits = forward(input_ids=ids[:, :-1], use_cache=False).logits
    chosen: Tensor = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])
    return chosen.squeeze(-1)


@torch.no_grad()
def prompt_logprobs(
    forward: Forward, prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[tuple[float, ...], ...]:
    """Log-probability of each prompt token but the first; one prompt a pass, no padding."""
    return tuple(
        tuple(token_logprobs(forward, [prompt], device)[0].tolist()) if len(prompt) > 1 else ()
        for prompt in prompts
    )


def with_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Forward:
    """``model``'s forward pass under other ``weights``, in their dtype, on its device.

    The model itself is lent for the duration of each call: call it from the thread that
    trains. No second copy is made where the weights lie on the same device.
    """
    device = next(model.parameters()).device
    tensors = {name: tensor.to(device) for name, tensor in weights}

    def forward(**inputs: object) -> Any:
        return torch.func.functional_call(model, tensors, args=(), kwargs=dict(inputs))

    return forward


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    if device.type == "cpu":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
