"""Evaluations: a task set, n attempts at each task, success rates with intervals.

with Book(Path("runs/mine"), config) as book:
    await Evaluation(ps, book, load_tasks("tasks").tasks, agent, options, attempts=5, concurrency=16, ...).run()
    print(summarise(book.attempts, book.config["tasks"], 5).pass_at[1])
"""

from penstock.evaluation.attempts import Attempt, Book, Ran, read_attempts, read_config
from penstock.evaluation.runner import Evaluation, Observer
from penstock.evaluation.statistics import Estimate, estimate, pass_at_k
from penstock.evaluation.summary import Summary, TaskScore, summarise

__all__ = [
    "Attempt",
    "Book",
    "Estimate",
    "Evaluation",
    "Observer",
    "Ran",
    "Summary",
    "TaskScore",
    "estimate",
    "pass_at_k",
    "read_attempts",
    "read_config",
    "summarise",
]
