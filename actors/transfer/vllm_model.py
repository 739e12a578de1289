"""What a model that vLLM has loaded is made of, and vLLM's layerwise reload. For workers.

Beyond vLLM's public interface: the reload's bookkeeping, to tell which weights did not arrive, and
to start over after an update that failed half-way. Nothing here imports vLLM before it is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch


def loading_context() -> contextlib.AbstractContextManager[Any]:
    """Around ``load_weights``: a partial list is complete for its layer only at the end."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return contextlib.nullcontext()
    return disable_mtp_completeness_check()  # type: ignore[no-any-return]


def derived_weights(model: torch.nn.Module) -> Iterator[str]:
    """Why copying into the parameters of a loaded model is not enough, one reason a layer.

    What vLLM makes of weights after loading (quantised, re-packed, shuffled or absorbed ones)
    stays as it was when only the parameters change.
    """
    if hasattr(model, "process_weights_after_loading"):
        yield f"{type(model).__name__} processes its weights after loading"
    for name, module in model.named_modules():
        reason = _packed(module) or _quantised(module) or _absorbed(module)
        if reason:
            yield f"{name or type(model).__name__}: {reason}"


def only_packed(model: torch.nn.Module) -> bool:
    """Whether nothing but re-packing is done to the weights: they are loaded as they are sent."""
    return not hasattr(model, "process_weights_after_loading") and not any(
        _quantised(module) or _absorbed(module) for module in model.modules()
    )


@contextlib.contextmanager
def as_created(model: torch.nn.Module) -> Iterator[None]:
    """In the block ``model`` has the parameters it was made with, on the meta device.

    Those are what a reload would load into. Nobody may run the model meanwhile.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    ties = tied_parameters(model)
    live = [(module, dict(module._parameters)) for module in model.modules()]
    try:
        for module, _ in live:
            made, _buffers = get_layerwise_info(module).restore_metadata
            replaced = [n for n, p in module._parameters.items() if p is not None] if made else []
            for name in replaced:
                if name not in SKIP_TENSORS:
                    del module._parameters[name]
            for name, placeholder in made.items():
                # A twin: vLLM's own is what the next reload starts from.
                parameter = restore_layer_refs(to_meta_tensor(placeholder), module)
                loader: Any = getattr(parameter, "weight_loader", None)
                while getattr(loader, "__name__", "") == "online_process_loader":
                    loader = loader.__wrapped__  # left there by the last reload
                if loader is not None:
                    parameter.weight_loader = loader
                module._parameters[name] = parameter
        for name, first in ties.items():
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._parameters[own] = model.get_parameter(first)
        yield
    finally:
        for module, parameters in live:
            module._parameters.clear()
            module._parameters.update(parameters)


def _packed(layer: torch.nn.Module) -> str:
    # Plain functions read the weight they are given; a closure holds its own copy.
    if getattr(getattr(layer, "cpu_linear", None), "__closure__", None):
        return "the CPU computes with a re-packed copy"
    for copy in ("_cpu_unpacked_conv_weight", "_bf16x3_weight", "_moonep_weight_layout"):
        if getattr(layer, copy, None) is not None:
            return f"vLLM computes with a copy of its weight ({copy})"
    return _packed_experts(layer)


def _packed_experts(layer: torch.nn.Module) -> str:
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    method = _method(layer)
    if isinstance(method, UnquantizedFusedMoEMethod):
        # The other kernels want the experts swapped, padded or in blocks.
        backend = method.unquantized_backend.name
        if backend not in ("TRITON", "BATCHED_TRITON"):
            return f"experts are re-packed for the {backend} kernel"
    return ""


def _method(layer: torch.nn.Module) -> object:
    from vllm.model_executor.layers.fused_moe.fused_moe_modular_method import FusedMoEModularMethod

    method = getattr(layer, "quant_method", None)
    return method.old_quant_method if isinstance(method, FusedMoEModularMethod) else method


def _quantised(layer: torch.nn.Module) -> str:
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = _method(layer)
    if isinstance(method, QuantizeMethodBase) and not isinstance(method, UnquantizedFusedMoEMethod):
        plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        known = [kind.process_weights_after_loading for kind in plain]
        # GateLinear's only makes the copy that _packed looks for.
        if not isinstance(method, plain) or (
            type(method).process_weights_after_loading not in known
            and type(method).__name__ != "_GateLinearMethod"
        ):
            return f"weights are processed by {type(method).__name__}"
    return ""


def _absorbed(layer: torch.nn.Module) -> str:
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.v1.attention.backend import AttentionImplBase

    if not is_deferred_attention_layer(layer) or getattr(layer, "fp8_enabled", None) is False:
        return ""
    if not isinstance(layer, Attention):
        return f"{type(layer).__name__} processes weights after loading"
    for impl in layer.impl.get_impl_variants():
        plain = type(impl).process_weights_after_loading
        # FlashInfer's only casts sinks, and most models have none.
        if (
            plain is not AttentionImplBase.process_weights_after_loading
            and getattr(impl, "_sinks_source", impl) is not None
        ):
            return f"{type(impl).__name__} processes weights after loading"
    return ""


def begin_reload(model: torch.nn.Module, model_config: Any, *, interrupted: bool) -> None:
    """Start vLLM's layerwise reload; ``interrupted``: the last one was never ended."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    if interrupted:
        for info in _open_layers(model).values():
            # What a failed update left here would be loaded again beside the new weights.
            info.loaded_weights.clear()
            info.load_numel = 0
        end_reload(model, model_config)
    initialize_layerwise_reload(model)


def end_reload(model: torch.nn.Module, model_config: Any) -> None:
    """End vLLM's layerwise reload."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)


def incomplete_parameters(model: torch.nn.Module, tied: Collection[str] = ()) -> Iterator[str]:
    """Parameters of layers that have not got all their elements yet, those in ``tied`` aside.

    A fused layer counts as loaded by name when one of its parts was, so elements are counted.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    names = {module: name for name, module in model.named_modules()}
    for layer, info in _open_layers(model).items():
        own = {
            n: p
            for n, p in layer._parameters.items()
            if p is not None and f"{names[layer]}.{n}" not in tied
        }
        if not own or is_deferred_attention_layer(layer):
            continue
        if isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0:
            continue  # rows that pad the vocabulary are in no checkpoint
        wanted = sum(getattr(p, "weight_loader_numel", p.numel()) for p in own.values())
        if info.load_numel < wanted:
            for name in own:
                yield f"{names[layer]}.{name} ({info.load_numel} of {wanted} elements)"


def tied_parameters(model: torch.nn.Module) -> dict[str, str]:
    """Names of parameters that are another one under a second name -> that one's name.

    Ask before :func:`begin_reload`: it replaces both by separate placeholders.
    """
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied[name] = known
    return tied


def tied_names(model: torch.nn.Module, names: Collection[str]) -> dict[str, str]:
    """Checkpoint tensors of ``names`` that the model ties to another one of them -> that one.

    Ask before :func:`begin_reload`.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    sent = dict(zip(names, names, strict=True))
    known = sent if mapper is None else mapper.apply_dict(sent)
    ties = tied_parameters(model)
    return {known[n]: known[to] for n, to in ties.items() if n in known and to in known}


def refresh_tied(model: torch.nn.Module, tied: Mapping[str, str]) -> None:
    """After :func:`end_reload`: make what was derived from a tied weight follow it.

    The storage is shared and holds the new values, but the CPU's packed copy for the tied
    layer's own GEMM is still the old one (vLLM: "Failed to load weights", vllm#51665).
    """
    for name in tied:
        layer = model.get_submodule(name.rpartition(".")[0])
        quant_method = getattr(layer, "quant_method", None)
        if quant_method is not None:
            quant_method.process_weights_after_loading(layer)


def _open_layers(model: torch.nn.Module) -> dict[torch.nn.Module, Any]:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    infos = {layer: get_layerwise_info(layer) for layer in model.modules()}
    return {layer: info for layer, info in infos.items() if info.can_load()}
