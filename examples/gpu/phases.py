"""The services of a phase, the agents with their options, and an evaluation of several agents."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from examples.gpu.plan import Plan

from penstock.client import AgentChoice, Budgets, Limits, Penstock, RolloutOptions, Sampling, Task, connect
from penstock.client.transport.endpoints import write_connection
from penstock.client.types.results import RolloutEvent
from penstock.client.wire.specs import digest
from penstock.evaluation import Attempt, Book, Evaluation, Summary, summarise
from penstock.evaluation.attempts import ATTEMPTS_FILE, read_attempts
from penstock.local.stack import LocalStack
from penstock.tasks.sets import load_tasks

START_TIMEOUT_S = 1800.0
"""vLLM reads gigabytes and captures graphs before it is ready."""


@asynccontextmanager
async def services(
    plan: Plan, model: Path, engine: str, options: Mapping[str, str]
) -> AsyncIterator[tuple[Penstock, Path]]:
    """All four services on this machine; yields a client and the connection file for other processes."""
    plan.weights.mkdir(parents=True, exist_ok=True)
    inference: dict[str, Any] = {"max_context_tokens": plan.context_tokens, "model_name": "policy"}
    if engine == "vllm":
        inference["weights_dir"] = str(plan.weights)
    if plan.tiny:
        inference["kv_cache_bytes"] = 256 << 20
    stack = LocalStack(
        model_dir=model,
        engine=engine,
        engine_options=options,
        state_dir=plan.out / "state",
        settings={"inference": inference, "sandbox": plan.sandbox},
        start_timeout=START_TIMEOUT_S,
    )
    async with stack, connect(stack.endpoints) as ps:
        write_connection(plan.out / "connection.json", stack.endpoints, pid=os.getpid())
        yield ps, plan.out / "connection.json"


async def choices(ps: Penstock, plan: Plan) -> dict[str, AgentChoice]:
    """Every agent of the plan, without prompts for permissions, and with the model's lengths where it takes them.

    Raises NotFound: an agent is unknown.
    """
    found = {}
    for name in (*plan.agents, *plan.unseen):
        agent = await ps.agents.get(name)
        wanted = {
            "context_tokens": plan.context_tokens,
            "max_tokens": plan.answer_tokens,
            **plan.agent_options.get(name, {}),
        }
        known = {option.name for option in agent.options}
        options = {option: value for option, value in wanted.items() if option in known}
        found[name] = AgentChoice(name=name, options=options, skip_permissions=agent.can_skip_permissions)
    return found


def tasks(plan: Plan, part: str) -> list[Task]:
    """The tasks of `train` or `test`."""
    return list(load_tasks(plan.tasks / part).tasks)


def rollout_options(plan: Plan) -> RolloutOptions:
    """Of every rollout, in training and in evaluations: what is trained is what is evaluated."""
    return RolloutOptions(
        limits=Limits(agent=plan.agent_seconds),
        budgets=Budgets(max_calls=plan.max_calls),
        sampling=Sampling(temperature=1.0, top_p=1.0),
    )


async def evaluate(ps: Penstock, plan: Plan, folder: Path) -> dict[str, Summary]:
    """Runs every agent on the tasks of `test`; what is in the folder already is not run again.

    `penstock eval show`, `diff` and `report` take the folder of each agent.
    """
    given = tasks(plan, "test")
    names = [task.task_id for task in given]
    found = {}
    for name, choice in (await choices(ps, plan)).items():
        config = {
            "name": "test", "model": folder.name, "upstream": "", "mode": "transparent_proxy", "backend": "",
            "timeout": plan.agent_seconds, "max_calls": plan.max_calls, "temperature": 1.0, "seed": None,
            "attempts": plan.attempts, "tasks": {task.task_id: digest(task) for task in given},
            "agent": name, "options": dict(choice.options), "skip_permissions": choice.skip_permissions,
        }  # fmt: skip
        with Book(folder / name, config) as book:
            evaluation = Evaluation(
                ps, book, given, choice, {**rollout_options(plan), "mode": "transparent_proxy"},
                attempts=plan.attempts, concurrency=plan.concurrency, observer=_Lines(f"{folder.name}, {name}"),
            )  # fmt: skip
            await evaluation.run()
            found[name] = summarise(book.attempts, names, plan.attempts)
    return found


def evaluated(plan: Plan, folder: Path) -> dict[str, Summary] | None:
    """What `evaluate` returned for this folder; None = it is not whole."""
    names, found = [task.task_id for task in tasks(plan, "test")], {}
    for name in (*plan.agents, *plan.unseen):
        if not (folder / name / ATTEMPTS_FILE).exists():
            return None
        found[name] = summarise(read_attempts(folder / name), names, plan.attempts)
    return found if all(summary.complete for summary in found.values()) else None


class _Lines:
    """A line for each attempt that ended."""

    def __init__(self, title: str) -> None:
        self._title = title

    def event(self, task_id: str, index: int, event: RolloutEvent) -> None:
        """See `Observer`."""

    def ended(self, attempt: Attempt) -> None:
        """See `Observer`."""
        outcome = f"{attempt.cause}: {attempt.reason}" if attempt.reward is None else f"reward {attempt.reward:g}"
        print(f"{self._title}, {attempt.task_id} {attempt.index + 1}: {outcome}", flush=True)
