"""`penstock bias`: what was trained of a run beside what was started."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from penstock.cli.commands.grades.chosen import chosen
from penstock.cli.connections.options import AsJson, StateDir
from penstock.cli.connections.service_selection import services
from penstock.cli.terminal.console import FAILED, OK, clean, columns, counted, emit, out, run, usage_error
from penstock.client import Bias
from penstock.client.pacing.run_bias import bias_of


def bias(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a group.")],
    trained: Annotated[
        Path | None,
        typer.Option(help="File of the trained rollouts' ids, one a line; default: all that can be learned from."),
    ] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Show how far the trained rollouts of a run are from those that were started.

    Tasks, lengths, durations and rewards, each with its distance: 0 = the same shares, 1 = nothing in common.
    """
    ids = None if trained is None else _ids(trained)

    async def work() -> int:
        async with services(state_dir=state_dir) as ps:
            which = await chosen(ps, run_id)
            if which is None:
                return FAILED
            rollouts = [one async for one in ps.rollouts.list(**which.where)]
            if unknown := (ids or set()) - {one.rollout_id for one in rollouts}:
                usage_error(f"--trained: {counted(len(unknown), 'id')} not of {run_id}, such as {min(unknown)}")
            found = await bias_of(rollouts, ps.rollouts.export(**which.where), ids)
        if as_json:
            emit(found.as_dict())
        else:
            _print(found)
        return OK

    run(work())


def _ids(file: Path) -> set[str]:
    try:
        return {line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()}
    except (OSError, UnicodeDecodeError) as error:
        usage_error(f"--trained: {file}: {error}")


def _print(found: Bias) -> None:
    table = columns("of", ("distance", "right"), ("by chance", "right"), "differs most", "started", "trained")
    for one in found.distributions:
        most = max(one.classes, key=lambda share: abs(share.started - share.trained))
        cells = (f"{one.distance:.4f}", f"{one.by_chance:.4f}", most.name, f"{most.started:.1%}", f"{most.trained:.1%}")
        table.add_row(one.name, *(escape(clean(cell)) for cell in cells))
    if found.distributions:
        out.print(table)
    counts = f"{found.trained} trained of {found.started} started"
    running = f"; {found.running} still run" if found.running else ""
    out.print(f"distance {found.distance:.4f}: {counts}{running}", soft_wrap=True)
