"""`penstock openenv`: the OpenEnv-compatible server."""

import asyncio
import importlib.util
import os
import secrets
import signal
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.markup import escape

from penstock.cli.connections.model_sources import Engine, ModelDir, Script, model_choice
from penstock.cli.connections.options import AsJson, StateDir
from penstock.cli.connections.service_selection import check_access, services
from penstock.cli.terminal.console import OK, emit, err, out, run, usage_error
from penstock.client import Penstock

app = typer.Typer(help="Serve agents' rollouts to clients of OpenEnv.", no_args_is_help=True, rich_markup_mode=None)

TOKEN_VARIABLE = "PENSTOCK_OPENENV_TOKEN"  # noqa: S105 - a name
SESSIONS_VARIABLE = "MAX_CONCURRENT_ENVS"


@app.callback()
def _group() -> None:
    """Serve agents' rollouts to clients of OpenEnv."""


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; a wide one needs a token and a certificate.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 = any free one.")] = 8000,
    agent: Annotated[str, typer.Option(help="The agent of callers that name none.")] = "opencode",
    endpoint: Annotated[
        str, typer.Option(help="The endpoint of callers that name none: an upstream by name, or `inference`.")
    ] = "",
    backend: Annotated[str, typer.Option(help="Backend of sandboxes; default: the sandbox service's.")] = "",
    skip_permissions: Annotated[bool, typer.Option(help="Skip agents' own prompts, where they have any.")] = False,
    max_sessions: Annotated[
        int, typer.Option(min=1, max=4096, envvar=SESSIONS_VARIABLE, help="Limit of open environments.")
    ] = 4,
    idle_timeout: Annotated[float, typer.Option(min=1.0, help="Seconds until an unused session is closed.")] = (3600.0),
    no_token: Annotated[
        bool, typer.Option(help="Serve every program on this machine without a token; loopback only.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    model_dir: ModelDir = None,
    engine: Engine = "numpy",
    script: Script = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Serve `reset`, `step`, `state` and the tool `run_rollout` until Ctrl-C.

    Callers need the token in PENSTOCK_OPENENV_TOKEN; without that variable one is made, and shown in the address.
    """
    if importlib.util.find_spec("aiohttp") is None:
        usage_error("aiohttp is not installed: pip install 'penstock[openenv]'")
    from penstock.adapters.openenv.rollout_arguments import Defaults
    from penstock.adapters.openenv.serving import Listen, serving

    given = os.environ.get(TOKEN_VARIABLE)
    if given is not None and no_token:
        usage_error(f"--no-token and {TOKEN_VARIABLE} contradict each other")
    token = None if no_token else given if given is not None else secrets.token_urlsafe(32)
    defaults = Defaults(agent=agent, endpoint=endpoint, backend=backend, skip_permissions=skip_permissions)
    choice = model_choice(model_dir, engine, script)

    async def work() -> int:
        listen = Listen(host=host, port=port, token=token, cert=tls_cert, key=tls_key)
        stopped = _stop_signals()
        async with services(choice, state_dir=state_dir) as ps:
            await _look(ps, agent, skip_permissions)
            async with serving(ps, listen, defaults, max_sessions=max_sessions, idle_s=idle_timeout) as address:
                shown = address if token is None or given is not None else _with_token(address, token)
                if as_json:
                    emit({"base_url": shown})
                else:
                    out.print(escape(shown), soft_wrap=True)
                err.print("[dim]clients use this as base_url; Ctrl-C ends it with every rollout that it runs[/]")
                await stopped.wait()
                err.print("stopping")
        return OK

    run(work())


async def _look(ps: Penstock, agent: str, skip_permissions: bool) -> None:
    """Exits before serving if the token may start no rollouts; services may still be starting."""
    if not await check_access(ps.endpoints, starts_rollouts=True):
        where = escape(ps.endpoints.driver)
        err.print(
            f"no driver answers at {where} yet: calls fail until it does, and the token was not checked", soft_wrap=True
        )
        return
    asks = (await ps.agents.get(agent)).can_skip_permissions
    if skip_permissions and not asks:
        err.print(f"{escape(agent)} asks for no permissions: --skip-permissions affects callers' other agents only")


def _stop_signals() -> asyncio.Event:
    """Returns an event that SIGINT and SIGTERM set."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


def _with_token(address: str, token: str) -> str:
    """Returns the address with the token in it, which the clients' libraries use for basic authentication."""
    parts = urlsplit(address)
    return parts._replace(netloc=f"penstock:{token}@{parts.netloc}").geturl()
