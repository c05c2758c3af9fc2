"""`penstock eval`: a task set, n attempts at each task, success rates, a report; an interrupted run can be resumed."""

import asyncio
import hashlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.live import Live
from rich.markup import escape
from typer.core import TyperGroup

from penstock.analysis.prices import Cost, Prices, Used
from penstock.cli.connections.model_sources import Engine, ModelDir, Script, answered, answerer, model_choice
from penstock.cli.connections.options import (
    AgentName,
    AgentOptions,
    AgentTimeout,
    ApiKeyEnv,
    AsJson,
    AssayKey,
    Backend,
    FilesFrom,
    KeepEndState,
    MaxCalls,
    PriceFile,
    RequireAssay,
    Seed,
    SkipPermissions,
    StateDir,
    UpstreamChoice,
    UpstreamModel,
    agent_choice,
    required_assays,
    rollout_options,
)
from penstock.cli.terminal.console import FAILED, OK, clean, emit, err, out, read, run, usage_error
from penstock.cli.views.evaluation import Board, differences, table
from penstock.client import Mode, Sampling, Task
from penstock.client.errors import ConfigurationError
from penstock.client.transport.atomic_files import NOT_WRITTEN
from penstock.client.wire.specs import digest
from penstock.evaluation import (
    Attempt,
    Book,
    Evaluation,
    Summary,
    read_attempts,
    read_config,
    summarise,
)
from penstock.evaluation.compare import compare
from penstock.evaluation.report import check_plots, write_report
from penstock.tasks.images import build_images, with_image
from penstock.tasks.sets import load_tasks


class _RunIsMeant(TyperGroup):
    """Makes `penstock eval TASKS` mean `penstock eval run TASKS`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As click's; a name that is no command is a task set."""
        if args and args[0] not in self.commands:
            args = ["run", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(help="Run a set of tasks n times each: pass@k, resumable.", cls=_RunIsMeant, no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="Results directory of an evaluation.")]
Threshold = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Share of the reward range from which an attempt passes; 1 = the full reward."),
]


@app.command("run", short_help="Run every task n times and keep every attempt; the default command.")
def run_(
    tasks: Annotated[Path, typer.Argument(help="Directory of tasks, task set file, or task file.")],
    agent: AgentName,
    n: Annotated[int, typer.Option("--n", "-n", min=1, max=1000, help="Attempts at each task.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Rollouts at once.")] = 4,
    to: Annotated[
        Path | None,
        typer.Option("--out", help="Results directory; an existing one is resumed. Default: from the names."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--task", metavar="PATTERN", help="Only tasks that match this pattern; repeat.")
    ] = None,
    upstream: UpstreamChoice = None,
    model: UpstreamModel = "",
    api_key_env: ApiKeyEnv = None,
    black_box: Annotated[bool, typer.Option(help="Let the upstream answer directly; nothing is captured.")] = False,
    option: AgentOptions = None,
    skip_permissions: SkipPermissions = False,
    backend: Backend = "",
    build: Annotated[bool, typer.Option(help="Build the tasks' images first.")] = False,
    timeout: AgentTimeout = None,
    max_calls: MaxCalls = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Overrides the agent's value.")] = None,
    seed: Seed = None,
    keep_end_state: KeepEndState = None,
    retries: Annotated[
        int, typer.Option(min=0, help="Limit of retries of an attempt after failures of the infrastructure.")
    ] = 2,
    threshold: Threshold = 1.0,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML report, too.")] = None,
    require_assay: RequireAssay = None,
    assay_key: AssayKey = None,
    prices: PriceFile = None,
    model_dir: ModelDir = None,
    engine: Engine = "numpy",
    script: Script = None,
    state_dir: StateDir = None,
    files_from: FilesFrom = None,
    as_json: AsJson = False,
) -> None:
    """Run every task n times, show a live table, and keep every attempt in a results directory."""
    answers = answerer(upstream, model, api_key_env)
    if black_box and answers is None:
        usage_error("--black-box needs --upstream")
    choice = model_choice(model_dir, engine, script)
    table_of_prices = _prices(prices)
    if report is not None:
        read(lambda _: check_plots(), report)
    chosen_tasks = [
        with_image(task)
        for task in _chosen(read(partial(load_tasks, files_from=files_from or ()), tasks).tasks, only or [])
    ]
    options = rollout_options(
        answers, backend=backend, timeout=timeout, max_calls=max_calls, seed=seed, keep_end_state=keep_end_state
    )
    options["mode"] = Mode.BLACK_BOX if black_box else Mode.TRANSPARENT_PROXY
    if temperature is not None:
        options["sampling"] = Sampling(temperature=temperature)
    required_assays(options, require_assay, assay_key)
    chosen = agent_choice(agent, option, skip_permissions)
    answered_by = model or upstream or (model_dir.absolute().name if model_dir is not None else "the inference service")
    config: dict[str, Any] = {
        "name": tasks.absolute().name,
        "agent": agent,
        "options": dict(chosen.options),
        "skip_permissions": skip_permissions,
        "model": answered_by,
        "upstream": upstream or "",
        "mode": str(options["mode"]),
        "backend": backend,
        "timeout": timeout,
        "max_calls": max_calls,
        "temperature": temperature,
        "seed": seed,
        "attempts": n,
        "tasks": {task.task_id: digest(task) for task in chosen_tasks},
    }
    folder = to or Path("runs/evals") / _name(config)

    async def work() -> int:
        if "require_assay" in options:
            for task in chosen_tasks:  # all of them before any starts
                options["require_assay"].require(task)
        if build:
            await build_images(chosen_tasks, lambda line: err.print(escape(line), style="dim"))
        async with answered(choice, answers, state_dir=state_dir) as ps:
            spec = await ps.agents.get(agent)
            with _showing_how_to_resume(folder), ExitStack() as stack:
                book = stack.enter_context(Book(folder, {**config, "agent_spec": spec.spec_sha256}))
                names = [task.task_id for task in chosen_tasks]
                board = Board(book, names, n, threshold, as_json=as_json)
                if not as_json and out.is_terminal:
                    stack.enter_context(Live(board, console=out, refresh_per_second=4, transient=True))
                evaluation = Evaluation(
                    ps, book, chosen_tasks, chosen, options,
                    attempts=n, concurrency=concurrency, retries=retries, observer=board,
                )  # fmt: skip
                await evaluation.run()
                attempts = list(book.attempts)
        summary = summarise(attempts, names, n, threshold)
        cost = _cost(table_of_prices, attempts, answered_by)
        _show(summary, cost, as_json)
        if report is not None:
            write_report(report, read_config(folder), attempts, summary, cost)
        err.print(f"[dim]results in {escape(str(folder))}[/]", soft_wrap=True)
        return OK if summary.complete else FAILED

    run(work())


@app.command(short_help="The table of an evaluation.")
def show(folder: Folder, threshold: Threshold = 1.0, prices: PriceFile = None, as_json: AsJson = False) -> None:
    """The table of an evaluation, whether it has ended or not."""
    table_of_prices = _prices(prices)

    async def work() -> int:
        attempts, summary, config = _read(folder, threshold)
        for attempt in attempts if as_json else ():
            emit({"attempt": orjson.loads(attempt.line())})
        _show(summary, _cost(table_of_prices, attempts, config["model"]), as_json)
        return OK if summary.complete else FAILED

    run(work())


@app.command(short_help="An evaluation as one HTML file.")
def report(
    folder: Folder,
    to: Annotated[Path | None, typer.Option("--out", help="The file; default: report.html in the directory.")] = None,
    threshold: Threshold = 1.0,
    prices: PriceFile = None,
    as_json: AsJson = False,
) -> None:
    """One HTML file with tables, plots and the output of each attempt."""
    table_of_prices = _prices(prices)

    async def work() -> int:
        check_plots()
        attempts, summary, config = _read(folder, threshold)
        file = to or folder / "report.html"
        write_report(file, config, attempts, summary, _cost(table_of_prices, attempts, config["model"]))
        if as_json:
            emit({"file": str(file)})
        else:
            out.print(escape(str(file)), soft_wrap=True)
        return OK

    run(work())


@app.command(short_help="Two evaluations side by side.")
def diff(
    before: Folder,
    after: Annotated[Path, typer.Argument(help="Results directory of another one.")],
    threshold: Threshold = 1.0,
    as_json: AsJson = False,
) -> None:
    """Two evaluations side by side: the tasks that both have, and the difference with its interval."""

    async def work() -> int:
        first, second = _read(before, threshold)[1], _read(after, threshold)[1]
        found = compare(first, second)
        if as_json:
            emit(found.as_dict())
        else:
            out.print(differences(found, str(before), str(after)))
        return OK

    run(work())


def _read(folder: Path, threshold: float) -> tuple[list[Attempt], Summary, dict[str, Any]]:
    config = read_config(folder)
    attempts = read_attempts(folder)
    return attempts, summarise(attempts, config["tasks"], int(config["attempts"]), threshold), config


def _show(summary: Summary, cost: Cost | None, as_json: bool) -> None:
    if as_json:
        emit({"summary": summary.table() | ({} if cost is None else {"cost": cost.as_dict()})})
        return
    out.print(table(summary))
    if cost is not None:
        out.print(f"[bold]cost[/] {escape(str(cost))}", soft_wrap=True)


def _prices(file: Path | None) -> Prices | None:
    return None if file is None else read(Prices.load, file)


def _cost(prices: Prices | None, attempts: Sequence[Attempt], model: str) -> Cost | None:
    """What all attempts cost, repeated ones too. Those of an older version have no models: `model` answered them."""
    if prices is None:
        return None
    of_old = (
        Used(model, one.prompt_tokens, one.completion_tokens) for one in attempts if one.prompt_tokens and not one.used
    )
    return prices.cost([*(found for one in attempts for found in one.used), *of_old])


@contextmanager
def _showing_how_to_resume(folder: Path) -> Iterator[None]:
    """On an interrupt or a full disk, prints the command that resumes."""
    try:
        yield
    except (asyncio.CancelledError, ConfigurationError) as error:
        if isinstance(error, ConfigurationError) and error.reason != NOT_WRITTEN:
            raise
        command = shlex.join(["penstock", *sys.argv[1:]])
        err.print(f"finished attempts are in {escape(str(folder))}; the same command continues:", soft_wrap=True)
        err.print(f"  {escape(clean(command))}", soft_wrap=True)
        raise


def _chosen(tasks: Sequence[Task], patterns: Sequence[str]) -> list[Task]:
    if not patterns:
        return list(tasks)
    found = [task for task in tasks if any(Path(task.task_id).match(pattern) for pattern in patterns)]
    if not found:
        usage_error(f"--task: no task matches {', '.join(patterns)}")
    return found


def _name(config: dict[str, Any]) -> str:
    """Returns the same name for the same evaluation, so that the same command line resumes it."""
    identity = {name: value for name, value in config.items() if name != "attempts"}
    mark = hashlib.sha256(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS)).hexdigest()[:8]
    plain = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in config["model"])[:40]
    return f"{config['name']}-{config['agent']}-{plain}-{mark}"
