"""What only Codex does on the wire: tools in namespaces, here those of a task's own MCP server in the sandbox."""

from __future__ import annotations

import secrets

import pytest
from tests.support.copying import copy_task, finish, training
from tests.support.policy import calling, in_shell, in_turn
from tests.support.services.stack import Running

from penstock.client import AgentChoice, AgentEvent, Budgets, CallRate, McpServer, SeedFile
from penstock.interception.v1 import rollout_gate_service_pb2 as gate
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as gate_grpc
from penstock_chassis.channel import connect

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


async def at_the_gate(stack: Running, rollout_id: str) -> gate.GateRollout:
    """A rollout as the gate sees it."""
    async with connect(stack.stack.address("interception"), stack.stack.operator_token) as channel:
        stub = gate_grpc.RolloutGateServiceStub(channel)
        return (await stub.GetRollout(gate.GetRolloutRequest(rollout_id=rollout_id))).rollout


@pytest.mark.requirement("R88")
async def test_a_used_up_budget_ends_it_at_once(stack: Running) -> None:
    """Told in a way that it does not repeat: one request is refused, and the rollout says why."""
    label = secrets.token_hex(8)
    async with training(stack, label) as trainer:
        agent = AgentChoice(name="codex", skip_permissions=True)
        budgets = Budgets(max_calls=1)
        handle = await stack.ps.rollouts.create(copy_task(stack), agent, labels={"test": label}, budgets=budgets)
        finished = await finish(handle)
    assert finished.result.failure is not None
    assert finished.result.failure.reason == "BUDGET_EXHAUSTED", finished.agent_said()
    assert len(trainer.calls) == 1
    assert (await at_the_gate(stack, handle.rollout_id)).totals.refused == 1


@pytest.mark.requirement("R26", "R88")
async def test_a_call_rate_slows_it_down_and_ends_nothing(stack: Running) -> None:
    """It waits as long as it is told and finishes its task."""
    label = secrets.token_hex(8)
    async with training(stack, label):
        agent = AgentChoice(name="codex", skip_permissions=True)
        budgets = Budgets(call_rate=CallRate(calls=1, period=3.0))
        handle = await stack.ps.rollouts.create(copy_task(stack), agent, labels={"test": label}, budgets=budgets)
        finished = await finish(handle)
    assert finished.reward == 1.0, finished.agent_said()


@pytest.mark.requirement("R69", "R82")
async def test_codex_calls_an_mcp_tool_by_the_models_name(stack: Running) -> None:
    """A server of the choice and one of the task are configured, their tools are the model's in namespaces, and the
    turns stay token-exact.
    """
    label = secrets.token_hex(8)
    task = copy_task(stack)
    books = McpServer(name="books", args=["python3", "notes.py"], env={"READER": "the task"})
    task = copy_task(stack, files=[*task.files, SeedFile("notes.py", NOTES)], mcp_servers=[books])
    server = McpServer(name="notes", args=["python3", "notes.py"], secret_env={"READER": 'O\'Kiwi "$(x)"'})
    agent = AgentChoice(name="codex", skip_permissions=True, mcp_servers=[server])
    reads = calling("mcp__notes__read_note", which="a"), calling("mcp__books__read_note", which="b")
    reply = in_turn(*reads, in_shell("bash work.sh"), "The word is copied.")
    async with training(stack, label, reply):
        handle = await stack.ps.rollouts.create(task, agent, labels={"test": label})
        finished = await finish(handle)
    assert finished.reward == 1.0, finished.agent_said()
    events = [event.payload for event in finished.events if isinstance(event.payload, AgentEvent)]
    assert {'note a for O\'Kiwi "$(x)"', "note b for the task"} <= {event.data.get("output") for event in events}
    trajectory = await handle.trajectory()
    assert trajectory.grade == "exact", trajectory.findings
    assert [call.call_class for call in trajectory.calls] == ["main"] * 4
    assert len(trajectory.samples) == 1
