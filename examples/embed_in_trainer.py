"""A larger trainer that owns its loop and uses midflight as its scheduler.

Learning is yours (here: REINFORCE on the share of vowels); midflight keeps a real vLLM engine
generating and swaps your weights into it, each swap digested on both sides.
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
from orchestrator import GenerationOptions, Orchestrator, Rollout

BATCH, NEW = 16, 48


class YourTrainer:
    """Stands for the code you have."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)

    def step(self, batch: list[Rollout]) -> float:
        """One REINFORCE step on ``batch``; returns its mean reward."""
        texts = [rollout.completion.text for rollout in batch]
        rewards = torch.tensor([sum(c in "aeiou" for c in t) / max(1, len(t)) for t in texts])
        for rollout, advantage in zip(batch, rewards - rewards.mean(), strict=True):
            prompt, new = rollout.request.prompt.token_ids, rollout.completion.token_ids
            logits = self.model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(-1, torch.tensor(new)[:, None])
            (-advantage * chosen.sum() / (NEW * len(batch))).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(rewards.mean())


async def main(steps: int, logs: Path) -> None:
    cache = models.default_cache_dir()
    base = models.resolve("tiny", "engine", cache)
    yours = YourTrainer(models.resolve("tiny", "trainer", cache))
    log = str(logs / "engine.log")
    engine = RayEngine("engine-0", EngineSettings(str(base), dtype="float32", log_path=log))
    sender = LocalSender(yours.model.named_parameters)
    words = base / "tokenizer.json"
    given = prompts.load_prompts(None, words, vocab_size=320, context=1024, new_tokens=NEW)
    options = GenerationOptions(max_tokens=NEW, group_size=1, prompts_per_step=BATCH)
    async with (
        connected(None, logs),
        Orchestrator([engine], sender, prompts=given, generation=options) as o,
    ):
        batch: list[Rollout] = []
        async for rollout in o.rollouts():
            batch.append(rollout)
            if len(batch) == BATCH:
                reward = await asyncio.to_thread(yours.step, batch)
                stale, batch = max(r.staleness or 0 for r in batch), []
                report = await o.sync()
                print(f"version {o.version}: reward {reward:.3f}, staleness at most {stale},")
                print(f"  stall {report.stall_s.p50} s, digest {report.checks[0].verdict}")
                if o.version >= steps:
                    break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Embed midflight in a trainer.")
    parser.add_argument("--steps", type=int, default=3)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(parser.parse_args().steps, Path(folder)))
