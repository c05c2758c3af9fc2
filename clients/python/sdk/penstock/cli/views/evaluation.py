"""An evaluation on a terminal, while it runs and afterwards."""

from collections.abc import Sequence
from typing import Final

import orjson
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from penstock.cli.terminal.console import clean, columns, counted, emit, err
from penstock.client.types.results import PhaseChanged, RolloutEvent
from penstock.evaluation import Attempt, Book, Estimate, Summary, summarise
from penstock.evaluation.compare import Comparison

_SHOWN_TASKS: Final = 40
_ONE_TASK: Final = "one task: the intervals are over its attempts, and say nothing about other tasks"


def table(summary: Summary) -> RenderableType:
    """Returns the tasks, the rates over all of them, and the excluded attempts."""
    return Group(_tasks(summary, {}), Text(), *_totals(summary))


def _tasks(summary: Summary, running: dict[str, str], most: int | None = None) -> Table:
    wanted = sorted({1, summary.wanted})
    shown = columns(
        "task", ("graded", "right"), ("passed", "right"), *((f"pass@{k}", "right") for k in wanted),
        ("reward", "right"), ("seconds", "right"), "not graded", *(["now"] if running else []),
    )  # fmt: skip
    tasks = list(summary.tasks)
    if most is not None and len(tasks) > most:
        # Running tasks first: users look for them.
        tasks.sort(key=lambda task: (task.task_id not in running, task.missing == 0, task.task_id))
        tasks = tasks[:most]
    for task in tasks:
        full = task.attempts and task.passed == task.attempts
        style = "green" if full else "yellow" if task.passed else "red" if task.attempts else "dim"
        shown.add_row(
            Text(task.task_id, style="bold"),
            f"{task.attempts}/{summary.wanted}",
            Text(str(task.passed), style=style),
            *(f"{task.pass_at[k]:.2f}" if k in task.pass_at else "" for k in wanted),
            "" if task.reward is None else f"{task.reward:.3f}",
            "" if task.seconds is None else f"{task.seconds:.1f}",
            str(task.excluded or ""),
            *([running.get(task.task_id, "")] if running else []),
        )
    if len(tasks) < len(summary.tasks):
        shown.add_row(Text(f"... {len(summary.tasks) - len(tasks)} more", style="dim"))
    return shown


def _totals(summary: Summary) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for k, found in summary.pass_at.items():
        lines.append(Text.assemble((f"pass@{k} ", "bold"), rate(found)))
    if summary.reward is not None:
        lines.append(Text.assemble(("reward ", "bold"), rate(summary.reward)))
        if summary.reward.tasks == 1:
            lines.append(Text(_ONE_TASK, style="dim"))
    for name, count in summary.excluded.items():
        lines.append(Text(clean(f"not graded, not counted: {counted(count, 'attempt')}, {name}"), style="yellow"))
    for name, count in summary.ended.items():
        lines.append(Text(clean(f"graded although cut short: {counted(count, 'attempt')}, {name}"), style="dim"))
    if summary.repeated:
        lines.append(Text(f"{counted(summary.repeated, 'rollout')} repeated", style="dim"))
    return lines


def rate(found: Estimate) -> str:
    """Formats a rate, or a mean reward, with its interval."""
    of = f"{counted(found.tasks, 'task')}, {counted(found.attempts, 'attempt')}"
    return f"{found.value:.3f}  95 % {found.low:.3f} to {found.high:.3f}  ({of})"


class Board:
    """The live table, and for programs and pipes a line for each attempt that ends, with the agent if one is given."""

    def __init__(
        self,
        book: Book,
        tasks: Sequence[str],
        wanted: int,
        threshold: float,
        *,
        as_json: bool,
        agent: str | None = None,
    ) -> None:
        self._book = book
        self._tasks = tasks
        self._wanted = wanted
        self._threshold = threshold
        self._as_json = as_json
        self._agent = agent
        self._lines = not as_json and not err.is_terminal
        self._phases: dict[tuple[str, int], str] = {}

    def event(self, task_id: str, index: int, event: RolloutEvent) -> None:
        """Shows the phases of running attempts."""
        if isinstance(event.payload, PhaseChanged):
            self._phases[task_id, index] = event.payload.phase.value.replace("_", " ")

    def ended(self, attempt: Attempt) -> None:
        """Prints a line where there is no live table."""
        self._phases.pop((attempt.task_id, attempt.index), None)
        if self._as_json:
            of = {} if self._agent is None else {"agent": self._agent}
            emit({**of, "attempt": orjson.Fragment(attempt.line().rstrip())})
        elif self._lines:
            score = "not graded" if attempt.reward is None else f"reward {attempt.reward:g}"
            why = f", {attempt.cause}: {attempt.reason}" if attempt.reason is not None else ""
            name = attempt.task_id if self._agent is None else f"{self._agent} {attempt.task_id}"
            err.print(Text(clean(f"{name} {attempt.index}: {score}{why}, {attempt.seconds:.1f} s")))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        summary = summarise(self._book.attempts, self._tasks, self._wanted, self._threshold)
        running: dict[str, str] = {}
        for (task_id, index), phase in sorted(self._phases.items()):
            running[task_id] = ", ".join(filter(None, (running.get(task_id, ""), f"{index} {phase}")))
        yield _tasks(summary, running, most=max(5, min(_SHOWN_TASKS, options.size.height - 12)))
        done = len(summary.tasks) * self._wanted - sum(task.missing for task in summary.tasks)
        yield Text(f"{done} of {len(summary.tasks) * self._wanted} attempts, {len(self._phases)} run", style="dim")
        yield from _totals(summary)


def differences(found: Comparison, before: str, after: str) -> RenderableType:
    """Shows two evaluations side by side."""
    shown = columns("task", ("before", "right"), ("after", "right"), ("difference", "right"))
    for task in found.tasks:
        if task.difference:
            style = "green" if task.difference > 0 else "red"
            shown.add_row(
                task.task_id, f"{task.before:.2f}", f"{task.after:.2f}", Text(f"{task.difference:+.2f}", style=style)
            )
    same = sum(not task.difference for task in found.tasks)
    lines: list[RenderableType] = [Text(clean(f"before: {before}\nafter:  {after}"), style="dim"), shown]
    if same:
        lines.append(Text(f"{counted(same, 'task')} unchanged", style="dim"))
    for name, tasks in (("before", found.only_before), ("after", found.only_after)):
        if tasks:
            lines.append(Text(clean(f"only {name}: {', '.join(tasks)}"), style="dim"))
    if found.changed:
        lines.append(Text(clean(f"changed, not compared: {', '.join(found.changed)}"), style="yellow"))
    if found.difference is not None:
        over = f"over {counted(len(found.tasks), 'task')}"
        if found.half_width is None:
            line = f"{found.difference:+.3f} {over}; no interval: the tasks show no variance"
        else:
            # Rates differ by 1 at most; the normal interval of few tasks exceeds that.
            low, high = max(-1.0, found.difference - found.half_width), min(1.0, found.difference + found.half_width)
            sure = "clear of zero" if low > 0 or high < 0 else "zero is within it"
            line = f"{found.difference:+.3f}  95 % {low:+.3f} to {high:+.3f} {over}: {sure}"
        lines.append(Text.assemble(("pass@1 ", "bold"), line))
        if found.p is None:
            lines.append(Text("no exact test: the numbers of attempts have too little in common", style="dim"))
        else:
            lines.append(Text.assemble(("p ", "bold"), f"{found.p:.3g}  exact permutation test {over}"))
    return Group(*lines)
