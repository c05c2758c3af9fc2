"""How the script of an agent's check makes the agent run a command."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.agents.smoke_test import acting
from penstock.chat.v1 import chat_pb2
from penstock.client import ModelCall
from penstock.driver.v1 import agent_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb


async def never(result: pb.CallResult) -> None:
    raise AssertionError("no call is answered here")


@pytest.mark.parametrize(
    ("kind", "key", "value"), [("string", "command", "ls"), ("array", "commands", ["ls"]), ("string", "cmd", "ls")]
)
def test_a_command_is_given_as_the_tool_takes_it(kind: str, key: str, value: Any) -> None:
    """A text, or a list of texts with one."""
    properties = {key: {"type": kind}, "why": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": [key, "why"]}
    tool = chat_pb2.Tool(name="run_commands", parameters_json_schema=json.dumps(schema))
    reply = acting(agent_pb2.AgentTrial(), ModelCall(pb.ModelCall(tools=[tool]), never), "ls")
    assert (reply.tool, reply.arguments) == ("run_commands", {key: value, "why": "Works"})
