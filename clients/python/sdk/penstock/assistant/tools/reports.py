"""Reports: results of evaluations and assays in files, two grades of a run, and definitions of tasks."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
from pydantic import Field

from penstock.analysis.reward_diff import FIRST, grade_names, reward_diff
from penstock.assistant.answers import Answer, Quote, excerpt, shown_text
from penstock.assistant.context import MAX_FILE_BYTES, Context
from penstock.assistant.errors import ToolError
from penstock.assistant.paging import page
from penstock.assistant.tools.base import Arguments, Cursor, Limit, Name, Offset, PathName, Tool
from penstock.client.tasks.task import Task
from penstock.evaluation.attempts import ATTEMPTS_FILE, CONFIG_FILE, Attempt, read_attempts, read_config
from penstock.evaluation.summary import summarise
from penstock.tasks.sets import load_tasks
from penstock.values.similar_names import did_you_mean

_ASSAY: Final = b'{\n  "assays": ['
"""How the JSON report of `penstock tasks assay` begins."""
_TEXT_BYTES: Final = 24 << 10
_ATTEMPTS: Final = 20
_FINDINGS: Final = 20


class _Reports(Arguments):
    limit: Limit = 50
    cursor: Cursor = ""


class _Report(Arguments):
    path: PathName
    task_id: Annotated[
        Name, Field(description="With the attempts, or the findings, of this task; empty: all tasks in short.")
    ] = ""
    threshold: Annotated[
        float,
        Field(gt=0, le=1, description="Of an evaluation: share of the reward's range from which an attempt passed."),
    ] = 1.0
    limit: Limit = 50
    cursor: Cursor = ""


class _Diff(Arguments):
    run_id: Annotated[str, Field(min_length=1, max_length=200, description="A run, from `runs`.")]
    grade: Annotated[Name, Field(description="Name of a further grade; empty: the newest.")] = ""
    against: Annotated[Name, Field(description="The grade to compare it with.")] = FIRST
    limit: Limit = 50
    cursor: Cursor = ""


class _Definition(Arguments):
    path: PathName
    task_id: Annotated[Name, Field(description="Which task of a set; empty: the only one, or the list.")] = ""
    offset: Offset = 0


async def _list(context: Context, given: _Reports) -> Answer:
    def search() -> list[tuple[Path, str]]:
        return [(path, kind) for path in context.files() if (kind := _kind(path))]

    found = await asyncio.to_thread(search)

    def row(item: tuple[Path, str]) -> Mapping[str, Any]:
        path, kind = item
        return {"path": str(path.parent if kind == "evaluation" else path), "kind": kind}

    rows = page(found, lambda item: (0.0, str(item[0])), row, given.cursor, given.limit)
    facts = rows.facts("reports")
    facts["directories"] = [str(place) for place in context.directories]
    if not found:
        facts["next"] = "none is there: ask the user for the directory, which the server needs as --files DIR"
    return Answer(facts)


async def _read(context: Context, given: _Report) -> Answer:
    path = context.place(given.path)
    if path.name == CONFIG_FILE:
        path = path.parent
    return await asyncio.to_thread(_evaluation if path.is_dir() else _assay, context, path, given)


def _evaluation(context: Context, folder: Path, given: _Report) -> Answer:
    for name in (CONFIG_FILE, ATTEMPTS_FILE):  # bounded, and no pipe
        if (folder / name).exists():
            context.content(context.place(str(folder / name)))
    config = read_config(folder)
    attempts = read_attempts(folder)
    summary = summarise(attempts, config["tasks"], int(config["attempts"]), given.threshold)
    table = summary.table()
    if given.task_id:
        _check_task(given.task_id, config["tasks"])
        return _attempts(given, [one for one in attempts if one.task_id == given.task_id])
    rows = page(table.pop("tasks"), lambda row: (0.0, row["task_id"]), lambda row: row, given.cursor, given.limit)
    about = {name: config.get(name) for name in ("eval_id", "name", "agent", "model", "mode", "temperature", "seed")}
    tokens = {"prompt_tokens": summary.prompt_tokens, "sampled_tokens": summary.completion_tokens}
    return Answer(
        {"kind": "evaluation", **about, "complete": summary.complete, **table, **tokens, **rows.facts("tasks")}
    )


def _attempts(given: _Report, attempts: Sequence[Attempt]) -> Answer:
    ordered = sorted(attempts, key=lambda one: (one.index, one.again))[:_ATTEMPTS]
    rows, quotes = [], []
    for one in ordered:
        rows.append(
            {
                "index": one.index,
                "again": one.again,
                "rollout_id": one.rollout_id,
                "reward": one.reward,
                "passed": one.passed(given.threshold),
                "cause": one.cause,
                "reason": one.reason,
                "agent_exit": one.agent_exit,
                "seconds": round(one.seconds, 1),
                "calls": one.calls,
                "prompt_tokens": one.prompt_tokens,
                "sampled_tokens": one.completion_tokens,
            }
        )
        which = f"attempt {one.index}"
        output = "\n".join(f"$ {ran.command} [{ran.end}]\n{ran.output}" for ran in one.ran)
        quotes += [
            Quote("Penstock, with parts of what failed", f"{which}: message", one.message),
            Quote("the agent", f"{which}: the end of its output", one.said),
            Quote("the verifier and set-up commands", f"{which}: output", output),
        ]
    return Answer({"kind": "evaluation", "task_id": given.task_id, "total": len(attempts), "attempts": rows}, quotes)


def _assay(context: Context, path: Path, given: _Report) -> Answer:
    content = context.content(path)
    try:
        entries = orjson.loads(content)["assays"]
        if given.task_id:
            _check_task(given.task_id, [entry["task_id"] for entry in entries])
            return _assayed(next(entry for entry in entries if entry["task_id"] == given.task_id))
        codes = Counter(code for entry in entries for code in {one["code"] for one in entry["findings"]})
        rows = page(
            entries,
            lambda entry: (0.0, str(entry["task_id"])),
            lambda entry: {
                "task_id": entry["task_id"],
                "passed": entry["passed"],
                "findings": sorted({one["code"] for one in entry["findings"]}),
                "trials": len(entry["trials"]),
            },
            given.cursor,
            given.limit,
        )
        passed = sum(entry["passed"] is True for entry in entries)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise ToolError(
            f"path: {path} is neither an evaluation's directory nor the JSON report of an assay",
            reason="REPORT_UNREADABLE",
            advice="call `reports` for those that are there",
        ) from None
    return Answer({"kind": "assay", "passed": passed, "codes": dict(codes.most_common()), **rows.facts("tasks")})


def _assayed(entry: Mapping[str, Any]) -> Answer:
    findings, trials = entry["findings"][:_FINDINGS], entry["trials"][:100]
    facts = {
        "kind": "assay",
        "task_id": entry["task_id"],
        "passed": entry["passed"],
        "findings": [{"code": one["code"], "severity": one["severity"]} for one in findings],
        "trials": [{"kind": one["kind"], "reward": one["reward"], "seconds": one["seconds"]} for one in trials],
    }
    text = "\n".join(f"{one['code']}: {one['message']}\n{one['evidence']}".rstrip() for one in findings)
    failures = "\n".join(f"{one['kind']} {one['name']}: {one['failure']}" for one in trials if one["failure"])
    return Answer(
        facts,
        [
            Quote("the assay and the task's sandbox", "findings with their evidence", text),
            Quote("Penstock, with parts of what failed", "trials without a reward", failures),
        ],
    )


async def _diff(context: Context, given: _Diff) -> Answer:
    async with context.connected() as ps:
        rollouts = [one async for one in ps.rollouts.list(run_id=given.run_id, ended=True)]
    names = grade_names(rollouts)
    if not names:
        raise ToolError(
            f"no ended rollout of run {given.run_id} has a further grade",
            reason="GRADE_UNKNOWN",
            advice="the user makes further grades with `penstock regrade`",
        )
    for name in (given.grade, given.against):
        if name and name not in (FIRST, *names):
            meant = did_you_mean(name, (FIRST, *names)) or ";"
            raise ToolError(
                f"there is no grade {name}{meant} there are {FIRST}, {', '.join(names[:20])}",
                reason="GRADE_UNKNOWN",
                advice="use one of these names",
            )
    found = reward_diff(rollouts, given.against, given.grade or names[-1])
    whole = found.as_dict()
    rows = page(whole.pop("changed"), lambda row: (0.0, row["rollout_id"]), lambda row: row, given.cursor, given.limit)
    return Answer({"run_id": given.run_id, "grades": [FIRST, *names[:50]], **whole, **rows.facts("changed")})


async def _define(context: Context, given: _Definition) -> Answer:
    return await asyncio.to_thread(_definition, context, given)


def _definition(context: Context, given: _Definition) -> Answer:
    found = load_tasks(context.place(given.path))
    tasks = {task.task_id: task for task in found.tasks}
    if given.task_id:
        _check_task(given.task_id, tasks)
        return _defined(context, tasks[given.task_id], given.offset)
    if len(tasks) == 1:
        return _defined(context, next(iter(tasks.values())), given.offset)
    return Answer({"total": len(tasks), "task_ids": list(tasks)[:200], "next": "choose one: task_id"})


def _defined(context: Context, task: Task, offset: int) -> Answer:
    verifier = task.verifier
    facts: dict[str, Any] = {
        "task_id": task.task_id,
        "files": [{"path": file.path, "bytes": len(file.content)} for file in list(task.files)[:50]],
        "setup_commands": len(task.setup),
        "has_solution": task.solution is not None,
        "verifier": None
        if verifier is None
        else {"commands": len(verifier.commands), "files": [file.path for file in list(verifier.files)[:50]]},
    }
    commands = [] if verifier is None else list(verifier.commands)
    parts = [f"[instruction]\n{task.instruction}"]
    parts += [f"[setup command {number}]\n{_command(one)}" for number, one in enumerate(task.setup)]
    parts += [f"[verifier command {number}]\n{_command(one)}" for number, one in enumerate(commands)]
    whole = shown_text("\n\n".join(parts), context.redact)
    shown, following = excerpt(whole, offset, _TEXT_BYTES)
    facts |= {"characters": len(whole), "next_offset": following}
    return Answer(facts, [Quote("the task's author", "instruction and commands", shown)])


def _command(command: Any) -> str:
    return command.shell or " ".join(command.argv)


def _check_task(task_id: str, known: Any) -> None:
    if task_id not in known:
        meant = did_you_mean(task_id, list(known)[:1000])
        raise ToolError(
            f"task_id: there is no task {task_id}{meant}", reason="TASK_UNKNOWN", advice="leave it out for the list"
        )


def _kind(path: Path) -> str:
    """What a file is a report of; empty: of nothing."""
    if path.name == CONFIG_FILE:
        return "evaluation"
    if path.suffix != ".json" or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        return ""
    try:
        with path.open("rb") as file:
            return "assay" if file.read(len(_ASSAY)) == _ASSAY else ""
    except OSError:
        return ""


REPORTS: Final = (
    Tool(
        "rewards_diff",
        "Two grades of a run's rollouts compared, after `penstock regrade`: means, counts, rollouts whose reward"
        " changed.",
        _Diff,
        _diff,
    ),
    Tool("reports", "Reports in files: results of evaluations, assays of tasks.", _Reports, _list),
    Tool(
        "report",
        "One report: an evaluation (pass@k and rewards with intervals, tasks; attempts of one task with output) or an"
        " assay (which tasks are fit to train on; findings of one).",
        _Report,
        _read,
    ),
    Tool(
        "task_definition",
        "A task file, or a set's: instruction, files, set-up and verifier commands.",
        _Definition,
        _define,
    ),
)
