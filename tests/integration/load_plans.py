"""Load plans against vLLM's own loader. Run by test_load_plan, one process a rank:

``python -m tests.integration.load_plans FOLDER RANK WORLD`` builds each model without an engine,
loads one checkpoint, records the plan, replays it with another, and compares with a second
model that loaded that one. Writes what it saw as JSON into ``FOLDER``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from actors.transfer import vllm_model
from actors.transfer.digest import digest_all, parts_of
from actors.transfer.layout import Layout, dtype_name
from actors.transfer.plan import LoadPlan, NoPlan
from actors.transfer.planned import Planned
from orchestrator.errors import ChannelError
from orchestrator.types import TensorSpec

COMMON = {
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
MODELS: dict[str, dict[str, Any]] = {
    # First: vLLM's process groups for experts are made only if the first model has some.
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "tie_word_embeddings": False,
    },
    # One key-value head: two ranks hold the same one. Tied: the head is in no checkpoint.
    "qwen3": {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True},
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "tie_word_embeddings": False},
}
WIRE = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def write_checkpoints(folder: Path) -> None:
    """Two float32 checkpoints of each model, as transformers saves them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, extra in MODELS.items():
        for seed in (1, 2):
            torch.manual_seed(seed)
            config = AutoConfig.for_model(name, **COMMON, **extra)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter)
            model.save_pretrained(folder / name / str(seed))


def tensors_of(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {n: t.to(dtype) for n, t in load_file(folder / "model.safetensors").items()}


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [
        TensorSpec(n, dtype_name(t.dtype), tuple(t.shape), t.nbytes) for n, t in tensors.items()
    ]


def held_by(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [
        n
        for n, t in one.items()
        if not torch.equal(t.view(torch.uint8), other[n].view(torch.uint8))
    ]


def attributes_of(model: torch.nn.Module) -> dict[str, list[str]]:
    owners = [*model.named_modules(), *((f"{n} ", p) for n, p in model.named_parameters())]
    return {name: sorted(f"{k} {id(v)}" for k, v in vars(o).items()) for name, o in owners}


def examine(make: Any, folder: Path, wire: torch.dtype) -> dict[str, Any]:
    """One model, one dtype on the wire."""
    a, b = (tensors_of(folder / seed, wire) for seed in "12")
    replayed, loaded = make(), make()
    for model, tensors in ((replayed, a), (loaded, b)):
        for parameter in model.parameters():
            parameter.data.fill_(1)
        with torch.no_grad():
            model.load_weights(iter(tensors.items()))
    before, attributes = held_by(replayed), attributes_of(replayed)
    plan = LoadPlan.record(replayed, specs_of(a))
    touched = differing(before, held_by(replayed)) or attributes_of(replayed) != attributes
    plan.bind(b).run()
    shapes = {n: tuple(t.shape) for n, t in b.items()}
    result = {
        "touched": touched,
        "copies": len(plan.copies),
        "sliced": sum(not copy.whole for copy in plan.copies),
        "unused": plan.unused,
        "lossy": len(plan.lossy),
        "changed": len(differing(before, held_by(replayed))),
        "parameters": len(before),
        "differing": differing(held_by(replayed), held_by(loaded)),
        "parts": parts_of(plan.live(), shapes),
        "digests": digest_all(b.items()),
        "shapes": shapes,
        "derived before": list(vllm_model.derived_weights(replayed)),
    }
    missing = [spec for spec in specs_of(a) if "layers.1.self_attn.k_proj" not in spec.name]
    try:
        LoadPlan.record(replayed, missing)
    except NoPlan as error:
        result["incomplete"] = str(error)
    unexpected = [*specs_of(a), TensorSpec("model.layers.0.nonsense.weight", "float32", (1,), 4)]
    try:
        LoadPlan.record(replayed, unexpected)
    except NoPlan as error:
        result["unexpected"] = str(error)
    return result


def processed(make: Any, config: Any, folder: Path) -> dict[str, Any]:
    """A float32 model as an engine on a CPU has it: re-packed."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model, tensors = make(), tensors_of(folder / "1", torch.float32)
    model.load_weights(iter(tensors.items()))
    process_weights_after_loading(model, config, torch.device("cpu"))
    result: dict[str, Any] = {"derived": list(vllm_model.derived_weights(model))}
    try:
        LoadPlan.record(model, specs_of(tensors))
    except NoPlan as error:
        result["reason"] = str(error)
    result["foretold"] = foretold(model, tensors)
    vllm_model.begin_reload(model, config, interrupted=False)
    model.load_weights(iter(tensors.items()))
    vllm_model.end_reload(model, config)
    result["foretold after a reload"] = foretold(model, tensors)
    return result


def foretold(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """What is said of several checkpoints before a model that is re-packed loads them."""
    norm, key = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"
    cases = {
        "the same": tensors,
        "missing": {n: t for n, t in tensors.items() if n != norm},
        "partly missing": {n: t for n, t in tensors.items() if n != key},
        "misshaped": {n: t[:-4] if n == key else t for n, t in tensors.items()},
        "wrapped": {f"module.{n}": t for n, t in tensors.items()},
    }
    before, attributes = held_by(model), attributes_of(model)
    said = {}
    for name, case in cases.items():
        said[name] = ""
        planned = Planned(model)
        try:
            planned.must_fit(Layout.of(specs_of(case)))
        except ChannelError as error:
            said[name] = str(error)
    touched = differing(before, held_by(model)) or attributes_of(model) != attributes
    said["touched"] = str(touched or "")
    return said


class Maker:
    """Makes instances of one model without an engine, as vLLM's loader would."""

    def __init__(self, folder: Path, dtype: str, rank: int, world: int) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel
        from vllm.engine.arg_utils import EngineArgs

        self.config = EngineArgs(
            model=str(folder / "1"),
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            tensor_parallel_size=world,
            distributed_executor_backend="external_launcher" if world > 1 else "uni",
        ).create_engine_config()
        self.current = lambda: set_current_vllm_config(self.config)
        with self.current():
            if not torch.distributed.is_initialized():
                meeting = f"file://{folder.parent}/meeting-{world}"
                init_distributed_environment(world, rank, meeting, rank, backend="gloo")
                initialize_model_parallel(world)

    def __call__(self) -> torch.nn.Module:
        from vllm.model_executor.model_loader.utils import initialize_model

        # It refuses a second layer of one name.
        self.config.compilation_config.static_forward_context.clear()
        self.config.compilation_config.static_all_moe_layers.clear()
        torch.set_default_dtype(self.config.model_config.dtype)
        try:
            with self.current():
                return initialize_model(self.config)  # type: ignore[no-any-return]
        finally:
            torch.set_default_dtype(torch.float32)


def main(folder: Path, rank: int, world: int) -> None:
    found: dict[str, Any] = {}
    for name in MODELS:
        make = Maker(folder / name, "bfloat16", rank, world)
        for wire, dtype in WIRE.items():
            found[f"{name} {wire}"] = examine(make, folder / name, dtype)
        if world == 1:
            make = Maker(folder / name, "float32", rank, world)
            found[f"{name} bfloat16 widened"] = examine(make, folder / name, torch.bfloat16)
            with make.current():
                found[f"{name} processed"] = processed(
                    make, make.config.model_config, folder / name
                )
    (folder / f"rank-{rank}-of-{world}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
