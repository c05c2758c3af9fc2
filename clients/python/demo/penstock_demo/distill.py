"""On-policy distillation: the policy learns from what a teacher says about the policy's own tokens.

    python -m penstock_demo.distill --seed 2        (after `penstock demo`, whose trained model is the teacher)

The rollouts are those of the demo: real agents in sandboxes, answered by the policy. Then a second inference service,
which serves the teacher, scores each rollout's tokens (`score_batch`). The advantage of a sampled token is the
teacher's logprob minus the policy's: its share of the KL divergence from the teacher, negated. Rewards are only shown.
A reward is one number for a rollout, and says nothing where all rollouts of a group have the same; a teacher says for
each token which way to go, so that far fewer rollouts are needed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from penstock.client import Penstock, PenstockError, ToScore, connect
from penstock.client.transport.endpoints import ServiceName
from penstock.local.stack import LocalStack
from penstock_demo import model
from penstock_demo.display import Display, Metrics, reasons
from penstock_demo.learner import Learner, Row
from penstock_demo.rollouts import Collect, Collected, ToLearn, start_group
from penstock_demo.tasks import build_codec
from penstock_demo.train import RUNS, Course, from_here, new_run, seed_number, train, warm_start

GROUP = 2  # rollouts of a task
STEPS = 6
OWN_RUNS = RUNS.with_name("distill")


class TeacherService(LocalStack):
    """One inference service, with the teacher's model."""

    @property
    def services(self) -> Sequence[ServiceName]:
        """See LocalStack."""
        return ("inference",)


@asynccontextmanager
async def serving(directory: Path, state_dir: Path) -> AsyncIterator[Penstock]:
    """Serves the teacher's model beside the policy's services."""
    async with (
        TeacherService(model_dir=directory, state_dir=state_dir) as stack,
        connect({"inference": stack.address("inference")}, stack.operator_token) as teacher,
    ):
        yield teacher


def by_teacher(teacher: Penstock, group: int = GROUP) -> Collect:
    """Collects rollouts of each task, and the teacher's advantages for their tokens."""

    async def collect(ps: Penstock, run_id: str, step: int, tasks: Sequence[ToLearn]) -> Collected:
        groups = await asyncio.gather(
            *(start_group(ps, run_id, step, i, task, size=group) for i, task in enumerate(tasks))
        )
        results = [result for group in groups for result in await group.results()]
        samples = [
            sample
            for result in results
            if result.trajectory is not None
            for sample in result.trajectory.samples
            if sample.logprobs is not None
        ]
        scores = await teacher.inference.score_batch([ToScore(one.input_ids) for one in samples]) if samples else []
        rows = []
        for sample, score in zip(samples, scores, strict=True):
            assert sample.logprobs is not None
            mask = sample.loss_mask.astype(np.float32)
            advantages = np.zeros(len(sample), np.float32)
            advantages[1:] = (score.logprobs - sample.logprobs[1:]) * mask[1:]
            rows.append(Row(sample.input_ids, mask, sample.logprobs, advantages))
        return Collected(results, [], rows)

    return collect


def distilled(learner: Learner, collected: Collected) -> tuple[float, float]:
    """One update by a teacher's logprobs; see `Learner.distill`."""
    return learner.distill(collected.rows)


async def distill(seed: int, steps: int, directory: Path, run: Path, display: Display) -> list[Metrics]:
    """One run; answers its metrics."""
    start, codec = time.perf_counter(), build_codec()
    learner = warm_start(codec, seed, run, display)
    async with serving(directory, run / "teacher") as teacher:
        course = Course(seed, steps, by_teacher(teacher), lambda _: False, distilled)
        return await train(learner, codec, course, run, start, display)


def main() -> None:
    """Reads the command line and distills."""
    parser = argparse.ArgumentParser(description="Train the demo's model by a teacher, through real services.")
    parser.add_argument("--seed", type=seed_number, default=2, help="seed of the policy that learns (default 2)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of 8 tasks and {GROUP} rollouts each ({STEPS})")
    parser.add_argument(
        "--teacher", type=Path, default=RUNS / "latest" / "model", help="its model (default runs/demo/latest/model)"
    )
    given = parser.parse_args()
    if not (given.teacher / "config.json").is_file():
        sys.exit(f"there is no model in {given.teacher}: run `make demo` first, or name another with --teacher")
    model.use_compilation_cache(RUNS / "cache" / "xla")
    run = new_run(given.seed, OWN_RUNS)
    with Display(f"Penstock: distillation on real rollouts, seed {given.seed}") as display:
        try:
            history = asyncio.run(distill(given.seed, given.steps, given.teacher, run, display))
        except (PenstockError, ExceptionGroup) as error:
            sys.exit(f"training stopped: {reasons(error)}")
        except KeyboardInterrupt:
            sys.exit("interrupted: the services are stopped")
    rollouts = sum(step["rollouts"] for step in history)
    print(
        f"\n{rollouts} rollouts, {history[-1]['elapsed']:.0f} s: success {history[0]['success']:.2f} ->"
        f" {history[-1]['success']:.2f} (before the last update); the model is in {from_here(run)}/model\n"
    )


if __name__ == "__main__":
    main()
