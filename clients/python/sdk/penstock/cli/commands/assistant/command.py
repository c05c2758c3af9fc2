"""`penstock mcp`: a server for coding assistants."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from penstock.assistant.context import Context
from penstock.assistant.server import Server
from penstock.assistant.stdio import can_serve, streams
from penstock.assistant.tools import tools
from penstock.cli.commands.doctor.live import examine
from penstock.cli.connections.options import StateDir
from penstock.cli.connections.service_selection import running
from penstock.cli.terminal.console import OK, run, usage_error


def mcp(
    allow_writes: Annotated[
        bool, typer.Option("--allow-writes", help="Offer tools that start and cancel rollouts, too.")
    ] = False,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--files", metavar="DIR", exists=True, file_okay=False,
            help="A directory whose reports and task files may be read; repeat. Default: the current one.",
        ),
    ] = None,
    max_rollouts: Annotated[
        int, typer.Option(min=1, max=10_000, help="With --allow-writes: how many rollouts may be started in all.")
    ] = 64,
    state_dir: StateDir = None,
) -> None:  # fmt: skip
    """Serve runs, rollouts, tasks and reports to a coding assistant, as an MCP server on standard input and output.

    An assistant starts it by itself: see the guide for its configuration. It only reads, unless --allow-writes is
    given. Texts of agents under training are marked as untrusted data.
    """
    if not can_serve():
        usage_error(
            "an assistant starts this command and speaks to it: set it up there, for example with"
            " `claude mcp add penstock -- penstock mcp`"
        )
    context = Context(
        partial(running, state_dir), examine, directories=files or [Path.cwd()], max_rollouts=max_rollouts
    )
    offered = tools(allow_writes=allow_writes)

    async def work() -> int:
        async with streams() as (reader, writer):
            await Server(context, offered, writer).serve(reader)
        return OK

    run(work())
