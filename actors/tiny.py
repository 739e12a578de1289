"""The tiny model: a 1.3 M-parameter byte-level Qwen3, trained here within a minute.

Imports torch and transformers; run it in its own process (``python -m actors.models tiny
engine``). One run makes both roles: the base is the model half-way, the tuned one its end.
Neither ever saw the end-of-text token, so generations run to their budget.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from actors.corpus import CORPUS

EOS_ID = 256
VOCAB_SIZE = 320
BASE_STEPS, TUNED_STEPS = 40, 80
_ROWS, _ROW_BYTES = 8, 128


def byte_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """256 bytes, end of text, and fillers up to ``vocab_size`` so that every id decodes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {symbol: i for i, symbol in enumerate(_byte_symbols())}
    vocab["<|endoftext|>"] = EOS_ID
    vocab.update({f"<{i}>": i for i in range(EOS_ID + 1, vocab_size)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def _byte_symbols() -> list[str]:
    """The printable symbol of each byte, in byte order, as byte-level BPE writes them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def tiny_config() -> Qwen3Config:
    """Shape of the tiny model."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=None,
    )


def build(
    folder: Path, *, seed: int = 0, steps: tuple[int, int] = (BASE_STEPS, TUNED_STEPS)
) -> None:
    """Train from ``seed`` and write ``folder/base`` and ``folder/tuned`` (float32).

    Deterministic on one machine: one thread, its own random streams. (Two threads that share
    two busy cores are also many times slower than one.)
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(tiny_config()).to(torch.float32)
    tokenizer = byte_tokenizer()
    rows = random.Random(seed)
    optimizers = _optimizers(model)
    rates = [group["lr"] for o in optimizers for group in o.param_groups]
    base_steps, tuned_steps = steps
    for step in range(1, tuned_steps + 1):
        scale = min(1.0, step / 8) * max(0.1, 1 - step / (tuned_steps + 1)) ** 0.5
        for group, rate in zip((g for o in optimizers for g in o.param_groups), rates, strict=True):
            group["lr"] = rate * scale
        batch = torch.tensor([_row(rows) for _ in range(_ROWS)])
        logits = model(input_ids=batch[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        if step == base_steps:
            _save(model, tokenizer, folder / "base")
    _save(model, tokenizer, folder / "tuned")


def _row(rng: random.Random) -> list[int]:
    text = " ".join(rng.sample(CORPUS, 8)).encode()
    return list(text[: _ROW_BYTES + 1])


def _optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    # Muon on the hidden matrices learns the corpus in a third of AdamW's steps.
    hidden: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (hidden if parameter.ndim == 2 and ".layers." in name else rest).append(parameter)
    return [
        _Muon(hidden, {"lr": 0.02}),
        torch.optim.AdamW(rest, lr=4e-3, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


class _Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) in float32, as ``torch.optim.Muon`` with Nesterov momentum.

    Not torch's: it orthogonalises in bfloat16, which a CPU without bfloat16 instructions
    emulates. There a step took ten times as long as all the rest of it.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(gradient, 0.1)
                update = _orthogonal(gradient.lerp(momentum, 0.9))
                rows, columns = parameter.shape
                parameter.sub_(update, alpha=group["lr"] * max(1.0, rows / columns) ** 0.5)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Nearly the orthogonal factor of ``matrix``, by four Newton-Schulz steps."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x: torch.Tensor = wide / wide.norm().clamp(min=1e-7)
    for _ in range(4):
        gram = x @ x.T
        x = x.mul(3.4445) + (gram @ gram).mul(2.0315).sub(gram, alpha=4.775) @ x
    return x if wide is matrix else x.T


def _save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
