"""`penstock rollout`: runs an agent on a task and shows its progress."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from penstock.analysis.prices import Prices
from penstock.cli.connections.ended_rollouts import EndedRollouts
from penstock.cli.connections.model_sources import (
    Engine,
    ModelDir,
    Script,
    answered,
    answerer,
    model_choice,
    require_engine,
)
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
    ModelsFile,
    PriceFile,
    RequireAssay,
    Seed,
    SkipPermissions,
    StateDir,
    UpstreamChoice,
    UpstreamModel,
    UserFile,
    agent_choice,
    required_assays,
    rollout_options,
)
from penstock.cli.terminal.console import FAILED, OK, clean, emit, err, out, read, run
from penstock.cli.views import events as show
from penstock.cli.views import group_progress, outcomes, rows
from penstock.cli.views.group_progress import GroupProgress
from penstock.cli.views.json_shapes import event_shape
from penstock.client import (
    AgentChoice,
    ArtifactCollected,
    GroupHandle,
    InterceptSession,
    Mode,
    Outcome,
    Penstock,
    Replay,
    ResultRejected,
    RolloutEvent,
    RolloutHandle,
    RolloutOptions,
    Task,
)
from penstock.client.errors import first_of
from penstock.client.rollouts.handles import abandon, created
from penstock.client.tasks.model_keys import load_models
from penstock.client.tasks.task import load_user
from penstock.client.transport.atomic_files import write_whole
from penstock.tasks.images import with_image

INTERRUPTED: Final = "interrupted"
"""Why rollouts of a command that ends early are cancelled."""
_SAVE_S: Final = 30.0
"""Seconds for saving what had ended when the command was interrupted."""
_REDRAW_S: Final = 0.25
"""Seconds between two drawings of a group."""


def rollout(
    agent: AgentName,
    task: Annotated[Path, typer.Option(help="Task file, YAML or JSON.")],
    mode: Annotated[
        Mode | None,
        typer.Option(help="Who answers model calls; default: the proxy with --upstream, otherwise the gate."),
    ] = None,
    upstream: UpstreamChoice = None,
    model: UpstreamModel = "",
    api_key_env: ApiKeyEnv = None,
    models: ModelsFile = None,
    option: AgentOptions = None,
    skip_permissions: SkipPermissions = False,
    n: Annotated[int, typer.Option("--n", "-n", min=1, max=256, help="How many rollouts of the task.")] = 1,
    backend: Backend = "",
    timeout: AgentTimeout = None,
    max_calls: MaxCalls = None,
    seed: Seed = None,
    run_id: Annotated[str | None, typer.Option(help="Groups rollouts of one run.")] = None,
    attempts: Annotated[
        int | None,
        typer.Option(min=1, max=10, help="Limit of attempts; only failures that are not the agent's are retried."),
    ] = None,
    replay: Annotated[
        Replay | None,
        typer.Option(help="What a further attempt does with the last one's answers; default until_divergence."),
    ] = None,
    require_assay: RequireAssay = None,
    assay_key: AssayKey = None,
    keep_end_state: KeepEndState = None,
    user: UserFile = None,
    prices: PriceFile = None,
    model_dir: ModelDir = None,
    engine: Engine = "numpy",
    script: Script = None,
    state_dir: StateDir = None,
    save: Annotated[Path, typer.Option(help="Directory for trajectories and artifacts.")] = Path("runs/rollouts"),
    files_from: FilesFrom = None,
    as_json: AsJson = False,
) -> None:
    """Run an agent on a task, watch it live, and save its trajectory."""
    answers = answerer(upstream, model, api_key_env)
    choice = model_choice(model_dir, engine, script)
    priced = None if prices is None else read(Prices.load, prices)
    given = with_image(read(partial(Task.load, files_from=files_from or ()), task))
    options = rollout_options(
        answers, backend=backend, timeout=timeout, max_calls=max_calls, seed=seed, keep_end_state=keep_end_state
    )
    options["mode"] = mode or (Mode.TRANSPARENT_PROXY if upstream else Mode.INTERCEPTION_GATE)
    if models is not None:
        options["models"] = read(load_models, models)
    if run_id is not None:
        options["run_id"] = run_id
    if attempts is not None:
        options["max_attempts"] = attempts
    if replay is not None:
        options["replay"] = replay
    if user is not None:
        options["user"] = read(load_user, user)
    required_assays(options, require_assay, assay_key)
    chosen = agent_choice(agent, option, skip_permissions)

    async def work() -> int:
        if "require_assay" in options:
            options["require_assay"].require(given)
        async with answered(choice, answers, state_dir=state_dir) as ps:
            await require_engine(ps, answers)
            return await _run(ps, given, chosen, n, options, save, priced, as_json)

    run(work())


async def _run(
    ps: Penstock,
    task: Task,
    agent: AgentChoice,
    n: int,
    options: RolloutOptions,
    save: Path,
    prices: Prices | None,
    as_json: bool,
) -> int:
    name = f"{agent.name}-{task.task_id}"[:100] + f"-{secrets.token_hex(4)}"
    selector: dict[str, Any] = {"rollout_ids": (name,)} if n == 1 else {"group_id": name}
    async with delegating(ps, selector, needed=options.get("mode") == Mode.INTERCEPTION_GATE):
        handle: RolloutHandle | GroupHandle
        if n == 1:
            handle = await created(ps.rollouts.create(task, agent, rollout_id=name, **options), INTERRUPTED)
        else:
            handle = await created(ps.groups.create(task, agent, n, group_id=name, **options), INTERRUPTED)
        title = f"{'rollout' if n == 1 else 'group'}: {name}"
        return await see_through(ps, handle, n, save, as_json, title, run_id=options.get("run_id"), prices=prices)


async def see_through(
    ps: Penstock,
    handle: RolloutHandle | GroupHandle,
    n: int,
    save: Path,
    as_json: bool,
    title: str,
    *,
    run_id: str | None = None,
    prices: Prices | None = None,
) -> int:
    """Shows rollouts to their end, and saves each as it ends. Returns the exit code.

    Whatever ends it early, an interruption, an error or a closed output, cancels those that run.
    """
    progress: GroupProgress | None = None
    ends = EndedRollouts(ps, save, keep=n == 1)
    try:
        if not as_json:
            err.print(title, markup=False)
        if n > 1 and isinstance(handle, GroupHandle) and not as_json:
            async with aclosing(ps.rollouts.list(group_id=handle.group_id)) as found:
                progress = GroupProgress([item async for item in found], run_id)
        async with ends.saving():
            await _watch(handle, progress, ends, save, as_json)
    except BaseException as error:
        with suppress(OSError, SystemExit):  # its reader may be gone, too
            err.print("cancelling")
        if await abandon(handle, INTERRUPTED):  # otherwise the services do not answer
            await ends.finish(_SAVE_S)
        if not isinstance(error, BrokenPipeError | SystemExit):
            _show(ps, ends, progress, save, prices, as_json)
        raise
    _show(ps, ends, progress, save, prices, as_json)
    for failed in ends.errors.values():
        raise failed
    return FAILED if any(outcome.failure is not None for outcome in ends.outcomes.values()) else OK


@asynccontextmanager
async def delegating(ps: Penstock, selector: dict[str, Any], *, needed: bool = True) -> AsyncIterator[None]:
    """In gate mode the command line is the trainer: it delegates each call to the model source."""
    if not needed:
        yield
        return
    async with ps.intercept(**selector, credits=64, identity="penstock rollout") as session:
        try:
            async with asyncio.TaskGroup() as tasks:  # without a trainer the rollout would wait forever
                delegating = tasks.create_task(_delegate(session), name="penstock-delegate")
                yield
                delegating.cancel()
        except BaseExceptionGroup as group:
            raise first_of(group) from None


async def _delegate(session: InterceptSession) -> None:
    async with asyncio.TaskGroup() as tasks, aclosing(session.calls()) as calls:
        async for call in calls:
            tasks.create_task(_pass_on(call))


async def _pass_on(call: Any) -> None:
    # A call that ended meanwhile needs no answer: its rollout has the reason.
    with suppress(ResultRejected):
        await call.delegate()


async def _watch(
    handle: RolloutHandle | GroupHandle, progress: GroupProgress | None, ends: EndedRollouts, save: Path, as_json: bool
) -> None:
    """Shows events, or a group's progress, until all have ended."""
    events: AsyncGenerator[RolloutEvent, None] = handle.events()
    async with _table(progress) as drawn, aclosing(events):
        async for item in events:
            payload = item.payload
            if isinstance(payload, ArtifactCollected):
                _keep(save / item.rollout_id / "artifacts", payload)
            ends.add(item)
            if as_json:
                emit(event_shape(item))
            elif progress is not None:
                changed = progress.apply(item)
                if changed is not None and not drawn:
                    out.print(Text(rows.line(changed)))
            elif (shown := show.event(item)) is not None:
                out.print(shown)


@asynccontextmanager
async def _table(progress: GroupProgress | None) -> AsyncIterator[bool]:
    """Draws a group live while open, where a terminal can be drawn on; yields whether it does."""
    if progress is None or not out.is_terminal or out.is_dumb_terminal:
        yield False
        return

    async def redraw(live: Live) -> None:
        while True:
            await asyncio.sleep(_REDRAW_S)
            live.refresh()

    # Drawn by this loop: a thread of its own would meet a table that is being changed.
    with Live(progress, console=out, auto_refresh=False, transient=True) as live:
        redrawing = asyncio.create_task(redraw(live), name="penstock-redraw")
        try:
            yield True
        finally:
            redrawing.cancel()
            with suppress(asyncio.CancelledError):
                await redrawing


def _show(
    ps: Penstock,
    ends: EndedRollouts,
    progress: GroupProgress | None,
    save: Path,
    prices: Prices | None,
    as_json: bool,
) -> None:
    """Prints what has ended: each rollout, or their group."""
    if progress is None:
        for rollout_id in ends.outcomes:
            _show_end(rollout_id, ends, save, prices, as_json)
    elif ends.outcomes:
        _show_group(progress, ends.outcomes, save, ps.endpoints.dashboard)
        if prices is not None:
            out.print(f"cost {escape(str(prices.cost(ends.used_by_all)))}", style="dim", soft_wrap=True)
    for rollout_id, error in ends.errors.items():
        err.print(f"{escape(rollout_id)} is not saved: {escape(clean(str(error)))}", soft_wrap=True)


def _show_group(progress: GroupProgress, ended: Mapping[str, Outcome], save: Path, dashboard: str) -> None:
    """Prints a group that has ended: its table, failures, and the summary."""
    group = progress.group
    width = out.width if out.is_terminal else rows.WIDE * 2
    out.print()
    out.print(progress.table(width), width=width)
    out.print()
    for part in group_progress.failures(ended):
        out.print(part)
    for line in group_progress.summary(group):
        out.print(line, soft_wrap=True)
    out.print(f"saved in {escape(str(save / group.group_id))}-*", style="dim", soft_wrap=True)
    if dashboard:
        out.print(f"{escape(clean(dashboard))}#/groups/{quote(group.group_id, safe='')}", style="dim", soft_wrap=True)


def _show_end(rollout_id: str, ends: EndedRollouts, save: Path, prices: Prices | None, as_json: bool) -> None:
    """Prints the outcome of one rollout."""
    folder, outcome = save / rollout_id, ends.outcomes[rollout_id]
    cost = None if prices is None else prices.cost(ends.used(rollout_id))
    if as_json:
        emit(
            {
                "rollout_id": rollout_id,
                "completed": outcome.completed,
                "failure": None if outcome.failure is None else outcome.failure.reason,
                "reward": None if outcome.reward is None else outcome.reward.value,
                "saved": str(folder) if rollout_id in ends.saved else None,
                "cost": None if cost is None else cost.as_dict(),
            }
        )
        return
    out.print()
    out.print(f"[bold]{escape(rollout_id)}[/] ", end="")
    out.print(outcomes.outcome(outcome))
    if outcome.failure is not None and outcome.agent_stderr:
        out.print(outcomes.agent_stderr(outcome.agent_stderr))
    trajectory = ends.trajectories.get(rollout_id)
    if trajectory is not None:
        if trajectory.calls:
            out.print(outcomes.calls(trajectory))
        out.print(outcomes.totals(trajectory), style="dim")
    elif rollout_id not in ends.errors:
        out.print("[dim]no trajectory: it ended before the gate was opened[/]")
    if cost is not None:
        out.print(f"cost {escape(str(cost))}", style="dim", soft_wrap=True)
    if rollout_id in ends.saved:
        out.print(f"saved in {escape(str(folder))}", style="dim")


def _keep(folder: Path, artifact: ArtifactCollected) -> None:
    """Writes an artifact under its name, which comes from the spec and cannot leave the directory."""
    name = Path(artifact.name).name
    if name:
        write_whole(folder / name, artifact.content)
