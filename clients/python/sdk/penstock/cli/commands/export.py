"""`penstock export`: writes trajectories to a file, or each rollout to its own."""

from collections.abc import AsyncIterable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from penstock.analysis.export import Format, Table, format_of, write
from penstock.analysis.export_files import with_images
from penstock.analysis.interchange import atif
from penstock.analysis.prices import Prices
from penstock.analysis.reward_diff import FIRST
from penstock.cli.connections import completion
from penstock.cli.connections.options import (
    AllNamespaces,
    AsJson,
    Labels,
    PriceFile,
    StateDir,
    directory_of,
    label_filter,
)
from penstock.cli.connections.service_selection import services
from penstock.cli.terminal.console import FAILED, OK, clean, counted, emit, err, out, read, run, usage_error
from penstock.client import InvalidArgument, Outcome, Trajectory
from penstock.values.similar_names import did_you_mean


def export(
    file: Annotated[
        Path,
        typer.Argument(
            help="File to write; .parquet writes Parquet, anything else JSON Lines. With --atif: a directory."
        ),
    ],
    table: Annotated[
        Table | None,
        typer.Option(
            help="One row per model call, sample, host tool call, annotation, rollout or conversation."
            " Default: sequences."
        ),
    ] = None,
    as_atif: Annotated[
        bool, typer.Option("--atif", help="One JSON file per rollout, in the Agent Trajectory Interchange Format.")
    ] = False,
    format_: Annotated[Format | None, typer.Option("--format", help="Default: from the file's name.")] = None,
    run_id: Annotated[str | None, typer.Option(help="Only of this run.")] = None,
    group_id: Annotated[
        str | None, typer.Option(help="Only of this group.", autocompletion=completion.group_ids)
    ] = None,
    task_id: Annotated[str | None, typer.Option(help="Only of this task.")] = None,
    agent: Annotated[
        str | None, typer.Option(help="Only of this agent.", autocompletion=completion.agent_names)
    ] = None,
    label: Labels = None,
    bodies: Annotated[bool, typer.Option(help="With the agents' request bodies (table turns).")] = False,
    top: Annotated[bool, typer.Option(help="With the alternatives of sampled tokens (top-k logprobs).")] = False,
    tensors: Annotated[bool, typer.Option(help="With the rows of tensors of tokens (routed experts).")] = False,
    images: Annotated[
        Path | None, typer.Option(file_okay=False, help="With the prompts' images, a file each, in this directory.")
    ] = None,
    grade: Annotated[str, typer.Option(help="Rewards of the further grade of this name; default: the first.")] = "",
    prices: PriceFile = None,
    all_namespaces: AllNamespaces = False,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Write the trajectories of ended rollouts to a file."""
    labels = label_filter(label)
    directory_of(file)
    if as_atif and (table is not None or format_ is not None or top or tensors or images):
        usage_error("--atif has no --table, --format, --top, --tensors and --images")
    kept = table or Table.SEQUENCES
    if prices is not None and not as_atif and kept is not Table.ROLLOUTS:
        usage_error("--prices goes with --table rollouts, or with --atif")
    priced = None if prices is None else read(Prices.load, prices)
    if state_dir is not None and not state_dir.is_dir():
        usage_error(f"--state-dir: there is no directory {state_dir}")
    asked = {"run id": run_id, "group id": group_id, "task id": task_id, "agent": agent}
    asked["label"] = ", ".join(label or ())

    async def work() -> int:
        chosen = None if as_atif else format_of(file, format_)  # before services are started for it
        async with services(state_dir=state_dir) as ps:
            if grade not in ("", FIRST):
                rollouts = ps.rollouts.list(
                    run_id=run_id,
                    group_id=group_id,
                    labels=labels,
                    ended=True,
                    task_id=task_id,
                    agent=agent,
                    all_namespaces=all_namespaces,
                )
                names = {further.name async for one in rollouts for further in one.grades}
                if grade not in names:  # a file without any reward is no answer to a name with a mistake
                    there = [FIRST, *sorted(names)]
                    meant = did_you_mean(grade, there) or ";"
                    usage_error(f"--grade: no rollout has a grade {grade}{meant} there are {', '.join(there)}")
            found: AsyncIterable[tuple[Trajectory, Outcome]] = ps.rollouts.export(
                run_id=run_id,
                group_id=group_id,
                labels=labels,
                task_id=task_id,
                agent=agent,
                bodies=bodies or as_atif or kept is Table.CHAT,
                top=top,
                tensors=tensors,
                images=images is not None,
                grade=grade,
                all_namespaces=all_namespaces,
            )
            if images is not None:
                found = with_images(found, images)
            if as_atif:
                count = await atif.write(found, file, priced)
            else:
                count = await _rows(found, file, kept, chosen, priced)
        what = "answer" if as_atif else f"row of {kept.value}"
        if not count:
            which = "; ".join(f"{name} {value}" for name, value in asked.items() if value)
            nothing = f"no {what}, no file written: no ended rollout" + (which and f" with {which}")
            err.print(escape(clean(nothing + " has one")), soft_wrap=True)
        elif not as_json:
            made = counted(count, "rollout" if as_atif else "row") + ("" if as_atif else f" of {kept.value}")
            out.print(f"{made} in {escape(str(file))}", soft_wrap=True)
        if as_json and as_atif:
            emit({"directory": str(file) if count else None, "rollouts": count})
        elif as_json:
            emit({"file": str(file) if count else None, "table": kept.value, "rows": count})
        return OK if count else FAILED

    run(work())


async def _rows(
    found: AsyncIterable[tuple[Trajectory, Outcome]],
    file: Path,
    table: Table,
    form: Format | None,
    prices: Prices | None,
) -> int:
    """Returns the number of rows; without one there is no file."""
    try:
        return await write(found, file, table=table, format=form, prices=prices)
    except InvalidArgument as error:
        if error.reason != "EMPTY":
            raise
        return 0
