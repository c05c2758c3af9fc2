"""`penstock metrics`: what a trainer logged of a run, listed or deleted."""

from collections.abc import Sequence
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
import typer
from rich.text import Text

from penstock.cli.connections.options import AllNamespaces, AsJson, StateDir
from penstock.cli.connections.service_selection import services
from penstock.cli.terminal.console import FAILED, OK, clean, columns, counted, emit, err, out, run, usage_error
from penstock.client import Metric

_BARS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 24
"""Characters of a metric's course."""
_SHOWN: Final = 1000
"""Points of each metric that are fetched for the table."""


def metrics(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="A run.")],
    name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only the metric of this name; repeat.")
    ] = None,
    max_points: Annotated[
        int,
        typer.Option(min=0, max=10_000, help="With --json: thin longer metrics to so many points; 0 = all points."),
    ] = 0,
    delete: Annotated[bool, typer.Option("--delete", help="Delete them instead.")] = False,
    from_step: Annotated[int, typer.Option(min=0, help="With --delete: only points of this step and later ones.")] = 0,
    all_namespaces: AllNamespaces = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Show the metrics that a trainer logged of a run, such as the loss.

    Exit code 1: it has none. A trainer that resumes from a checkpoint deletes what it logged after it:
    --delete --from-step STEP.
    """
    if from_step and not delete:
        usage_error("--from-step goes with --delete")
    if delete and all_namespaces:
        usage_error("--delete is for the runs of one namespace: leave --all-namespaces out")
    names = name or []

    async def work() -> int:
        async with services(state_dir=state_dir) as ps:
            if delete:
                count = await ps.runs.delete_metrics(run_id, names=names, from_step=from_step)
                if as_json:
                    emit({"run_id": run_id, "deleted": count})
                else:
                    out.print(f"{counted(count, 'point')} deleted")
                return OK if count else FAILED
            most = max_points if as_json else _SHOWN
            found = await ps.runs.metrics(run_id, names=names, max_points=most, all_namespaces=all_namespaces)
        if as_json:
            for one in found:
                emit(_shape(run_id, one))
        elif found:
            _print(found, with_namespace=all_namespaces)
        if not found:
            err.print(f"no metric of {clean(run_id)}", markup=False, soft_wrap=True)
        return OK if found else FAILED

    run(work())


def _shape(run_id: str, metric: Metric) -> dict[str, object]:
    return {
        "run_id": run_id,
        "namespace": metric.namespace,
        "name": metric.name,
        "steps": metric.steps.tolist(),
        "values": metric.values.tolist(),
        "times": [f"{time}Z" for time in np.datetime_as_string(metric.times)],
    }


def _print(found: Sequence[Metric], *, with_namespace: bool) -> None:
    table = columns("metric", ("step", "right"), ("last", "right"), ("least", "right"), ("greatest", "right"), "course")
    if with_namespace:
        table.add_column("namespace")
    for one in found:
        shown = (f"{value:.6g}" for value in (one.values[-1], one.values.min(), one.values.max()))
        cells = (one.name, f"{one.steps[-1]}", *shown, course(one.values))
        table.add_row(*(Text(clean(cell)) for cell in (*cells, *((one.namespace,) if with_namespace else ()))))
    out.print(table)


def course(values: npt.NDArray[np.float64], width: int = _WIDTH) -> str:
    """Returns the values as bars from the least to the greatest, oldest first: at most `width`, each a mean of some."""
    scaled = values / (np.abs(values).max() or 1.0)  # so that no sum or span leaves the range of numbers
    parts = [part.mean() for part in np.array_split(scaled, min(width, len(scaled)))]
    low, high = min(parts), max(parts)
    span = (high - low) or 1.0
    return "".join(_BARS[int((part - low) / span * (len(_BARS) - 1) + 0.5)] for part in parts)
