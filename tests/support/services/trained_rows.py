"""A driver with runs of a trainer that has learned: ended rollouts in groups, by step and policy version."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.services.many_rows import Driver, Engine, serving

from penstock.driver.v1 import rollout_pb2
from penstock.inference.v1 import inference_service_pb2
from penstock_chassis.journal import Statement
from penstock_driver.domain.records import Record
from penstock_driver.domain.rollout import Cause, Failure, Outcome, Phase, Reward
from penstock_driver.store.run_metrics import At, Logged
from penstock_driver.wire.to_proto import outcome_to_proto

TASKS = ("fix-parser", "add-flag", "sort-imports", "<img src=x onerror=alert(1)>", "never-solved", "rename-field")
GROUP = 8
_FAILED = 0.04
_FAILURES = ((Cause.BUDGET, "BUDGET_EXHAUSTED"), (Cause.TIMEOUT, "AGENT_TIMED_OUT"), (Cause.AGENT, "AGENT_CRASHED"))


@asynccontextmanager
async def trained(
    place: Path, runs: Mapping[str, float], steps: int, start: float = 1_700_000_000.0, tasks: Sequence[str] = TASKS
) -> AsyncIterator[tuple[Driver, str]]:
    """A driver with some runs of `steps` steps, and its dashboard's address.

    Each step has a group of each task; all is drawn from a fixed seed.

    Args:
        runs: how fast each learns, by run id: how much the share that is solved grows over all steps.
        steps: one minute each.
        start: when the first begins, in seconds since the epoch.
        tasks: what they are called; "never-solved" is not.
    """
    drawn = random.Random(7)
    records, updates = list[Record](), list[Statement]()
    for run_id, gain in runs.items():
        for step in range(steps):
            for task_id in tasks:
                group_id = f"g.d0.{drawn.getrandbits(128):032x}"
                for index in range(GROUP):
                    record = _record(run_id, group_id, step, task_id, index, start + 60 * step)
                    seconds = drawn.uniform(5, 40)
                    outcome = _outcome(drawn, task_id, 0.2 + gain * step / steps)
                    records.append(record)
                    updates.append(
                        _ended(record, seconds, outcome, step, calls=drawn.randint(2, 9 - 4 * step // steps))
                    )
    gaps = [
        inference_service_pb2.LogprobGap(policy_version=version, tokens=5000, mean_abs=4e-7 * (1 + version % 3))
        for version in range(steps)
    ]
    engine = Engine(gaps)  # type: ignore[abstract]
    async with serving(place, records, updates, engine) as opened:
        for run_id, gain in runs.items():
            await opened[0].metrics.put("default", run_id, _logged(drawn, gain, steps, start))
        yield opened


def _logged(drawn: random.Random, gain: float, steps: int, start: float) -> dict[At, Logged]:
    """What the trainer of a run logged by step: one metric is level, and one has a spike."""
    points = dict[At, Logged]()
    for step in range(steps):
        values = {
            "entropy": 0.4 + math.exp(-3 * gain * step / steps) + drawn.gauss(0, 0.03),
            "learning_rate": 1e-6,
            "loss": 0.1 * (1 - gain) + drawn.gauss(0, 0.05),
            "optimizer/grad_norm": 25.0 if step == steps // 2 else abs(drawn.gauss(1.5, 0.4)),
        }
        at = round((start + 60 * step) * 1e6)
        points |= {At(name, step): Logged(value, at) for name, value in values.items()}
    return points


def _record(run_id: str, group_id: str, step: int, task_id: str, index: int, start: float) -> Record:
    return Record(
        rollout_id=f"{group_id}-{index}",
        group_id=group_id,
        index=index,
        run_id=run_id,
        task_id=task_id,
        agent="codex" if index % 2 else "mini-swe-agent",
        agent_sha256="",
        labels={"step": str(step)},
        spec=rollout_pb2.RolloutSpec(),
        create_time=start,
        phase=Phase.ENDED,
    )


def _outcome(drawn: random.Random, task_id: str, share: float) -> Outcome:
    chance = drawn.random()
    if chance < _FAILED:
        cause, reason = _FAILURES[int(chance / _FAILED * len(_FAILURES))]
        return Outcome(failure=Failure(cause, reason, "no call is left", False, Phase.RUNNING))
    solved = task_id != "never-solved" and drawn.random() < share
    return Outcome(reward=Reward(float(solved), 0.0, 1.0, {}))


def _ended(record: Record, seconds: float, outcome: Outcome, version: int, calls: int) -> Statement:
    logprob = -0.3 - 0.05 * record.index - 0.7 * math.exp(-version / 10)
    return (
        "UPDATE rollouts SET end_time = ?, phase = ?, outcome = ?, calls = ?, prompt_tokens = ?, completion_tokens = ?,"
        " logprob_sum = ?, logprob_count = ?, oldest_version = ?, newest_version = ? WHERE rollout_id = ?",
        (
            *(record.create_time + seconds, Phase.ENDED, outcome_to_proto(outcome).SerializeToString()),
            *(calls, 900 * calls, 120 * calls, 120 * calls * logprob, 120 * calls),
            *(version, version + (record.index == 0), record.rollout_id),
        ),
    )
