"""mini-SWE-agent's own agent, which also prints each of its messages as a line of JSON on standard output.

`mini --agent-class=mini_swe_agent_events.Agent`; nothing else about the agent is changed.
"""

import json
from typing import Any

from minisweagent.agents.default import DefaultAgent  # type: ignore[import-not-found]


class Agent(DefaultAgent):  # type: ignore[misc]
    """Prints each message that it adds to its conversation, except the first prompt."""

    def add_messages(self, *messages: "dict[str, Any]") -> "list[dict[str, Any]]":
        if self.messages:
            for message in messages:
                _emit(message)
        added: list[dict[str, Any]] = super().add_messages(*messages)
        return added


def _emit(message: "dict[str, Any]") -> None:
    extra = message.get("extra") or {}
    _say(
        {
            "role": message.get("role"),
            "content": message.get("content"),
            "reasoning_content": message.get("reasoning_content"),
            "tool_call_id": message.get("tool_call_id"),
            "output": extra.get("raw_output"),
            "returncode": extra.get("returncode"),
            "exit_status": extra.get("exit_status"),
        }
    )
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        _say(
            {"role": "call", "id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
        )


def _say(line: "dict[str, Any]") -> None:
    print(json.dumps({name: value for name, value in line.items() if value is not None}), flush=True)
