"""`penstock export`: trajectories to a file."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from penstock.cli.console import OK, out, run, usage_error
from penstock.cli.services import services
from penstock.cli.up import StateDir
from penstock.client.export import Format, Table, write


def export(
    file: Annotated[Path, typer.Argument(help="Where to write; .parquet writes Parquet, anything else JSON Lines.")],
    table: Annotated[Table, typer.Option(help="A row per model call, sample or host tool call.")] = Table.SEQUENCES,
    format_: Annotated[Format | None, typer.Option("--format", help="Default: by the file's name.")] = None,
    run_id: Annotated[str | None, typer.Option(help="Only of this run.")] = None,
    group_id: Annotated[str | None, typer.Option(help="Only of this group.")] = None,
    task_id: Annotated[str | None, typer.Option(help="Only of this task.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only of this agent.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only with this label; repeat.")] = None,
    bodies: Annotated[bool, typer.Option(help="With the agents' request bodies (table turns).")] = False,
    state_dir: StateDir = None,
) -> None:
    """Write the trajectories of ended rollouts to a file."""
    labels = {}
    for item in label or []:
        name, equals, value = item.partition("=")
        if not (name and equals):
            usage_error(f"--label: {item!r} is not NAME=VALUE")
        labels[name] = value

    async def work() -> int:
        async with services(state_dir=state_dir) as ps:
            found = ps.rollouts.export(
                run_id=run_id, group_id=group_id, labels=labels, task_id=task_id, agent=agent, bodies=bodies
            )
            count = await write(found, file, table=table, format=format_)
        out.print(f"{count} rows of {table.value} in {escape(str(file))}", soft_wrap=True)
        return OK

    run(work())
