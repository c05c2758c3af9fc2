"""`penstock regrade`: grades the ended rollouts of a run again, without their policy."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from penstock.cli.commands.grades.chosen import Chosen, chosen
from penstock.cli.connections.options import AsJson, FilesFrom, StateDir
from penstock.cli.connections.service_selection import services
from penstock.cli.terminal.console import FAILED, OK, clean, counted, emit, err, out, read, run
from penstock.client import Penstock, PenstockError, Regraded, Verifier
from penstock.tasks.verifiers import load_verifiers


def regrade(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a group.")],
    verifier: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="A file with a verifier's keys, a task file, or a directory of tasks: of several tasks, each verifier"
            " is for the rollouts with its task_id. Default: each rollout's own.",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the grade; default: from the verifier's SHA-256.")] = "",
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Rollouts at once.")] = 16,
    files_from: FilesFrom = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Grade ended rollouts again, from their kept end states; their first grades stay.

    After an interruption, the same command goes on: grades that are there are not made again. Exit code 1: some rollout
    has no grade of this verifier.
    """
    given = None if verifier is None else read(partial(load_verifiers, files_from=files_from or ()), verifier)

    async def work() -> int:
        async with services(state_dir=state_dir) as ps:
            which = await chosen(ps, run_id)
            if which is None:
                return FAILED
            began = monotonic()
            found, broken = await _all(ps, given, name, concurrency, which, emit if as_json else None)
            seconds = monotonic() - began
        if isinstance(given, Mapping) and not found and broken is None:
            tasks = ", ".join(sorted(given)[:8])
            err.print(escape(clean(f"no rollout of {run_id} is of a task of {verifier}: {tasks}")), soft_wrap=True)
        failed = Counter(one.error.reason for one in found if one.error is not None)
        if as_json:
            graded = len(found) - failed.total()
            emit({"run": run_id, "graded": graded, "errors": dict(failed), "seconds": round(seconds, 3)})
        else:
            _print(found, failed, seconds)
        if broken is not None:
            raise broken
        return OK if found and not failed else FAILED

    run(work())


async def _all(
    ps: Penstock,
    given: Verifier | Mapping[str, Verifier] | None,
    name: str,
    concurrency: int,
    which: Chosen,
    each: Callable[[object], None] | None,
) -> tuple[list[Regraded], PenstockError | None]:
    """Regrades all; returns what was done, and the error that ended it early, such as that of a driver that is away."""
    broken: PenstockError | None = None
    found: list[Regraded] = []
    look = (TextColumn("regrading"), BarColumn(), MofNCompleteColumn())
    with Progress(*look, console=err, transient=True) as progress:
        bar = progress.add_task("", total=which.ended)
        grading = ps.rollouts.regrade_all(given, name=name, concurrency=concurrency, **which.where)
        async with aclosing(grading):
            try:
                async for one in grading:
                    found.append(one)
                    if each is not None:
                        each(_row(one))
                    progress.advance(bar)
            except PenstockError as error:
                broken = error
    return found, broken


def _row(one: Regraded) -> dict[str, Any]:
    grade, error = one.grade, one.error
    return {
        "rollout_id": one.rollout.rollout_id,
        "grade": None if grade is None else grade.name,
        "verifier_sha256": None if grade is None or grade.grading is None else grade.grading.verifier_sha256,
        "reward": None if grade is None or grade.reward is None else grade.reward.value,
        "reason": None if grade is None or grade.failure is None else grade.failure.reason,
        "error": None if error is None else error.reason,
        "message": None if error is None else error.message,
    }


def _print(found: list[Regraded], failed: Counter[str], seconds: float) -> None:
    graded = [one.grade for one in found if one.grade is not None]
    rewards = [grade.reward.value for grade in graded if grade.reward is not None]
    names = ", ".join(sorted({grade.name for grade in graded}))
    rate = len(found) / seconds if seconds > 0 else 0.0
    text = f"{counted(len(graded), 'rollout')} graded"
    if names:
        text += f" as {names}"
    text += f", in {seconds:.1f} s ({rate:.1f} per second)"
    if rewards:
        text += f"; mean reward {sum(rewards) / len(rewards):.3f} of {len(rewards)}"
    out.print(escape(clean(text)), soft_wrap=True)
    for reason, count in failed.most_common():
        example = next(one.error for one in found if one.error is not None and one.error.reason == reason)
        err.print(escape(clean(f"{count} not graded, {reason}: {example.message}")), soft_wrap=True)
