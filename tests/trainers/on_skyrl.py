"""SkyRL: its trainer calls our generator, validates the output and makes its TrainingInputBatch."""

from __future__ import annotations

import importlib
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions

# SkyRL wants Python 3.12, whose TypedDict pydantic takes; on 3.11 that of typing_extensions is the same.
typing.TypedDict = typing_extensions.TypedDict

import torch  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineOutput  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.generators.base import GeneratorInput, TrajectoryID  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from tests.trainers.driven import EXAMPLES, PER_TASK, TASK_IDS, Driven, Learned  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

MOST_TOKENS = 500
"""Of an answer, by the trainer's configuration."""


class Engines:
    """In the place of SkyRL's inference engines, with its input and output."""

    def __init__(self, driven: Driven) -> None:
        self.driven = driven
        self.limits = set[int]()
        """Tokens that it was asked for at most."""

    async def generate(self, input_batch: Any, model: str | None = None) -> InferenceEngineOutput:
        """See SkyRL's InferenceEngineInterface."""
        (prompt,), (session,) = input_batch["prompt_token_ids"], input_batch["session_ids"]
        self.limits.add(input_batch["sampling_params"]["max_tokens"])
        ids, logprobs = self.driven.engine.answer(prompt, session)
        return InferenceEngineOutput(
            responses=[""],
            response_ids=[ids],
            stop_reasons=["stop"],
            response_logprobs=[logprobs],
            prompt_logprobs=None,
            rollout_expert_indices=None,
        )


async def run(driven: Driven, folder: Path) -> tuple[list[str], list[str]]:
    """Returns what was seen, and what is wrong."""
    tokenizer = AutoTokenizer.from_pretrained(driven.model)
    rows = [(task_id, number) for task_id in TASK_IDS for number in range(PER_TASK)]
    uids = [task_id for task_id, _ in rows]
    config = SkyRLTrainConfig()
    config.trainer.train_batch_size = config.trainer.policy_mini_batch_size = len(TASK_IDS)
    config.generator.n_samples_per_prompt = PER_TASK
    # Its constructor starts Ray; what is called below is the trainer's own.
    sys.path.insert(0, str(EXAMPLES))
    experiment = importlib.import_module("skyrl_experiment").Experiment
    engines = Engines(driven)
    generator = experiment.get_generator(None, config, tokenizer, engines)
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.cfg, trainer.tokenizer, trainer.generator, trainer.all_metrics = config, tokenizer, generator, {}
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1)
    output = await trainer.generate(
        GeneratorInput(
            prompts=[[{"role": "user", "content": "see the task"}] for _ in rows],
            env_classes=["penstock" for _ in rows],
            env_extras=[{"task_id": task_id} for task_id in uids],
            sampling_params={"temperature": 1.0, "top_p": 1.0, "logprobs": 0, "max_tokens": MOST_TOKENS},
            trajectory_ids=[TrajectoryID(task_id, number) for task_id, number in rows],
            batch_metadata=None,
        )
    )
    output, uids = trainer.postprocess_generator_output(output, uids)
    batch = trainer.convert_to_training_input(output, uids)
    lines, wrong = await driven.faults([learned(batch, row) for row in range(len(rows))])
    if [(one.instance_id, one.repetition_id) for one in output["trajectory_ids"]] != rows:
        wrong.append("the trajectory ids are not those of the input")
    if engines.limits != {MOST_TOKENS}:
        wrong.append(f"an answer may have {engines.limits} tokens, and the trainer says {MOST_TOKENS}")
    there = sorted(key for key in batch if batch[key] is not None)
    lines.append(f"TrainingInputBatch of {batch.batch_size} rows: {', '.join(there)}")
    return lines, wrong


def learned(batch: Any, row: int) -> Learned:
    """A row of the batch, without its padding."""
    there = batch["attention_mask"][row].bool()
    ids = batch["sequences"][row][there]
    in_response = batch["response_mask"][row].bool()
    count = int(in_response.sum())
    mask, logprobs = torch.zeros(2, len(ids))
    mask[-count:] = batch["loss_mask"][row][in_response]
    logprobs[-count:] = batch["rollout_logprobs"][row][in_response]
    return Learned.of(ids, mask, logprobs, batch["rewards"][row].sum())
