"""An evaluation that is interrupted in every way and taken up again comes to the table of one that was not."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.support.services.restarting import RestartableStack
from tests.support.services.stack import Running

from penstock.cli.terminal.console import REFUSED, UNREACHABLE
from penstock.client.transport.endpoints import write_connection

pytestmark = pytest.mark.asyncio(loop_scope="module")

TASKS = {
    "good": "echo yes > first; echo yes > second",
    "half": "echo yes > first",
    "none": "true",
}
"""What the agent's script does, by task: the scripted engine runs `work.sh`, whatever it is."""
ATTEMPTS = 3


class Eval:
    """`penstock eval` on one results directory."""

    def __init__(self, running: Running, folder: Path) -> None:
        self._folder = folder
        tasks = folder / "tasks"
        tasks.mkdir()
        for name, work in TASKS.items():
            (tasks / f"{name}.yaml").write_text(
                f"instruction: Do the work.\nfiles: [{{path: work.sh, content: {work!r}}}]\n"
                "verifier: {commands: ['test -f first', 'test -f second']}\n"
            )
        connection = folder / "connection.json"
        write_connection(connection, running.stack.endpoints, pid=os.getpid())
        self._environment = {**os.environ, "PENSTOCK_CONNECTION": str(connection)}

    async def start(self, results: str | None) -> Process:
        """The command; None = the default directory."""
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock.cli.main", "eval", "tasks", "--agent", "shell", "-n", str(ATTEMPTS),
            "--concurrency", "2", *([] if results is None else ["--out", results]), "--json",
            stdout=PIPE, stderr=PIPE, cwd=self._folder, env=self._environment, limit=1 << 24,
        )  # fmt: skip

    async def finish(self, process: Process, results: str | None) -> dict[str, Any]:
        """What the command says at its end; where it gave up since a service was away for long, it is started again."""
        out, err = await process.communicate()
        for _ in range(20):
            if process.returncode != UNREACHABLE:
                break
            process = await self.start(results)
            out, err = await process.communicate()
        assert process.returncode == 0, (process.returncode, err.decode())
        summary: dict[str, Any] = orjson.loads(out.splitlines()[-1])["summary"]
        return summary


async def attempts(process: Process, count: int) -> None:
    """Waits until the command has told of so many attempts that ended, or that all did."""
    assert process.stdout is not None
    for _ in range(count):
        line = await process.stdout.readline()
        if line.startswith(b'{"summary"'):
            return
        assert line.startswith(b'{"attempt"'), line


async def test_killed_interrupted_and_abandoned_evaluation_gives_the_same_table(
    fragile: tuple[Running, RestartableStack], tmp_path: Path
) -> None:
    """Issue 6, point 6: kill -9 of the command, Ctrl-C, and a driver that dies and comes back."""
    running, stack = fragile
    command = Eval(running, tmp_path)
    whole = await command.finish(await command.start("whole"), "whole")
    assert [(task["task_id"], task["attempts"], task["passed"], task["reward"]) for task in whole["tasks"]] == [
        ("good", ATTEMPTS, ATTEMPTS, 1.0),
        ("half", ATTEMPTS, 0, 0.5),
        ("none", ATTEMPTS, 0, 0.0),
    ]

    killed = await command.start("broken")
    await attempts(killed, 1)
    killed.kill()
    await killed.communicate()  # its pipes are at their end before the loop is

    interrupted = await command.start("broken")
    await attempts(interrupted, 2)
    interrupted.send_signal(signal.SIGINT)
    await interrupted.communicate()
    # It may have been done before the signal came; then there was nothing to interrupt.
    assert interrupted.returncode in (0, 130)

    last = await command.start("broken")
    if interrupted.returncode == 130:
        await stack.restart("driver")
    again = await command.finish(last, "broken")
    assert again == whole

    # Done is done: nothing is made anew.
    lines = (tmp_path / "broken" / "attempts.jsonl").read_bytes()
    assert await command.finish(await command.start("broken"), "broken") == whole
    assert (tmp_path / "broken" / "attempts.jsonl").read_bytes() == lines


@pytest.mark.requirement("R63")
async def test_an_evaluation_of_newer_weights_is_another_one(
    fragile: tuple[Running, RestartableStack], tmp_path: Path
) -> None:
    """Weights are pushed to running services, whose model keeps its name: old results are not shown as theirs, and the
    default directory is another one. Services that start again have their first version, and its evaluation."""
    running, stack = fragile
    command = Eval(running, tmp_path)
    whole = await command.finish(await command.start("one"), "one")
    await command.finish(await command.start(None), None)
    version = (await running.ps.inference.info()).policy_version
    await running.ps.inference.update_weights(version + 1, {"weight": np.zeros(1, np.float32)})

    refused = await command.start("one")
    out, err = await refused.communicate()
    assert (refused.returncode, out) == (REFUSED, b""), err
    assert b"has the results of another evaluation: policy_version changed" in err
    await command.finish(await command.start(None), None)
    folders = list((tmp_path / "runs" / "evals").iterdir())
    assert len(folders) == 2
    assert {len((folder / "attempts.jsonl").read_bytes().splitlines()) for folder in folders} == {len(TASKS) * ATTEMPTS}

    await stack.restart("inference")
    lines = (tmp_path / "one" / "attempts.jsonl").read_bytes()
    assert await command.finish(await command.start("one"), "one") == whole
    assert (tmp_path / "one" / "attempts.jsonl").read_bytes() == lines
