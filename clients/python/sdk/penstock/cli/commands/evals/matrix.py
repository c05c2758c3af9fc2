"""`penstock eval matrix`: several agents at the same tasks, with the share that each did of each."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from penstock.cli.commands.evals import running
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
from penstock.cli.connections.completion import agent_names
from penstock.cli.connections.model_sources import Engine, ModelDir, Script, answered, model_choice, require_engine
from penstock.cli.connections.options import (
    AgentTimeout,
    ApiKeyEnv,
    AsJson,
    Backend,
    FilesFrom,
    MaxCalls,
    Seed,
    SkipPermissions,
    StateDir,
    UpstreamChoice,
    UpstreamModel,
    agent_choice,
    directory_of,
)
from penstock.cli.terminal.console import FAILED, OK, emit, err, out, read, run, usage_error
from penstock.cli.views import matrix_table
from penstock.evaluation.heat_map import FORMATS, write_heat_map
from penstock.evaluation.matrix import matrix
from penstock.evaluation.plots import check_plots


def matrix_(
    tasks: Tasks,
    agent: Annotated[
        list[str], typer.Option(help="An agent; repeat. `penstock agents` lists them.", autocompletion=agent_names)
    ],
    n: Attempts = 1,
    concurrency: Concurrency = 4,
    to: Annotated[
        Path | None,
        typer.Option("--out", help="Directory with a results directory for each agent. Default: from the names."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a heat map, too: .png, .svg or .pdf.")
    ] = None,
    only: Only = None,
    upstream: UpstreamChoice = None,
    model: UpstreamModel = "",
    api_key_env: ApiKeyEnv = None,
    black_box: BlackBox = False,
    skip_permissions: SkipPermissions = False,
    backend: Backend = "",
    build: Build = False,
    timeout: AgentTimeout = None,
    max_calls: MaxCalls = None,
    temperature: Temperature = None,
    seed: Seed = None,
    retries: Retries = 2,
    threshold: Threshold = 1.0,
    model_dir: ModelDir = None,
    engine: Engine = "numpy",
    script: Script = None,
    state_dir: StateDir = None,
    files_from: FilesFrom = None,
    as_json: AsJson = False,
) -> None:
    """Run every task n times with each agent, one agent after another, and show agents by tasks with intervals.

    Each agent's results are an evaluation's: `penstock eval show`, `diff` and `report` take its directory. The same
    command continues an interrupted one.
    """
    if len(set(agent)) < len(agent):
        usage_error("--agent: each agent once")
    if picture is not None:
        if picture.suffix[1:] not in FORMATS:
            usage_error(f"--picture: the name of {picture} ends in none of {', '.join(f'.{name}' for name in FORMATS)}")
        directory_of(picture)
        read(lambda _: check_plots(), picture)
    choice = model_choice(model_dir, engine, script)
    given = running.plan(
        tasks, attempts=n, concurrency=concurrency, only=only or (), upstream=upstream, model=model,
        api_key_env=api_key_env, black_box=black_box, backend=backend, timeout=timeout, max_calls=max_calls,
        temperature=temperature, seed=seed, keep_end_state=None, retries=retries, threshold=threshold,
        choice=choice, files_from=files_from or (), as_json=as_json,
    )  # fmt: skip
    agents = [agent_choice(name, None, skip_permissions) for name in agent]

    async def work() -> int:
        if build:
            await running.build(given)
        summaries = {}
        async with answered(choice, given.upstream, state_dir=state_dir) as ps:
            await require_engine(ps, given.upstream)
            for chosen in agents:  # all of them before any starts
                await ps.agents.get(chosen.name)
            known = await running.identified(ps, given)
            folder = to or Path("runs/evals") / running.directory_name(
                {**known.config, "skip_permissions": skip_permissions}, "matrix"
            )
            for number, chosen in enumerate(agents, 1):
                if not as_json:
                    err.print(f"[dim]{escape(chosen.name)}, {number} of {len(agents)}[/]")
                _, summaries[chosen.name] = await running.evaluate(ps, known, chosen, folder / chosen.name, named=True)
        found = matrix(summaries)
        if as_json:
            emit({"matrix": found.as_dict()})
        else:
            out.print(matrix_table.table(found))
        if picture is not None:
            write_heat_map(picture, found)
            err.print(f"[dim]picture in {escape(str(picture))}[/]", soft_wrap=True)
        err.print(f"[dim]results in {escape(str(folder))}[/]", soft_wrap=True)
        return OK if all(summary.complete for summary in summaries.values()) else FAILED

    run(work())
