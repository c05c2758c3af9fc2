"""`penstock up` and `penstock serve`."""

import asyncio
import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml
from rich.markup import escape

from penstock.cli.commands.dashboard import beside
from penstock.cli.connections.model_sources import (
    LOCAL_EXTRA,
    NO_ENGINE,
    Engine,
    ModelDir,
    Script,
    api_key,
    demo_package,
    is_url,
    model_choice,
    unnamed_model,
)
from penstock.cli.connections.options import StateDir
from penstock.cli.terminal.console import OK, TERMINATED, clean, columns, emit, err, out, run, usage_error
from penstock.client.errors import ConfigurationError
from penstock.client.transport.endpoints import (
    DEFAULT_DASHBOARD_PORT,
    SERVICES,
    connection_file,
    write_connection,
)
from penstock.launchers.stack import LAUNCHERS, Running, launched
from penstock.local.stack import FIXED_PORTS, StackFailed, UpstreamEndpoint
from penstock.local.supervision import ServiceRestart
from penstock.values.similar_names import did_you_mean

OWN_ENGINE_CONTEXT: Final = 131_072
"""Tokens of a prompt and its completion with `--engine none` and no model: the small model's own are few."""

_HUNG_UP: Final = 128 + signal.SIGHUP
_COMMAND_STOP_S: Final = 10.0
"""Seconds that the command has to end when the services stop first."""


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
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Option of the engine, such as base_url of sglang."),
    ] = None,
    engine_key_env: Annotated[
        str | None,
        typer.Option(metavar="VARIABLE", help="Environment variable with the key of the endpoint."),
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
    on: Annotated[
        str, typer.Option(help=f"Where: {', '.join(LAUNCHERS)}. local is this machine, others are clusters.")
    ] = "local",
    nodes: Annotated[
        int | None, typer.Option(min=1, help="On a cluster: machines with a sandbox service; default: all.")
    ] = None,
    drivers: Annotated[
        int | None, typer.Option(min=1, help="On a cluster: drivers; the first one is here, and is the default.")
    ] = None,
    gates: Annotated[int | None, typer.Option(min=1, help="On a cluster: gates, as drivers.")] = None,
    engines: Annotated[int | None, typer.Option(min=1, help="On a cluster: inference services, as drivers.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="On a cluster: GPUs of each inference service, all placed by them.")
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=AMOUNT", help="On Ray: what a sandbox service reserves, such as CPU=8; repeat."),
    ] = None,
    max_nodes: Annotated[
        int | None,
        typer.Option(min=1, help="On Ray: ask its autoscaler for machines as sandbox services fill, at most so many."),
    ] = None,
    values: Annotated[
        Path | None, typer.Option(help="On Kubernetes: a YAML file with values of the Helm chart (images, model, ...).")
    ] = None,
    kube_namespace: Annotated[
        str | None, typer.Option(help="On Kubernetes: an existing namespace; default: the context's.")
    ] = None,
    kube_context: Annotated[
        str | None, typer.Option(help="On Kubernetes: a context of the kubeconfig; default: the current one.")
    ] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="On a cluster: a directory on a local disk of each machine, for state.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one line of JSON.")] = False,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="Run this while the services run, and stop them when it ends."),
    ] = None,
) -> None:
    """Start all services on this machine or a cluster, and keep them running until Ctrl-C or the end of a command.

    Without a model of yours or an upstream they serve the small one of penstock[local], where that is installed; with
    --engine none its tokenizer. A command after -- finds the services by PENSTOCK_CONNECTION, and its exit code is
    returned.
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
        name = next(iter(keys))
        usage_error(f"--api-key-env: there is no --upstream {name}=URL{did_you_mean(name, endpoints)}")
    # Elsewhere a model is none of this machine's directories.
    here = on != "kubernetes"
    if not here and (model_dir is not None or script is not None or engine != "numpy"):
        usage_error("--model-dir, --engine and --script: on Kubernetes the model and its engine stand in --values FILE")
    unnamed = unnamed_model(engine, scripted=script is not None, upstreams=bool(endpoints)) if here else None
    services = _settings(settings or [])
    if engine == "none" and unnamed is not None and model_dir is None:
        services.setdefault("inference", {}).setdefault("max_context_tokens", OWN_ENGINE_CONTEXT)
    choice = replace(
        model_choice(model_dir or unnamed, engine, script, endpoints),
        engine_options=dict(_pair(item, "--engine-option") for item in engine_option or []),
        engine_key=api_key(engine_key_env, "--engine-key-env"),
        settings=services,
    )
    local = on == "local"
    own = {
        "nodes": nodes,
        "drivers": drivers,
        "gates": gates,
        "engines": engines,
        "gpus": gpus,
        "scratch": scratch,
        "resources": _amounts(resource) if resource else None,
        "max_nodes": max_nodes,
        "values": values,
        "kube_namespace": kube_namespace,
        "kube_context": kube_context,
    }
    options = {**choice.options, "state_dir": state_dir, "on_restart": _show_restart}
    if local and not free_ports:
        options["ports"] = FIXED_PORTS
    shown = (
        None
        if not dashboard
        else 0
        if (free_ports or not local) and dashboard_port == DEFAULT_DASHBOARD_PORT
        else dashboard_port
    )
    package = demo_package() if model_dir is None and unnamed is not None and engine != "none" else None
    example = None if engine == "none" else "FILE" if package is None else str(package / "task.yaml")
    try:
        stack = launched(on, own, options)
    except ConfigurationError as error:
        usage_error(str(error))
    for name in _unread(os.environ) if local else ():
        service, _, setting = name.removeprefix("PENSTOCK_").lower().partition("_")
        err.print(f"{name} has no effect here: use --set {service}.{setting}=VALUE", markup=False, soft_wrap=True)
    run(_up(stack, shown, as_json, example, command or [], may_free=local and not free_ports))


async def _up(
    stack: Running,
    dashboard_port: int | None,
    as_json: bool,
    example: str | None,
    command: Sequence[str],
    *,
    may_free: bool,
) -> int:
    """Runs until it is stopped or the command has ended, and returns its exit code.

    Args:
        stack: not yet started.
        dashboard_port: None = no dashboard.
        as_json: whether the addresses are shown as JSON.
        example: a task to try; None = no engine would answer it.
        command: empty = none.
        may_free: whether a taken port can be replaced by a free one.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    stopped: int | None = None
    stopping = False

    def stop(ended: int) -> None:
        nonlocal stopped
        if stopped is None and not stopping and task is not None:
            stopped = ended
            task.cancel()

    # A terminal that is closed sends SIGHUP, often twice: a further one must not cut the stop short.
    for number, ended in ((signal.SIGTERM, TERMINATED), (signal.SIGINT, TERMINATED), (signal.SIGHUP, _HUNG_UP)):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # which nohup has ignored
            loop.add_signal_handler(number, stop, ended)
    connection = stack.connection_file
    code = OK
    where = escape(str(connection.parent))
    err.print(f"[dim]starting {', '.join(stack.services)}; state in {where}[/]", soft_wrap=True)
    try:
        with _shown("starting"):
            try:
                await stack.__aenter__()
            except StackFailed as error:
                if error.reason == "PORT_IN_USE" and may_free:
                    raise StackFailed(f"{error} Or use --free-ports.", reason=error.reason) from None
                raise
        try:
            write_connection(connection, stack.endpoints, pid=os.getpid())
            async with AsyncExitStack() as beside_it:
                link = ""
                if dashboard_port is not None:
                    dashboard = beside(stack.endpoints, stack.trainer_token, dashboard_port)
                    address, link = await beside_it.enter_async_context(dashboard)
                    if address:
                        write_connection(connection, replace(stack.endpoints, dashboard=address), pid=os.getpid())
                _say_where(stack, connection, link, as_json, example)
                if command:
                    code = await _beside(command, connection, discover=stack.endpoints.discover)
                else:
                    await stack.wait()
        except BaseException as error:
            stopping = True
            connection.unlink(missing_ok=True)
            with _shown("stopping"):
                await stack.__aexit__(type(error), error, error.__traceback__)
            raise
        stopping = True
        connection.unlink(missing_ok=True)
        with _shown("stopping"):
            await stack.__aexit__(None, None, None)
    except asyncio.CancelledError:
        if stopped is None:
            raise
        return stopped if command else OK
    return code


@contextmanager
def _shown(what: str) -> Iterator[None]:
    """Shows what goes on, which goes on where the terminal has been closed, too: then it takes no output."""
    status = err.status(what)
    with suppress(OSError):
        status.start()
    try:
        yield
    finally:
        with suppress(OSError):
            status.stop()


async def _beside(command: Sequence[str], connection: Path, *, discover: bool) -> int:
    """Runs a program that finds the services; returns its exit code, 128 and its number for a signal."""
    environment = {**os.environ, "PENSTOCK_CONNECTION": str(connection)}
    if not discover:  # clients of other languages do not read it from the file
        environment["PENSTOCK_DISCOVER"] = "false"
    try:
        process = await asyncio.create_subprocess_exec(*command, env=environment)
    except OSError as error:
        usage_error(f"{command[0]} cannot be run: {error.strerror}")
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_COMMAND_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
        raise
    return code if code >= 0 else 128 - code


def _show_restart(restart: ServiceRestart) -> None:
    colour = "green" if restart.ready else "yellow"
    err.print(f"[{colour}]{escape(clean(str(restart)))}[/]", soft_wrap=True)


def _say_where(stack: Running, connection: Path, link: str, as_json: bool, example: str | None) -> None:
    """Prints the addresses, and how to try the task `example`; `link` opens the dashboard, if there is one."""
    if as_json:
        where = {name: stack.endpoints.address(name) or None for name in SERVICES}
        places = {"ingress": f"http://{stack.ingress_address}", "dashboard": link or None, "logs": str(stack.log_dir)}
        emit({"services": where, **places, "connection": str(connection)})
    else:
        table = columns("service", "address")
        for name in SERVICES:
            address = stack.endpoints.address(name)
            table.add_row(name, address or "[dim]none: no model is given[/]")
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
    tries = f"penstock agents{where_to}"
    if example is not None:
        tries += f", or penstock rollout{where_to} --agent shell --task {shlex.quote(example)}"
    if example is None:
        err.print(f"no engine: {NO_ENGINE}", soft_wrap=True)
    elif not stack.endpoints.inference:
        tries += " --upstream URL --model M"
        err.print(
            "no model: rollouts are refused that name no --upstream URL --model M; to serve one, stop this and start"
            " `penstock up --model-dir DIR`",
            soft_wrap=True,
        )
    err.print(f"try: {escape(tries)} in another terminal", soft_wrap=True)


def serve(
    context: typer.Context,
    service: Annotated[str, typer.Argument(help=f"One of {', '.join(SERVICES)}.")],
) -> None:
    """Run one service in the foreground; further arguments are its own (`penstock serve sandbox --help`)."""
    if service == "--help":  # of this command: a service's own comes after its name
        out.print(escape(context.get_help()), soft_wrap=True)
        raise typer.Exit
    if service not in SERVICES:
        meant = did_you_mean(service, SERVICES) or ";"
        usage_error(f"there is no service {service!r}{meant} services: {', '.join(SERVICES)}")
    if importlib.util.find_spec(f"penstock_{service}") is None:
        usage_error(f"the {service} service is not installed: {LOCAL_EXTRA}")
    os.execv(sys.executable, [sys.executable, "-m", f"penstock_{service}", *context.args])  # noqa: S606 - no shell


def demo(context: typer.Context) -> None:
    """Train a small model by GRPO through all services (`penstock demo --help`): a seed repeats its run."""
    if demo_package() is None:
        usage_error(f"the demo is not installed: {LOCAL_EXTRA}")
    os.execv(sys.executable, [sys.executable, "-m", "penstock_demo", *context.args])  # noqa: S606 - no shell


def _unread(environment: Iterable[str]) -> list[str]:
    """Returns the variables that are settings of a service which is started by itself: those of a stack are its own."""
    services = tuple(f"PENSTOCK_{service.upper()}_" for service in SERVICES)
    # A client's variable for a service's address is nobody's setting.
    clients = {f"{service}ADDRESS" for service in services}
    return sorted(name for name in environment if name.startswith(services) and name not in clients)


def _settings(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns settings by service; values are parsed as YAML: a number, true, a [list], or text."""
    found: dict[str, dict[str, Any]] = {}
    for item in given:
        place, value = _pair(item, "--set")
        service, dot, name = place.partition(".")
        if service not in SERVICES or not (dot and name):
            meant = "" if service in SERVICES else did_you_mean(service, SERVICES)
            usage_error(f"--set: {item!r} is not SERVICE.NAME=VALUE with one of {', '.join(SERVICES)}{meant}")
        try:
            found.setdefault(service, {})[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            usage_error(f"--set: the value of {place} is not YAML: {value}")
    return found


def _amounts(given: Sequence[str]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in (_pair(item, "--resource") for item in given)}
    except ValueError:
        usage_error("--resource: an amount is a number, as in CPU=8")


def _pair(item: str, option: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not (name and equals and value):
        usage_error(f"{option}: {item!r} is not NAME=VALUE")
    return name, value
