"""Agents are certified whatever model is served: also one whose context their prompts do not fit into."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.support.terminal.commands import invoke

from penstock.client.transport.endpoints import write_connection
from penstock.local.stack import LocalStack


@pytest.mark.requirement("R66")
@pytest.mark.parametrize("callers_own", [True, False])
async def test_short_context_is_the_only_finding_or_none(
    callers_own: bool, tmp_path: Path, model_dir: Path, script: Path
) -> None:
    """`agents check --run` asks no model; where the operator has it lean on the served one, whose context is too
    short, nothing else that did not come about is held against the agent."""
    stack = LocalStack(
        model_dir=model_dir,
        engine="scripted",
        engine_options={"script": str(script)},
        settings={"inference": {"max_context_tokens": 1024}, "interception": {"caller_endpoints": callers_own}},
        state_dir=tmp_path / "state",
    )
    file = tmp_path / "connection.json"
    async with stack:
        write_connection(file, stack.endpoints, pid=os.getpid())
        environment = {"PENSTOCK_CONNECTION": str(file)}
        code, out, err = await asyncio.to_thread(invoke, "agents", "check", "shell", "--run", environment=environment)
    told = out.partition("start ok")[2]
    if callers_own:
        assert code == 0, (out, err)
        for step in ("endpoint", "instruction", "work", "exit", "events", "secrets"):
            assert f"{step} ok" in told, (step, out, err)
        return
    assert code == 1, (out, err)
    assert " ok" not in told and told.count(" failed") == 1, (out, err)
    assert "context failed the served model's context (1,024 tokens) is too short for this agent's prompt" in told
    assert "so the agent was not tested" in told
