"""GRPO on real coding-agent rollouts, on a laptop: a small decoder learns to complete shell tasks.

    penstock demo --seed 1                  (or `make demo SEED=1` in a clone)

Each step starts 8 groups of 8 rollouts (with `--credit turn` 8 rollouts, and their branches). A rollout is a real agent
process in its own sandbox; its model calls wait at the gate until this program answers them with what the inference
service samples; a verifier in the sandbox makes the reward. The captured tokens and logprobs become one GRPO update,
and the new weights are pushed back, one policy version later. What a run leaves behind is in runs/demo/latest of the
working directory. The seed decides everything: weights, tasks, and each sampled token, whatever the order in which
calls arrive.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.analysis.export import Table, write_jsonl
from penstock.client import (
    InterceptSession,
    ModelCall,
    Penstock,
    ResultRejected,
    RolloutResult,
    connect,
)
from penstock.local.processes import hold
from penstock.local.stack import LocalStack
from penstock_codec import Codec
from penstock_demo import model
from penstock_demo.display import Display, Figures, Metrics, recent
from penstock_demo.learner import Learner, Row
from penstock_demo.rollouts import Collect, Collected, ToLearn, by_rollout, reward_of
from penstock_demo.tasks import TASKS, Corpus, Examples
from penstock_demo.turns import by_turn

PROMPTS = 8
MAX_STEPS, GOAL, WINDOW = 100, 0.93, 10
COLLECT: Mapping[str, Collect] = {"rollout": by_rollout, "turn": by_turn}
RUNS = Path.cwd() / "runs" / "demo"


def warm_start(codec: Codec, seed: int, run: Path, display: Display) -> Learner:
    """The policy that training starts from, in `run`/initial."""
    return warm_start_from(Corpus(codec), codec, seed, run, display)


def warm_start_from(examples: Examples, codec: Codec, seed: int, run: Path, display: Display) -> Learner:
    """The same from other examples."""
    learner = Learner(model.ModelConfig(vocab_size=codec.vocab_size), seed)
    display.begin("warm start: learning the format from examples (kept for the next run of this seed) ...")
    learner.warm_start(examples, run.parent / "cache", display.say)
    model.export(learner.params, learner.config, codec.files, run / "initial")
    return learner


def learned(history: Sequence[Metrics]) -> bool:
    """Whether the last steps were good enough to end."""
    return len(history) >= WINDOW and recent(history, WINDOW) >= GOAL


def update(learner: Learner, collected: Collected) -> tuple[float, float]:
    """One GRPO update by what a step collected; see `Learner.update`."""
    return learner.update(collected.rows)


@dataclass(frozen=True, slots=True)
class Course:
    """How to train: what the seed decides, most steps, what a step collects, whether enough is learned, and how.

    `tasks` are those to learn, `prompts` of them in a step (None: PROMPTS). `prepare` runs before the first step.
    `settings` are the services', by service.
    """

    seed: int
    max_steps: int = MAX_STEPS
    collect: Collect = by_rollout
    enough: Callable[[Sequence[Metrics]], bool] = learned
    update: Callable[[Learner, Collected], tuple[float, float]] = update
    tasks: Sequence[ToLearn] = TASKS
    prompts: int | None = None
    prepare: Callable[[Penstock, Display], Awaitable[None]] | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


async def train(
    learner: Learner, codec: Codec, course: Course, run: Path, start: float, display: Display
) -> list[Metrics]:
    """One training run; answers its metrics. Everything that it makes is in `run`; `start` is when the clock began."""
    display.begin("starting the four services ...")
    history: list[Metrics] = []
    stack = LocalStack(model_dir=run / "initial", state_dir=run / "services", settings=course.settings)
    prompts = course.prompts or PROMPTS
    async with (
        stack,
        connect(stack.endpoints) as ps,
        ps.intercept(run_id=run.name, policy_version=0) as session,
        asyncio.TaskGroup() as background,
    ):
        background.create_task(answer_calls(ps, session))
        if course.prepare is not None:
            await course.prepare(ps, display)
        order = np.random.default_rng(course.seed)
        for step in range(course.max_steps):
            began = time.perf_counter()
            (display.say if step else display.begin)(f"step {step + 1}: agents at work on {prompts} tasks ...")
            chosen = [course.tasks[i] for i in order.permutation(len(course.tasks))[:prompts]]
            collected = await course.collect(ps, run.name, step, chosen)

            display.say(f"step {step + 1}: learning ...")
            loss, gap = await asyncio.to_thread(course.update, learner, collected)
            await ps.inference.update_weights(step + 1, learner.weights())
            session.announce(step + 1)
            # By the version that sampled the rollouts: so the dashboard has both at one place.
            await session.log({"loss": loss, "logprob_gap": gap, **entropy(collected.rows)}, step=step)

            ended = [*collected.whole, *collected.branches]
            save_trajectories(run, step + 1, ended)
            now = time.perf_counter()
            history.append(
                Metrics(
                    step=step + 1,
                    policy_version=step,
                    seconds=round(now - began, 3),
                    elapsed=round(now - start, 3),
                    loss=loss,
                    logprob_gap=gap,
                    **figures(collected.whole, collected.branches),
                )
            )
            if step == 0:
                point_latest(run)
            display.step(history[-1])
            append(run / "metrics.jsonl", history[-1])
            for result in ended:
                if reward_of(result) is None:
                    append(run / "ungraded.jsonl", {"rollout_id": result.rollout_id, "failure": str(result.failure)})
            if course.enough(history):
                break
        session.finish()
    display.begin("saving ...")
    model.export(learner.params, learner.config, codec.files, run / "model")
    return history


async def answer_calls(ps: Penstock, session: InterceptSession) -> None:
    """The trainer's side of the gate: every call that comes in is answered, many at a time."""
    async with asyncio.TaskGroup() as tasks:
        async for call in session.calls():
            tasks.create_task(answer(ps, call))


async def answer(ps: Penstock, call: ModelCall) -> None:
    """One answer. The seed names the call by its place in the run, so that the order of arrival changes nothing."""
    digest = hashlib.blake2b(f"{call.rollout_id}/{call.index}".encode(), digest_size=8).digest()
    sampling = call.sampling.replace(temperature=1.0, seed=int.from_bytes(digest) >> 1)
    completion = await ps.inference.generate(call.prompt_token_ids, sampling, session_id=call.rollout_id)
    with suppress(ResultRejected):  # the rollout may have ended meanwhile; it says why itself
        await call.deliver(completion)


def figures(whole: Sequence[RolloutResult], branches: Sequence[RolloutResult] = ()) -> Figures:
    """What a step's rollouts say, all together; branches begin where the policy is unsure, so their rewards do not."""
    rewards = [reward for result in whole if (reward := reward_of(result)) is not None]
    if not rewards:
        raise RuntimeError(f"no rollout of this step was graded; the first one's failure: {whole[0].failure}")
    ended = [*whole, *branches]
    samples = [sample for result in ended if result.trajectory is not None for sample in result.trajectory.samples]
    return Figures(
        success=sum(reward == 1.0 for reward in rewards) / len(rewards),
        reward_mean=sum(rewards) / len(rewards),
        rollouts=len(ended),
        tokens=sum(int(sample.loss_mask.sum()) for sample in samples),
        ungraded=sum(reward_of(result) is None for result in ended),
    )


def entropy(rows: Sequence[Row]) -> dict[str, float]:
    """The policy's entropy in nats a token, as its samples estimate it: the mean of what each token had against it.

    Empty without a token: that is no entropy of 0.
    """
    tokens = sum(float(row.mask.sum()) for row in rows)
    if not tokens:
        return {}
    return {"entropy": -sum(float((row.logprobs * row.mask).sum()) for row in rows) / tokens}


def save_trajectories(run: Path, step: int, ended: list[RolloutResult]) -> None:
    """A file per step: each rollout's tokens, mask, logprobs and reward."""
    path = run / "trajectories" / f"step-{step:03d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    write_jsonl([result.trajectory for result in ended if result.trajectory is not None], path, Table.SEQUENCES)


def append(path: Path, line: Mapping[str, object]) -> None:
    """Add a JSON line to a file."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def new_run(seed: int, runs: Path = RUNS) -> Path:
    """An empty directory seed-N among the runs. An earlier run of the seed is replaced.

    Raises:
        ConfigurationError: STATE_DIR_IN_USE: services run on the earlier one, as `penstock up` of it does.
    """
    run = runs / f"seed-{seed}"
    with ExitStack() as held:
        if (services := run / "services").is_dir():
            advice = "They serve the earlier run of this seed: stop them first, or choose another --seed."
            held.callback(os.close, hold(services, advice))
        shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    return run


def point_latest(run: Path) -> None:
    """Beside the run, `latest` is the newest that got as far as a step."""
    latest = run.parent / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(run.name)


def seed_number(text: str) -> int:
    """A seed as the command line has it."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a seed must be a whole number from 0, not {text!r}")
    return int(text)


def from_here(path: Path) -> Path:
    """A path as one types it: relative where it is below the working directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
