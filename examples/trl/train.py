"""GRPO by TRL, where each completion is a whole rollout of a coding agent in a sandbox.

    penstock up --model-dir DIR                                       # in another terminal; DIR holds the model
    python examples/trl/train.py DIR task.yaml [more tasks ...]       # with trl installed

TRL computes the loss and steps the optimizer. What it learns from are the tokens and logprobs that the engine sampled,
and the rewards of the tasks' verifiers. Before each batch the engine gets the trainer's weights.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from penstock.adapters.trainers import Selection, select, trl
from penstock.client import AgentChoice, Sampling, Task
from penstock.client.sync import Penstock, connect


class Rollouts:
    """TRL's `rollout_func`: a prompt is a task's instruction, a completion is what an agent did about it."""

    def __init__(self, ps: Penstock, tasks: Iterable[Task], agent: str | AgentChoice) -> None:
        self.ps, self.agent = ps, agent
        self.tasks = {task.instruction: task for task in tasks}
        self.last = Selection(())
        """What the last batch was made of."""
        self._pushed: int | None = None

    def __call__(self, prompts: list[str], trainer: Any) -> trl.RolloutOutput:
        """One completion for each prompt; equal ones in a row are a group."""
        self.push(trainer)
        sampling = Sampling(temperature=trainer.args.temperature, top_p=1.0)
        groups = [
            self.ps.groups.create(
                self.tasks[prompt], self.agent, len(list(same)), mode="transparent_proxy", sampling=sampling
            )
            for prompt, same in itertools.groupby(prompts)
        ]
        self.last = select([result for group in groups for result in group.results()], one_sequence=True)
        for dropped in self.last.dropped:
            print(f"not trained on: {dropped}", file=sys.stderr)
        return trl.rollout_output(self.last, filler_token_id=trainer.processing_class.pad_token_id)

    def push(self, trainer: Any) -> None:
        """Gives the engine the weights of this step, one policy version later."""
        if trainer.accelerator.is_main_process and self._pushed != trainer.state.global_step:
            weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
            arrays = {name: weight.detach().float().cpu().numpy() for name, weight in weights.items()}
            self.ps.inference.update_weights(self.ps.inference.info().policy_version + 1, arrays)
            self._pushed = trainer.state.global_step
        trainer.accelerator.wait_for_everyone()


def trainer_for(
    rollouts: Rollouts, model_dir: Path, config: GRPOConfig, callbacks: Sequence[TrainerCallback] = ()
) -> GRPOTrainer:
    """A trainer of the model in `model_dir` on the tasks of `rollouts`."""
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": instruction} for instruction in rollouts.tasks]),
        reward_funcs=trl.reward,
        rollout_func=rollouts,
        callbacks=list(callbacks),
    )


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description="GRPO by TRL on rollouts of a coding agent.")
    parser.add_argument("model_dir", type=Path, help="directory of the model that `penstock up` serves")
    parser.add_argument("tasks", type=Path, nargs="+", help="task files")
    parser.add_argument("--agent", default="shell")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", default="runs/trl")
    given = parser.parse_args()
    gpu = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=given.output,
        max_steps=given.steps,
        num_generations=given.group_size,
        per_device_train_batch_size=given.group_size,
        gradient_accumulation_steps=len(given.tasks),
        learning_rate=1e-6,
        temperature=1.0,
        logging_steps=1,
        report_to="none",
        use_cpu=not gpu,
        bf16=gpu,
    )
    with connect() as ps:
        trainer = trainer_for(Rollouts(ps, map(Task.load, given.tasks), given.agent), given.model_dir, config)
        trainer.train()
        trainer.save_model()


if __name__ == "__main__":
    main()
