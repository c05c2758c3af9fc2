"""GRPO by TRL, where each completion is a whole rollout of a coding agent in a sandbox.

    penstock up --model-dir DIR                                       # in another terminal; DIR holds the model
    python examples/trl/train.py DIR task.yaml [more tasks ...]       # with trl installed

TRL computes the loss and steps the optimizer. What it learns from are the tokens and logprobs that the engine sampled,
and the rewards of the tasks' verifiers. Before each batch the engine gets the trainer's weights. Several agents take
turns: each group is of one.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from penstock.adapters.trainers import Selection, select, trl
from penstock.client import AgentChoice, RolloutOptions, Sampling, Task
from penstock.client.sync import Penstock, connect


class Rollouts:
    """TRL's `rollout_func`: a prompt is a task's instruction, a completion is what an agent did about it.

    Args:
        ps: the services.
        model_dir: the model that the engine started with: its names and types of tensors are those of each push.
        tasks: their instructions differ.
        agents: one or more.
        weights_dir: the inference service's directory of that name, for models that are too large to be sent.
        options: of each rollout, such as `limits` and `budgets`.
    """

    def __init__(
        self,
        ps: Penstock,
        model_dir: Path,
        tasks: Iterable[Task],
        agents: Sequence[str | AgentChoice],
        weights_dir: Path | None = None,
        options: RolloutOptions | None = None,
    ) -> None:
        self.ps, self.model_dir, self.weights_dir = ps, model_dir, weights_dir
        self.tasks = {task.instruction: task for task in tasks}
        self.last = Selection(())
        """What the last batch was made of."""
        self._agents = itertools.cycle(agents)
        self._options: RolloutOptions = {"mode": "transparent_proxy", **(options or {})}
        self._types = tensor_types(model_dir)
        self._pushed: int | None = None

    def __call__(self, prompts: list[str], trainer: Any) -> trl.RolloutOutput:
        """One completion for each prompt; equal ones in a row are a group."""
        self.push(trainer)
        options: RolloutOptions = {
            **self._options,
            "sampling": Sampling(temperature=trainer.args.temperature, top_p=1.0),
        }
        groups = [
            self.ps.groups.create(self.tasks[prompt], next(self._agents), len(list(same)), **options)
            for prompt, same in itertools.groupby(prompts)
        ]
        self.last = select([result for group in groups for result in group.results()], one_sequence=True)
        for dropped in self.last.dropped:
            print(f"not trained on: {dropped}", file=sys.stderr)
        return trl.rollout_output(self.last, filler_token_id=trainer.processing_class.pad_token_id)

    def push(self, trainer: Any) -> None:
        """Gives the engine the weights of this step, one policy version later."""
        if trainer.accelerator.is_main_process and self._pushed != trainer.state.global_step:
            state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
            # A head that is tied to the embeddings is in `state`, and seldom in the model's files.
            weights = {name: state[name].detach().to("cpu", kind) for name, kind in self._types.items()}
            version = self.ps.inference.info().policy_version + 1
            if self.weights_dir is None:
                arrays = {name: weight.float().numpy() for name, weight in weights.items()}
                self.ps.inference.update_weights(version, arrays)
            else:
                self._push_file(self.weights_dir, version, weights)
            self._pushed = trainer.state.global_step
        trainer.accelerator.wait_for_everyone()

    def _push_file(self, weights_dir: Path, version: int, weights: dict[str, torch.Tensor]) -> None:
        file = weights_dir / f"version-{version}.safetensors"
        save_file({name: weight.clone().contiguous() for name, weight in weights.items()}, file)
        self.ps.inference.update_weights_from(version, file.name, timeout=None)
        # In force until now.
        (weights_dir / f"version-{version - 1}.safetensors").unlink(missing_ok=True)


def tensor_types(model_dir: Path) -> dict[str, torch.dtype]:
    """The tensors in the model's files by name, with their types. Raises ValueError: there is none."""
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    found: dict[str, torch.dtype] = {}
    for file in sorted(model_dir.glob("model*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: kinds[opened.get_slice(name).get_dtype()] for name in opened.keys()}  # noqa: SIM118
    if not found:
        raise ValueError(f"{model_dir} has no model*.safetensors")
    return found


def trainer_for(rollouts: Rollouts, config: GRPOConfig, callbacks: Sequence[TrainerCallback] = ()) -> GRPOTrainer:
    """A trainer of the model of `rollouts` on their tasks."""
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(rollouts.model_dir, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(rollouts.model_dir),
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
    parser.add_argument("--agent", action="append", help="an agent; repeat (default: shell)")
    parser.add_argument("--weights-dir", type=Path, help="the service's `weights_dir`: for models above 512 MiB")
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
        tasks, agents = map(Task.load, given.tasks), given.agent or ["shell"]
        trainer = trainer_for(Rollouts(ps, given.model_dir, tasks, agents, given.weights_dir), config)
        trainer.train()
        trainer.save_model()


if __name__ == "__main__":
    main()
