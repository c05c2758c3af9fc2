"""`penstock rollout -n`: one table at a terminal, lines in a pipe, and a summary of the group."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.client.test_cli import TASK_FILE
from tests.support.terminal import ptys
from tests.support.terminal.commands import invoke

from penstock.client import Penstock
from penstock.client.transport.endpoints import write_connection
from penstock.local.stack import LocalStack

pytestmark = pytest.mark.asyncio(loop_scope="session")

DASHBOARD = "http://127.0.0.1:7790/"


@pytest.fixture
def connection(stack: LocalStack, tmp_path: Path) -> dict[str, str]:
    """An environment in which the command line finds the stack of the tests, and a dashboard beside it."""
    write_connection(tmp_path / "connection.json", replace(stack.endpoints, dashboard=DASHBOARD), pid=os.getpid())
    (tmp_path / "task.yaml").write_text(TASK_FILE)
    return {"PENSTOCK_CONNECTION": str(tmp_path / "connection.json")}


async def test_a_group_is_one_table_that_ends_with_its_summary(connection: dict[str, str], tmp_path: Path) -> None:
    """No event of a rollout is between the rows; every trajectory is saved."""
    given = ("rollout", "--agent", "shell", "--task", "task.yaml", "-n", "2", "--run-id", "table")
    async with ptys.penstock(*given, environment=connection, cwd=tmp_path, columns=130) as terminal:
        shown = await terminal.shows("2 rollouts: 2 completed", "saved in", "#/groups/")
        assert await terminal.ends() == 0
        assert "0/2" in terminal.raw.decode(), "the table was drawn before the end"
        assert not terminal.foreign
    (group,) = re.findall(r"^group (\S+)  2 rollouts", shown, re.MULTILINE)
    assert "reward 1.000  95 % 0.342 to 1.000  (2 graded rollouts of one task)" in shown
    assert f"{DASHBOARD}#/groups/{group}" in shown
    assert shown.count(" completed  ") == 2 and "==" not in shown and "2/2" in shown
    for index in range(2):
        assert (tmp_path / "runs" / "rollouts" / f"{group}-{index}" / "turns.jsonl").stat().st_size


async def test_a_group_in_a_pipe_is_lines_and_its_summary(connection: dict[str, str], tmp_path: Path) -> None:
    """A line for each change of state, as of `penstock watch`; a failed rollout has its reason, and gives exit code
    1."""
    (tmp_path / "task.yaml").write_text("instruction: x\nsetup: [exit 9]\n")
    given = ("rollout", "--agent", "shell", "--task", "task.yaml", "-n", "2")
    code, out, err = invoke(*given, environment=connection, cwd=tmp_path)
    (group,) = re.findall(r"^group: (\S+)", err, re.MULTILINE)
    assert code == 1, (out, err)
    lines = out.splitlines()
    assert f"{group}-1: setting up" in lines and f"{group}-0: setup failed" in lines, out
    assert f"{group}-0: completed" not in lines, "it never was"
    assert out.count("setup command 1 of 1 failed: exit code 9") == 2 and "\x1b" not in out, out
    assert f"group {group}  2 rollouts: 0 completed, 2 failed" in lines


@pytest.mark.requirement("R70")
async def test_rollouts_whose_output_has_no_reader_any_more_are_cancelled(
    connection: dict[str, str], ps: Penstock, tmp_path: Path
) -> None:
    """As by `penstock rollout -n 2 --json | head`: a trainer that is gone answers none of their calls."""
    (tmp_path / "task.yaml").write_text("instruction: x\nsetup: [sleep 600]\n")
    given = ("rollout", "--agent", "shell", "--task", "task.yaml", "-n", "2", "--run-id", "unread")
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli.main", *given, "--json"),
        stdout=writing, stderr=PIPE, env={**os.environ, **connection}, cwd=tmp_path,
    )  # fmt: skip
    os.close(writing)
    os.close(reading)
    _, err = await process.communicate()
    assert process.returncode == 141 and b"Traceback" not in err, err
    found = [one async for one in ps.rollouts.list(run_id="unread")]
    assert len(found) == 2 and all(one.outcome is not None for one in found), found
