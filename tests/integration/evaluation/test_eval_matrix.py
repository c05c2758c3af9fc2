"""`penstock eval matrix` with two agents, against real services."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest
from tests.integration.evaluation.test_eval_cli import TASKS
from tests.support.services.stack import Running
from tests.support.terminal.commands import invoke

from penstock.client import connect
from penstock.client.transport.endpoints import write_connection

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_agents_are_run_one_after_another_and_shown_by_tasks(stack: Running, tmp_path: Path) -> None:
    """An unknown agent is refused before any starts. Each agent's results are an evaluation's, and are continued."""
    write_connection(tmp_path / "connection.json", stack.stack.endpoints, pid=os.getpid())
    environment = {"PENSTOCK_CONNECTION": str(tmp_path / "connection.json")}
    (tmp_path / "set").mkdir()
    for name in ("done", "half"):
        (tmp_path / "set" / f"{name}.yaml").write_text(TASKS[name])
    given = ("eval", "matrix", "set", "--agent", "shell", "--out", "results")

    code, out, err = invoke(*given, "--agent", "shel", environment=environment, cwd=tmp_path)
    assert code == 4 and "did you mean shell?" in err and not out, (out, err)
    assert not (tmp_path / "results").exists()

    async with connect(stack.stack.endpoints) as ps:
        spec = (await ps.agents.get("shell")).spec
        spec.name = "another-shell"
        await ps.agents.register(spec)
        code, out, err = invoke(*given, "--json", environment=environment, cwd=tmp_path)
        assert code == 0, err
        lines = [orjson.loads(line) for line in out.splitlines()]
        assert [line.get("agent") for line in lines] == ["shell", "shell", None]
        rates = {cell["task_id"]: cell["rate"] for cell in lines[-1]["matrix"]["cells"]}
        assert rates == {"done": 1.0, "half": 0.0}

        further = ("--agent", "another-shell", "--picture", "matrix.png")
        code, out, err = invoke(*given, *further, environment=environment, cwd=tmp_path)
        await ps.agents.delete("another-shell")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["task", "shell", "another-shell"]
    assert rows[1] == ["done", *(["1.00", "0.21", "to", "1.00", "1/1"] * 2)]
    assert rows[2] == ["half", *(["0.00", "0.00", "to", "0.79", "0/1"] * 2)]
    assert "another-shell done 0: reward 1" in err and "\nshell done 0" not in err, "the first agent's are continued"
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")
    code, out, err = invoke("eval", "diff", "results/shell", "results/another-shell", cwd=tmp_path)
    assert code == 0 and "2 tasks unchanged" in out, err
