"""What an engine replica is started with. Plain data; no vLLM needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .transfer.names import ENGINE_NAME, WORKER_EXTENSION

CPU_BATCHED_TOKENS = 8192
"""Tokens of one step on the CPU: a recomputed batch should fit into one."""
UNCOMPILED_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""vLLM's compilation config: kernels as in eager mode, replayed as graphs while decoding."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Arguments of one replica."""

    model: str
    """Path or hub name of the checkpoint that is policy version 0."""
    swaps: bool = True
    """Whether weights will arrive, over whichever backend; False for the fresh check's engine."""
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    """Requests decoded together; more wait inside the engine."""
    seed: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    executor: str = "auto"
    """vLLM's executor: ``uni``, ``mp``, ``ray``; auto: uni for one worker, for more ray on GPUs
    and mp on the CPU, where vLLM has no Ray executor."""
    worker_gpus: float = 1.0
    """GPUs that each worker of the Ray executor takes of its bundle."""
    cpu: bool = True
    """Run on the CPU: eager, threads bound to no core, ``kv_cache_gib`` of cache."""
    threads: int = 0
    """Compute threads on the CPU (0: half of the cores)."""
    kv_cache_gib: float = 0.5
    """KV cache on the CPU; on a GPU ``gpu_memory_utilization`` decides."""
    gpu_memory_utilization: float = 0.9
    graphs: bool | None = None
    """CUDA graphs. None: on a GPU, unless batch invariance is asked for: torch.compile's kernels
    depend on the batch (H200, vLLM 0.33: 0 of 13 probes equal). With it True captures the decode
    steps without compiling them."""
    batch_invariant: bool = False
    prefix_caching: bool = True
    log_path: str | None = None
    """Where the output of the replica's processes goes (None: left as it is)."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """More arguments of vLLM's ``AsyncEngineArgs``; they win."""

    @property
    def workers(self) -> int:
        """Worker processes, each a rank of the transfer group."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def executor_backend(self) -> str:
        """``executor`` with ``auto`` resolved."""
        if self.executor != "auto":
            return self.executor
        if self.workers == 1:
            return "uni"
        return "mp" if self.cpu else "ray"

    @property
    def eager(self) -> bool:
        """Neither compiled nor captured: ``graphs`` with None resolved."""
        if self.cpu:
            return True
        return self.batch_invariant if self.graphs is None else not self.graphs

    @property
    def warms_up(self) -> bool:
        """Whether kernels are compiled before the first request: see :mod:`actors.warm_up`."""
        return self.batch_invariant and self.swaps and not self.cpu

    @property
    def offline(self) -> bool:
        """The model is a folder here: nothing is to be looked up on the hub."""
        return Path(self.model).is_dir()

    @property
    def missing(self) -> bool:
        """The model is a folder that this machine does not have."""
        return Path(self.model).is_absolute() and not Path(self.model).exists()

    @property
    def compute_threads(self) -> int:
        """``threads`` with 0 resolved."""
        return self.threads or max(1, (os.cpu_count() or 2) // 2)

    def arguments(self) -> dict[str, object]:
        """Arguments of ``AsyncEngineArgs``."""
        found: dict[str, object] = {
            "model": self.model,
            "dtype": self.dtype,
            "seed": self.seed,
            "max_num_seqs": self.max_num_seqs,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "distributed_executor_backend": self.executor_backend,
            "enforce_eager": self.eager,
            "enable_prefix_caching": self.prefix_caching,
            "worker_extension_cls": WORKER_EXTENSION,
            # Neither the model's own sampling defaults nor its temperature may shape logprobs.
            "generation_config": "vllm",
            "logprobs_mode": "raw_logprobs",
            "enable_log_requests": False,
            "disable_log_stats": True,
        }
        if self.max_model_len is not None:
            found["max_model_len"] = self.max_model_len
        if self.batch_invariant and not self.eager:
            found["compilation_config"] = dict(UNCOMPILED_GRAPHS)
        if self.cpu:
            found["kv_cache_memory_bytes"] = int(self.kv_cache_gib * 2**30)
            if self.max_model_len is not None:
                # A seeded request whose prefill is split kills the CPU worker ("CPU Generator
                # does not use offset", gpu_model_runner._bookkeeping_sync): never split one.
                found["enable_chunked_prefill"] = False
                found["max_num_batched_tokens"] = max(self.max_model_len, CPU_BATCHED_TOKENS)
        else:
            found["gpu_memory_utilization"] = self.gpu_memory_utilization
        if self.swaps:
            found["weight_transfer_config"] = {"backend": ENGINE_NAME}
        found.update(self.extra)
        return found
