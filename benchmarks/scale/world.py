"""What a rollout of the load consists of: its task, what its agent says, and what the model says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from tokenizers import Tokenizer

from benchmarks import world as demo
from penstock.client import Command, Completion, Limits, Task, Verifier
from penstock_codec import tiny_tokenizer

CALLS: Final = 3
"""Model calls of an agent."""
LIMIT_S: Final = 7200.0
"""The first agents wait until the last ones wait."""
INSTRUCTION: Final = "Copy the word in note.txt to out.txt"
MESSAGES: Final[Sequence[dict[str, Any]]] = (
    {"role": "system", "content": "You are a shell agent."},
    {"role": "user", "content": INSTRUCTION},
)
_BASH: Final = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
_OF_CALL: Final = {"model": "policy", "tools": [_BASH]}


def body(messages: Sequence[dict[str, Any]]) -> bytes:
    """A request of the agent."""
    return orjson.dumps({**_OF_CALL, "messages": messages})


def results(said: dict[str, Any]) -> list[dict[str, Any]]:
    """What the agent's tool answers."""
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f"{demo.NOTE}\n"}
        for call in said.get("tool_calls") or ()
    ]


def task() -> Task:
    """One task for all: each group has one prepared state."""
    return Task(
        task_id="null",
        instruction=INSTRUCTION,
        verifier=Verifier(commands=[Command(shell="true")]),
        limits=Limits(prepare=LIMIT_S, agent=LIMIT_S),
    )


def replies(model: Path) -> list[Completion]:
    """What the model samples, call by call."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    end = tiny_tokenizer.SPECIAL_TOKENS.index(tiny_tokenizer.TURN_END)

    def completion(text: str) -> Completion:
        ids = np.array([*tokenizer.encode(text, add_special_tokens=False).ids, end], dtype=np.int32)
        return Completion.of_tokens(ids, np.full(len(ids), -0.5, dtype=np.float32), policy_version=0)

    return [completion(text) for text in demo.REPLIES]
