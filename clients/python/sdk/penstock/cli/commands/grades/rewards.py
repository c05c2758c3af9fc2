"""`penstock rewards diff`: compares two grades of a run."""

from typing import Annotated

import typer
from rich.markup import escape
from rich.text import Text

from penstock.analysis.reward_diff import FIRST, RewardDiff, grade_names, reward_diff
from penstock.cli.commands.grades.chosen import chosen
from penstock.cli.connections.options import AsJson, StateDir
from penstock.cli.connections.service_selection import services
from penstock.cli.terminal.console import FAILED, OK, clean, columns, emit, out, run, usage_error
from penstock.values.similar_names import did_you_mean

app = typer.Typer(help="Compare rewards.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Compare rewards."""


@app.command()
def diff(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a group.")],
    grade: Annotated[str, typer.Option(help="Name of a further grade; default: the newest.")] = "",
    against: Annotated[str, typer.Option(help="The grade to compare it with.")] = FIRST,
    limit: Annotated[int, typer.Option(min=0, help="Most rows of the table of changed rewards.")] = 50,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Show which rewards of a run differ between two grades.

    Exit code 0: none, of at least one rollout with both; 1: some, or there is nothing to compare.
    """

    async def work() -> int:
        async with services(state_dir=state_dir) as ps:
            which = await chosen(ps, run_id)
            if which is None:
                return FAILED
            rollouts = [one async for one in ps.rollouts.list(ended=True, **which.where)]
        names = grade_names(rollouts)
        if not names:
            usage_error(f"{run_id}: no rollout has a further grade; make them with `penstock regrade`")
        for name in (grade, against):
            if name and name not in (FIRST, *names):
                meant = did_you_mean(name, (FIRST, *names)) or ";"
                usage_error(f"there is no grade {name}{meant} there are {FIRST}, {', '.join(names)}")
        found = reward_diff(rollouts, against, grade or names[-1])
        if as_json:
            emit(found.as_dict())
        else:
            _print(found, limit)
        return OK if found.pairs and not found.changed else FAILED

    run(work())


def _print(found: RewardDiff, limit: int) -> None:
    table = columns("rollout", "task", (found.before, "right"), (found.after, "right"), "reason")
    for pair in found.changed[:limit]:
        reason = pair.reason_after or pair.reason_before
        cells = (pair.rollout_id, pair.task_id, _number(pair.before), _number(pair.after), reason)
        table.add_row(*(Text(clean(cell)) for cell in cells))
    if found.changed and limit:
        out.print(table)
    if len(found.changed) > limit:
        out.print(f"{len(found.changed) - limit} more changed; --limit shows more, --json all", soft_wrap=True)
    counts = ", ".join(f"{count} {name}" for name, count in found.counts().items() if count or name == "compared")
    before, after = found.means()
    means = "" if before is None or after is None else f"; mean {before:.4f} -> {after:.4f}"
    out.print(escape(clean(f"{found.before} -> {found.after}: {counts}{means}")), soft_wrap=True)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
