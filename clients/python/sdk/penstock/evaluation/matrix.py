"""Several agents at the same tasks: the share of attempts that passed, by agent and task, with its interval."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penstock.evaluation.statistics import Estimate, wilson
from penstock.evaluation.summary import Summary, TaskScore


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An agent at a task: `rate` of the graded attempts passed; None with its interval = none was graded.

    The 95 % interval is Wilson's, over the attempts at this task.
    """

    agent: str
    task_id: str
    attempts: int
    passed: int
    excluded: int
    missing: int
    rate: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Agents by tasks. `cells` has every pair; `totals` is pass@1 over an agent's tasks, None = none was graded."""

    agents: tuple[str, ...]
    tasks: tuple[str, ...]
    threshold: float
    cells: Mapping[tuple[str, str], Cell]
    totals: Mapping[str, Estimate | None]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values, for programs."""
        return {
            "agents": self.agents,
            "tasks": self.tasks,
            "threshold": self.threshold,
            "cells": [asdict(self.cells[agent, task]) for agent in self.agents for task in self.tasks],
            "totals": {agent: None if found is None else asdict(found) for agent, found in self.totals.items()},
        }


def matrix(summaries: Mapping[str, Summary]) -> Matrix:
    """Returns the matrix of agents' summaries; the tasks are those of any of them."""
    cells = {
        (agent, score.task_id): _cell(agent, score) for agent, summary in summaries.items() for score in summary.tasks
    }
    tasks = tuple(sorted({task for _, task in cells}))
    for agent, summary in summaries.items():
        for task in tasks:
            cells.setdefault(
                (agent, task),
                Cell(
                    agent=agent, task_id=task, attempts=0, passed=0, excluded=0, missing=summary.wanted, rate=None,
                    low=None, high=None,
                ),
            )  # fmt: skip
    return Matrix(
        agents=tuple(summaries),
        tasks=tasks,
        threshold=max((summary.threshold for summary in summaries.values()), default=1.0),
        cells=cells,
        totals={agent: summary.pass_at.get(1) for agent, summary in summaries.items()},
    )


def _cell(agent: str, score: TaskScore) -> Cell:
    rate = score.passed / score.attempts if score.attempts else None
    low, high = (None, None) if rate is None else wilson(rate, score.attempts)
    return Cell(
        agent=agent, task_id=score.task_id, attempts=score.attempts, passed=score.passed, excluded=score.excluded,
        missing=score.missing, rate=rate, low=low, high=high,
    )  # fmt: skip
