"""`penstock eval`: a task set, n attempts at each task, success rates, a report; an interrupted run can be resumed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.markup import escape
from typer.core import TyperGroup

from penstock.analysis.prices import Cost, Prices, Used
from penstock.cli.commands.evals import running
from penstock.cli.commands.evals.matrix import matrix_
from penstock.cli.commands.evals.running import (
    Attempts,
    BlackBox,
    Build,
    Concurrency,
    Only,
    Retries,
    Tasks,
    Temperature,
    Threshold,
)
from penstock.cli.connections.model_sources import Engine, ModelDir, Script, answered, model_choice, require_engine
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
)
from penstock.cli.terminal.console import FAILED, OK, emit, err, out, read, run
from penstock.cli.views.evaluation import differences, table
from penstock.evaluation import (
    Attempt,
    Summary,
    read_attempts,
    read_config,
    summarise,
)
from penstock.evaluation.compare import compare
from penstock.evaluation.report import check_plots, write_report
from penstock.values.similar_names import did_you_mean


class _RunIsMeant(TyperGroup):
    """Makes `penstock eval TASKS` mean `penstock eval run TASKS`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As click's; a name that is no command is a task set, or a command with a mistake if there is none."""
        if args and args[0] not in self.commands:
            if not Path(args[0]).exists() and (meant := did_you_mean(args[0], self.commands)):
                ctx.fail(f"there is no task set and no command {args[0]!r}{meant}")
            args = ["run", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(help="Run a set of tasks n times each: pass@k, resumable.", cls=_RunIsMeant, no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="Results directory of an evaluation.")]


@app.command("run", short_help="Run every task n times and keep every attempt; the default command.")
def run_(
    tasks: Tasks,
    agent: AgentName,
    n: Attempts = 1,
    concurrency: Concurrency = 4,
    to: Annotated[
        Path | None,
        typer.Option("--out", help="Results directory; an existing one is resumed. Default: from the names."),
    ] = None,
    only: Only = None,
    upstream: UpstreamChoice = None,
    model: UpstreamModel = "",
    api_key_env: ApiKeyEnv = None,
    black_box: BlackBox = False,
    option: AgentOptions = None,
    skip_permissions: SkipPermissions = False,
    backend: Backend = "",
    build: Build = False,
    timeout: AgentTimeout = None,
    max_calls: MaxCalls = None,
    temperature: Temperature = None,
    seed: Seed = None,
    keep_end_state: KeepEndState = None,
    retries: Retries = 2,
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
    if report is not None:
        read(lambda _: check_plots(), report)
    table_of_prices = _prices(prices)
    choice = model_choice(model_dir, engine, script)
    given = running.plan(
        tasks, attempts=n, concurrency=concurrency, only=only or (), upstream=upstream, model=model,
        api_key_env=api_key_env, black_box=black_box, backend=backend, timeout=timeout, max_calls=max_calls,
        temperature=temperature, seed=seed, keep_end_state=keep_end_state, retries=retries, threshold=threshold,
        choice=choice, files_from=files_from or (), as_json=as_json,
    )  # fmt: skip
    required_assays(given.options, require_assay, assay_key)
    chosen = agent_choice(agent, option, skip_permissions)

    async def work() -> int:
        if "require_assay" in given.options:
            for task in given.tasks:  # all of them before any starts
                given.options["require_assay"].require(task)
        if build:
            await running.build(given)
        async with answered(choice, given.upstream, state_dir=state_dir) as ps:
            await require_engine(ps, given.upstream)
            known = await running.identified(ps, given)
            folder = to or Path("runs/evals") / running.directory_name(known.config_of(chosen), agent)
            attempts, summary = await running.evaluate(ps, known, chosen, folder)
        config = read_config(folder)
        cost = _cost(table_of_prices, attempts, config["model"])
        _show(summary, cost, as_json)
        if report is not None:
            write_report(report, config, attempts, summary, cost)
        err.print(f"[dim]results in {escape(str(folder))}[/]", soft_wrap=True)
        return OK if summary.complete else FAILED

    run(work())


app.command("matrix", short_help="Run every task n times with several agents: agents by tasks, a picture.")(matrix_)


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
    """Two evaluations side by side: the tasks that are the same in both, and the difference with its interval."""

    async def work() -> int:
        _, first, of_first = _read(before, threshold)
        _, second, of_second = _read(after, threshold)
        found = compare(first, second, of_first["tasks"], of_second["tasks"])
        if as_json:
            emit(found.as_dict())
        else:
            out.print(differences(found, str(before), str(after)))
        if not found.tasks:
            err.print("nothing is compared: no task was graded in both and is the same in both")
            return FAILED
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
