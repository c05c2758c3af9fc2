"""The reference agent as a program: the real file, run by the real interpreter, against a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tests.unit.driver.world import HttpGate, bash, say

AGENT = str(resources.files("penstock_driver") / "agents" / "catalog" / "shell_agent.py")
Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the agent against a script of answers: (exit code, events, gate)."""

    async def run(script: Any, **config: Any) -> tuple[int, list[dict[str, Any]], HttpGate]:
        async with HttpGate(script) as gate:
            (tmp_path / "task.md").write_text(config.pop("instruction", "do it"), encoding="utf-8")
            values = {
                "base_url": f"http://127.0.0.1:{gate.port}/v1", "key": "sk-test '$(leak)", "model": "tiny",
                "instruction_file": str(tmp_path / "task.md"),
            }  # fmt: skip
            (tmp_path / "config.json").write_text(json.dumps({**values, **config}), encoding="utf-8")
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", AGENT, str(tmp_path / "config.json"),
                stdout=asyncio.subprocess.PIPE, cwd=tmp_path, env={"PATH": os.environ["PATH"]},
            )  # fmt: skip
            out, _ = await process.communicate()
            assert process.returncode is not None
            return process.returncode, [json.loads(line) for line in out.splitlines()], gate

    return run


def answers(*messages: Any) -> Callable[[Any], Any]:
    left = list(messages)
    return lambda _: left.pop(0)


@pytest.mark.requirement("R71")
async def test_agent_runs_commands_until_the_model_calls_no_tool(run: Run) -> None:
    """Events as it goes, exit code 0, the conversation echoed in full."""
    code, events, gate = await run(answers(bash("echo hi; echo err >&2; false"), say("done")), instruction="it's $(x)")
    assert code == 0
    assert [event["type"] for event in events] == ["tool_call", "tool_result", "assistant", "done"]
    assert events[1] == {
        "type": "tool_result", "turn": 1, "id": "c1", "output": "hi\nerr\nexit 1", "exit_code": 1,
    }  # fmt: skip
    (_, headers, first), (path, _, second) = gate.requests
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer sk-test '$(leak)"
    assert first["messages"] == [
        {"role": "system", "content": "You are a shell agent."},
        {"role": "user", "content": "it's $(x)"},
    ]
    assert second["messages"][2:] == [
        bash("echo hi; echo err >&2; false"),
        {"role": "tool", "tool_call_id": "c1", "content": "hi\nerr\nexit 1"},
    ]


@pytest.mark.requirement("R34")
async def test_retry_repeats_the_idempotency_key_and_a_new_turn_changes_it(run: Run) -> None:
    """Two failures and two turns are four requests under two keys."""
    code, _, gate = await run(answers(503, 429, bash("true"), say("done")))
    keys = [headers["idempotency-key"] for _, headers, _ in gate.requests]
    assert code == 0
    assert keys[0] == keys[1] == keys[2] != keys[3]


@pytest.mark.requirement("R59", "R62")
@pytest.mark.parametrize(
    ("script", "config", "code"),
    [
        (answers(400), {}, 4),
        (answers(500, 500), {"max_retries": 1}, 3),
        (answers({"nonsense": 1}), {}, 0),
        (answers(*[bash("true")] * 3), {"max_turns": 3}, 5),
        (answers(), {"colour": "red"}, 2),
        (answers(), {"max_turns": True}, 2),
        (answers(), {"key": " "}, 2),
        (answers(), {"base_url": "https://127.0.0.1/v1"}, 2),
        (answers(), {"instruction_file": "/nowhere"}, 2),
    ],
)
async def test_every_way_out_has_its_exit_code(run: Run, script: Any, config: dict[str, Any], code: int) -> None:
    """And an error event says why."""
    got, events, _ = await run(script, **config)
    assert got == code
    assert events[-1]["type"] == ("done" if code in (0, 5) else "error")


@pytest.mark.requirement("R80", "R81")
async def test_non_command_arguments_are_answered_to_the_model(run: Run) -> None:
    """Free text is never run as a command."""
    bad = [bash("x"), bash("x"), bash("x"), bash("x")]
    for message, arguments in zip(bad, ["rm -rf /", "[1]", '{"command": 3}', "{" * 3000], strict=True):
        message["tool_calls"][0]["function"]["arguments"] = arguments
    code, events, _ = await run(answers(*bad, say("done")))
    assert code == 0
    results = [event["output"] for event in events if event["type"] == "tool_result"]
    assert results == ['error: expected {"command": "..."}'] * 4


@pytest.mark.requirement("R40", "R41")
async def test_a_command_may_time_out_or_leave_something_behind(run: Run) -> None:
    """A limit kills the command's group, and a background process holds nobody up."""
    background, late = bash("sleep 60 & echo started"), bash("sleep 60")
    for command, limit, told in ((background, 50.0, ("started\n", 0)), (late, 0.1, ("timed out after 0.1 s", None))):
        code, events, _ = await run(answers(command, say("done")), command_timeout_s=limit)
        assert code == 0
        (result,) = [event for event in events if event["type"] == "tool_result"]
        assert (result["output"], result["exit_code"]) == told


@pytest.mark.requirement("R26")
async def test_long_output_loses_its_middle_and_says_so(run: Run) -> None:
    """And bytes that are no text do no harm."""
    script = answers(bash("printf 'a%.0s' {1..3000}; printf '\\377z'"), say("done"))
    _, events, _ = await run(script, max_output_bytes=100)
    assert events[1]["output"] == "a" * 50 + "\n[2902 bytes left out]\n" + "a" * 48 + "\ufffdz"


@pytest.mark.requirement("R10")
async def test_its_programs_inherit_no_endpoint_and_no_key(run: Run) -> None:
    _, events, gate = await run(answers(bash("env"), say("done")))
    assert "leak" not in events[1]["output"]
    assert gate.requests[0][1]["host"] not in events[1]["output"]


def test_agent_imports_no_module_that_slows_its_start() -> None:
    """The start-up budget: only what the interpreter has loaded anyway, and three built-in modules."""
    directory = str(Path(AGENT).parent)
    script = (
        f"import sys; before = set(sys.modules); sys.path.insert(0, {directory!r}); import shell_agent;"
        " print(*(set(sys.modules) - before))"
    )
    out = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True).stdout
    assert set(out.split()) == {"_json", "_socket", "select", "shell_agent", "shell_agent_endpoint"}


@pytest.mark.requirement("R59")
def test_end_of_a_command_is_seen_without_the_kernels_notice() -> None:
    """GVisor has no pidfds."""
    directory = str(resources.files("penstock_driver") / "agents" / "catalog")
    program = f"""
import errno, posix, sys
def refuse(*_):
    raise OSError(errno.ENOSYS, "")
posix.pidfd_open = refuse
sys.path.insert(0, {directory!r})
import shell_agent
print([shell_agent.run(c, s, 100) for c, s in (("echo a; exit 3", 60), ("sleep 30", 0.5), ("sleep 2 & echo left", 60))])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[('a\\nexit 3', 3), ('timed out after 0.5 s', None), ('left\\n', 0)]"
