"""`penstock dashboard`, and the dashboard beside `penstock up`."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape

from penstock.cli.connections.options import AsJson
from penstock.cli.connections.service_selection import check_access
from penstock.cli.terminal.console import OK, emit, err, out, run, usage_error
from penstock.client.errors import ConfigurationError, PermissionDenied, Unauthenticated
from penstock.client.transport.endpoints import DEFAULT_DASHBOARD_PORT, Endpoints, of_state_dir, resolve

MISSING: Final = "the dashboard needs aiohttp: pip install 'penstock[dashboard]'"


def dashboard(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 = any free one.")
    ] = DEFAULT_DASHBOARD_PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback needs a certificate.")
    ] = "127.0.0.1",
    name: Annotated[
        list[str] | None,
        typer.Option(
            envvar="PENSTOCK_DASHBOARD_NAMES",
            help="A host name that browsers may use for it, besides the address and localhost.",
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file with the dashboard's certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its private key.")] = None,
    connection: Annotated[
        Path | None, typer.Option(help="Connection file of the services; default: the same as for every command.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="State directory of the `penstock up` whose services are shown.")
    ] = None,
    show_token: Annotated[
        bool, typer.Option("--token/--no-token", help="Whether the printed address includes your token.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Serve the dashboard of services that run, here or elsewhere, until Ctrl-C."""
    if importlib.util.find_spec("aiohttp") is None:
        usage_error(MISSING)
    listen = (host, port, name or [], tls_cert, tls_key)
    run(_serve(_endpoints(connection, state_dir), show_token, listen, as_json))


def _endpoints(connection: Path | None, state_dir: Path | None) -> Endpoints:
    if connection is not None and state_dir is not None:
        usage_error("--connection and --state-dir both locate the services: set only one")
    try:
        if state_dir is None:
            return resolve(connection)
        found = of_state_dir(state_dir)
    except ConfigurationError as error:
        usage_error(str(error))
    if found is None:
        usage_error(
            f"--state-dir: no services run in {state_dir}: start them with `penstock up --state-dir {state_dir}`"
        )
    return found


async def _serve(
    endpoints: Endpoints,
    show_token: bool,
    listen: tuple[str, int, list[str], Path | None, Path | None],
    as_json: bool,
) -> int:
    from penstock.dashboard.serving import Place, serve  # aiohttp is an extra

    if show_token:
        await _check_token(endpoints)
    async with serve(endpoints, Place(*listen)) as shown:
        link = shown.link(endpoints.token if show_token else None)
        if as_json:
            emit({"url": link})
        else:
            out.print(escape(link), soft_wrap=True)
        err.print(f"[dim]services from {escape(endpoints.origin)}; Ctrl-C ends the dashboard, not the services[/]")
        await asyncio.get_running_loop().create_future()
    return OK


async def _check_token(endpoints: Endpoints) -> None:
    """Checks the token of the printed address: with an invalid one the page would show nothing."""
    try:
        up = await check_access(endpoints, starts_rollouts=False)
    except (Unauthenticated, PermissionDenied) as error:
        raise type(error)(
            f"{error.message} (With --no-token the page is served without a token and asks the user for one.)",
            reason=error.reason,
        ) from None
    if not up:
        err.print(
            f"no driver answers at {escape(endpoints.driver)} yet: the page waits for it, and the token was not "
            "checked",
            soft_wrap=True,
        )


@asynccontextmanager
async def beside(endpoints: Endpoints, token: str, port: int) -> AsyncIterator[tuple[str, str]]:
    """Runs the dashboard of one's own services while open; yields its address, and the same with the token.

    If it cannot run, the block goes on without it, after an explanation, and both are empty.
    """
    if importlib.util.find_spec("aiohttp") is None:
        err.print(f"no dashboard: {escape(MISSING)}", soft_wrap=True)
        yield "", ""
        return
    from penstock.dashboard.serving import Place, serve  # aiohttp is an extra

    async with AsyncExitStack() as opened:
        address = link = ""
        try:
            shown = await opened.enter_async_context(serve(endpoints, Place(port=port)))
            address, link = shown.address, shown.link(token)
        except ConfigurationError as error:
            err.print(f"no dashboard: {escape(str(error))}", soft_wrap=True)
        yield address, link
