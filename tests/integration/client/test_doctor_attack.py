"""`penstock doctor --attack` on services that run."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from tests.support.services.stack import running
from tests.support.terminal.commands import invoke

from penstock.client.transport.endpoints import write_connection


@pytest.mark.requirement("R13", "R72")
async def test_attacks_on_a_deployment_are_reported_as_table_and_json(tmp_path: Path) -> None:
    """What was tried and what came of it; exit code 0 when nothing is broken, and a wrong name is refused."""
    file = tmp_path / "connection.json"
    async with running(tmp_path, agents=False) as stack:
        write_connection(file, stack.stack.endpoints, pid=os.getpid())
        environment = {"PENSTOCK_CONNECTION": str(file)}

        async def doctor(*line: str) -> tuple[int, str, str]:
            return await asyncio.to_thread(invoke, "doctor", "--attack", *line, environment=environment)

        code, out, err = await doctor("--only", "kill-all", "--only", "deep-line")
        assert code == 0, (out, err)
        assert "held" in out and "kill-all" in out and "deep-line" in out and "BROKEN" not in out
        code, out, err = await doctor("--only", "deep-line", "--json")
        assert code == 0, (out, err)
        *results, summary = [json.loads(line) for line in out.splitlines()]
        assert {(row["attack"], row["verdict"]) for row in results} == {("deep-line", "held")}
        assert (summary["held"], summary["broken"]) == (len(results), 0)
        code, _, err = await doctor("--only", "no-such-attack")
        assert code == 2 and "no-such-attack" in err


@pytest.mark.requirement("R13", "R72")
async def test_attacks_need_no_engine_and_no_services_that_run(tmp_path: Path) -> None:
    """On services of the command's own, which have no model, an endpoint of its own answers."""
    line = ("doctor", "--attack", "--only", "kill-all", "--state-dir", str(tmp_path / "state"))
    code, out, err = await asyncio.to_thread(invoke, *line, environment={})
    assert code == 0, (out, err)
    assert "held" in out and "kill-all" in out and "BROKEN" not in out
