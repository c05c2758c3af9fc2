"""Runs an evaluation with an agent for the commands of `penstock eval`: what all of them share."""

import asyncio
import hashlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.live import Live
from rich.markup import escape

from penstock.cli.connections.model_sources import answerer
from penstock.cli.connections.options import rollout_options
from penstock.cli.connections.service_selection import ModelChoice
from penstock.cli.terminal.console import clean, err, out, read, usage_error
from penstock.cli.views.evaluation import Board
from penstock.client import AgentChoice, Mode, Penstock, RolloutOptions, Sampling, Task, Upstream
from penstock.client.errors import ConfigurationError
from penstock.client.transport.atomic_files import NOT_WRITTEN
from penstock.client.wire.specs import digest
from penstock.evaluation import Attempt, Book, Evaluation, Summary, summarise
from penstock.evaluation.identity import files_digest, models_digest
from penstock.tasks.images import build_images, with_image
from penstock.tasks.sets import load_tasks
from penstock.values.similar_names import did_you_mean

Tasks = Annotated[Path, typer.Argument(help="Directory of tasks, task set file, or task file.")]
Attempts = Annotated[int, typer.Option("--n", "-n", min=1, max=1000, help="Attempts at each task.")]
Concurrency = Annotated[int, typer.Option(min=1, max=1024, help="Rollouts at once.")]
Only = Annotated[
    list[str] | None, typer.Option("--task", metavar="PATTERN", help="Only tasks that match this pattern; repeat.")
]
BlackBox = Annotated[bool, typer.Option(help="Let the upstream answer directly; nothing is captured.")]
Build = Annotated[bool, typer.Option(help="Build the tasks' images first.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="Overrides the agent's value.")]
Retries = Annotated[
    int, typer.Option(min=0, help="Limit of retries of an attempt after failures of the infrastructure.")
]
Threshold = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Share of the reward range from which an attempt passes; 1 = the full reward."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An evaluation but for its agent."""

    tasks: Sequence[Task]
    upstream: Upstream | None
    options: RolloutOptions
    config: Mapping[str, Any]
    """What a results directory says of it."""
    attempts: int
    concurrency: int
    retries: int
    threshold: float
    as_json: bool

    def config_of(self, agent: AgentChoice) -> dict[str, Any]:
        """Returns the configuration with an agent."""
        return {
            **self.config,
            "agent": agent.name,
            "options": dict(agent.options),
            "skip_permissions": agent.skip_permissions,
        }


def plan(
    tasks: Path,
    *,
    attempts: int,
    concurrency: int,
    only: Sequence[str],
    upstream: str | None,
    model: str,
    api_key_env: str | None,
    black_box: bool,
    backend: str,
    timeout: float | None,
    max_calls: int | None,
    temperature: float | None,
    seed: int | None,
    keep_end_state: bool | None,
    retries: int,
    threshold: float,
    choice: ModelChoice,
    files_from: Sequence[Path],
    as_json: bool,
) -> Plan:
    """Returns the plan of a command line; an invalid one ends the program."""
    answers = answerer(upstream, model, api_key_env)
    if black_box and answers is None:
        usage_error("--black-box needs --upstream")
    chosen = [with_image(task) for task in _chosen(read(partial(load_tasks, files_from=files_from), tasks).tasks, only)]
    options = rollout_options(
        answers, backend=backend, timeout=timeout, max_calls=max_calls, seed=seed, keep_end_state=keep_end_state
    )
    options["mode"] = Mode.BLACK_BOX if black_box else Mode.TRANSPARENT_PROXY
    if temperature is not None:
        options["sampling"] = Sampling(temperature=temperature)
    own = "the inference service" if choice.model_dir is None else choice.model_dir.absolute().name
    config = {
        "name": tasks.absolute().name,
        "model": model or upstream or own,
        "upstream": upstream or "",
        "mode": str(options["mode"]),
        "backend": backend,
        "timeout": timeout,
        "max_calls": max_calls,
        "temperature": temperature,
        "seed": seed,
        "attempts": attempts,
        "tasks": {task.task_id: digest(task) for task in chosen},
        "task_models": {task.task_id: models_digest(task.models) for task in chosen},
        **_answers(choice),
    }
    return Plan(
        tasks=chosen, upstream=answers, options=options, config=config, attempts=attempts, concurrency=concurrency,
        retries=retries, threshold=threshold, as_json=as_json,
    )  # fmt: skip


def _answers(choice: ModelChoice) -> dict[str, Any]:
    """Returns the identity of an engine of the command's own; all None = running services or an upstream answer."""
    found = dict.fromkeys(("engine", "model_dir", "model_files", "script", "served_model", "policy_version"))
    if choice.model_dir is None:
        return found
    try:
        return {
            **found,
            "engine": choice.engine,
            "model_dir": str(choice.model_dir.resolve()),
            "model_files": files_digest(choice.model_dir),
            "script": None if choice.script is None else hashlib.sha256(choice.script.read_bytes()).hexdigest(),
        }
    except OSError as error:
        usage_error(f"{error.filename}: {error.strerror}")


async def identified(ps: Penstock, given: Plan) -> Plan:
    """Returns the plan with the identity of running services' model, which only they know.

    They may have other weights by now under the same name; after a restart their versions begin again.
    """
    if given.upstream is not None or given.config["model_dir"] is not None:
        return given
    info = await ps.inference.info()
    served = {"engine": info.engine, "served_model": info.model, "policy_version": info.policy_version}
    return replace(given, config={**given.config, **served})


async def build(given: Plan) -> None:
    """Builds the images of its tasks."""
    await build_images(given.tasks, lambda line: err.print(escape(line), style="dim"))


async def evaluate(
    ps: Penstock, given: Plan, agent: AgentChoice, folder: Path, *, named: bool = False
) -> tuple[list[Attempt], Summary]:
    """Runs every attempt of an agent that the results directory lacks; returns all of them, and their summary.

    Args:
        ps: the services.
        given: the plan.
        agent: the agent.
        folder: its results directory.
        named: whether each attempt is printed with the agent's name.
    """
    spec = await ps.agents.get(agent.name)
    names = [task.task_id for task in given.tasks]
    with _showing_how_to_resume(folder), ExitStack() as stack:
        book = stack.enter_context(Book(folder, {**given.config_of(agent), "agent_spec": spec.spec_sha256}))
        board = Board(
            book, names, given.attempts, given.threshold, as_json=given.as_json, agent=agent.name if named else None
        )
        if not given.as_json and out.is_terminal:
            stack.enter_context(Live(board, console=out, refresh_per_second=4, transient=True))
        evaluation = Evaluation(
            ps, book, given.tasks, agent, given.options,
            attempts=given.attempts, concurrency=given.concurrency, retries=given.retries, observer=board,
        )  # fmt: skip
        await evaluation.run()
        attempts = list(book.attempts)
    return attempts, summarise(attempts, names, given.attempts, given.threshold)


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
        meant = did_you_mean(patterns[0], [task.task_id for task in tasks])
        usage_error(f"--task: no task matches {', '.join(patterns)}{meant}")
    return found


def directory_name(config: Mapping[str, Any], agents: str) -> str:
    """Returns the same name for the same evaluation, so that the same command line resumes it."""
    identity = {name: value for name, value in config.items() if name != "attempts"}
    mark = hashlib.sha256(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS)).hexdigest()[:8]
    plain = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in config["model"])[:40]
    return f"{config['name']}-{agents}-{plain}-{mark}"
