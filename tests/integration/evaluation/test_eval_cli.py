"""`penstock tasks` and `penstock eval` as a person uses them, against real services."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import orjson
import pytest
from tests.support.services.stack import Running
from tests.support.waiting import eventually_async

from penstock.client import Command, Mode, Task, Verifier
from penstock.client.transport.endpoints import write_connection
from penstock.tasks.solutions import AGENT, solving_agent

TASKS = {
    "done": "instruction: Do the work.\nfiles: [{path: work.sh, content: touch first second}]\n"
    "verifier: {commands: [test -f first, test -f second]}\nsolution: {commands: [touch first second]}\n",
    "half": "instruction: Do the work.\nfiles: [{path: work.sh, content: touch first}]\n"
    "verifier: {commands: [test -f first, test -f second]}\nsolution: {commands: [touch first]}\n",
    "silent": "instruction: Do the work.\nfiles: [{path: work.sh, content: 'true'}]\n"
    "verifier: {commands: [echo '<b>no reward</b>'], reward: file}\n",
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A directory of three tasks: one that gets done, one by half, one whose verifier gives no reward."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


async def started(running: Running, folder: Path, *argv: str) -> Process:
    """A command that finds the stack."""
    connection = folder / "connection.json"
    write_connection(connection, running.stack.endpoints, pid=os.getpid())
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.cli.main", *argv, stdout=PIPE, stderr=PIPE, cwd=folder,
        env={**os.environ, "PENSTOCK_CONNECTION": str(connection)},
    )  # fmt: skip


async def penstock(running: Running, folder: Path, *argv: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command that finds the stack."""
    process = await started(running, folder, *argv)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.requirement("R74")
async def test_an_evaluation_is_run_shown_reported_and_compared(stack: Running, tasks: Path, tmp_path: Path) -> None:
    """R74, issue 6 point 6: rates over what was graded; what was not, by its cause, and exit code 1."""
    code, out, err = await penstock(
        stack, tmp_path, "eval", "./tasks", "--agent", "shell", "-n", "2", "--out", "first", "--report", "first.html"
    )
    assert code == 1, err
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line[:1].isalpha()}
    assert rows["done"][:5] == ["2/2", "2", "1.00", "1.00", "1.000"]
    assert rows["half"][:5] == ["2/2", "0", "0.00", "0.00", "0.500"]
    assert rows["silent"] == ["0/2", "0", "2"]
    assert rows["pass@1"][0] == "0.500"
    assert "not graded, not counted: 2 attempts, verifier: " in out
    assert "done 0: reward 1" in err
    report = (tmp_path / "first.html").read_text()
    assert "&lt;b&gt;no reward&lt;/b&gt;" in report
    assert "<b>no reward</b>" not in report

    (tmp_path / "prices.yaml").write_text('models: {"*": {prompt: 1000000, completion: 2000000}}')
    code, out, _ = await penstock(
        stack, tmp_path, "eval", "run", "tasks", "--agent", "shell", "--task", "ha*", "--task", "done",
        "--threshold", "0.5", "--out", "second", "--json", "--prices", "prices.yaml",
    )  # fmt: skip
    assert code == 0
    lines = [orjson.loads(line) for line in out.splitlines()]
    assert [next(iter(line)) for line in lines] == ["attempt", "attempt", "summary"]
    assert lines[-1]["summary"]["pass_at"]["1"]["value"] == 1.0
    ended = [line["attempt"] for line in lines[:-1]]
    paid = sum(one["prompt_tokens"] + 2 * one["completion_tokens"] for one in ended)
    assert paid and lines[-1]["summary"]["cost"] == {"amount": float(paid), "currency": "USD", "unpriced": []}

    code, out, _ = await penstock(
        stack, tmp_path, "eval", "show", "first", "--threshold", "0.5", "--prices", "prices.yaml"
    )
    assert (code, "pass@1 1.000" in out, "cost " in out) == (1, True, True)
    code, out, _ = await penstock(stack, tmp_path, "eval", "diff", "first", "second")
    assert code == 0
    assert "2 tasks unchanged" in out
    code, out, _ = await penstock(stack, tmp_path, "eval", "report", "second")
    assert (code, out.strip()) == (0, "second/report.html")
    assert (tmp_path / "second" / "report.html").stat().st_size > 10_000


async def test_interrupted_evaluation_prints_the_command_that_resumes(stack: Running, tmp_path: Path) -> None:
    """Issue 6, point 6: nothing has to be put together again by hand."""
    (tmp_path / "its tasks").mkdir()
    (tmp_path / "its tasks" / "stuck.yaml").write_text(
        "instruction: x\nsetup: [mkfifo in, cat in]\nverifier: {commands: ['true']}\n"
    )
    connection = tmp_path / "connection.json"
    write_connection(connection, stack.stack.endpoints, pid=os.getpid())
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli.main", "eval", "its tasks", "--agent", "shell", "--out", "kept"),
        stdout=PIPE, stderr=PIPE, cwd=tmp_path, env={**os.environ, "PENSTOCK_CONNECTION": str(connection)},
    )  # fmt: skip

    async def begun() -> bool:
        return any([item.task_id == "stuck" async for item in stack.ps.rollouts.list(ended=False)])

    await eventually_async(begun, "a rollout is made")
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130
    assert "  penstock eval 'its tasks' --agent shell --out kept\n" in err.decode(), err


STUCK = "setup: [mkfifo in, cat in]\nverifier: {commands: ['true']}\nsolution: {commands: ['true']}\n"
"""The rest of a task whose rollouts never end."""


async def interrupted_after_a_line(running: Running, folder: Path, *argv: str) -> tuple[int | None, str, str]:
    """Exit code, first line and standard error of a command that is interrupted once it has printed a line."""
    process = await started(running, folder, *argv)
    assert process.stdout is not None
    line = await process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    return process.returncode, line.decode(), err.decode()


async def test_a_proof_is_printed_as_soon_as_it_is_known(stack: Running, tmp_path: Path) -> None:
    """An interruption does not take it back."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "bare.yaml").write_text("instruction: x\n")
    (tmp_path / "tasks" / "stuck.yaml").write_text(f"instruction: x\n{STUCK}")
    code, line, err = await interrupted_after_a_line(stack, tmp_path, "tasks", "prove", "tasks", "--json")
    assert code == 130, err
    assert orjson.loads(line)["task_id"] == "bare"


async def test_solution_agent_is_never_listed(stack: Running) -> None:
    """Whoever proves tasks leaves no agent behind, interrupted or killed, and takes none from another who proves."""
    first, second = await solving_agent(stack.ps), await solving_agent(stack.ps)
    assert first == second
    assert AGENT not in [agent.name async for agent in stack.ps.agents.list()]
    task = Task(task_id="solved", instruction="touch it\n", verifier=Verifier(commands=[Command(["test", "-e", "it"])]))
    handle = await stack.ps.rollouts.create(task, first, mode=Mode.TRANSPARENT_PROXY)
    result = await handle.result()
    assert result.reward is not None and result.reward.value == 1.0


async def test_tasks_are_checked_and_proved_with_exit_codes_1_and_2(
    stack: Running, tasks: Path, tmp_path: Path
) -> None:
    """Issue 6, point 6: a task that its own solution does not satisfy is found before any agent is judged by it."""
    code, out, _ = await penstock(stack, tmp_path, "tasks", "check", "tasks")
    assert code == 0
    assert "none" not in out
    code, out, _ = await penstock(stack, tmp_path, "tasks", "prove", "tasks")
    assert code == 1
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[:4]}
    assert rows["done"] == ["1", "0", "holds"]
    assert rows["half"] == ["0.5", "0", "invalid"]
    assert "the solution gets the reward 0.5, not 1" in out
    assert "it has no solution" in out

    (tasks / "typo.yaml").write_text("instruction: x\nverifer: {}\n")
    code, _, err = await penstock(stack, tmp_path, "tasks", "check", "tasks")
    assert code == 2
    assert "typo.yaml: verifer: line 2: no such key; did you mean verifier?" in err
    code, out, _ = await penstock(stack, tmp_path, "tasks", "schema", "--taskset")
    assert (code, orjson.loads(out)["title"]) == (0, "Penstock task set")
