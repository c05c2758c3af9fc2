"""`penstock agents`: what can be run."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from penstock.cli.console import FAILED, OK, columns, out, quoted, read, run
from penstock.cli.services import services
from penstock.client.agentfile import dump_spec, load_spec

app = typer.Typer(help="List, show, check and register agents.", invoke_without_command=True, no_args_is_help=False)


@app.callback()
def agents(context: typer.Context) -> None:
    """List the agents when no command is given."""
    if context.invoked_subcommand is None:
        run(_list())


@app.command("list")
def list_() -> None:
    """All agents that can be run."""
    run(_list())


@app.command()
def show(name: Annotated[str, typer.Argument(help="The agent's name.")]) -> None:
    """An agent's spec, as the file that `register` takes."""
    run(_show(name))


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="The agent's name.")],
    backend: Annotated[str, typer.Option(help="Sandbox backend; default: the operator's.")] = "",
) -> None:
    """Install an agent and run its check command in a sandbox."""
    run(_check(name, backend))


@app.command()
def register(spec: Annotated[Path, typer.Argument(help="YAML file with the spec.")]) -> None:
    """Add an agent of your own, or a new version of it."""
    run(_register(spec))


async def _list() -> int:
    table = columns("agent", "version", "speaks", "options", "description")
    async with services() as ps:
        async for agent in ps.agents.list():
            table.add_row(
                f"[bold]{escape(agent.name)}[/]",
                escape(agent.version),
                ", ".join(agent.dialects),
                escape(", ".join(option.name for option in agent.options)),
                escape(agent.description) + ("" if agent.built_in else " [dim](registered)[/]"),
            )
    out.print(table)
    return OK


async def _show(name: str) -> int:
    async with services() as ps:
        agent = await ps.agents.get(name)
    # As it is, for a file: a console would wrap and colour it. YAML escapes what could drive a terminal.
    typer.echo(f"# {agent.name} {agent.version}, spec {agent.spec_sha256}\n{dump_spec(agent.spec)}", nl=False)
    return OK


async def _check(name: str, backend: str) -> int:
    failed = False
    async with services() as ps:
        async for finding in ps.agents.check(name, backend=backend):
            style = {"ok": "green", "failed": "red"}.get(finding.outcome, "dim")
            out.print(f"[{style}]{escape(finding.step)} {finding.outcome}[/] ", end="")
            out.print(quoted(finding.message))
            failed |= finding.outcome == "failed"
    return FAILED if failed else OK


async def _register(spec: Path) -> int:
    given = read(load_spec, spec)
    async with services() as ps:
        agent = await ps.agents.register(given)
    out.print(f"registered {escape(agent.name)} {escape(agent.version)}, spec {agent.spec_sha256}", soft_wrap=True)
    return OK
