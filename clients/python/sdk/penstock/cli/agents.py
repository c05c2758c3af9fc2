"""`penstock agents`: what can be run."""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from google.protobuf.json_format import MessageToDict
from rich.markup import escape
from rich.table import Table

from penstock.cli.console import FAILED, OK, out, quoted, read, run
from penstock.cli.services import services
from penstock.client.agentfile import load_spec

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
    """An agent's whole spec, as YAML."""
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
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("agent", "version", "speaks", "options", "description"):
        table.add_column(name)
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
    content: dict[str, Any] = MessageToDict(agent.spec, preserving_proto_field_name=True)
    out.print(f"# spec {agent.spec_sha256}", style="dim", soft_wrap=True)
    out.print(quoted(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), lines=10_000, width=10_000))
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
