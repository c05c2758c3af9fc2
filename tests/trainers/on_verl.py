"""verl: its AgentLoopWorker loads our agent loop by name and makes a DataProto; its GRPO computes the advantages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl
from omegaconf import OmegaConf
from tests.trainers.driven import EXAMPLES, PER_TASK, TASK_IDS, VERSION, Driven, Learned
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

PROMPT, RESPONSE, SHORT = 2048, 1024, 32


class Servers(LLMServerClient):  # type: ignore[misc]
    """verl's client of its LLM servers, of which there is none here: the script answers."""

    def __init__(self, config: Any, driven: Driven) -> None:
        super().__init__(config)
        self.driven = driven

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """See verl."""
        assert sampling_params["logprobs"]
        # What the prompt leaves of the two lengths, where verl has no limit of its own.
        assert 0 < sampling_params["max_tokens"] <= PROMPT + RESPONSE - len(prompt_ids)
        ids, logprobs = self.driven.engine.answer(prompt_ids, request_id)
        return TokenOutput(
            token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields={"global_steps": VERSION}
        )


async def run(driven: Driven, folder: Path) -> tuple[list[str], list[str]]:
    """Returns what was seen, and what is wrong."""
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml")
    rollout = config.actor_rollout_ref.rollout
    config.actor_rollout_ref.model.path = str(driven.model)
    rollout.name = "vllm"
    rollout.prompt_length, rollout.response_length = PROMPT, RESPONSE
    rollout.calculate_log_probs = True
    rollout.agent.agent_loop_config_path, rollout.agent.default_agent_loop = str(EXAMPLES / "verl.yaml"), "penstock"
    worker = AgentLoopWorker(config, Servers(config, driven))
    rows = [task_id for task_id in TASK_IDS for _ in range(PER_TASK)]
    batch = await worker.generate_sequences(prompts(rows))
    lines, wrong = await driven.faults([learned(batch, row) for row in range(len(rows))])
    if batch.batch["input_ids"].shape != (len(rows), PROMPT + RESPONSE):
        wrong.append(f"input_ids have the shape {tuple(batch.batch['input_ids'].shape)}")
    if set(batch.non_tensor_batch["max_global_steps"]) != {VERSION}:
        wrong.append(f"max_global_steps {set(batch.non_tensor_batch['max_global_steps'])}, not {VERSION}")
    rewards, mask = batch.batch["rm_scores"], batch.batch["response_mask"]
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, np.array(rows), norm_adv_by_std_in_grpo=False)
    expected = (rewards.sum(-1) - 0.5)[:, None] * mask
    if not torch.allclose(advantages, expected):
        wrong.append("verl's GRPO advantages are not reward minus the group's mean")
    rollout.response_length = SHORT
    cut = await AgentLoopWorker(config, Servers(config, driven)).generate_sequences(prompts([TASK_IDS[0]] * 2))
    if cut.batch["response_mask"].any() or sorted(cut.batch["rm_scores"].sum(-1).tolist()) != [0.0, 1.0]:
        wrong.append("a response that is too long trains something, or has lost its reward")
    lines.append(f"DataProto of {len(batch)} rows: {', '.join(sorted(batch.batch.keys()))}; GRPO advantages of verl")
    return lines, wrong


def prompts(rows: list[str]) -> DataProto:
    """A batch of verl's data set: a row for each rollout of these tasks."""
    return DataProto.from_dict(
        tensors={"dummy_tensor": torch.zeros(len(rows), 1, dtype=torch.uint8)},
        non_tensors={
            "raw_prompt": objects([[{"role": "user", "content": "see the task"}] for _ in rows]),
            "extra_info": objects([{"task_id": task_id} for task_id in rows]),
            "uid": objects(rows),
        },
        meta_info={"global_steps": VERSION},
    )


def learned(batch: Any, row: int) -> Learned:
    """A row of the DataProto, without its padding."""
    there = batch.batch["attention_mask"][row].bool()
    mask, logprobs = torch.zeros(2, PROMPT + RESPONSE)
    mask[PROMPT:] = batch.batch["response_mask"][row]
    logprobs[PROMPT:] = batch.batch["rollout_log_probs"][row]
    ids = batch.batch["input_ids"][row]
    return Learned.of(ids[there], mask[there], logprobs[there], batch.batch["rm_scores"][row].sum())


def objects(values: list[Any]) -> np.ndarray:
    """A column of verl's data."""
    column = np.empty(len(values), object)
    column[:] = values
    return column
