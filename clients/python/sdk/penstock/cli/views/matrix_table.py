"""A matrix of agents and tasks on a terminal."""

from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.cli.terminal.console import clean, columns, counted
from penstock.evaluation.matrix import Cell, Matrix

_LOW: Final = 0.0
_FULL: Final = 1.0


def table(matrix: Matrix) -> RenderableType:
    """Returns a row for each task, a column for each agent, and pass@1 over all tasks."""
    shown = columns("task", *(clean(agent) for agent in matrix.agents))
    for task in matrix.tasks:
        cells = (_shown(matrix.cells[agent, task]) for agent in matrix.agents)
        shown.add_row(Text(clean(task), style="bold"), *cells)
    totals = [matrix.totals[agent] for agent in matrix.agents]
    shown.add_row()
    shown.add_row(
        Text("pass@1", style="bold"),
        *("" if total is None else _rate(total.value, total.low, total.high) for total in totals),
    )
    notes = [f"95 % intervals: of a task over its attempts, of pass@1 over {counted(len(matrix.tasks), 'task')}"]
    excluded = sum(cell.excluded for cell in matrix.cells.values())
    if excluded:
        notes.append(f"not graded, not counted: {counted(excluded, 'attempt')}")
    return Group(shown, *(Text(note, style="dim") for note in notes))


def _shown(cell: Cell) -> Text:
    if cell.rate is None or cell.low is None or cell.high is None:
        return Text("not graded" if cell.excluded else "", style="dim")
    style = "green" if cell.rate == _FULL else "red" if cell.rate == _LOW else "yellow"
    text = _rate(cell.rate, cell.low, cell.high)
    text.stylize(style, 0, 4)
    return text.append(f" {cell.passed}/{cell.attempts}", style="dim")


def _rate(value: float, low: float, high: float) -> Text:
    return Text.assemble(f"{value:.2f} ", (f"{low:.2f} to {high:.2f}", "dim"))
