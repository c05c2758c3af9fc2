"""`penstock tasks`: writes, checks, imports, proves and assays tasks, exports their schema, builds their images."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.markup import escape

from penstock.cli.commands.assay.command import assay_
from penstock.cli.connections.model_sources import Engine, ModelDir, Script, answered, answerer, model_choice
from penstock.cli.connections.options import AsJson, Backend, FilesFrom, StateDir, UpstreamModel, rollout_options
from penstock.cli.terminal.console import (
    FAILED,
    OK,
    clean,
    columns,
    counted,
    emit,
    err,
    out,
    quoted,
    read,
    run,
    usage_error,
)
from penstock.client.tasks.file import identifier
from penstock.client.tasks.task import Task
from penstock.tasks import debian
from penstock.tasks.images import build_images, contexts_of, image_of, with_image
from penstock.tasks.importers import FORMATS, Choices, import_tasks
from penstock.tasks.scaffold import write
from penstock.tasks.sets import load_tasks, schemas
from penstock.tasks.solutions import Proof, prove

app = typer.Typer(help="Write, check, import, prove and assay tasks.", no_args_is_help=True)
Tasks = Annotated[Path, typer.Argument(help="Directory of tasks, task set file, or task file.")]


@app.command(short_help="Write a task to start from: a repository with pytest.")
def new(
    name: Annotated[str, typer.Argument(help="The task's name, and its directory's.")],
    folder: Annotated[Path, typer.Option("--in", help="Directory to make it in.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Write a directory with a task that can be proved at once: repository, packages, verifier, solution."""
    target = folder / name
    if identifier(name) != name:
        raise typer.BadParameter(
            "expected at most 128 letters, digits and . _ -, starting with a letter or digit", param_hint="NAME"
        )
    try:
        write(target)
    except FileExistsError:
        raise typer.BadParameter(f"{target} exists: choose another name", param_hint="NAME") from None
    except OSError as error:
        raise typer.BadParameter(f"{target} cannot be written: {error.strerror}", param_hint="--in") from None
    if as_json:
        emit({"folder": str(target)})
        return
    out.print(f"wrote {escape(str(target))}; next: penstock tasks prove {escape(str(target))}", soft_wrap=True)


@app.command(short_help="Check that every task of a directory is valid, and list them.")
def check(
    tasks: Tasks,
    files_from: FilesFrom = None,
    as_json: AsJson = False,
) -> None:
    """Read every task and report each problem with file, line and field. Nothing is started."""
    given = read(partial(load_tasks, files_from=files_from or ()), tasks)
    rows = columns("task", "image", ("files", "right"), ("setup", "right"), "verifier", "solution")
    for task in given.tasks:
        image = image_of(task) or ("" if task.sandbox is None else task.sandbox.image)
        commands = 0 if task.verifier is None else len(task.verifier.commands)
        if as_json:
            body = {
                "task_id": task.task_id,
                "image": image,
                "files": len(task.files),
                "setup": len(task.setup),
                "verifier_commands": commands,
                "has_solution": task.solution is not None,
            }
            emit(body)
            continue
        rows.add_row(
            escape(task.task_id),
            escape(image),
            str(len(task.files)),
            str(len(task.setup)),
            counted(commands, "command") if commands else "[yellow]none: not graded[/]",
            "yes" if task.solution is not None else "",
        )
    if not as_json:
        out.print(rows)
        verb = "is" if len(given) == 1 else "are"
        err.print(f"{counted(len(given), 'task')} of {escape(given.name)} {verb} valid", style="dim")


@app.command("lock", short_help="Write the lock of a task's Debian packages, as apt would install them here.")
def lock_(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Packages, as NAME or NAME=VERSION.")],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="Where it is written.")] = Path("debian.txt"),
    status: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="dpkg's status of the image it is for; default: this machine's."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask this machine's apt what it would install, and write each file's version, path and SHA-256.

    Nothing is installed. The lock names the packages and those dependencies that are not installed; it is
    `sandbox.packages.debian` of a task.
    """

    async def work() -> int:
        found = await debian.lock(names, status)
        to.write_text("".join(f"{package.line}\n" for package in found), encoding="utf-8")
        for package in found if as_json else ():
            emit(asdict(package))
        if not as_json:
            out.print(f"wrote {escape(str(to))}: {counted(len(found), 'package')}", soft_wrap=True)
        return OK

    run(work())


@app.command(short_help="The JSON schema of a task file, for editors.")
def schema(
    of_set: Annotated[bool, typer.Option("--taskset", help="The schema of a task set file instead.")] = False,
) -> None:
    """Print the JSON schema that editors complete and check task files by."""
    found = schemas()["taskset" if of_set else "task"]
    typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())


@app.command("import", short_help="Tasks of Harbor, Terminal-Bench, SWE-bench's family, NeMo-Gym as task directories.")
def import_(
    form: Annotated[str, typer.Argument(metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.")],
    source: Annotated[
        Path,
        typer.Argument(help="Their directory, file or directory of records (.jsonl, .json, .parquet), or registry."),
    ],
    destination: Annotated[Path, typer.Argument(help="Directory for the task directories.")],
    image: Annotated[
        bool, typer.Option(help="Whether the backend has images; without images, only their files are imported.")
    ] = True,
    resources: Annotated[bool, typer.Option(help="Whether limits of CPU, memory and disk are imported.")] = True,
    user: Annotated[
        str | None, typer.Option(help="User that runs the tasks; default: root if there is an image.")
    ] = None,
    reward: Annotated[str, typer.Option(help="binary, or fraction of the tests.")] = "binary",
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Value of ${NAME}; repeat.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME|PATTERN", help="Import the tasks of this name only; repeat.")
    ] = None,
    dataset: Annotated[str, typer.Option(metavar="NAME[@VERSION]", help="Data set of a registry.")] = "",
    image_template: Annotated[
        str, typer.Option(help="Image of a record without one, with {instance_id}, {docker_id}, {gym_id}, {repo}.")
    ] = "",
    workdir: Annotated[
        str, typer.Option(help="Where a record's image has its repository; default: the format's.")
    ] = "",
    test_command: Annotated[str, typer.Option(help="How pytest runs a record's tests.")] = "",
    history: Annotated[
        bool, typer.Option("--history", help="Keep the commits of a record's image, which may have the answer.")
    ] = False,
    repositories: Annotated[
        Path | None, typer.Option(help="Directory of clones: of records without an image, of a registry's tasks.")
    ] = None,
    build: Annotated[bool, typer.Option(help="Build the images that the tasks bring.")] = False,
    as_json: AsJson = False,
) -> None:
    """Import tasks of other formats as task directories, graders included, and report what could not be imported."""
    if reward not in ("binary", "fraction"):
        usage_error("--reward is binary or fraction")
    answers = dict(item.partition("=")[::2] for item in env or [])
    choices = Choices(
        image=image, resources=resources, user=user, reward=reward, env=answers, only=only or (), dataset=dataset,
        image_template=image_template, workdir=workdir, test_command=test_command, history=history,
        repositories=repositories,
    )  # fmt: skip
    found = read(lambda path: import_tasks(form, path, destination, choices), source)
    for item in found:
        if as_json:
            folder = None if item.folder is None else str(item.folder)
            emit({"name": item.name, "folder": folder, "problem": item.problem, "notes": item.notes})
            continue
        if item.folder is None:
            err.print(f"[red]{escape(item.name)}[/]: {escape(clean(item.problem))}", soft_wrap=True)
        else:
            out.print(escape(str(item.folder)), soft_wrap=True)
        for note in item.notes:
            err.print(f"[dim]{escape(item.name)}: {escape(clean(note))}[/]", soft_wrap=True)
    made = [item.folder for item in found if item.folder is not None]

    async def work() -> int:
        for folder in made if build else ():  # one task's files in memory at a time
            await build_images([Task.load(folder)], lambda line: err.print(escape(line), style="dim"))
        err.print(f"{counted(len(made), 'task')} imported, {len(found) - len(made)} refused", style="dim")
        return OK if len(made) == len(found) else FAILED

    run(work())


@app.command(short_help="Build the images of tasks that bring a Dockerfile.")
def build(tasks: Tasks, files_from: FilesFrom = None, as_json: AsJson = False) -> None:
    """Build the missing images of tasks; each is named after its content."""
    given = read(partial(load_tasks, files_from=files_from or ()), tasks).tasks

    async def work() -> int:
        await build_images(given, lambda line: err.print(escape(line), style="dim"))
        for image in (name for task in given for name in contexts_of(task)):
            if as_json:
                emit({"image": image})
            else:
                out.print(escape(image), soft_wrap=True)
        return OK

    run(work())


@app.command("prove", short_help="Check that solutions get the full reward, and that doing nothing gets less.")
def prove_(
    tasks: Tasks,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Rollouts at once.")] = 4,
    backend: Backend = "",
    build: Annotated[bool, typer.Option(help="Build the tasks' images first.")] = False,
    upstream: Annotated[
        str | None, typer.Option(metavar="URL|NAME", help="Never called; stands for the model if there is none.")
    ] = None,
    model: UpstreamModel = "",
    model_dir: ModelDir = None,
    engine: Engine = "numpy",
    script: Script = None,
    state_dir: StateDir = None,
    files_from: FilesFrom = None,
    as_json: AsJson = False,
) -> None:
    """Grade each task's own solution, and no work at all, with its verifier, to prove the verifier."""
    given = [with_image(task) for task in read(partial(load_tasks, files_from=files_from or ()), tasks).tasks]
    answers = answerer(upstream, model, None)
    choice = model_choice(model_dir, engine, script)
    options = rollout_options(answers, backend=backend)

    proofs: list[Proof] = []

    def ended(proof: Proof) -> None:
        proofs.append(proof)
        if as_json:
            emit(proof)
        else:
            err.print(f"{escape(proof.task_id)}: {'holds' if proof.holds else 'invalid'}", style="dim", soft_wrap=True)

    def show() -> None:
        """Prints the proofs that there are, in the order of the tasks."""
        places = {task.task_id: place for place, task in enumerate(given)}
        proofs.sort(key=lambda proof: places[proof.task_id])
        rows = columns("task", "solution", "nothing", "verdict")
        for proof in proofs:
            verdict = "[green]holds[/]" if proof.holds else "[red]invalid[/]"
            rows.add_row(escape(proof.task_id), _shown(proof.solution), _shown(proof.nothing), verdict)
        out.print(rows)
        for proof in proofs:
            for text in proof.problems:
                out.print(f"[bold]{escape(proof.task_id)}[/]")
                out.print(quoted(text, "red", lines=30))

    async def work() -> int:
        if build:
            await build_images(given, lambda line: err.print(escape(line), style="dim"))
        try:
            async with answered(choice, answers, state_dir=state_dir) as ps:
                await prove(ps, given, concurrency=concurrency, options=options, ended=ended)
        finally:
            if not as_json and proofs:
                show()
        return OK if all(proof.holds for proof in proofs) else FAILED

    run(work())


app.command("assay", short_help="Try whether tasks are fit to train on, and sign the results.")(assay_)


def _shown(reward: Any) -> str:
    return "not graded" if reward is None else f"{reward:g}"
