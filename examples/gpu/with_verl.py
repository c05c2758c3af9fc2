"""GRPO by verl 0.9.1: `python -m examples.gpu.with_verl PLAN CONNECTION AGENTS`, which `python -m examples.gpu` starts.

verl's own vLLM servers answer the agents; its FSDP workers train. It runs in verl's own environment, which has Penstock
too. Writes the model into the plan's `trained`.

With `--to-tensors` the same settings, rows and agent loops go through verl's own loop worker up to its tensors and its
GRPO advantages, with the inference service's engine in the place of verl's servers, and nothing is trained: for a
machine without a GPU.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset
from examples.gpu.phases import tasks
from examples.gpu.plan import Plan

from penstock.client import Penstock, Sampling, connect


def loops(plan: Plan, connection: Path, agents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """verl's agent loops: one for each agent, by its name."""
    return [
        {
            "name": choice["name"],
            "_target_": "penstock.adapters.trainers.plugins.verl.PenstockAgentLoop",
            "tasks": str(plan.tasks / "train"),
            "agent": choice["name"],
            "connection": str(connection),
            "options": {
                "options": choice["options"],
                "skip_permissions": choice["skip_permissions"],
                "limits": {"_target_": "penstock.client.Limits", "agent": plan.agent_seconds},
                "budgets": {"_target_": "penstock.client.Budgets", "max_calls": plan.max_calls},
            },
            "_convert_": "all",
        }
        for choice in agents
    ]


def rows(plan: Plan, agents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """verl's data set: every task with every agent. The prompt is verl's own affair; no agent sees it."""
    return [
        {
            "data_source": "penstock",
            "prompt": [{"role": "user", "content": task.instruction}],
            "agent_name": choice["name"],
            "task_id": task.task_id,
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for task in tasks(plan, "train")
        for choice in agents
    ]


def settings(plan: Plan, folder: Path) -> list[str]:
    """verl's settings, as on its command line."""
    length = plan.prompt_tokens + plan.response_tokens
    return [
        "algorithm.adv_estimator=grpo",
        "algorithm.norm_adv_by_std_in_grpo=false",
        f"data.train_files={folder / 'rows.parquet'}",
        f"data.val_files={folder / 'rows.parquet'}",
        f"data.train_batch_size={plan.groups}",
        f"data.max_prompt_length={plan.prompt_tokens}",
        f"data.max_response_length={plan.response_tokens}",
        f"actor_rollout_ref.model.path={plan.model}",
        f"actor_rollout_ref.actor.optim.lr={plan.learning_rate}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={plan.groups}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={length}",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.n={plan.group_size}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"actor_rollout_ref.rollout.gpu_memory_utilization={plan.training_options.get('gpu_memory_utilization', 0.5)}",
        f"actor_rollout_ref.rollout.max_model_len={plan.context_tokens}",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder / 'agents.yaml'}",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={plan.agents[0]}",
        "trainer.use_v1=false",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={plan.gpus}",
        f"trainer.total_training_steps={plan.steps}",
        f"trainer.total_epochs={plan.steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        f"trainer.save_freq={plan.steps}",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.logger=[console]",
    ]


def train(plan: Plan, folder: Path) -> None:
    """verl's trainer, then its merger, which makes a model's directory of the workers' shards."""
    subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *settings(plan, folder)], check=True)
    actor = folder / "checkpoints" / f"global_step_{plan.steps}" / "actor"
    merger = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    partial = plan.trained.with_suffix(".partial")
    subprocess.run([*merger, "--local_dir", str(actor), "--target_dir", str(partial)], check=True)
    partial.rename(plan.trained)


async def to_tensors(plan: Plan, connection: Path, folder: Path) -> dict[str, Any]:
    """What verl would learn from in its first step: its batch, by its own classes, in figures."""
    import numpy as np
    from hydra import compose, initialize_config_module
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
    from verl.utils import hf_tokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", settings(plan, folder))
    data = RLHFDataset(config.data.train_files, hf_tokenizer(str(plan.model)), config.data)
    batch = DataProto.from_single_dict(collate_fn([data[place] for place in range(min(plan.groups, len(data)))]))
    batch.non_tensor_batch["uid"] = np.array([str(place) for place in range(len(batch))], object)
    batch = batch.repeat(plan.group_size, interleave=True)
    batch.meta_info["global_steps"] = 0
    async with connect(connection) as ps:
        made = await AgentLoopWorker(config, _servers(config, ps)).generate_sequences(batch)
    rewards, mask = made.batch["rm_scores"], made.batch["response_mask"]
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, mask, batch.non_tensor_batch["uid"], norm_adv_by_std_in_grpo=config.algorithm.norm_adv_by_std_in_grpo
    )
    return {
        "rows": len(made),
        "shape": list(made.batch["input_ids"].shape),
        "tokens": int(made.batch["attention_mask"].sum()),
        "trained_tokens": int(mask.sum()),
        "rewards": [round(float(reward), 4) for reward in rewards.sum(-1)],
        "advantages": [round(float(advantages[row][mask[row].bool()][:1].sum()), 4) for row in range(len(made))],
        "agents": [str(name) for name in batch.non_tensor_batch["agent_name"]],
        "logprob_mean": round(float((made.batch["rollout_log_probs"] * mask).sum() / mask.sum()), 4),
    }


def _servers(config: Any, ps: Penstock) -> Any:
    """verl's client of its LLM servers, which asks the inference service instead."""
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    class Servers(LLMServerClient):  # type: ignore[misc]
        async def generate(
            self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
        ) -> TokenOutput:
            """See verl."""
            sampling = Sampling(
                temperature=sampling_params["temperature"],
                top_p=sampling_params["top_p"],
                max_tokens=sampling_params.get("max_tokens"),
            )
            done = await ps.inference.generate(prompt_ids, sampling, session_id=request_id)
            assert done.token_ids is not None and done.logprobs is not None
            return TokenOutput(
                token_ids=done.token_ids.tolist(),
                log_probs=done.logprobs.tolist(),
                stop_reason="completed",
                extra_fields={"global_steps": 0},
            )

    return Servers(config)


def main() -> None:
    """Trains, or writes the tensors' figures into the plan's `verl/tensors.json`."""
    parser = argparse.ArgumentParser(description="GRPO by verl on rollouts of coding agents.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("connection", type=Path)
    parser.add_argument("agents", help="the trained agents' choices, as JSON")
    parser.add_argument("--to-tensors", action="store_true", help="stop before the optimizer")
    given = parser.parse_args()
    plan, agents = Plan.read(given.plan), json.loads(given.agents)
    folder = plan.out / "verl"
    folder.mkdir(exist_ok=True)
    (folder / "agents.yaml").write_text(yaml.safe_dump(loops(plan, given.connection, agents)), "utf-8")
    Dataset.from_list(rows(plan, agents)).to_parquet(folder / "rows.parquet")
    if given.to_tensors:
        found = asyncio.run(to_tensors(plan, given.connection, folder))
        (folder / "tensors.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        print(f"verl: {found}", flush=True)
    else:
        train(plan, folder)


if __name__ == "__main__":
    main()
