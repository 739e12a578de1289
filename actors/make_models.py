"""What ``python -m actors.models`` runs in its own process. Imports torch and transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

from actors.models import smollm2_package
from orchestrator.errors import ConfigError

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PERTURBATION = 0.04
"""Size of the noise in SmolLM2's version 0, relative to each matrix's deviation."""


def build(name: str, folder: Path, seed: int) -> None:
    """Write both roles of ``tiny`` or ``smollm2`` below ``folder``."""
    if name == "tiny":
        from actors import tiny

        tiny.build(folder, seed=seed)
    else:
        _smollm2(folder, seed)


def _smollm2(folder: Path, seed: int) -> None:
    package = smollm2_package()
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=SMOLLM2_FILE)
    quantized = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=SMOLLM2_FILE, dtype=torch.float32
    )
    # A fresh model: the loaded one's config still says GGUF, and would be saved so.
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    for role in ("original", "perturbed"):
        if role == "perturbed":
            _perturb(model, seed)
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)


@torch.no_grad()
def _perturb(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise, alpha=PERTURBATION * parameter.std().item())


def random_qwen3(folder: Path, shape: dict[str, int], seed: int) -> None:
    """A Qwen3 of ``shape`` with random bfloat16 weights and the byte-level tokenizer."""
    from actors.tiny import EOS_ID, byte_tokenizer

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 151_936,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
        **shape,
    }
    config = Qwen3Config(
        **sizes,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        dtype="bfloat16",
    )
    # A billion random numbers take a GPU a moment and a CPU minutes.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer(config.vocab_size).save_pretrained(folder)


def download(name: str) -> Path:
    """The hub's snapshot of ``name``, from the local cache if it is whole there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"])
        )
    except Exception as error:  # the hub client's own kinds, OSError, httpx
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model {name} is not cached and the hub did not give it ({reason[:160]}): check "
            "the name and the network, or give a local folder"
        ) from None
