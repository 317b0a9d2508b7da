"""Training with TRL's GRPO on rollouts, token by token as the model read and wrote them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.live.trainer.agent import CITIES, work
from tests.live.trainer.servers import MODEL, Servers
from tests.support.paths import TINY_QWEN

torch.set_num_threads(1)  # a second one waits for its core, if other programs have it

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # it says so of rollout_func

BATCHES = 12
SESSIONS = 48
"""Sessions of a batch, all at once."""

PASSES = 2
"""Steps of the optimizer for each batch."""

LEARNING_RATE = 5e-4

SURENESS = 0.2
"""The factor of the logits of the tiny Qwen: as it is, it is so sure that it tries nothing."""


def unsure_model(folder: Path) -> Path:
    """Write the model that trainings begin with to a folder, and return that.

    Its output table is its own: on CPUs, vLLM 0.32 goes on with the old one where a reloaded model has both in one.
    """
    model = AutoModelForCausalLM.from_pretrained(TINY_QWEN, dtype=torch.float32, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
        model.model.norm.weight *= SURENESS
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_QWEN).save_pretrained(folder)
    return folder


@dataclass
class Step:
    """A batch of sessions, and what the trainer finds in it before it takes a step."""

    rewards: list[float]
    versions: list[str]
    """The versions of the weights that wrote its first session, as penstock recorded them."""
    cut: int
    """Paths beside the one of each session that is trained."""
    tokens: int = 0
    """Tokens that the model wrote."""
    worst: float = 0.0
    """The largest difference of a log probability, as the trainer computes it, from the recorded one."""
    mean: float = 0.0
    """The mean difference."""
    ratio: float = 0.0
    """The mean ratio of the trainer's probabilities to the recorded ones."""


class RolloutTrainer(GRPOTrainer):
    """GRPO with the recorded probabilities as the old ones of its ratios; TRL computes its own, for comparison."""

    def __init__(self, steps: list[Step], **given: Any) -> None:
        super().__init__(**given)
        self.steps = steps

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        recorded, step = batch["sampling_per_token_logps"], self.steps[-1]
        written = (batch["completion_mask"] * batch["tool_mask"]).bool()
        apart = (batch["old_per_token_logps"] - recorded)[written]
        step.tokens, step.ratio = len(apart), apart.exp().mean().item()
        step.worst, step.mean = apart.abs().max().item(), apart.abs().mean().item()
        batch["old_per_token_logps"] = recorded
        return batch


@dataclass
class Training:
    """One training of a model, with servers that write with it."""

    servers: Servers
    weights: Path
    """The model as it is before."""
    folder: Path
    name: str
    shuffled: bool = False
    """True if the rewards go to other sessions than those that earned them."""
    steps: list[Step] = field(default_factory=list)

    def run(self, batches: int) -> Sequence[Step]:
        """Train, and return what each batch was like."""
        given = GRPOConfig(
            output_dir=str(self.folder / "trl"),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=SESSIONS,
            num_generations=SESSIONS // len(CITIES),
            num_iterations=PASSES,
            max_steps=PASSES * batches,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            beta=0.0,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = RolloutTrainer(
            steps=self.steps,
            model=AutoModelForCausalLM.from_pretrained(self.weights, dtype=torch.float32),
            args=given,
            processing_class=AutoTokenizer.from_pretrained(self.weights),
            train_dataset=Dataset.from_list([{"prompt": city} for city in CITIES]),
            rollout_func=self.rollouts,
            reward_funcs=rewarded,
        )
        trainer.train()
        return self.steps

    def rollouts(self, cities: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Let an agent work for each city, with the weights as they are now, and return what TRL reads of that."""
        version = f"{self.name}-{len(self.steps)}"
        trainer.model.save_pretrained(self.folder / version)
        self.servers.load(self.folder / version, version)
        sessions = {f"{version}-{number}": city for number, city in enumerate(cities)}
        rewards = asyncio.run(self._work(sessions))
        exported = sorted(self.servers.rollouts(), key=lambda row: sum(row["env_mask"]))
        rows = {row["session"]: row for row in exported}
        self.steps.append(Step(rewards, self.servers.versions(next(iter(sessions))), len(exported) - len(rows)))
        self.servers.forget()
        sys.stderr.write(f"{version}: mean reward {sum(rewards) / len(rewards):.2f}\n")
        ordered = [rows[session] for session in sessions]
        columns = {name: [row[name] for row in ordered] for name in ordered[0]}
        assert columns["reward"] == rewards
        if self.shuffled:
            columns["reward"] = [*rewards[1:], rewards[0]]  # none keeps its own, as one of a random order may
        return columns

    async def _work(self, sessions: dict[str, str]) -> list[float]:
        async with AsyncOpenAI(base_url=f"{self.servers.penstock}/v1", api_key="none", max_retries=0) as client:
            agents = (work(client, MODEL, session, city) for session, city in sessions.items())
            rewards = await asyncio.gather(*agents)
        for session, reward in zip(sessions, rewards, strict=True):
            self.servers.reward(session, reward)
        return rewards


def rewarded(reward: list[float], **_: object) -> list[float]:
    """The rewards of sessions, as penstock exports them."""
    return reward
