"""`penstock tasks assay`: tries whether tasks are fit to train on, reports what is wrong, and signs the results."""

from functools import partial
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.markup import escape

from penstock.assay import Assay, Code, Kind, Terms, assay
from penstock.assay.report import line_of, rewards, shape, size_text, write_html
from penstock.cli.connections.model_sources import Engine, ModelDir, Script, answered, answerer, model_choice
from penstock.cli.connections.options import AsJson, Backend, FilesFrom, StateDir, UpstreamModel, rollout_options
from penstock.cli.terminal.console import FAILED, OK, clean, columns, counted, emit, err, out, quoted, read, run
from penstock.client.errors import InvalidArgument
from penstock.client.rollouts.assays import existing_or_new_key, key_beside, read_key, read_lines
from penstock.client.transport.atomic_files import write_whole
from penstock.tasks.images import build_images, with_image
from penstock.tasks.sets import load_tasks


def assay_(
    tasks: Annotated[list[Path], typer.Argument(help="Directories of tasks, task set files, or task files.")],
    solutions: Annotated[int, typer.Option(min=1, max=100, help="Trials of each solution.")] = 5,
    mutants: Annotated[int, typer.Option(min=0, max=1000, help="At most so many mutated solutions of a task.")] = 12,
    attacks: Annotated[bool, typer.Option(help="Whether the reward attacks are tried.")] = True,
    accept: Annotated[
        list[Code] | None,
        typer.Option(case_sensitive=False, help="A defect that is only a warning, and is in the line; repeat."),
    ] = None,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="End a task's assay at the first kind of trial that shows a defect.")
    ] = False,
    lines: Annotated[
        Path, typer.Option("--out", help="File of the signed lines; lines of other tasks in it stay.")
    ] = Path("runs/assay/assay.jsonl"),
    key: Annotated[
        Path | None,
        typer.Option(
            envvar="PENSTOCK_ASSAY_KEY",
            help="File of the key that signs, made if absent and --out has no line; default: beside --out, *.key.",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="File of the HTML report; default: beside --out.")] = None,
    report: Annotated[Path | None, typer.Option(help="File of the JSON report; default: beside --out.")] = None,
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
    """Try whether tasks are fit to train on: solution, verifier, and what their agents can read; sign the results."""
    load = partial(load_tasks, files_from=files_from or ())
    given = [with_image(task) for place in tasks for task in read(load, place).tasks]
    answers = answerer(upstream, model, None)
    choice = model_choice(model_dir, engine, script)
    options = rollout_options(answers, backend=backend)
    terms = Terms(
        solutions=solutions, mutants=mutants, attacks=attacks, accept=frozenset(accept or ()), fail_fast=fail_fast
    )

    found: list[Assay] = []

    def ended(secret: bytes, result: Assay) -> None:
        found.append(result)
        _sign(lines, secret, found)  # at once: whatever ends the command does not take it back
        if as_json:
            emit(shape(result))
        else:
            what = "passed" if result.passed else ", ".join(dict.fromkeys(item.code for item in result.defects))
            err.print(f"{escape(result.task_id)}: {what}", style="dim", soft_wrap=True)

    def tell() -> None:
        """Writes the reports, and prints the table, of the tasks whose assays have ended."""
        places = {task.task_id: place for place, task in enumerate(given)}
        found.sort(key=lambda item: places[item.task_id])
        page, data = html or lines.with_suffix(".html"), report or lines.with_suffix(".json")
        write_html(page, ", ".join(place.absolute().name for place in tasks), found)
        content = {"assays": [shape(item) for item in found]}
        write_whole(data, orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        if not as_json:
            _show(found)
        passed, rest = sum(item.passed for item in found), len(given) - len(found)
        unended = f", {rest} not assayed" if rest else ""
        err.print(f"[dim]{passed} of {counted(len(found), 'task')} passed{unended}; signed lines in "
                  f"{escape(str(lines))}, reports in {escape(str(page))} and {escape(str(data))}[/]",
                  soft_wrap=True)  # fmt: skip

    async def work() -> int:
        secret = _key_for(lines, key or key_beside(lines))
        if build:
            await build_images(given, lambda line: err.print(escape(line), style="dim"))
        try:
            async with answered(choice, answers, state_dir=state_dir) as ps:
                known = partial(ended, secret)
                await assay(ps, given, terms, concurrency=concurrency, options=options, ended=known)
        finally:
            if found:
                tell()
        return OK if all(item.passed for item in found) else FAILED

    run(work())


def _key_for(lines: Path, key: Path) -> bytes:
    """Returns the key, which is that of the lines there are: those of two keys in one file would all be refused.

    Raises:
        InvalidArgument: `ASSAY_UNREADABLE`; the key does not fit the lines, or cannot be read.
        ConfigurationError: `FILE_NOT_WRITTEN`.
    """
    if not lines.exists() or lines.stat().st_size == 0:
        return existing_or_new_key(key)
    try:
        secret = read_key(key)
        read_lines(lines, secret)
    except InvalidArgument as error:
        remedy = f"{lines} has lines, which stay: name their key by --key, or another file by --out"
        raise InvalidArgument(f"{error.message}; {remedy}", reason="ASSAY_UNREADABLE") from None
    return secret


def _sign(file: Path, key: bytes, found: list[Assay]) -> None:
    """Writes the lines of these tasks, and keeps those of others.

    Whatever became of the file since its lines were read, the results of this assay are written.
    """
    ids = {item.task_id for item in found}
    lines = file.read_bytes().splitlines() if file.exists() else []
    kept = b"".join(line + b"\n" for line in lines if _task_of(line) not in ids)
    write_whole(file, kept + b"".join(line_of(item).signed(key) for item in found))


def _task_of(line: bytes) -> str | None:
    try:
        return str(orjson.loads(line)["task_id"])
    except (ValueError, TypeError, LookupError):
        return None


def _show(found: list[Assay]) -> None:
    rows = columns(
        "task", "solution", "nothing", ("trials", "right"), ("set-up", "right"), ("size", "right"), "verdict"
    )
    for item in found:
        rows.add_row(
            escape(item.task_id),
            rewards(item, Kind.SOLUTION),
            rewards(item, Kind.NOTHING),
            str(len(item.trials)),
            f"{item.setup_seconds:.1f} s",
            size_text(item.size_bytes),
            "[green]passed[/]" if item.passed else f"[red]{counted(len(item.defects), 'defect')}[/]",
        )
    out.print(rows)
    for item in found:
        for finding in item.findings:
            colour = "red" if finding in item.defects else "yellow"
            head = f"[bold]{escape(item.task_id)}[/] [{colour}]{finding.code}[/]"
            out.print(f"{head} {escape(clean(finding.message))}", soft_wrap=True)
            if finding.evidence.strip():
                out.print(quoted(finding.evidence, colour, lines=12))
