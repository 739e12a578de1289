"""A larger trainer that owns its loop and uses midflight as its scheduler.

    python examples/embed_in_trainer.py --steps 3

Everything about learning is yours (here: plain REINFORCE on the share of vowels); midflight
keeps a real vLLM engine generating and swaps your weights into it, digests checked.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from actors import models, prompts
from actors.adapters import RayEngine
from actors.assembly import connected
from actors.engine_settings import EngineSettings
from actors.local import LocalSender
from orchestrator import Event, GenerationOptions, Orchestrator, Rollout, StateChanged

BATCH, CONTEXT = 16, 256


class YourTrainer:
    """Stands for the code you have."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, batch: list[Rollout]) -> float:
        """One REINFORCE step; returns the mean reward."""
        texts = [r.completion.text for r in batch]
        rewards = torch.tensor([sum(c in "aeiou" for c in t) / max(1, len(t)) for t in texts])
        for rollout, advantage in zip(batch, rewards - rewards.mean(), strict=True):
            prompt, new = rollout.request.prompt.token_ids, rollout.completion.token_ids
            ids = torch.tensor([prompt + new])
            logprobs = self.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            chosen = logprobs.gather(-1, torch.tensor(new)[:, None])
            (-advantage * chosen.mean() / len(batch)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(rewards.mean())


def show(event: Event) -> None:
    if isinstance(event, StateChanged):
        print(f"  {event.source} -> {event.target} after {event.seconds:.3f} s {event.reason}")


async def main(steps: int, logs: Path) -> None:
    cache = models.default_cache_dir()
    base = models.resolve("tiny", "engine", cache)
    yours = YourTrainer(models.resolve("tiny", "trainer", cache))
    sender = LocalSender(yours.model.named_parameters)
    engine = RayEngine(
        "engine-0", EngineSettings(str(base), max_model_len=CONTEXT, log_path=str(logs / "engine.log"))
    )
    questions = prompts.load_prompts(
        None, base / "tokenizer.json", vocab_size=320, context=CONTEXT, new_tokens=48
    )
    options = GenerationOptions(max_tokens=48, group_size=1, prompts_per_step=BATCH)
    async with (
        connected(None, logs),
        Orchestrator([engine], sender, prompts=questions, generation=options, observers=[show]) as o,
    ):
        batch: list[Rollout] = []
        async for rollout in o.rollouts():
            batch.append(rollout)
            if len(batch) == BATCH:
                reward = await asyncio.to_thread(yours.step, batch)
                stale = max(r.staleness or 0 for r in batch)
                report = await o.sync()
                print(f"version {o.version}: reward {reward:.3f}, staleness <= {stale}, "
                      f"stall p50 {report.stall_s.p50} s, {report.checks[0].verdict}")  # fmt: skip
                batch = []
                if o.version == steps:
                    break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Embed midflight in a trainer.")
    parser.add_argument("--steps", type=int, default=3)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(parser.parse_args().steps, Path(folder)))
