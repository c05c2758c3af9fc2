"""`penstock verify`: checks whether an export is what the gate recorded."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from penstock.analysis.export import Table, read_exports, read_rows
from penstock.analysis.verify_chain import verify as check
from penstock.cli.connections.options import AsJson
from penstock.cli.terminal.console import FAILED, OK, clean, counted, emit, out, run, usage_error

_SHOWN = 20


def verify(
    place: Annotated[
        str,
        typer.Argument(
            metavar="PLACE",
            help="File of `penstock export --table turns`, or a directory or URL with what drivers exported.",
        ),
    ],
    sequences: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="File of the table of samples, which is compared with the calls."
        ),
    ] = None,
    tool_calls: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File of the table of host tool calls.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="File of `penstock export --table turns` with the parents' or earlier attempts' calls, which replayed"
            " calls are compared with.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find what was altered in exported trajectories since the gate recorded them, offline."""
    is_store = "://" in place or Path(place).is_dir()
    if is_store and (sequences is not None or tool_calls is not None):
        usage_error("--sequences and --tool-calls go with a file: a directory or URL has all tables")
    if not is_store and not Path(place).exists():
        usage_error(f"there is no file {place}")

    async def work() -> int:
        if is_store:
            tables = [read_exports(place, table) for table in (Table.TURNS, Table.SEQUENCES, Table.TOOL_CALLS)]
        else:
            files = (Path(place), sequences, tool_calls)
            tables = [iter(()) if file is None else read_rows(file) for file in files]
        proof = check(*tables, against=None if against is None else read_rows(against))
        holds = not proof.problems and proof.calls > 0
        if as_json:
            emit({"holds": holds, **asdict(proof)})
            return OK if holds else FAILED
        for problem in proof.problems[:_SHOWN]:
            call = f", call {problem.call_id}" if problem.call_id else ""
            out.print(
                f"[red]broken[/]: rollout {escape(clean(problem.rollout_id + call))}: {escape(clean(problem.message))}",
                soft_wrap=True,
            )
        if len(proof.problems) > _SHOWN:
            out.print(f"and {len(proof.problems) - _SHOWN} more; --json lists all")
        if not proof.calls:
            out.print("[red]nothing to prove[/]: no call has exact tokens")
        rest = f"; {proof.unproven} without exact tokens are not verified" if proof.unproven else ""
        rest += f"; {counted(proof.samples, 'sample')} compared" if is_store or sequences is not None else ""
        rest += f"; {counted(proof.tool_calls, 'tool call')} compared" if is_store or tool_calls is not None else ""
        if against is not None:
            rest += f"; {counted(proof.replayed, 'replayed call')} compared with the origin"
            if proof.unproven_replays:
                rest += f", {proof.unproven_replays} unproven: their origins are not in {escape(clean(against.name))}"
        if proof.undigested:
            rest += f"; {counted(proof.undigested, 'row')} of an older version without digests"
        verdict = "[green]holds[/]" if holds else "[red]broken[/]"
        what = ", ".join((counted(proof.rollouts, "rollout"), counted(proof.calls, "call")))
        out.print(f"{verdict}: {what}, {counted(proof.tokens, 'sampled token')}{rest}")
        return OK if holds else FAILED

    run(work())
