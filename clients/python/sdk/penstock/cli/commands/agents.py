"""`penstock agents`: the agents that can run."""

import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
import yaml
from rich.markup import escape

from penstock.agents.replay_check import ReplayTrial, check_replay
from penstock.agents.replay_check import as_json as replay_json
from penstock.agents.smoke_test import NO_UNASKED, Trial, run_trial, unasked_model
from penstock.cli.commands.scaffold import scaffold
from penstock.cli.connections.completion import agent_names
from penstock.cli.connections.options import AsJson, Backend, StateDir
from penstock.cli.connections.service_selection import services
from penstock.cli.terminal.console import FAILED, OK, columns, emit, out, quoted, read, run, usage_error
from penstock.cli.views import agent_summary
from penstock.client.agents import Agent, CheckFinding
from penstock.client.connection import Penstock
from penstock.client.errors import PenstockError
from penstock.client.transport.atomic_files import write_whole
from penstock.client.transport.endpoints import is_local
from penstock.client.wire.agents import dump_spec, load_spec
from penstock.driver.v1.agent_pb2 import AgentSpec

T = TypeVar("T")
_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,62}")

app = typer.Typer(help="List, show, check and register agents.", invoke_without_command=True, no_args_is_help=False)


@app.callback()
def agents(context: typer.Context, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """List the agents when no command is given."""
    if context.invoked_subcommand is None:
        run(_list(as_json, state_dir))
    elif state_dir is not None:
        usage_error(f"put --state-dir after the command: penstock agents {context.invoked_subcommand} --state-dir DIR")


@app.command("list")
def list_(as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """All agents that can be run."""
    run(_list(as_json, state_dir))


@app.command(short_help="An agent in short, or its whole spec.")
def show(
    name: Annotated[str, typer.Argument(help="The agent's name.", autocompletion=agent_names)],
    full: Annotated[bool, typer.Option("--full", help="The whole spec on a terminal, too.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """An agent in short; with --full, or to a file or a pipe, the whole spec: the file that `register` takes."""
    run(_show(name, full or not out.is_terminal, as_json, state_dir))


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The agent's name.")],
    npm: Annotated[str, typer.Option(help="Its package at npm, as NAME@VERSION.")] = "",
    pypi: Annotated[str, typer.Option(help="Its package at PyPI, as NAME==VERSION.")] = "",
    file: Annotated[Path | None, typer.Option("--file", "-o", help="Where to write; default NAME.yaml.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a commented spec to start from."""
    target = file or Path(f"{name}.yaml")
    if not _NAME.fullmatch(name):
        raise typer.BadParameter(
            "expected lower-case letters, digits and '-', starting with a letter", param_hint="NAME"
        )
    if npm and pypi:
        raise typer.BadParameter("set --npm or --pypi, not both")
    try:
        text = scaffold(name, target.name, npm=npm, pypi=pypi)
        if target.exists():
            raise FileExistsError
        write_whole(target, text.encode())
    except PenstockError as error:
        raise typer.BadParameter(str(error)) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except FileExistsError:
        raise typer.BadParameter(f"{target} exists: choose another file with --file") from None
    if as_json:
        emit({"file": str(target)})
        return
    first = f"{escape(name)}.txt, as the file says under python_packages; then " if pypi else ""
    out.print(f"wrote {escape(str(target))}; next: {first}penstock agents check {escape(str(target))}", soft_wrap=True)


@app.command()
def check(
    agent: Annotated[
        str, typer.Argument(help="A registered agent's name, or the YAML file of one.", autocompletion=agent_names)
    ],
    install: Annotated[
        bool, typer.Option(help="Install a file's agent and run its check command in a sandbox.")
    ] = False,
    trial: Annotated[
        bool, typer.Option("--run", help="Also run it once, with a scripted model; needs a trainer's token.")
    ] = False,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="With --run: also lose its sandbox at the last call, and see whether a fresh one repeats the calls.",
        ),
    ] = False,
    backend: Backend = "",
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Certify an agent: read its spec, install it, run it once. A file's agent is only read unless you say more."""
    if replay and not trial:
        usage_error("--replay runs the agent: give --run too")
    is_file = agent.endswith((".yaml", ".yml")) or "/" in agent
    given = Path(agent) if is_file else agent
    run(_check(given, install or not is_file, trial, replay, backend, as_json, state_dir))


@app.command()
def register(
    spec: Annotated[Path, typer.Argument(help="YAML file with the spec.")],
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Add an agent of your own, or a new version of it."""
    run(_register(spec, as_json, state_dir))


async def _list(as_json: bool, state_dir: Path | None) -> int:
    table = columns("agent", "version", "speaks", "options", "description")
    async with services(state_dir=state_dir) as ps:
        async for agent in ps.agents.list():
            if as_json:
                emit(_shape(agent))
                continue
            table.add_row(
                f"[bold]{escape(agent.name)}[/]",
                escape(agent.version),
                ", ".join(agent.dialects),
                escape(", ".join(option.name for option in agent.options)),
                escape(agent.description) + ("" if agent.built_in else " [dim](registered)[/]"),
            )
    if not as_json:
        out.print(table)
    return OK


def _shape(agent: Agent) -> dict[str, Any]:
    return {
        "name": agent.name,
        "version": agent.version,
        "description": agent.description,
        "dialects": agent.dialects,
        "options": agent.options,
        "built_in": agent.built_in,
        "needs_root": agent.needs_root,
        "spec_sha256": agent.spec_sha256,
    }


async def _show(name: str, full: bool, as_json: bool, state_dir: Path | None) -> int:
    async with services(state_dir=state_dir) as ps:
        agent = await ps.agents.get(name)
    if as_json:
        emit({**_shape(agent), "spec": yaml.safe_load(dump_spec(agent.spec))})
        return OK
    if not full:
        out.print(agent_summary.summary(agent))
        out.print("[dim]the whole spec: --full, or redirect the output to a file[/]", soft_wrap=True)
        return OK
    # To a file unchanged: a console would wrap and colour it. YAML escapes control characters.
    typer.echo(f"# {agent.name} {agent.version}, spec {agent.spec_sha256}\n{dump_spec(agent.spec)}", nl=False)
    return OK


async def _check(
    agent: Path | str, install: bool, trial: bool, replay: bool, backend: str, as_json: bool, state_dir: Path | None
) -> int:
    given = read(load_spec, agent) if isinstance(agent, Path) else agent
    failed = False
    async with services(state_dir=state_dir) as ps:
        async for finding in ps.agents.check(given, backend=backend, spec_only=not (install or trial)):
            failed |= _print_finding(finding, as_json)
        if trial and not failed:
            async with _registered(ps, given) as tried:
                made = await _tried(ps, tried, backend, as_json)
                for finding in made.findings():
                    failed |= _print_finding(finding, as_json)
                if replay and not failed:
                    failed |= _print_replay(await _replayed(ps, tried, backend, as_json), as_json)
    return FAILED if failed else OK


async def _tried(ps: Penstock, agent: Agent, backend: str, as_json: bool) -> Trial:
    """Runs the trial without a model if the gate allows it: a real model's context would bound the prompt."""
    on_progress = partial(_progress, as_json)
    return await _unasked(ps, partial(run_trial, ps, agent, backend=backend, on_progress=on_progress))


async def _replayed(ps: Penstock, agent: Agent, backend: str, as_json: bool) -> ReplayTrial:
    """Runs the replay with the served model's tokenizer if the prompts fit into its context, else without one."""
    work = partial(check_replay, ps, agent, backend=backend, on_progress=partial(_progress, as_json))
    if ps.endpoints.inference:
        made = await work()
        failure = made.result.failure
        if made.reached or made.divergences or failure is None or failure.reason != "CONTEXT_EXCEEDED":
            return made
    return await _unasked(ps, work)


async def _unasked(ps: Penstock, work: Callable[..., Awaitable[T]]) -> T:
    if is_local(ps.endpoints.interception):
        try:
            async with unasked_model() as source:
                return await work(source=source)
        except PenstockError as error:
            if error.reason not in NO_UNASKED:
                raise
    return await work()


@asynccontextmanager
async def _registered(ps: Penstock, given: str | AgentSpec) -> AsyncIterator[Agent]:
    """Yields the agent; registers it under a temporary name if needed."""
    if isinstance(given, str):
        yield await ps.agents.get(given)
        return
    spec = AgentSpec()
    spec.CopyFrom(given)
    spec.name = f"{given.name[:40]}-check-{secrets.token_hex(4)}"
    try:
        yield await ps.agents.register(spec)
    finally:
        await ps.agents.delete(spec.name)


def _progress(as_json: bool, line: str) -> None:
    _print_finding(CheckFinding("run", "progress", line), as_json)


def _print_finding(finding: CheckFinding, as_json: bool) -> bool:
    """Prints a finding; returns whether it must be fixed."""
    if as_json:
        emit({"step": finding.step, "outcome": finding.outcome, "message": finding.message})
        return finding.outcome == "failed"
    style = {"ok": "green", "failed": "red", "warning": "yellow"}.get(finding.outcome, "dim")
    out.print(f"[{style}]{escape(finding.step)} {finding.outcome}[/] ", end="")
    out.print(quoted(finding.message))
    return finding.outcome == "failed"


def _print_replay(made: ReplayTrial, as_json: bool) -> bool:
    """Prints how a replay went; returns whether the agent does not repeat itself."""
    finding = made.finding()
    if not as_json:
        return _print_finding(finding, as_json)
    emit({"step": finding.step, "outcome": finding.outcome, "message": finding.message, "replay": replay_json(made)})
    return finding.outcome == "failed"


async def _register(spec: Path, as_json: bool, state_dir: Path | None) -> int:
    given = read(load_spec, spec)
    async with services(state_dir=state_dir) as ps:
        agent = await ps.agents.register(given)
    if as_json:
        emit(_shape(agent))
        return OK
    out.print(f"registered {escape(agent.name)} {escape(agent.version)}, spec {agent.spec_sha256}", soft_wrap=True)
    return OK
