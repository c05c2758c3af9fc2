"""`penstock scan`: searches trajectories for cheating."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape

from penstock.analysis.export import Row, Table, read_exports, read_rows, turns
from penstock.analysis.scan import Severity, built_in_rules, load_rules, scan
from penstock.cli.connections.options import AsJson, StateDir
from penstock.cli.connections.service_selection import services
from penstock.cli.terminal.console import FAILED, OK, clean, counted, emit, err, out, quoted, read, run
from penstock.client import Penstock
from penstock.client.errors import FailedPrecondition, NotFound

_COLOURS = {Severity.HIGH: "red", Severity.MEDIUM: "yellow", Severity.LOW: "dim"}
_SUFFIXES: Final = (".jsonl", ".parquet")
_MOST_NAMED: Final = 5


def scan_(
    place: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_EXPORT",
            help="Run, group or rollout id; or a file of `penstock export --table turns`, a directory of such files,"
            " or a directory or URL with what drivers exported.",
        ),
    ],
    severity: Annotated[Severity, typer.Option(help="The least severity that is reported.")] = Severity.MEDIUM,
    rules: Annotated[list[Path] | None, typer.Option(help="File of further rules, YAML; repeat.")] = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Search the tool calls of trajectories for cheating: git history, tests, verifiers, forged outcomes."""
    chosen = [*built_in_rules(), *(rule for file in rules or () for rule in read(load_rules, file))]
    chosen = [rule for rule in chosen if rule.severity.rank >= severity.rank]
    is_stored = "://" in place or Path(place).exists()

    left_out: list[str] = []

    async def work() -> int:
        rollouts: set[str] = set()
        hit: set[str] = set()
        found = rows = 0
        async with aclosing(_of_files(place, left_out) if is_stored else _of_services(place, state_dir)) as batches:
            async for row in batches:
                rows += 1
                rollouts.add(str(row.get("rollout_id")))
                for item in scan([row], chosen):
                    found += 1
                    hit.add(item.rollout_id)
                    if as_json:
                        emit(asdict(item))
                        continue
                    colour = _COLOURS[item.severity]
                    out.print(
                        f"[{colour}]{item.severity}[/] [bold]{escape(clean(item.rollout_id))}[/] turn {item.turn}"
                        f" {escape(clean(item.tool))}: {escape(item.says)} [dim]({escape(item.rule)})[/]",
                        soft_wrap=True,
                    )
                    out.print(quoted(item.quoted, colour, lines=4))
        summary = f"{counted(found, 'finding')} in {len(hit)} of {counted(len(rollouts), 'rollout')}"
        err.print(f"{summary}, {counted(rows, 'model call')}", style="dim")
        if left_out:
            more = f" and {len(left_out) - _MOST_NAMED} more" if len(left_out) > _MOST_NAMED else ""
            names = escape(clean(", ".join(left_out[:_MOST_NAMED])))
            err.print(
                f"{counted(len(left_out), 'data file')} left out, without rows of model calls: {names}{more}",
                style="dim",
                soft_wrap=True,
            )
        if not rows:
            err.print(f"[red]nothing to scan[/]: {escape(clean(place))} has no model call", soft_wrap=True)
        return OK if rows and not found else FAILED

    run(work())


async def _of_files(place: str, left_out: list[str]) -> AsyncGenerator[Row, None]:
    for row in _rows(place, left_out):
        yield row


def _rows(place: str, left_out: list[str]) -> Iterator[Row]:
    """Yields the rows of a place; files of a directory that have other rows are added to `left_out`."""
    path = Path(place)
    if "://" not in place and path.is_file():
        yield from read_rows(path)
        return
    yield from read_exports(place, Table.TURNS)
    if "://" in place:
        return
    for file in sorted(item for item in path.rglob("*") if item.suffix in _SUFFIXES and item.is_file()):
        if file.name.endswith(f".{Table.TURNS}.parquet"):
            continue  # read above: drivers may have stored a rollout twice
        rows = read_rows(file)
        first = next(rows, None)
        if first is not None and "turn_index" not in first:
            left_out.append(str(file.relative_to(path)))
        elif first is not None:
            yield first
            yield from rows


async def _of_services(name: str, state_dir: Path | None) -> AsyncGenerator[Row, None]:
    async with services(state_dir=state_dir) as ps:
        try:
            trajectory = await ps.rollouts.trajectory(name)
        except NotFound:
            async with aclosing(_of_many(ps, name)) as rows:
                async for row in rows:
                    yield row
            return
        except FailedPrecondition as error:
            if error.reason != "TRAJECTORY_ABSENT":
                raise
            return
        for row in turns(trajectory):
            yield row


async def _of_many(ps: Penstock, name: str) -> AsyncGenerator[Row, None]:
    """Yields the calls of a group, or of a run where no group has the name."""
    seen = False
    async with aclosing(ps.rollouts.export(group_id=name)) as trajectories:
        async for trajectory, _ in trajectories:
            seen = True
            for row in turns(trajectory):
                yield row
    if not seen:
        async with aclosing(ps.rollouts.export(run_id=name)) as trajectories:
            async for trajectory, _ in trajectories:
                for row in turns(trajectory):
                    yield row
