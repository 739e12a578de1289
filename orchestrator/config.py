"""Settings of a run, validated before anything heavy is imported.

:func:`orchestrator.sources.load` fills them from flags, ``MIDFLIGHT_*`` variables, a YAML file
and the defaults below, in this order of precedence. The fields, their types and limits are the
only place where a setting is declared: flags, help text and messages are made from them.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, InstanceOf, PlainSerializer, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from orchestrator.errors import ConfigError
from orchestrator.injection import GRAMMAR, Injection, parse_injection
from orchestrator.options import (
    GenerationOptions,
    RecoveryOptions,
    SwapOptions,
    ValidationOptions,
)
from orchestrator.types import KVPolicy, PauseMode, PhaseTimeouts, Strategy, TransferBackend

ENV_PREFIX = "MIDFLIGHT_"

PRESETS: dict[str, dict[str, str]] = {
    "qwen3-1.7b": {"model": "Qwen/Qwen3-1.7B-Base", "trainer_model": "Qwen/Qwen3-1.7B"},
}
"""What each preset sets, unless it is set beside it."""

Check = Literal["digest", "canary", "fresh"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Backend = Literal[
    "auto",
    "gloo",
    "nccl",
    "ipc",
    "native-nccl",
    "native-ipc",
    "staged",
    "staged-gloo",
    "staged-nccl",
    "staged-ipc",
]


def conflict(message: str, *fields: str) -> PydanticCustomError:
    """An error about several settings; ``fields`` are named with where they came from."""
    return PydanticCustomError("conflict", "{reason}", {"reason": message, "fields": fields})


def _none(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() in ("", "none") else value


def _path(value: object) -> object:
    if not isinstance(value, str | Path):
        return value
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # ~name of nobody
        raise ValueError(f"{error}: write the path out") from None


def _checks(value: object) -> object:
    if value is None:
        return ()
    if isinstance(value, str):
        value = [] if value.strip() == "none" else [v.strip() for v in value.split(",")]
    return tuple(dict.fromkeys(value)) if isinstance(value, list | tuple) else value


def _injections(value: object) -> object:
    if value is None:
        return ()
    words = [value] if isinstance(value, str | Injection) else value
    if not isinstance(words, list | tuple):
        return value
    found: list[Injection] = []
    for word in words:
        if isinstance(word, Injection):
            found.append(word)
            continue
        for text in str(word).split(","):
            if text.strip() in ("", "none"):
                continue
            try:
                found.append(parse_injection(text))
            except ConfigError as error:
                raise PydanticCustomError("injection", "{reason}", {"reason": str(error)}) from None
    return tuple(found)


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "midflight"


OptBool = Annotated[bool | None, BeforeValidator(_none)]
OptInt = Annotated[int | None, BeforeValidator(_none)]
OptFloat = Annotated[float | None, BeforeValidator(_none)]
OptStr = Annotated[str | None, BeforeValidator(_none)]
OptPath = Annotated[Path | None, BeforeValidator(_path), BeforeValidator(_none)]
Checks = Annotated[tuple[Check, ...], NoDecode, BeforeValidator(_checks)]
Injections = Annotated[
    tuple[InstanceOf[Injection], ...],
    NoDecode,
    BeforeValidator(_injections),
    PlainSerializer(lambda found: [str(injection) for injection in found]),
]

_BUDGET = PhaseTimeouts()


def _opt(default: Any, help: str, group: str, **limits: Any) -> Any:
    return Field(default, description=help, json_schema_extra={"group": group}, **limits)


def _timeout(phase: str, help: str) -> Any:
    return _opt(getattr(_BUDGET, phase), f"seconds for {help}", "deadlines", gt=0)


class Settings(BaseSettings):
    """Everything a run is asked to do. Frozen; unknown names are refused."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_prefix_target="all",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
    )

    steps: int = _opt(5, "train steps; each is followed by one weight swap", "run", ge=1)
    seed: int = _opt(0, "seeds sampling and training", "run", ge=0, le=2**32 - 1)
    output_dir: OptPath = _opt(None, "where the run's files go (default runs/<run id>)", "run")
    cache_dir: Annotated[Path, BeforeValidator(_path)] = Field(
        default_factory=_cache_dir,
        description="where models made locally are kept (default ~/.cache/midflight)",
        json_schema_extra={"group": "run"},
    )
    checkpoint_every: int = _opt(
        0, "steps from one checkpoint of the run to the next (0: none); see --resume", "run", ge=0
    )
    ray_address: OptStr = _opt(
        None, "attach to this Ray cluster instead of starting a local one", "run"
    )
    inject: Injections = Field(
        (),
        description="rehearse a fault, may be repeated: engine.N, engine.* or trainer; crash, hang "
        f"or slow; as {GRAMMAR}",
        json_schema_extra={"group": "run", "repeated": True},
    )

    model: str = _opt(
        "tiny",
        "what the engines start with: tiny, smollm2, random:NAME (random:qwen3-1.7b), a folder or "
        "a hub name",
        "models",
        min_length=1,
    )
    trainer_model: OptStr = _opt(
        None, "what the trainer starts with (default: the tuned side of --model)", "models"
    )
    preset: Annotated[Literal["qwen3-1.7b"] | None, BeforeValidator(_none)] = _opt(
        None, "sets --model and --trainer-model together", "models"
    )
    prompts: OptPath = _opt(
        None, "prompts, one a line or JSON lines (default: 13 built in)", "models"
    )
    dtype: Dtype = _opt("auto", "the engines' dtype", "models")
    max_model_len: OptInt = _opt(
        None, "context length in tokens (default: the model's)", "models", ge=8
    )

    engines: int = _opt(1, "engine replicas", "engines", ge=1)
    tensor_parallel_size: int = _opt(1, "workers of one replica", "engines", ge=1)
    executor: Literal["auto", "uni", "mp", "ray"] = _opt("auto", "vLLM's executor", "engines")
    gpu_memory_utilization: float = _opt(
        0.4, "share of a GPU's memory one engine may take", "engines", gt=0, le=1
    )

    cuda_graphs: OptBool = _opt(
        None,
        "CUDA graphs in the engines (default: on a GPU, unless they are to be batch-invariant)",
        "engines",
    )

    backend: Backend = _opt(
        "auto",
        "how weights travel (auto: 2 GPUs nccl, 1 ipc, none gloo); staged: into a second copy "
        "while decoding goes on; native: vLLM's own",
        "swap",
    )
    transfer_dtype: Dtype = _opt(
        "auto", "dtype of the weights on the way; must be the engines' (auto)", "swap"
    )
    pause_mode: Literal["keep", "wait", "abort"] = _opt(
        "keep", "running requests freeze, finish first, or end and are continued", "swap"
    )
    strategy: Literal["all-at-once", "rolling"] = _opt(
        "all-at-once",
        "all replicas together, or a few at a time while the others go on (staged and ipc)",
        "swap",
    )
    max_unavailable: int = _opt(
        1, "replicas that are paused at the same time (rolling)", "swap", ge=1
    )
    kv: Literal["recompute", "keep"] = _opt(
        "recompute", "KV cache written under the old weights", "swap"
    )
    pause_after_tokens: int = _opt(
        10, "a swap waits until a live request has this many tokens", "swap", ge=0
    )

    max_tokens: int = _opt(32, "new tokens a rollout", "rollouts", ge=1)
    probe_tokens: int = _opt(
        100, "new tokens a probe writes beyond --pause-after-tokens", "rollouts", ge=1
    )
    temperature: float = _opt(1.0, "sampling temperature of rollouts", "rollouts", gt=0)
    group_size: int = _opt(4, "samples a prompt; advantages are relative to them", "rollouts", ge=2)
    prompts_per_step: int = _opt(8, "prompt groups in a training batch", "rollouts", ge=1)
    max_in_flight: int = _opt(16, "rollouts that generate at the same time", "rollouts", ge=1)
    buffer_size: int = _opt(64, "finished rollouts that may wait for the trainer", "rollouts", ge=1)
    max_staleness: OptInt = _opt(
        None,
        "versions a rollout may lag when it is trained on (default: no limit)",
        "rollouts",
        ge=0,
    )

    learning_rate: OptFloat = _opt(None, "of AdamW (default: by model)", "training", gt=0)
    grad_clip: float = _opt(1.0, "largest norm of the gradient", "training", gt=0)
    reward: str = _opt("auto", "name of the reward function", "training", min_length=1)

    validate_: Checks = Field(
        ("digest", "canary", "fresh"),
        alias="validate",
        description="proof of each swap: comma list of digest, canary, fresh; or none",
        json_schema_extra={"group": "validation"},
    )
    fresh_every: int = _opt(
        0, "fresh-engine check after every N-th swap (0: after the last)", "validation", ge=0
    )
    min_pass_rate: OptFloat = _opt(
        None,
        "share of probes a fresh engine must reproduce (default 1.0; 0.9 on ROCm)",
        "validation",
        ge=0,
        le=1,
    )
    canary_tolerance: OptFloat = _opt(
        None,
        "largest logprob difference (default: by dtype, or twice the control)",
        "validation",
        gt=0,
    )

    recovery_attempts: int = _opt(
        3,
        "tries to make a swap, to resync a replica or to replace an actor before giving up "
        "(0: the first failure ends the run)",
        "recovery",
        ge=0,
    )
    min_engines: int = _opt(
        1, "with fewer replicas that serve, or may again, the run is given up", "recovery", ge=1
    )

    timeout_starting: float = _timeout("starting", "engines and trainer to come up")
    timeout_generating: float = _timeout("generating", "one train step and its rollouts")
    timeout_staging: float = _timeout("staging", "weights to arrive before a pause (staged, ipc)")
    timeout_pausing: float = _timeout("pausing", "every engine to be idle")
    timeout_syncing: float = _timeout("syncing", "the weights to be everywhere")
    timeout_resuming: float = _timeout("resuming", "the first tokens after a swap")
    timeout_validating: float = _timeout("validating", "the checks of one swap")

    log_format: Literal["auto", "console", "json"] = _opt(
        "auto",
        "auto: live display on a terminal, else plain lines; console: lines only; json: JSON lines",
        "output",
    )
    quiet: bool = _opt(False, "warnings and the result only", "output")
    verbose: bool = _opt(False, "debug lines too", "output")

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {**PRESETS.get(str(data.get("preset")), {}), **data}

    @model_validator(mode="after")
    def _agree(self) -> Self:
        batch = self.group_size * self.prompts_per_step
        if self.buffer_size < batch:
            raise conflict(
                f"a batch of {batch} rollouts (group_size x prompts_per_step) does not fit into "
                f"a buffer of {self.buffer_size}: raise buffer_size to {batch} or lower the others",
                "buffer_size",
                "group_size",
                "prompts_per_step",
            )
        if self.quiet and self.verbose:
            raise conflict("quiet and verbose exclude each other: drop one", "quiet", "verbose")
        if self.executor == "uni" and self.tensor_parallel_size > 1:
            raise conflict(
                f"executor uni runs one worker, tensor_parallel_size asks for "
                f"{self.tensor_parallel_size}: use executor auto, mp or ray",
                "executor",
                "tensor_parallel_size",
            )
        if self.fresh_every and "fresh" not in self.validate_:
            raise conflict(
                f"fresh_every {self.fresh_every} needs the fresh check: add fresh to validate",
                "fresh_every",
                "validate",
            )
        if self.min_engines > self.engines:
            raise conflict(
                f"min_engines {self.min_engines} of {self.engines} engines: raise engines or lower "
                "min_engines",
                "min_engines",
                "engines",
            )
        for injection in self.inject:
            if problem := injection.problem(self.engines, self.steps):
                raise conflict(problem, "inject", "engines", "steps")
        if self.max_model_len is not None:
            longest = max(self.max_tokens, self.pause_after_tokens + self.probe_tokens)
            if longest >= self.max_model_len:
                raise conflict(
                    f"{longest} new tokens and a prompt do not fit into a context of "
                    f"{self.max_model_len}: raise max_model_len or lower max_tokens, probe_tokens",
                    "max_model_len",
                    "max_tokens",
                    "probe_tokens",
                    "pause_after_tokens",
                )
        return self

    def timeouts(self) -> PhaseTimeouts:
        """Budget of each phase in seconds."""
        names = [f.name for f in fields(PhaseTimeouts) if f.name != "stopping"]
        return PhaseTimeouts(**{name: getattr(self, f"timeout_{name}") for name in names})

    def swap_options(self, backend: TransferBackend, *, staged: bool = False) -> SwapOptions:
        """How swaps are made, over the backend that was resolved from ``backend``."""
        return SwapOptions(
            backend=backend,
            staged=staged,
            pause_mode=PauseMode(self.pause_mode),
            kv_policy=KVPolicy(self.kv),
            strategy=Strategy(self.strategy),
            max_unavailable=self.max_unavailable,
            pause_after_tokens=self.pause_after_tokens,
            timeouts=self.timeouts(),
        )

    def generation_options(self) -> GenerationOptions:
        """How rollouts are made."""
        return GenerationOptions(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            group_size=self.group_size,
            prompts_per_step=self.prompts_per_step,
            max_in_flight=self.max_in_flight,
            buffer_size=self.buffer_size,
            max_staleness=self.max_staleness,
            probe_tokens=self.probe_tokens,
            seed=self.seed,
        )

    def recovery_options(self) -> RecoveryOptions:
        """What is tried after a failure."""
        return RecoveryOptions(attempts=self.recovery_attempts, min_engines=self.min_engines)

    def validation_options(
        self, *, min_pass_rate: float = 1.0, canary_tolerance: float = 1e-3
    ) -> ValidationOptions:
        """Which proof a swap owes; the arguments stand in for what was left to the hardware."""
        return ValidationOptions(
            digest="digest" in self.validate_,
            canary="canary" in self.validate_,
            fresh="fresh" in self.validate_,
            fresh_every=self.fresh_every,
            min_pass_rate=min_pass_rate if self.min_pass_rate is None else self.min_pass_rate,
            canary_tolerance=(
                canary_tolerance if self.canary_tolerance is None else self.canary_tolerance
            ),
            # A limit that was asked for is one; one by dtype knows nothing of the model.
            canary_control_factor=2.0 if self.canary_tolerance is None else 0.0,
        )

    def to_yaml(self, **resolved: object) -> str:
        """The settings as YAML that ``--config`` takes back, with ``resolved`` put in.

        ``output_dir`` is left out: fed back, it would name a folder that holds a run already.
        """
        data = self.model_dump(mode="json", by_alias=True, exclude={"output_dir"})
        if self.prompts is not None:
            data["prompts"] = str(self.prompts.resolve())
        unknown = resolved.keys() - data.keys()
        if unknown:
            raise KeyError(f"no such settings: {sorted(unknown)}")
        return yaml.safe_dump({**data, **resolved}, sort_keys=False)


def public_names() -> dict[str, str]:
    """Name of each setting in YAML -> name of its field."""
    return {field.alias or name: name for name, field in Settings.model_fields.items()}
