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
from tests.trainers.driven import PER_TASK, TASK_IDS, Driven, Learned
from vllm import CompletionOutput, RequestOutput, SamplingParams
from vllm.logprobs import Logprob

LENGTH = 4096
AGENT = """
from penstock.adapters.trainers.plugins.openrlhf import PenstockExecutor
from penstock.adapters.trainers.plugins.rollouts import AgentRollouts


class AgentExecutor(PenstockExecutor):
    rollouts = AgentRollouts.load({tasks!r}, "shell", connection={connection!r})
"""


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
    file = folder / "agent.py"
    file.write_text(AGENT.format(tasks=str(driven.tasks), connection=str(driven.connection)))
    actor = Actor(driven, _load_agent_executor(str(file)))
    groups = await asyncio.gather(
        *(
            actor.generate_responses(
                prompt=f"see {task_id}",
                label=task_id,
                sampling_params=SamplingParams(temperature=1.0, top_p=1.0, logprobs=1, max_tokens=None),
                max_length=LENGTH,
                hf_tokenizer=None,
                num_samples=PER_TASK,
            )
            for task_id in TASK_IDS
        )
    )
    generator = SamplesGenerator(SimpleNamespace(args=None), None, None, None, [])
    made = [generator._process_response_into_experience(one, max_len=LENGTH) for group in groups for one in group]
    lines, wrong = await driven.faults([learned(one) for one in made])
    if [one.labels for one in made] != [[task_id] for task_id in TASK_IDS for _ in range(PER_TASK)]:
        wrong.append("the labels are not those of the data set")
    batch = Experience.concat_experiences(made, 0)
    lines.append(f"Experience of {len(batch.sequences)} rows, concatenated by OpenRLHF: {tuple(batch.sequences.shape)}")
    return lines, wrong


def learned(one: Experience) -> Learned:
    """An Experience; entry i of its masks and logprobs is about token i + 1."""
    mask = np.concatenate(([0], one.action_mask[0].numpy()))
    logprobs = np.concatenate(([0.0], one.rollout_log_probs[0].numpy()))
    return Learned.of(one.sequences[0], mask, logprobs, one.rewards[0])
