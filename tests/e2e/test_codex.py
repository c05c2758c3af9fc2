"""What only Codex does on the wire: tools in namespaces, here those of a task's own MCP server in the sandbox."""

from __future__ import annotations

import secrets

from tests.support.copying import copy_task, finish, training
from tests.support.policy import calling, in_shell, in_turn
from tests.support.stack import Running

from penstock.client import AgentChoice, AgentEvent, McpServer, SeedFile

NOTES = b"""
import json, os, sys

for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("method") == "initialize":
        version = asked["params"]["protocolVersion"]
        said = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "n", "version": "1"}}
    elif asked.get("method") == "tools/list":
        schema = {"type": "object", "properties": {"which": {"type": "string"}}}
        said = {"tools": [{"name": "read_note", "description": "Reads.", "inputSchema": schema}]}
    elif asked.get("method") == "tools/call":
        text = f"note {asked['params']['arguments']['which']} for {os.environ['READER']}"
        said = {"content": [{"type": "text", "text": text}]}
    else:
        said = {}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": said}), flush=True)
"""


async def test_codex_calls_a_tool_of_an_mcp_server_by_the_name_that_the_model_gave(stack: Running) -> None:
    """R69, R82: the server is configured, its tool is the model's in a namespace, and the turns stay token-exact."""
    label = secrets.token_hex(8)
    task = copy_task(stack)
    task = copy_task(stack, files=[*task.files, SeedFile("notes.py", NOTES)])
    server = McpServer(name="notes", args=["python3", "notes.py"], secret_env={"READER": 'O\'Kiwi "$(x)"'})
    agent = AgentChoice(name="codex", skip_permissions=True, mcp_servers=[server])
    reply = in_turn(calling("mcp__notes__read_note", which="a"), in_shell("bash work.sh"), "The word is copied.")
    async with training(stack, label, reply):
        handle = await stack.ps.rollouts.create(task, agent, labels={"test": label})
        finished = await finish(handle)
    assert finished.reward == 1.0, finished.agent_said()
    events = [event.payload for event in finished.events if isinstance(event.payload, AgentEvent)]
    assert 'note a for O\'Kiwi "$(x)"' in [event.data.get("output") for event in events]
    trajectory = await handle.trajectory()
    assert trajectory.grade == "exact", trajectory.findings
    assert [call.call_class for call in trajectory.calls] == ["main"] * 3
    assert len(trajectory.samples) == 1
