"""The real trainer, with the real tiny model, over the real gloo channel, in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors import models, rewards
from actors.learner import Learner, LearnerOptions, prompt_logprobs
from actors.prompts import BUILTIN_PROMPTS
from actors.rewards import alliteration
from actors.trainer import TrainerActor
from actors.transfer.digest import digest_all
from actors.transfer.inbox import Inbox, Invitation
from actors.transfer.ipc import IpcInbox
from orchestrator.errors import ChannelError, ConfigError, TrainerError, TransferError
from orchestrator.types import (
    ChannelSpec,
    Completion,
    FinishReason,
    GenerationRequest,
    KVPolicy,
    OpContext,
    PauseMode,
    PolicyVersion,
    Prompt,
    Rollout,
    TransferBackend,
    WeightUpdate,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

CTX = OpContext(run_id="test", sync_id="s1", step=1)
GLOO = TransferBackend.GLOO
DEADLINE_S = 30
PROMPTS = [list(text.encode()) for text in BUILTIN_PROMPTS[:3]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    cache = tmp_path_factory.mktemp("models")
    return {
        "engine": models.resolve("tiny", "engine", cache),
        "trainer": models.resolve("tiny", "trainer", cache),
    }


def make(tiny: dict[str, Path], run_dir: Path, **changes: Any) -> TrainerActor:
    arguments: dict[str, Any] = {
        "trainer_path": str(tiny["trainer"]),
        "engine_path": str(tiny["engine"]),
        "run_dir": str(run_dir),
        "backend": GLOO,
        "learning_rate": 1e-4,
        "threads": 1,
        **changes,
    }
    return TrainerActor(**arguments)


@pytest.fixture
async def trainer(tiny: dict[str, Path], tmp_path: Path) -> AsyncIterator[TrainerActor]:
    actor = make(tiny, tmp_path)
    await actor.start(CTX)
    yield actor
    await actor.aclose(CTX)


def update(version: int) -> WeightUpdate:
    return WeightUpdate(
        "s1",
        PolicyVersion(version - 1),
        PolicyVersion(version),
        1,
        GLOO,
        PauseMode.KEEP,
        KVPolicy.RECOMPUTE,
    )


def batch(texts: tuple[str, ...] = (" Some seals sleep", " The gas of the air")) -> list[Rollout]:
    prompt = Prompt(tuple(PROMPTS[0]), BUILTIN_PROMPTS[0])
    return [
        Rollout(
            GenerationRequest(f"r{i}", prompt, 32, group="g"),
            Completion(
                f"r{i}",
                "e",
                tuple(text.encode()),
                (-1.0,) * len(text),
                (),
                FinishReason.LENGTH,
                text,
            ),
        )
        for i, text in enumerate(texts)
    ]


class Peer:
    """Rank 1 of a channel, as an engine's worker is."""

    def __init__(self, spec: ChannelSpec) -> None:
        self._spec = spec

    def join(self) -> None:
        inbox = IpcInbox if self._spec.backend is TransferBackend.IPC else Inbox
        invitation = Invitation.of(self._spec, 1)
        self._inbox = inbox(invitation, 1, lambda layout: None, torch.device("cpu"))

    def receive(self) -> dict[str, torch.Tensor]:
        if self._inbox.at_hand:
            self._inbox.fetch()
            return {name: tensor.clone() for name, tensor in self._inbox.views().items()}
        return {name: tensor.clone() for name, tensor in self._inbox.tensors("s1")}

    def leave(self) -> None:
        self._inbox.leave("the test is over")


async def connect(trainer: TrainerActor, timeout_s: float = 20.0) -> Peer:
    spec = await trainer.listen(CTX, GLOO, 2, timeout_s)
    peer = Peer(spec)
    await asyncio.gather(trainer.open_channel(CTX, spec), asyncio.to_thread(peer.join))
    return peer


async def test_what_was_staged_is_sent_saved_and_scored_while_training_goes_on(
    trainer: TrainerActor, tiny: dict[str, Path]
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        peer = await connect(trainer)
        digests = await trainer.stage(CTX, PolicyVersion(1))
        stats = await trainer.train(CTX, batch(), 1)
        sent, received = await asyncio.gather(
            trainer.send(CTX, update(1)), asyncio.to_thread(peer.receive)
        )
        path = Path(await trainer.save_checkpoint(CTX, "v1"))
        scored = await trainer.reference_logprobs(CTX, PROMPTS)
        initial = await trainer.reference_logprobs(CTX, PROMPTS, True)
        again = await trainer.stage(CTX, PolicyVersion(2))
        peer.leave()

    stored = load_file(tiny["trainer"] / "model.safetensors")
    assert digest_all(received.items()) == digests
    assert digests.keys() == stored.keys()
    assert all(torch.equal(received[name], stored[name]) for name in stored)
    assert sent.nbytes == sum(tensor.nbytes for tensor in stored.values())
    saved = load_file(path / "model.safetensors")
    assert all(torch.equal(saved[name], stored[name]) for name in stored)

    for role, got in (("trainer", scored), ("engine", initial)):
        model = AutoModelForCausalLM.from_pretrained(tiny[role], dtype=torch.float32)
        expected = prompt_logprobs(model, PROMPTS, torch.device("cpu"))
        for ours, theirs in zip(got, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
    assert AutoModelForCausalLM.from_pretrained(path).dtype is torch.float32

    assert stats.rewards == (1.0, 0.0) and stats.tokens == 36
    changed = [name for name in digests if again[name] != digests[name]]
    assert len(changed) == len(digests), "a train step changes every tensor"


async def test_a_trainer_that_loads_a_state_goes_on_bit_for_bit(
    trainer: TrainerActor, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """Case 24: two steps, and one step, a state, another trainer and one step, are the same."""
    path = str(tmp_path / "state")
    async with asyncio.timeout(2 * DEADLINE_S):
        await trainer.train(CTX, batch(), 1)
        saved = await trainer.stage(CTX, PolicyVersion(1))
        await trainer.save_state(CTX, path)
        through = await trainer.train(CTX, batch((" Stars loom", " Salt")), 2)
        expected = await trainer.stage(CTX, PolicyVersion(2))

        other = make(tiny, tmp_path, seed=9)
        await other.start(CTX)
        await other.load_state(CTX, path)
        assert await other.stage(CTX, PolicyVersion(1)) == saved
        again = await other.train(CTX, batch((" Stars loom", " Salt")), 2)
        assert await other.stage(CTX, PolicyVersion(2)) == expected
        with pytest.raises(TrainerError, match=f"no trainer state in {tmp_path}/nothing"):
            await other.load_state(CTX, f"{tmp_path}/nothing")
        await other.aclose(CTX)
    assert replace(again, seconds=0) == replace(through, seconds=0)


async def test_a_declared_cast_reaches_the_wire_the_checkpoint_and_the_score(
    tiny: dict[str, Path], tmp_path: Path
) -> None:
    """Case 10."""
    trainer = make(tiny, tmp_path, wire_dtype="bfloat16")
    async with asyncio.timeout(DEADLINE_S):
        await trainer.start(CTX)
        spec = await trainer.listen(CTX, GLOO, 2, 20.0)
        await trainer.stage(CTX, PolicyVersion(1))
        path = await trainer.save_checkpoint(CTX, "half")
        scored = await trainer.reference_logprobs(CTX, PROMPTS)
        await trainer.aclose(CTX)
    assert {tensor.dtype for tensor in spec.tensors} == {"bfloat16"}
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype is torch.bfloat16
    assert scored == prompt_logprobs(model, PROMPTS, torch.device("cpu"))


async def test_only_the_staged_version_can_be_sent(trainer: TrainerActor) -> None:
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(TrainerError, match="version 1 is to be sent, version None is staged"):
            await trainer.send(CTX, update(1))
        await trainer.stage(CTX, PolicyVersion(1))
        with pytest.raises(TrainerError, match="version 2 is to be sent, version 1 is staged"):
            await trainer.send(CTX, update(2))


async def test_closing_the_channel_frees_a_blocked_open_and_a_new_one_works(
    trainer: TrainerActor,
) -> None:
    """Cases 1 and 28."""
    async with asyncio.timeout(DEADLINE_S):
        spec = await trainer.listen(CTX, GLOO, 2, 300.0)
        blocked = asyncio.create_task(trainer.open_channel(CTX, spec))
        await trainer.stage(CTX, PolicyVersion(1))
        await trainer.close_channel(CTX)
        await trainer.close_channel(CTX)
        with pytest.raises(ChannelError):
            await blocked
        peer = await connect(trainer)
        _, received = await asyncio.gather(
            trainer.send(CTX, update(1)), asyncio.to_thread(peer.receive)
        )
        peer.leave()
    assert received


async def test_closing_the_channel_frees_a_send_whose_peer_never_receives(
    trainer: TrainerActor,
) -> None:
    """Case 1: the channel's own timeout would be too late."""
    async with asyncio.timeout(10):
        peer = await connect(trainer, timeout_s=60.0)
        await trainer.stage(CTX, PolicyVersion(1))
        blocked = asyncio.create_task(trainer.send(CTX, update(1)))
        await trainer.reference_logprobs(CTX, PROMPTS[:1])
        await trainer.close_channel(CTX)
        outcome = (await asyncio.gather(blocked, return_exceptions=True))[0]
        peer.leave()
    # A few megabytes may fit the sockets' buffers; then the send had ended before.
    assert isinstance(outcome, ChannelError) or outcome.nbytes > 0


async def test_the_actor_answers_while_a_train_step_runs(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 4."""
    entered, release = threading.Event(), threading.Event()

    def slow(prompt: str, text: str) -> float:
        entered.set()
        assert release.wait(DEADLINE_S)
        return float(text.startswith(" S"))

    monkeypatch.setattr(rewards, "REWARDS", {"slow": slow})
    trainer = make(tiny, tmp_path, reward="slow")
    async with asyncio.timeout(DEADLINE_S):
        await trainer.start(CTX)
        await trainer.stage(CTX, PolicyVersion(1))
        training = asyncio.create_task(trainer.train(CTX, batch(), 1))
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        saved = await trainer.save_checkpoint(CTX, "during")
        await trainer.listen(CTX, GLOO, 2, 20.0)
        await trainer.close_channel(CTX)
        assert not training.done()
        release.set()
        assert (await training).reward == 0.5
        await trainer.aclose(CTX)
    assert saved == str(tmp_path / "checkpoints" / "during")


async def test_records_carry_the_operation(trainer: TrainerActor) -> None:
    """Case 35."""
    async with asyncio.timeout(DEADLINE_S):
        await trainer.next_events()
        await trainer.train(replace(CTX, step=7), batch(), 7)
        records = await trainer.next_events()
    (trained,) = [record for record in records if record["event"] == "trained"]
    assert (trained["sync_id"], trained["step"], trained["actor"]) == ("s1", 7, "trainer")
    assert trained["reward"] == 0.5


async def test_the_next_channel_may_have_another_backend(
    trainer: TrainerActor, tiny: dict[str, Path]
) -> None:
    stored = load_file(tiny["trainer"] / "model.safetensors")
    async with asyncio.timeout(DEADLINE_S):
        for version, backend in enumerate((GLOO, TransferBackend.IPC, GLOO), 1):
            spec = await trainer.listen(CTX, backend, 2, 20.0)
            assert spec.backend is backend
            peer = Peer(spec)
            await asyncio.gather(trainer.open_channel(CTX, spec), asyncio.to_thread(peer.join))
            with pytest.raises((TrainerError, TransferError), match="staged"):
                await trainer.send(CTX, update(version))
            await trainer.stage(CTX, PolicyVersion(version))
            _, received = await asyncio.gather(
                trainer.send(CTX, update(version)), asyncio.to_thread(peer.receive)
            )
            assert all(torch.equal(received[name], stored[name]) for name in stored)


async def test_wrong_calls_are_refused_in_words(tiny: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown reward"):
        make(tiny, tmp_path, reward="best")
    trainer = make(tiny, tmp_path)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(TrainerError, match=r"call start\(\) first"):
            await trainer.train(CTX, batch(), 1)
        await trainer.close_channel(CTX)
        await trainer.start(CTX)
        with pytest.raises(TrainerError, match="started already"):
            await trainer.start(CTX)
        with pytest.raises(ChannelError, match="nccl needs a GPU"):
            await trainer.listen(CTX, TransferBackend.NCCL, 2, 1.0)
        for name in ("../out", "", ".hidden", "a/b"):
            with pytest.raises(ConfigError, match="checkpoint name"):
                await trainer.save_checkpoint(CTX, name)
        watching = asyncio.create_task(trainer.watch())
        await trainer.aclose(CTX)
        await trainer.aclose(CTX)
        assert await watching == "closed"
        with pytest.raises(TrainerError, match="was closed"):
            await trainer.train(CTX, batch(), 1)


async def test_a_model_that_cannot_be_loaded_is_a_trainer_error(
    tiny: dict[str, Path], tmp_path: Path
) -> None:
    trainer = make(tiny, tmp_path, trainer_path=str(tmp_path / "nothing"))
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(TrainerError, match="start failed: "):
            await trainer.start(CTX)
        await trainer.aclose(CTX)


def test_the_default_reward_rises_from_stale_rollouts(tiny: dict[str, Path]) -> None:
    """Twenty steps as in a run: each batch was sampled one policy before, at first by the base."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny["trainer"], dtype=torch.float32)
    behind = AutoModelForCausalLM.from_pretrained(tiny["engine"], dtype=torch.float32).eval()
    learner = Learner(model, LearnerOptions(learning_rate=models.default_learning_rate("tiny")))
    history = []
    for step in range(20):
        texts = [BUILTIN_PROMPTS[(8 * step + i) % 13] for i in range(8) for _ in range(4)]
        rollouts = sample(behind, texts, tokens=32)
        behind.load_state_dict(model.state_dict())
        stats = learner.step(
            rollouts, [alliteration("", r.completion.text) for r in rollouts], step
        )
        history.append(stats.reward)
    first, last = sum(history[:3]) / 3, sum(history[-3:]) / 3
    assert first < 0.35, history
    assert last > first + 0.15, history


@torch.no_grad()
def sample(model: torch.nn.Module, texts: list[str], tokens: int) -> list[Rollout]:
    """Groups of four by temperature 1."""
    width = max(map(len, texts))
    ids = torch.tensor([[32] * (width - len(t)) + list(t.encode()) for t in texts])
    mask = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in texts])
    chosen, logprobs, cache, inputs = [], [], None, ids
    for _ in range(tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
        out = model(
            input_ids=inputs,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        cache, scores = out.past_key_values, out.logits[:, -1].log_softmax(-1)
        inputs = torch.multinomial(scores.exp(), 1)
        chosen.append(inputs)
        logprobs.append(scores.gather(1, inputs))
        mask = torch.cat([mask, torch.ones_like(inputs)], 1)
    rows = zip(texts, torch.cat(chosen, 1).tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
    return [
        Rollout(
            GenerationRequest(str(i), Prompt(tuple(t.encode()), t), tokens, group=str(i // 4)),
            Completion(
                str(i),
                "e",
                tuple(row),
                tuple(lps),
                (),
                FinishReason.LENGTH,
                bytes(b for b in row if b < 256).decode(errors="replace"),
            ),
        )
        for i, (t, row, lps) in enumerate(rows)
    ]
