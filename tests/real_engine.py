"""Real Ray and one real vLLM engine for the whole session, as a pytest plugin.

Registered by the conftest of each folder that needs it, so that they share one engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from orchestrator.types import EngineInfo
from tests.swaps import LocalSender, Rig

PLUGINS = Path(__file__).parent / "plugins"
HIDDEN_DEFAULTS = {"do_sample": True, "temperature": 9.0, "top_k": 3, "repetition_penalty": 3.0}
"""Sampling defaults in the engine's checkpoint, as real ones have; they must shape nothing."""


class RealRig(Rig):
    """The real engine, the models behind its two sets of weights, and its fault file."""

    engine: Any
    sender: LocalSender

    info: EngineInfo
    records: list[dict[str, Any]]
    """What the engine's actor has logged, oldest first."""

    def __init__(
        self, engine: Any, sender: LocalSender, models: dict[str, Any], faults: Path
    ) -> None:
        super().__init__(engine, sender, sender.use)
        self.models, self._faults = models, faults
        self.records = []

    def fault(self, name: str = "", value: str = "1") -> None:
        """Set the one fault that is active from now on; none without a name."""
        self._faults.write_text(f"MIDFLIGHT_TEST_{name}={value}\n" if name else "")

    def greedy(self, which: str, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """What the model ``which`` continues ``prompt`` with, by transformers."""
        import torch

        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = self.models[which].generate(
                ids, max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
        return tuple(out[0, len(prompt) :].tolist())

    def logprobs(self, which: str, tokens: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probability of each token but the first under the model ``which``."""
        import torch

        ids = torch.tensor([tokens])
        with torch.no_grad():
            scores = self.models[which](ids).logits.log_softmax(-1)[0, :-1]
        return tuple(scores.gather(-1, ids[0, 1:, None])[:, 0].tolist())


def make_model(folder: Path, seed: int, *, tied: bool = False) -> Any:
    """A small random Qwen3 with a byte tokenizer, saved in ``folder``."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from actors.tiny import EOS_ID, VOCAB_SIZE, byte_tokenizer

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.08,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def state(model: Any) -> dict[str, Any]:
    """Names and tensors as a trainer sends them: a tied head once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray of this session."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    # GPUs that Ray only counts: nothing here uses one.
    ray.init(
        num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    yield
    ray.shutdown()


def engine_options(faults: Path, **environment: str) -> dict[str, Any]:
    """Ray's actor options that put the fault plugin into the engine's processes."""
    here = [str(PLUGINS), str(PLUGINS.parents[1]), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, here))
    env = {"PYTHONPATH": path, "MIDFLIGHT_TEST_FAULT_FILE": str(faults), **environment}
    return {"runtime_env": {"env_vars": env}}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_rig(
    ray_session: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RealRig]:
    """One real engine for all tests; its versions go on from test to test."""
    from actors.adapters import RayEngine
    from actors.engine_settings import EngineSettings

    class TestedEngine(RayEngine):
        actor = "tests.tested_engine:TestedEngineActor"

        async def warm_up(self) -> None:
            await self._call("control", "warm_up")

    folder = tmp_path_factory.mktemp("real")
    models = {"a": make_model(folder / "a", 1), "b": make_model(folder / "b", 2)}
    (folder / "a" / "generation_config.json").write_text(json.dumps(HIDDEN_DEFAULTS))
    records: list[dict[str, Any]] = []
    engine = TestedEngine(
        "real",
        EngineSettings(
            model=str(folder / "a"),
            dtype="float32",
            max_model_len=512,
            log_path=str(folder / "engine.log"),
        ),
        on_event=lambda _, record: records.append(record),
        options=engine_options(folder / "faults"),
    )
    sender = LocalSender({which: state(model) for which, model in models.items()})
    try:
        info = await engine.start()
        rig = RealRig(engine, sender, models, folder / "faults")
        rig.info, rig.records = info, records
        yield rig
    finally:
        await sender.aclose()
        await engine.aclose()


@pytest_asyncio.fixture(loop_scope="session")
async def real_rig(shared_rig: RealRig) -> AsyncIterator[RealRig]:
    """The shared engine, running, without faults or requests; afterwards again, or it is said."""
    shared_rig.fault()
    yield shared_rig
    shared_rig.fault()
    await shared_rig.engine.abort_requests()
    status = await shared_rig.engine.status()
    assert not status.paused, "the test left the engine paused"
