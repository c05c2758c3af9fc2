"""The picture of a matrix: a cell for each agent and task, the darker the more of its attempts passed.

Drawn by matplotlib (`pip install 'penstock[report]'`); the same matrix gives the same bytes.
"""

import io
from pathlib import Path
from typing import Any, Final

from penstock.analysis.plot_style import EXCLUDED, INK, MISSING, PASSED, printed
from penstock.client.transport.atomic_files import write_whole
from penstock.evaluation.matrix import Cell, Matrix
from penstock.evaluation.plots import check_plots, short

FORMATS: Final = ("png", "svg", "pdf")
"""What a picture may be, by the end of its file's name."""
_MOST_TASKS: Final = 60
_DARK: Final = 0.65
"""Rates above this have white text."""
_DATED: Final = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}


def write_heat_map(file: Path, matrix: Matrix) -> None:
    """Draws a matrix.

    Raises:
        ConfigurationError: `MATPLOTLIB_MISSING`; `FILE_NOT_WRITTEN`.
    """
    check_plots()
    form = file.suffix[1:]
    target = io.BytesIO()
    with printed(**{"svg.hashsalt": "penstock"}):
        _drawn(matrix).savefig(target, format=form, metadata=_DATED[form])
    write_whole(file, target.getvalue())


def _drawn(matrix: Matrix) -> Any:
    # Not pyplot: it keeps figures, and looks for a display.
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    tasks, agents = matrix.tasks[:_MOST_TASKS], matrix.agents
    figure = Figure(figsize=(2.4 + 1.1 * len(agents), 1.2 + 0.34 * (len(tasks) + 1)), layout="constrained")
    axes = figure.add_subplot()
    colours = LinearSegmentedColormap.from_list("passed", [MISSING, PASSED])
    for column, agent in enumerate(agents):
        for row, task in enumerate(tasks):
            cell = matrix.cells[agent, task]
            colour = EXCLUDED if cell.rate is None else colours(cell.rate)
            axes.barh(row, 0.96, left=column - 0.48, height=0.92, color=colour)
            _write(axes, column, row, cell.rate, _text(cell))
        total = matrix.totals[agent]
        if total is not None:
            text = f"{total.value:.2f}\n{total.low:.2f} to {total.high:.2f}"
            axes.barh(len(tasks) + 0.25, 0.96, left=column - 0.48, height=0.92, color=colours(total.value))
            _write(axes, column, len(tasks) + 0.25, total.value, text)
    axes.set_xticks(range(len(agents)), [short(agent) for agent in agents])
    axes.set_yticks([*range(len(tasks)), len(tasks) + 0.25], [*map(short, tasks), "pass@1 of all tasks"])
    axes.set_xlim(-0.5, len(agents) - 0.5)
    axes.set_ylim(len(tasks) + 0.8, -0.5)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    more = len(matrix.tasks) - len(tasks)
    axes.set_xlabel("share of attempts that passed, with its 95 % interval" + (f" ({more} more tasks)" if more else ""))
    return figure


def _text(cell: Cell) -> str:
    return "not graded" if cell.rate is None else f"{cell.rate:.2f}\n{cell.low:.2f} to {cell.high:.2f}"


def _write(axes: Any, x: float, y: float, rate: float | None, text: str) -> None:
    colour = "white" if rate is not None and rate > _DARK else INK
    axes.text(x, y, text, ha="center", va="center", fontsize=6.5, linespacing=1.1, color=colour)
