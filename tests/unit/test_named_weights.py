"""Which tensors are sent, under which names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from actors.checkpoint import write_checkpoint
from actors.named_weights import checkpoint_names, named_weights
from orchestrator.errors import TrainerError


def llama(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_the_names_are_those_of_the_checkpoint(tmp_path: Path, tied: bool) -> None:
    """Case 9: a tied head travels once."""
    model = llama(tied=tied)
    model.save_pretrained(tmp_path)
    names = checkpoint_names(tmp_path)
    assert names is not None and ("lm_head.weight" in names) is not tied
    weights = dict(named_weights(model, names)())
    assert weights.keys() == names
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name], weights[name]) for name in names)
    assert not any("inv_freq" in name for name in weights)


def test_what_is_yielded_is_live(tmp_path: Path) -> None:
    model = llama(tied=True)
    weights = named_weights(model, None)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(3.0)
    assert dict(weights())["model.embed_tokens.weight"].unique().tolist() == [3.0]


def test_a_redundant_head_in_the_checkpoint_is_fine(tmp_path: Path) -> None:
    """Case 9."""
    model = llama(tied=True)
    save_file(
        {name: t.detach().clone() for name, t in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    names = checkpoint_names(tmp_path)
    assert names is not None and "lm_head.weight" in names
    sent = [name for name, _ in named_weights(model, names)()]
    assert len(sent) == len(set(sent)) == len(names) - 1


def test_a_head_that_should_be_tied_and_is_not_is_refused() -> None:
    """Case 9."""
    model = llama(tied=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(TrainerError, match=r"two tensors.*model\.tie_weights\(\)"):
        named_weights(model, None)


def test_buffers_are_weights_only_if_the_checkpoint_has_them() -> None:
    """Case 13."""
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(2))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    names = frozenset({"weight", "bias", "scale"})
    assert {name for name, _ in named_weights(model, names)()} == names
    with pytest.raises(TrainerError, match=r"buffer 'scale' is persistent.*persistent=False"):
        named_weights(model, names - {"scale"})
    with pytest.raises(TrainerError, match="buffer 'scale' would be sent"):
        named_weights(model, None)


def test_renamed_and_missing_weights_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TrainerError, match="weight 'bias' is not in the checkpoint"):
        named_weights(model, frozenset({"weight", "b"}))
    with pytest.raises(TrainerError, match="has 'gate' but the model would not send it"):
        named_weights(model, frozenset({"weight", "bias", "gate"}))


def test_sharded_checkpoints_are_read_by_their_index(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_names(tmp_path) == {"a", "b"}
    assert checkpoint_names(tmp_path / "missing") is None


def test_a_checkpoint_is_whole_loadable_and_says_its_dtype(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "out" / "v3"
    model = llama(tied=False)
    model.save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    flat = torch.arange(4096, dtype=torch.bfloat16)  # views of one buffer, as staged
    offset, views = 0, {}
    for name, tensor in model.state_dict().items():
        views[name] = flat[offset : offset + tensor.numel()].view(tensor.shape)
        offset += tensor.numel()
    assert write_checkpoint(target, views.items(), source, metadata={"v": "3"}) == target
    again = AutoModelForCausalLM.from_pretrained(target)
    assert again.dtype is torch.bfloat16
    assert all(torch.equal(t, views[name]) for name, t in again.state_dict().items())
    assert (target / "tokenizer.json").is_file()

    views = {name: torch.zeros_like(view) for name, view in views.items()}
    write_checkpoint(target, views.items(), source)
    assert not load_file(target / "model.safetensors")["lm_head.weight"].any()
    assert [path.name for path in target.parent.iterdir()] == ["v3"]


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "v1"
    llama(tied=False).save_pretrained(source)
    write_checkpoint(target, [("a", torch.ones(2))], source)
    (source / "config.json").unlink()
    with pytest.raises(FileNotFoundError):
        write_checkpoint(target, [("a", torch.zeros(2))], source)
    assert load_file(target / "model.safetensors")["a"].tolist() == [1.0, 1.0]
    with pytest.raises(TrainerError, match="no weights to save"):
        write_checkpoint(target, [], source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "v1"]
