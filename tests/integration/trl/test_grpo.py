"""The example of examples/trl, run for real: TRL trains on rollouts of an agent in sandboxes."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import TrainerCallback
from trl import GRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from penstock.adapters.trainers import Selection, trl
from penstock.analysis.logprob_diff import Scored, compare
from penstock.client import AgentChoice, Command, LogprobsMode, RewardFrom, Task, Verifier
from penstock.client.sync import connect
from penstock.client.types.logprob_diff import GapReport
from penstock.local.stack import LocalStack

STEPS, GROUP_SIZE = 3, 4
AGENT = AgentChoice(name="shell", options={"max_turns": 4})
TASKS = [
    Task(
        task_id=f"speak-{number}",
        instruction=f"Say {number} times yes.",
        verifier=Verifier(
            # A share of what was asked for, so that a group is hardly ever of one mind.
            commands=[
                Command(
                    shell=f'said=$(cat said.txt 2>/dev/null | wc -l); [ "$said" -gt {number} ] && said={number}; '
                    f'awk "BEGIN {{ print $said / {number} }}" >"$PENSTOCK_REWARD_FILE"'
                )
            ],
            reward=RewardFrom.FILE,
        ),
    )
    for number in (3, 4)
]


@dataclass
class Watch(TrainerCallback):  # type: ignore[misc]
    """Looks at each batch under the weights that it was sampled with, which are those before the optimizer's step."""

    rollouts: Any
    gaps: list[GapReport] = field(default_factory=list)
    batches: list[Selection] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the gradients, before the step."""
        selection = self.rollouts.last
        self.batches.append(selection)
        self.gaps.append(
            compare(
                Scored.of_sample(row.sample, logprobs(kwargs["model"], row.sample.input_ids)) for row in selection.rows
            )
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """A line of TRL's metrics."""
        self.logs.append(logs)


def logprobs(model: Any, input_ids: np.ndarray) -> np.ndarray:
    """The model's logprob of each token after those before it; 0.0 for the first."""
    with torch.no_grad():
        ids = torch.from_numpy(input_ids.astype(np.int64))[None]
        scores = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        found = scores.gather(1, ids[0, 1:, None])[:, 0].numpy()
    return np.concatenate(([0.0], found)).astype(np.float32)


@dataclass(frozen=True)
class Run:
    """What is left of a training run."""

    watch: Watch
    version: int
    """The engine's policy version at the end."""
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(stack: LocalStack, model_dir: Path, example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps; each is a rollout of GROUP_SIZE agents for each of TASKS."""
    config = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("output")),
        max_steps=STEPS,
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=GROUP_SIZE,
        gradient_accumulation_steps=len(TASKS),
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
    )

    def train() -> Run:
        with connect(stack.endpoints) as ps:
            rollouts = example.Rollouts(ps, model_dir, TASKS, [AGENT])
            watch = Watch(rollouts)
            trainer = example.trainer_for(rollouts, config, [watch])
            before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
            trainer.train()
            return Run(watch, ps.inference.info().policy_version, before, trainer.model.state_dict())

    return await asyncio.to_thread(train)


@pytest.mark.requirement("R87")
def test_each_step_is_sampled_by_the_next_policy_version(run: Run) -> None:
    """The engine has TRL's weights of that step, for whole rollouts."""
    assert [[row.policy_versions for row in batch.rows] for batch in run.watch.batches] == [
        [(step,)] * GROUP_SIZE * len(TASKS) for step in range(1, STEPS + 1)
    ]
    assert run.version == STEPS
    assert not any(batch.dropped for batch in run.watch.batches)


@pytest.mark.requirement("R82")
def test_the_trainer_s_logprobs_of_what_was_sampled_are_the_engine_s(run: Run) -> None:
    """TRL learns from the very tokens of the engine, with the probabilities that they were sampled by."""
    for batch, report in zip(run.watch.batches, run.watch.gaps, strict=True):
        (gap,) = report.versions
        assert report.mode == LogprobsMode.PROCESSED
        assert gap.tokens == sum(int(row.sample.loss_mask.sum()) for row in batch.rows)
        assert gap.max_abs < 1e-3 and gap.kl < 1e-6


@pytest.mark.requirement("R79")
def test_the_loss_is_finite_and_the_rewards_are_the_verifiers(run: Run) -> None:
    """TRL's reward is what the verifier gave in the sandbox."""
    losses = [line["loss"] for line in run.watch.logs if "loss" in line]
    assert len(losses) == STEPS and all(math.isfinite(loss) for loss in losses)
    means = [np.mean([row.reward for row in batch.rows]) for batch in run.watch.batches]
    np.testing.assert_allclose([line["reward"] for line in run.watch.logs if "reward" in line], means, atol=1e-4)


@pytest.mark.requirement("R84")
def test_the_weights_change_exactly_when_a_group_disagrees(run: Run) -> None:
    """There is a gradient on what was sampled, and none where all rewards are equal."""
    disagreed = any(
        len({row.reward for row in batch.rows if row.trajectory.task_id == task.task_id}) > 1
        for batch in run.watch.batches
        for task in TASKS
    )
    assert any(not torch.equal(run.before[name], run.after[name]) for name in run.before) == disagreed


@pytest.mark.requirement("R84")
def test_samples_of_the_asynchronous_trainer_are_trl_s_own(run: Run) -> None:
    """TRL's class takes our fields, and has no other that must be given."""
    for batch in run.watch.batches:
        samples = [RolloutSample(**sample) for sample in trl.rollout_samples(batch)]
        assert len(samples) == GROUP_SIZE * len(TASKS) and {sample.group_id for sample in samples} == {0, 1}
        for sample, row in zip(samples, batch.rows, strict=True):
            assert sample.input_ids.dtype == sample.completion_mask.dtype == np.int64
            assert len(sample.input_ids) == len(sample.completion_mask) == len(sample.old_log_probs)
            assert sample.completion_mask.sum() == row.sample.loss_mask.sum() > 0
