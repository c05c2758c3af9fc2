"""`penstock`: the command line, thin over the client."""

from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any

import typer

from penstock.cli import (
    agents,
    completion,
    conformance,
    credentials,
    dashboard,
    diff,
    doctor,
    evals,
    export,
    gap,
    openenv,
    replay,
    rollout,
    tasks,
    terminal,
    up,
    verify,
    watch,
)
from penstock.cli.console import EXIT_CODES, out

app = typer.Typer(
    name="penstock",
    help="Run coding agents in sandboxes and meter their model calls.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,  # its tables cut the names of options where a terminal is narrow
)
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _add(command: Callable[..., None], context: dict[str, Any] | None = None) -> None:
    """A command with its first line as the short help: click cuts docstrings to the width of the terminal."""
    app.command(short_help=(command.__doc__ or "").partition("\n")[0], context_settings=context)(command)


_add(up.up)
_add(up.serve, _PASSED_ON)
_add(dashboard.dashboard)
_add(rollout.rollout)
_add(watch.watch)
_add(replay.replay)
_add(diff.diff)
_add(terminal.terminal)
app.add_typer(agents.app, name="agents")
app.add_typer(tasks.app, name="tasks")
app.add_typer(evals.app, name="eval")
app.add_typer(openenv.app, name="openenv")
_add(doctor.doctor)
_add(credentials.credentials)
_add(export.export)
_add(verify.verify)
_add(gap.gap)
_add(conformance.conformance)
_add(completion.completion)


def _print_versions(asked: bool) -> None:
    if not asked:
        return
    names = sorted(
        {item.name for item in metadata.distributions() if item.name and item.name.lower().startswith("penstock")}
    )
    for name in names:
        out.print(f"{name} {metadata.version(name)}")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_versions, is_eager=True, help="Versions of what is installed."),
    ] = False,
) -> None:
    """What holds for all commands."""


if __name__ == "__main__":
    app()
