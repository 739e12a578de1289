"""The real data plane of a run: a local Ray (or yours), a trainer actor, engine actors.

Used by the command and the benchmarks. An embedding trainer may use it too, or make
:class:`actors.adapters.RayEngine` and its own sender itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors import cluster, hardware, nodes, processes
from actors import preflight as checks
from actors.engine_settings import EngineSettings
from orchestrator.config import Settings
from orchestrator.errors import ConfigError, EngineError
from orchestrator.protocols import Engine, EngineFactory, EngineMaker, Trainer, TrainerMaker
from orchestrator.tasks import uninterrupted
from orchestrator.types import Prompt, TransferBackend

if TYPE_CHECKING:
    from actors.adapters import RayEngine

OnActorEvent = Callable[[str, dict[str, Any]], None]

PROBES = 13
"""Prompts that also run greedily across every swap."""
ABANDON_S = 3.0
"""What a Ray that is still starting may take when the run is over already."""
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest log-probability difference between two implementations of one model, by dtype."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that can be started: settings resolved against models and hardware."""

    checked: checks.Prepared
    min_pass_rate: float
    canary_tolerance: float

    @property
    def backend(self) -> TransferBackend:
        """How weights will travel."""
        return self.checked.backend

    @property
    def staged(self) -> bool:
        """Whether they arrive in a second copy first."""
        return self.checked.staged


@dataclass(frozen=True, slots=True)
class Parts:
    """The actors of a run, not yet started."""

    engines: tuple[Engine, ...]
    trainer: Trainer
    engine_factory: EngineFactory
    replace_engine: EngineMaker
    replace_trainer: TrainerMaker
    prompts: tuple[Prompt, ...]
    probes: tuple[Prompt, ...]
    hardware: str
    packages: Mapping[str, str]


def preflight(settings: Settings) -> Prepared:
    """Everything that can be wrong, found before anything is started (ConfigError)."""
    found = cluster.look(settings.ray_address) if settings.ray_address is not None else None
    if found is None:
        found = hardware.detect()
    if settings.cuda_graphs and not found.gpus:
        raise ConfigError("--cuda-graphs needs a GPU and none is visible: leave it out")
    checked = checks.preflight(
        model=settings.model,
        trainer_model=settings.trainer_model,
        prompts_file=settings.prompts,
        new_tokens=max(settings.max_tokens, settings.pause_after_tokens + settings.probe_tokens),
        backend=None if settings.backend == "auto" else settings.backend,
        max_model_len=settings.max_model_len,
        tensor_parallel_size=settings.tensor_parallel_size,
        dtype=settings.dtype,
        reward=None if settings.reward == "auto" else settings.reward,
        learning_rate=settings.learning_rate,
        cache_dir=settings.cache_dir,
        found=found,
    )
    check_executor(settings.executor, checked.gpus)
    if settings.transfer_dtype not in ("auto", checked.dtype):
        raise ConfigError(
            f"--transfer-dtype {settings.transfer_dtype}: the engines hold {checked.dtype}, and "
            f"what they receive must be just that. Leave it out, or give --dtype too"
        )
    if "canary" in settings.validate_ and all(len(p.token_ids) < 2 for p in checked.prompts):
        raise ConfigError(
            "the canary check scores prompt tokens after the first, and every prompt has only one: "
            "give longer prompts, or --validate digest,fresh"
        )
    rate = settings.min_pass_rate
    tolerance = settings.canary_tolerance
    return Prepared(
        checked,
        min_pass_rate=rate if rate is not None else (0.9 if checked.rocm else 1.0),
        canary_tolerance=tolerance if tolerance is not None else _TOLERANCE[checked.dtype],
    )


def check_executor(executor: str, gpus: int) -> None:
    """ConfigError for an executor that cannot run here."""
    if executor == "ray" and not gpus:
        raise ConfigError(
            "--executor ray needs GPUs and none is visible (vLLM has no Ray executor on the CPU): "
            "use auto or mp"
        )


@asynccontextmanager
async def assemble(
    settings: Settings, prepared: Prepared, run_dir: Path, on_event: OnActorEvent
) -> AsyncIterator[Parts]:
    """Connect to Ray for the time of the block; the caller starts and closes the actors."""
    run_dir = Path.cwd() / run_dir
    logs = run_dir / "logs"
    await asyncio.to_thread(logs.mkdir, parents=True, exist_ok=True)
    async with connected(settings.ray_address, logs):
        parts = make_parts(settings, prepared, run_dir, on_event)
        await asyncio.to_thread(check_room, settings, prepared.checked)
        yield parts


def check_room(settings: Settings, checked: checks.Prepared) -> None:
    """ConfigError when the whole run needs more GPUs than the Ray cluster has. Blocks."""
    import ray

    workers, engines = settings.tensor_parallel_size, settings.engines
    if checked.backend is TransferBackend.GLOO or on_one_gpu(checked.backend, workers):
        return
    needed, text = 1 + engines * workers, f"trainer 1, engines {engines} x {workers}"
    by_ray = vllm_uses_ray(settings.executor, workers, cpu=False)
    if workers > 1 and not by_ray and "fresh" in settings.validate_:
        needed, text = needed + workers, f"{text}, fresh engine {workers}"
    has = ray.cluster_resources().get("GPU", 0)
    if needed > has:
        shared = "" if by_ray or workers == 1 else ", --executor ray (its fresh engine shares)"
        raise ConfigError(
            f"this run takes {needed} GPUs ({text}) and the Ray cluster has {has:g}: ask for "
            f"fewer --engines or a smaller --tensor-parallel-size{shared}"
        )


@asynccontextmanager
async def connected(address: str | None, logs: Path) -> AsyncIterator[None]:
    """A Ray to run actors in: started here and ended with the block, or attached to.

    A cluster that is attached to is only disconnected from.
    """
    # Ray asks for consent on a terminal otherwise, and its own lines would break the display.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    arguments: dict[str, Any] = {
        "include_dashboard": None if address else False,
        "log_to_driver": False,
        "configure_logging": False,
        "logging_level": logging.WARNING,
        # Left out, it would attach to whatever RAY_ADDRESS or `ray start` left on this machine.
        "address": address or "local",
    }
    if address is not None:
        environment = nodes.carried_environment(os.environ)
        arguments["runtime_env"] = {"env_vars": environment}
    with ray_logs_to(logs / "ray.log"):
        starting = asyncio.ensure_future(asyncio.to_thread(ray.init, **arguments))
        try:
            await asyncio.shield(starting)
            yield
        except (ConnectionError, RuntimeError, ValueError) as error:
            if not starting.done() or starting.exception() is not error:
                raise
            raise EngineError("ray", f"Ray did not start: {error}") from error
        finally:
            await uninterrupted(_end_ray(starting))


async def _end_ray(starting: asyncio.Future[Any]) -> None:
    """Disconnect, and end what was started here.

    A Ray that comes up behind a cancel would outlive us: it gets a moment to be there, then its
    processes are killed as they are (an interrupt may have hit them already).
    """
    import ray

    await asyncio.wait([starting], timeout=ABANDON_S)
    if starting.done():
        starting.exception()  # retrieved
        await asyncio.to_thread(ray.shutdown)
    else:
        await asyncio.to_thread(processes.kill, processes.tree(os.getpid())[1:])


@contextlib.contextmanager
def ray_logs_to(path: Path) -> Iterator[None]:
    """What Ray's Python side logs in this process goes to ``path`` instead of stderr.

    Its warnings reach a user as errors of ours, or not at all: what it says while it starts
    (tokens, signal handlers) concerns nobody.
    """
    # Of the outer one ray.init drops all handlers, ours too.
    loggers = [logging.getLogger(name) for name in ("ray", "ray._private")]
    before = [logger.handlers[:] for logger in loggers]
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for logger in loggers:
        logger.handlers[:] = [handler]
    try:
        yield
    finally:
        for logger, handlers in zip(loggers, before, strict=True):
            logger.handlers[:] = handlers
        handler.close()


def make_parts(
    settings: Settings,
    prepared: Prepared,
    run_dir: Path,
    on_event: OnActorEvent,
    engine_class: type[RayEngine] | None = None,
    *,
    batch_invariant: bool = True,
) -> Parts:
    """The actors as the control plane sees them; Ray must be connected.

    ``engine_class``: a subclass to make the swapped engines of. ``batch_invariant``: on GPUs
    that can, output does not depend on the batch, which the fresh check needs.
    """
    from actors.adapters import RayEngine, RayTrainer
    from actors.placement import Seat, Seating

    checked = prepared.checked
    logs = run_dir / "logs"
    workers = settings.tensor_parallel_size
    by_ray = vllm_uses_ray(settings.executor, workers, cpu=not checked.gpus)
    seating = Seating(
        gpu_shares(checked.backend, settings.engines, workers, by_ray=by_ray),
        together=on_one_gpu(checked.backend, workers),
        ray_workers=workers if by_ray else 0,
        # With GPUs replicas belong near the trainer, and cannot crowd: they reserve what they use.
        spread=not checked.gpus,
    )

    def engine_settings(name: str, model: str, swaps: bool, seat: Seat) -> EngineSettings:
        return EngineSettings(
            model=model,
            swaps=swaps,
            dtype=checked.dtype,
            max_model_len=checked.max_model_len,
            max_num_seqs=max(16, settings.max_in_flight + 2 * PROBES),
            seed=settings.seed,
            tensor_parallel_size=workers,
            executor=settings.executor,
            worker_gpus=seat.worker_gpus,
            cpu=not checked.gpus,
            # The fresh engine comes beside a running one and the trainer, for a few requests.
            gpu_memory_utilization=settings.gpu_memory_utilization / (1 if swaps else 2),
            batch_invariant=batch_invariant and bool(checked.gpus) and not checked.rocm,
            graphs=settings.cuda_graphs,
            extra=attention(checked.gpus, checked.rocm),
            log_path=str(logs / f"{name}.log"),
        )

    def engine(name: str, model: str, swaps: bool = True) -> RayEngine:
        made = (engine_class or RayEngine) if swaps else RayEngine
        seat = seating.engine() if swaps else seating.fresh()
        return made(name, engine_settings(name, model, swaps, seat), on_event=on_event, seat=seat)

    async def fresh(checkpoint: str) -> Engine:
        return engine("fresh", checkpoint, swaps=False)

    def trainer() -> RayTrainer:
        arguments = {
            "trainer_path": str(checked.trainer_path),
            "engine_path": str(checked.engine_path),
            "run_dir": str(run_dir),
            "backend": checked.backend,
            "learning_rate": checked.learning_rate,
            "grad_clip": settings.grad_clip,
            "reward": checked.reward,
            "seed": settings.seed,
            "wire_dtype": checked.wire_dtype,
            "threads": max(1, (os.cpu_count() or 2) // 2) if not checked.gpus else None,
            "host": "127.0.0.1" if settings.ray_address is None else "auto",
            "log_path": str(logs / "trainer.log"),
        }
        return RayTrainer(arguments, on_event=on_event, seat=seating.trainer())

    names = [f"engine-{i}" for i in range(settings.engines)]
    return Parts(
        engines=tuple(engine(n, str(checked.engine_path)) for n in names),
        trainer=trainer(),
        engine_factory=fresh,
        replace_trainer=trainer,
        replace_engine=lambda name: engine(name, str(checked.engine_path)),
        prompts=checked.prompts,
        probes=checked.prompts[:PROBES],
        hardware=checked.hardware,
        packages=checked.packages,
    )


def attention(gpus: int, rocm: bool) -> dict[str, object]:
    """The attention backend whose output does not depend on the batch, where there is one."""
    if not gpus:
        return {}
    return {"attention_backend": "TRITON_ATTN" if rocm else "FLASH_ATTN"}


def vllm_uses_ray(executor: str, workers: int, *, cpu: bool) -> bool:
    """Whether vLLM's Ray executor starts the workers of a replica."""
    asked = EngineSettings("", tensor_parallel_size=workers, executor=executor, cpu=cpu)
    return asked.executor_backend == "ray"


def on_one_gpu(backend: TransferBackend, workers: int) -> bool:
    """Whether trainer and engines map each other's memory, and so must be on one GPU."""
    return workers == 1 and backend in (TransferBackend.IPC, TransferBackend.NATIVE_IPC)


def gpu_shares(
    backend: TransferBackend, engines: int, workers: int, *, by_ray: bool = False
) -> dict[str, float]:
    """GPUs each actor reserves; ``by_ray``: GPUs each of an engine's Ray workers does.

    NCCL: the trainer alone on one, an engine and the fresh one together on another (0.6 + 0.4
    fit only there). IPC: all on one, which :class:`actors.placement.Seating` sees to. Several
    workers in one process tree: so many whole GPUs, for the fresh engine too.
    """
    if on_one_gpu(backend, workers):
        part = 1000 // (engines + 2) / 1000  # rounded down: the last one must fit too
        return {"trainer": part, "engine": part, "fresh": part}
    trainer = 0 if backend is TransferBackend.GLOO else 1
    if by_ray:
        return {"trainer": trainer, "engine": 0.6, "fresh": 0.4}
    if backend is TransferBackend.GLOO:
        return {"trainer": 0, "engine": 0, "fresh": 0}
    if workers > 1:
        return {"trainer": trainer, "engine": workers, "fresh": workers}
    return {"trainer": trainer, "engine": 0.6, "fresh": 0.4}
