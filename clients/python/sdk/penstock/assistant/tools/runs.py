"""Runs, groups and tasks: statistics over the rollouts that the drivers know."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from operator import attrgetter
from statistics import fmean, pstdev
from typing import Annotated, Any, Final

from pydantic import Field

from penstock.assistant.answers import Answer
from penstock.assistant.context import Context
from penstock.assistant.paging import page
from penstock.assistant.tools.base import Arguments, Cursor, Limit, OfRun, Tool
from penstock.client.types.results import POLICY_CAUSES, RolloutSummary
from penstock.evaluation.statistics import bounded_mean

_CAUSES: Final = 10
"""Most reasons of failures of one row."""


class _Runs(Arguments):
    limit: Limit = 20
    cursor: Cursor = ""


class _Groups(OfRun):
    limit: Limit = 20
    cursor: Cursor = ""


class _By(StrEnum):
    STEP = "step"
    VERSION = "version"


class _Progress(OfRun):
    by: Annotated[
        _By,
        Field(description="A row for each training step (label `step`) or policy version that rollouts began with."),
    ] = _By.VERSION
    limit: Limit = 50
    cursor: Cursor = ""


async def _list_runs(context: Context, given: _Runs) -> Answer:
    snapshot = await context.snapshot()
    found = _by(snapshot.rollouts, lambda item: item.run_id or "")

    def row(item: tuple[str, Sequence[RolloutSummary]]) -> Mapping[str, Any]:
        name, members = item
        return {
            "run_id": name or None,
            "first_created": _first(members),
            "last_ended": max((one.end_time for one in members if one.end_time is not None), default=None),
            "groups": len({one.group_id for one in members if one.group_id is not None}),
            "tasks": len({one.task_id for one in members}),
            "agents": sorted({one.agent for one in members})[:10],
            **statistics(members),
        }

    rows = page(found.items(), lambda item: (-_seconds(_first(item[1])), item[0]), row, given.cursor, given.limit)
    return Answer({**rows.facts("runs"), **snapshot.remarks()})


async def _list_groups(context: Context, given: _Groups) -> Answer:
    snapshot = await context.snapshot(**given.conditions())
    found = _by((item for item in snapshot.rollouts if item.group_id is not None), lambda item: item.group_id or "")

    def row(item: tuple[str, Sequence[RolloutSummary]]) -> Mapping[str, Any]:
        name, members = item
        rewards = [one.reward.value for one in members if one.reward is not None]
        return {
            "group_id": name,
            "run_id": members[0].run_id,
            "task_id": members[0].task_id,
            "agent": members[0].agent,
            "created": _first(members),
            "rewards": [round(value, 4) for value in rewards[:32]],
            "standard_deviation": round(pstdev(rewards), 4) if rewards else None,
            # Equal rewards: every advantage of the group is 0, and it teaches nothing.
            "rewards_differ": len(set(rewards)) > 1 if rewards else None,
            **statistics(members),
        }

    rows = page(found.items(), lambda item: (-_seconds(_first(item[1])), item[0]), row, given.cursor, given.limit)
    return Answer({**rows.facts("groups"), **snapshot.remarks()})


async def _list_tasks(context: Context, given: _Groups) -> Answer:
    snapshot = await context.snapshot(**given.conditions())
    found = _by(snapshot.rollouts, lambda item: item.task_id)

    def row(item: tuple[str, Sequence[RolloutSummary]]) -> Mapping[str, Any]:
        name, members = item
        seconds = [
            (one.end_time - one.create_time).total_seconds()
            for one in members
            if one.end_time is not None and one.create_time is not None
        ]
        return {
            "task_id": name,
            "mean_seconds": round(fmean(seconds), 1) if seconds else None,
            "always": _always(members),
            **statistics(members),
        }

    rows = page(found.items(), lambda item: (0.0, item[0]), row, given.cursor, given.limit)
    return Answer({**rows.facts("tasks"), **snapshot.remarks()})


async def _list_progress(context: Context, given: _Progress) -> Answer:
    snapshot = await context.snapshot(**given.conditions())
    number: Callable[[RolloutSummary], int | None] = attrgetter("step" if given.by is _By.STEP else "min_version")
    found = _by((item for item in snapshot.rollouts if number(item) is not None), lambda item: str(number(item)))

    def row(item: tuple[str, Sequence[RolloutSummary]]) -> Mapping[str, Any]:
        return {given.by.value: int(item[0]), **statistics(item[1])}

    rows = page(found.items(), lambda item: (float(item[0]), item[0]), row, given.cursor, given.limit)
    facts = {**rows.facts("points"), **snapshot.remarks()}
    if not found and snapshot.rollouts:
        other = "version" if given.by is _By.STEP else "step"
        facts["next"] = f"no rollout has a {given.by.value}: try by={other}, or `groups`"
    return Answer(facts)


def statistics(members: Sequence[RolloutSummary]) -> dict[str, Any]:
    """Returns counts of rollouts, their mean reward with its 95 % interval, and what their calls took.

    `solved` have the greatest reward; those without a reward were not graded and count in no mean.
    """
    graded = [(one.task_id, one.reward) for one in members if one.reward is not None]
    by_task: dict[str, list[float]] = {}
    for task_id, reward in graded:
        by_task.setdefault(task_id, []).append(reward.value)
    mean = None
    if graded:
        least, most = min(one.range_min for _, one in graded), max(one.range_max for _, one in graded)
        mean = bounded_mean(by_task, least, most)
    failures = Counter(one.failure.reason for one in members if one.failure is not None)
    versions = [version for one in members for version in (one.min_version, one.max_version) if version is not None]
    calls = sum(one.calls for one in members)
    return {
        "rollouts": len(members),
        "ended": sum(one.ended for one in members),
        "graded": len(graded),
        "solved": sum(reward.value >= reward.range_max for _, reward in graded),
        "mean_reward": None
        if mean is None
        else {"value": round(mean.value, 4), "low": round(mean.low, 4), "high": round(mean.high, 4)},
        "failed": sum(failures.values()),
        "failures": dict(failures.most_common(_CAUSES)),
        "failed_not_by_the_policy": sum(
            one.failure is not None and one.failure.cause not in POLICY_CAUSES for one in members
        ),
        "calls": calls,
        "prompt_tokens": sum(one.prompt_tokens for one in members),
        "sampled_tokens": sum(one.completion_tokens for one in members),
        "policy_versions": [min(versions), max(versions)] if versions else None,
    }


def _by(items: Iterable[RolloutSummary], key: Callable[[RolloutSummary], str]) -> dict[str, list[RolloutSummary]]:
    found: dict[str, list[RolloutSummary]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _always(members: Sequence[RolloutSummary]) -> str | None:
    """Whether every graded attempt got the least or the greatest reward: such a task teaches nothing."""
    rewards = [one.reward for one in members if one.reward is not None]
    if not rewards:
        return None
    if all(one.value >= one.range_max for one in rewards):
        return "solved"
    return "unsolved" if all(one.value <= one.range_min for one in rewards) else None


def _first(members: Sequence[RolloutSummary]) -> datetime | None:
    return min((one.create_time for one in members if one.create_time is not None), default=None)


def _seconds(time: datetime | None) -> float:
    return 0.0 if time is None else time.timestamp()


RUNS: Final = (
    Tool(
        "runs",
        "Training runs and evaluations, newest first: how many rollouts, mean reward with its 95 % interval, solved,"
        " failures by reason, tokens, policy versions. Begin here.",
        _Runs,
        _list_runs,
    ),
    Tool(
        "progress",
        "How a run develops: mean reward, solved, failures and tokens for each policy version or training step.",
        _Progress,
        _list_progress,
    ),
    Tool(
        "groups",
        "Groups of rollouts of one task, newest first: each reward, mean, standard deviation, and whether rewards"
        " differ (a group of equal rewards teaches nothing).",
        _Groups,
        _list_groups,
    ),
    Tool(
        "tasks",
        "Tasks by their rollouts: solve rate, mean reward, time, and tasks that are always or never solved.",
        _Groups,
        _list_tasks,
    ),
)
