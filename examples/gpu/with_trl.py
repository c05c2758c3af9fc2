"""GRPO by TRL: `python -m examples.gpu.with_trl PLAN CONNECTION`, which `python -m examples.gpu` starts.

A process of its own, so that its end frees the GPU's memory. Writes the model into the plan's `trained`.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from examples.gpu.phases import rollout_options, tasks
from examples.gpu.plan import Plan
from examples.trl.train import Rollouts, trainer_for
from transformers import TrainerCallback
from trl import GRPOConfig

from penstock.client import AgentChoice
from penstock.client.sync import connect


@dataclass
class Log(TrainerCallback):  # type: ignore[misc]
    """Writes TRL's figures of each step to a file, a line each."""

    file: Path
    rollouts: Rollouts
    lines: list[dict[str, Any]] = field(default_factory=list)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """See Transformers."""
        if "loss" not in logs:
            return
        rewards = [row.reward for row in self.rollouts.last.rows]
        line: dict[str, Any] = {
            "step": state.global_step,
            "rollouts": len(rewards),
            "dropped": len(self.rollouts.last.dropped),
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "trained_tokens": sum(int(row.sample.loss_mask.sum()) for row in self.rollouts.last.rows),
            **{name: logs[name] for name in ("loss", "grad_norm", "entropy") if name in logs},
        }
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"trl: {line}", flush=True)


def config_of(plan: Plan) -> GRPOConfig:
    """One optimizer step for each batch of rollouts, a sequence at a time: prompts of agents are long."""
    gpu, sequences = torch.cuda.is_available(), plan.groups * plan.group_size
    return GRPOConfig(
        output_dir=str(plan.out / "trl"),
        max_steps=plan.steps,
        num_generations=plan.group_size,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=sequences,
        learning_rate=plan.learning_rate,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not gpu,
        bf16=gpu,
        gradient_checkpointing=gpu,
    )


def main() -> None:
    """Trains, and saves."""
    parser = argparse.ArgumentParser(description="GRPO by TRL on rollouts of coding agents.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("connection", type=Path)
    parser.add_argument("agents", help="the trained agents' choices, as JSON")
    given = parser.parse_args()
    plan = Plan.read(given.plan)
    agents = [AgentChoice(**choice) for choice in json.loads(given.agents)]
    log = plan.out / "steps.jsonl"
    log.unlink(missing_ok=True)
    with connect(given.connection) as ps:
        rollouts = Rollouts(ps, plan.model, tasks(plan, "train"), agents, plan.weights, rollout_options(plan))
        trainer = trainer_for(rollouts, config_of(plan), [Log(log, rollouts)])
        trainer.train()
        partial = plan.trained.with_suffix(".partial")
        trainer.save_model(str(partial))
        partial.rename(plan.trained)


if __name__ == "__main__":
    main()
