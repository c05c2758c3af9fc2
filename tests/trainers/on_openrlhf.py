"""OpenRLHF: its loader takes our executor from a file, its actor runs it, and its generator makes Experiences."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor, _load_agent_executor
from tests.trainers.driven import EXAMPLES, PER_TASK, TASK_IDS, Driven, Learned
from vllm import CompletionOutput, RequestOutput, SamplingParams
from vllm.logprobs import Logprob

LENGTH, SHORT = 4096, 350


class Actor:
    """In the place of OpenRLHF's vLLM actor: its `generate` alone is scripted, `generate_responses` is its own."""

    generate_responses = RolloutRayActor.__ray_metadata__.modified_class.generate_responses

    def __init__(self, driven: Driven, executor: Any) -> None:
        self.driven, self.executor = driven, executor

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, multi_modal_data: Any = None
    ) -> RequestOutput:
        """vLLM's output for a prompt."""
        assert params.logprobs is not None and params.max_tokens > 0
        ids, logprobs = self.driven.engine.answer(prompt_ids)
        found = [{token: Logprob(logprob)} for token, logprob in zip(ids, logprobs, strict=True)]
        output = CompletionOutput(
            index=0, text="", token_ids=ids, cumulative_logprob=None, logprobs=found, finish_reason="stop"
        )
        return RequestOutput("", None, prompt_ids, None, [output], finished=True)


async def run(driven: Driven, folder: Path) -> tuple[list[str], list[str]]:
    """Returns what was seen, and what is wrong."""
    actor = Actor(driven, _load_agent_executor(str(EXAMPLES / "openrlhf_agent.py")))
    groups = await asyncio.gather(*(responses(actor, task_id, PER_TASK, LENGTH) for task_id in TASK_IDS))
    generator = SamplesGenerator(SimpleNamespace(args=None), None, None, None, [])
    made = [generator._process_response_into_experience(one, max_len=LENGTH) for group in groups for one in group]
    lines, wrong = await driven.faults([learned(one) for one in made])
    if [one.labels for one in made] != [[task_id] for task_id in TASK_IDS for _ in range(PER_TASK)]:
        wrong.append("the labels are not those of the data set")
    cut = [
        generator._process_response_into_experience(one, max_len=SHORT)
        for one in await responses(actor, TASK_IDS[0], 2, SHORT)
    ]
    if any(one.action_mask.any() for one in cut) or sorted(one.rewards.item() for one in cut) != [0.0, 1.0]:
        wrong.append("a sequence that is too long trains something, or has lost its reward")
    batch = Experience.concat_experiences(made, 0)
    lines.append(f"Experience of {len(batch.sequences)} rows, concatenated by OpenRLHF: {tuple(batch.sequences.shape)}")
    return lines, wrong


async def responses(actor: Actor, task_id: str, count: int, length: int) -> list[dict[str, Any]]:
    """What OpenRLHF's actor returns for a row of its data."""
    found: list[dict[str, Any]] = await actor.generate_responses(
        prompt=f"see {task_id}",
        label=task_id,
        sampling_params=SamplingParams(temperature=1.0, top_p=1.0, logprobs=1, max_tokens=None),
        max_length=length,
        hf_tokenizer=None,
        num_samples=count,
    )
    return found


def learned(one: Experience) -> Learned:
    """An Experience; entry i of its masks and logprobs is about token i + 1."""
    mask = np.concatenate(([0], one.action_mask[0].numpy()))
    logprobs = np.concatenate(([0.0], one.rollout_log_probs[0].numpy()))
    return Learned.of(one.sequences[0], mask, logprobs, one.rewards[0])
