"""`penstock`: the command line, thin over the client."""

from importlib import metadata
from typing import Annotated

import typer

from penstock.cli import agents, conformance, credentials, doctor, export, rollout, up, verify
from penstock.cli.console import EXIT_CODES, out

app = typer.Typer(
    name="penstock",
    help="Run coding agents in sandboxes and meter their model calls.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    add_completion=False,
)
app.command()(up.up)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})(
    up.serve
)
app.command()(rollout.rollout)
app.add_typer(agents.app, name="agents")
app.command()(doctor.doctor)
app.command()(credentials.credentials)
app.command()(export.export)
app.command()(verify.verify)
app.command()(conformance.conformance)


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
