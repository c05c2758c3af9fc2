"""The report's plots as SVG, drawn by matplotlib (`pip install 'penstock[report]'`).

Invariants: all text becomes outlines, so no text can be markup in the page, and no font is needed; the same attempts
give the same bytes.
"""

import io
from collections.abc import Sequence
from typing import Any, Final

from penstock.analysis.plot_style import EXCLUDED, FAILED, MISSING, PASSED, printed
from penstock.client.errors import ConfigurationError
from penstock.evaluation.attempts import Attempt
from penstock.evaluation.summary import Summary, settled

_MOST_TASKS: Final = 60
_STYLE: Final[dict[str, Any]] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "penstock",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def check_plots() -> None:
    """Checks that plots can be drawn here.

    Raises:
        ConfigurationError: `MATPLOTLIB_MISSING`.
    """
    try:
        import matplotlib.figure  # noqa: F401 - 40 MB that few need
    except ModuleNotFoundError:
        raise ConfigurationError(
            "A report's plots need matplotlib: pip install 'penstock[report]'", reason="MATPLOTLIB_MISSING"
        ) from None


def plots(attempts: Sequence[Attempt], summary: Summary) -> list[tuple[str, str]]:
    """Returns captions and drawings of the plots that have data, over the attempts at the summary's tasks."""
    check_plots()
    with printed(**_STYLE):
        names = {task.task_id for task in summary.tasks}
        chosen = {key: item for key, item in settled(attempts).items() if key[0] in names and key[1] < summary.wanted}
        found = [("Every attempt: a row for each task", _grid(chosen, summary))]
        if len(summary.pass_at) > 1:
            found.append(("Share of tasks done in k attempts, and its 95 % interval", _curve(summary)))
        graded = [item for item in chosen.values() if item.graded]
        if graded:
            found.append(("Seconds that the agent ran", _histogram(graded, summary, "agent_seconds", "seconds")))
        if any(item.completion_tokens for item in graded):
            found.append(
                (
                    "Tokens that the model sampled for an attempt",
                    _histogram(graded, summary, "completion_tokens", "tokens"),
                )
            )
        if any(item.reward not in item.range for item in graded):
            found.append(("Rewards", _histogram(graded, summary, "reward", "reward")))
    return found


def _grid(chosen: dict[tuple[str, int], Attempt], summary: Summary) -> str:
    tasks = summary.tasks[:_MOST_TASKS]
    figure, axes = _figure(6.4, 0.9 + 0.24 * len(tasks))
    for row, task in enumerate(tasks):
        for index in range(summary.wanted):
            attempt = chosen.get((task.task_id, index))
            colour = (
                MISSING
                if attempt is None
                else EXCLUDED
                if not attempt.graded
                else PASSED
                if attempt.passed(summary.threshold)
                else FAILED
            )
            axes.barh(row, 0.92, left=index + 0.04, height=0.8, color=colour)
    axes.set_yticks(range(len(tasks)), [short(task.task_id) for task in tasks])
    axes.set_ylim(len(tasks) - 0.4, -0.6)
    axes.set_xlim(0, summary.wanted)
    marked = range(0, summary.wanted, max(1, summary.wanted // 10))
    axes.set_xticks([index + 0.5 for index in marked], [str(index) for index in marked])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    handles = [
        _patch(PASSED, "passed"),
        _patch(FAILED, "did not pass"),
        _patch(EXCLUDED, "not graded, not counted"),
    ]
    _legend_above(axes, handles=handles)
    more = len(summary.tasks) - len(tasks)
    axes.set_xlabel(f"attempt (and {more} more tasks)" if more else "attempt")
    return _svg(figure)


def _curve(summary: Summary) -> str:
    figure, axes = _figure(4.6, 2.8)
    ks = list(summary.pass_at)
    values = [summary.pass_at[k] for k in ks]
    axes.fill_between(ks, [item.low for item in values], [item.high for item in values], color=PASSED, alpha=0.16, lw=0)
    axes.plot(ks, [item.value for item in values], color=PASSED, marker="o", markersize=3.5)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xticks(ks if len(ks) <= 12 else ks[:: len(ks) // 10])
    axes.set_xlabel("k")
    axes.set_ylabel("pass@k")
    axes.grid(axis="y", alpha=0.25)
    return _svg(figure)


def _histogram(graded: Sequence[Attempt], summary: Summary, name: str, unit: str) -> str:
    figure, axes = _figure(4.6, 2.8)
    groups = [
        [float(getattr(item, name)) for item in graded if item.passed(summary.threshold) is passed]
        for passed in (True, False)
    ]
    least, most = min(map(min, filter(None, groups))), max(map(max, filter(None, groups)))
    axes.hist(groups, bins=_edges(least, most), stacked=True, color=[PASSED, FAILED], label=["passed", "did not pass"])
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(unit)
    axes.set_ylabel("attempts")
    _legend_above(axes)
    return _svg(figure)


def _edges(least: float, most: float) -> list[float]:
    """Returns the edges of 20 equal bins that contain both values: rounding leaves neither outside."""
    spread = (most - least) or 1.0
    return [*(least + spread * step / 20 for step in range(20)), max(most, least + spread)]


def _legend_above(axes: Any, **given: Any) -> None:
    """Places the legend above the plot, where it covers nothing."""
    axes.legend(**given, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=8, borderaxespad=0.2)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    # Not pyplot: it keeps figures, and looks for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _svg(figure: Any) -> str:
    target = io.BytesIO()
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    text = target.getvalue().decode()
    return text[text.index("<svg") :]


def short(name: str) -> str:
    """Returns a name that fits beside a plot: beginning and end of a long one, without what has no picture."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    return shown if len(shown) <= 40 else f"{shown[:24]}…{shown[-15:]}"
