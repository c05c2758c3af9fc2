"""`penstock up` and `penstock serve`."""

import asyncio
import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.markup import escape

from penstock.cli.commands.dashboard import beside
from penstock.cli.connections.model_sources import (
    LOCAL_EXTRA,
    Engine,
    ModelDir,
    Script,
    api_key,
    demo_package,
    is_url,
    model_choice,
    small_model,
)
from penstock.cli.connections.options import StateDir
from penstock.cli.connections.service_selection import ModelChoice
from penstock.cli.terminal.console import OK, clean, columns, emit, err, out, run, usage_error
from penstock.client.transport.endpoints import (
    CONNECTION_FILE,
    DEFAULT_DASHBOARD_PORT,
    SERVICES,
    connection_file,
    write_connection,
)
from penstock.local.stack import FIXED_PORTS, LocalStack, StackFailed, UpstreamEndpoint
from penstock.local.supervision import ServiceRestart


def up(
    model_dir: ModelDir = None,
    engine: Engine = "numpy",
    script: Script = None,
    upstream: Annotated[
        list[str] | None, typer.Option(metavar="NAME=URL", help="An OpenAI-compatible endpoint that rollouts may name.")
    ] = None,
    api_key_env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VARIABLE", help="Environment variable with the key of the upstream NAME."),
    ] = None,
    engine_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Option of the engine, such as base_url of openai.")
    ] = None,
    engine_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Environment variable with the key of openai's endpoint.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SERVICE.NAME=VALUE", help="A setting of a service, such as inference.replicas=2."
        ),
    ] = None,
    state_dir: StateDir = None,
    free_ports: Annotated[bool, typer.Option(help="Use free ports instead of 7701 to 7704, 7780 and 7790.")] = False,
    dashboard: Annotated[bool, typer.Option(help="Serve the dashboard, a page for the browser.")] = True,
    dashboard_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the dashboard; 0 = any free one.")
    ] = DEFAULT_DASHBOARD_PORT,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one line of JSON.")] = False,
) -> None:
    """Start all services on this machine and keep them running until Ctrl-C.

    Without a model of yours or an upstream they serve the small one of penstock[local], where that is installed.
    """
    keys = dict(_pair(item, "--api-key-env") for item in api_key_env or [])
    endpoints = {
        name: UpstreamEndpoint(url, api_key(keys.pop(name, None)))
        for name, url in (_pair(item, "--upstream") for item in upstream or [])
    }
    for name, item in endpoints.items():
        if not is_url(item.base_url):
            usage_error(f"--upstream {name}: expected a URL like http://host:port/v1")
    if keys:
        usage_error(f"--api-key-env: there is no --upstream {next(iter(keys))}=URL")
    small = model_dir is None and engine == "numpy" and script is None and not endpoints
    choice = replace(
        model_choice(small_model() if small else model_dir, engine, script, endpoints),
        engine_options=dict(_pair(item, "--engine-option") for item in engine_option or []),
        engine_key=api_key(engine_key_env, "--engine-key-env"),
        settings=_settings(settings or []),
    )
    shown = None if not dashboard else 0 if free_ports and dashboard_port == DEFAULT_DASHBOARD_PORT else dashboard_port
    package = demo_package() if small and choice.given else None
    example = "FILE" if package is None else str(package / "task.yaml")
    run(_up(choice, state_dir, free_ports, shown, as_json, example))


async def _up(
    choice: ModelChoice,
    state_dir: Path | None,
    free_ports: bool,
    dashboard_port: int | None,
    as_json: bool,
    example: str,
) -> int:
    """Runs until stopped; without a `dashboard_port` there is no dashboard. `example` is a task to try."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        if not stopped and task is not None:
            stopped = True
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    stack = choice.stack({} if free_ports else FIXED_PORTS, state_dir, on_restart=_show_restart)
    connection = stack.state_dir / CONNECTION_FILE
    err.print(f"[dim]starting {', '.join(stack.services)}; state in {escape(str(stack.state_dir))}[/]", soft_wrap=True)
    try:
        with err.status("starting"):
            try:
                await stack.__aenter__()
            except StackFailed as error:
                if error.reason == "PORT_IN_USE" and not free_ports:
                    raise StackFailed(f"{error} Or use --free-ports.", reason=error.reason) from None
                raise
        try:
            write_connection(connection, stack.endpoints, pid=os.getpid())
            async with AsyncExitStack() as beside_it:
                link = ""
                if dashboard_port is not None:
                    dashboard = beside(stack.endpoints, stack.trainer_token, dashboard_port)
                    link = await beside_it.enter_async_context(dashboard)
                _say_where(stack, connection, link, as_json, example)
                await stack.wait()
        except BaseException as error:
            connection.unlink(missing_ok=True)
            with err.status("stopping"):
                await stack.__aexit__(type(error), error, error.__traceback__)
            raise
    except asyncio.CancelledError:
        if not stopped:
            raise
    return OK


def _show_restart(restart: ServiceRestart) -> None:
    colour = "green" if restart.ready else "yellow"
    err.print(f"[{colour}]{escape(clean(str(restart)))}[/]", soft_wrap=True)


def _say_where(stack: LocalStack, connection: Path, link: str, as_json: bool, example: str) -> None:
    """Prints the addresses, and how to try the task `example`; `link` opens the dashboard, if there is one."""
    if as_json:
        where = {name: stack.endpoints.address(name) or None for name in SERVICES}
        places = {"ingress": f"http://{stack.ingress_address}", "dashboard": link or None, "logs": str(stack.log_dir)}
        emit({"services": where, **places, "connection": str(connection)})
    else:
        table = columns("service", "address")
        for name in SERVICES:
            address = stack.endpoints.address(name)
            table.add_row(name, address or "[dim]none: no --model-dir[/]")
        table.add_row("ingress", f"http://{stack.ingress_address}")
        out.print(table)
        if link:  # in no cell: a terminal splits a link that wraps
            beside = max(map(len, SERVICES)) + 2
            out.print(f"{'dashboard':<{beside}}{escape(link)}", soft_wrap=True)
    err.print(
        f"[dim]logs in {escape(str(stack.log_dir))}; clients find the addresses and the token in "
        f"{escape(str(connection))}[/]",
        soft_wrap=True,
    )
    # Commands find the services of the default directory by themselves.
    where_to = (
        "" if connection == connection_file().absolute() else f" --state-dir {shlex.quote(str(connection.parent))}"
    )
    tries = f"penstock agents{where_to}, or penstock rollout{where_to} --agent shell --task {shlex.quote(example)}"
    err.print(f"try: {escape(tries)} in another terminal", soft_wrap=True)


def serve(
    context: typer.Context,
    service: Annotated[str, typer.Argument(help=f"One of {', '.join(SERVICES)}.")],
) -> None:
    """Run one service in the foreground; further arguments are its own (`penstock serve sandbox --help`)."""
    if service not in SERVICES:
        usage_error(f"there is no service {service!r}; services: {', '.join(SERVICES)}")
    if importlib.util.find_spec(f"penstock_{service}") is None:
        usage_error(f"the {service} service is not installed: {LOCAL_EXTRA}")
    os.execv(sys.executable, [sys.executable, "-m", f"penstock_{service}", *context.args])  # noqa: S606 - no shell


def demo(context: typer.Context) -> None:
    """Train a small model by GRPO through all services (`penstock demo --help`): a seed repeats its run."""
    if demo_package() is None:
        usage_error(f"the demo is not installed: {LOCAL_EXTRA}")
    os.execv(sys.executable, [sys.executable, "-m", "penstock_demo", *context.args])  # noqa: S606 - no shell


def _settings(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns settings by service; values are parsed as YAML: a number, true, a [list], or text."""
    found: dict[str, dict[str, Any]] = {}
    for item in given:
        place, value = _pair(item, "--set")
        service, dot, name = place.partition(".")
        if service not in SERVICES or not (dot and name):
            usage_error(f"--set: {item!r} is not SERVICE.NAME=VALUE with one of {', '.join(SERVICES)}")
        try:
            found.setdefault(service, {})[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            usage_error(f"--set: the value of {place} is not YAML: {value}")
    return found


def _pair(item: str, option: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not (name and equals and value):
        usage_error(f"{option}: {item!r} is not NAME=VALUE")
    return name, value
