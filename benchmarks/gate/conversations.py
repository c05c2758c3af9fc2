"""What an agent sends, turn by turn: a system prompt, tools, a task, then each answer as it came and a tool's result.

Bodies are put together from bytes that are ready, so that the load costs little beside what it loads.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import orjson
from tokenizers import Tokenizer

from benchmarks.gate.words import Writer
from penstock_codec import tiny_tokenizer

TOOLS: Final = 20
RESULT_CHARACTERS: Final = 400
"""Of a tool's result, about a hundred tokens."""


ARGUMENTS: Final = '{"command": "cat notes.txt"}'
COMMAND: Final = f'\n<tool_call>\n{{"name": "bash", "arguments": {ARGUMENTS}}}\n</tool_call>'
"""What every answer ends with."""


class Size(Enum):
    """How much an agent says before its task."""

    SMALL = "small"
    """One tool, about 256 tokens."""
    AGENT = "agent-size"
    """TOOLS tools, 63 KB."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Model, sampling, tools and system prompt: what conversations may have in common."""

    size: Size
    head: bytes

    @classmethod
    def of(cls, size: Size, seed: str) -> Opening:
        """The same seed gives the same bytes; two seeds share no line."""
        writer = Writer(seed)
        system, tools = (500, [_tool("bash", writer, 60, 1)])
        if size is Size.AGENT:
            names = ["bash", *(f"{kind}_{what}" for kind in _KINDS for what in _WHATS)][:TOOLS]
            system, tools = (35_000, [_tool(name, writer, 600, 4) for name in names])
        given = {"model": "policy", "temperature": 1.0, "tools": tools}
        first = orjson.dumps({"role": "system", "content": writer.text(system)})
        return cls(size, orjson.dumps(given)[:-1] + b',"messages":[' + first)


class Conversation:
    """One agent's: `body()` is the next request, `answered()` takes the answer and runs the tool."""

    def __init__(self, opening: Opening, name: str, result_characters: int = RESULT_CHARACTERS) -> None:
        self._result_characters = result_characters
        self._writer = Writer(name)
        self._head = opening.head
        task = self._writer.text(1_500 if opening.size is Size.AGENT else 300)
        self._messages = [orjson.dumps({"role": "user", "content": f"Task {name}. {task}"})]

    def body(self, *, stream: bool = False) -> bytes:
        """The request, whole, as an agent repeats it each time."""
        tail = b'],"stream":true}' if stream else b"]}"
        return b",".join([self._head, *self._messages]) + tail

    def answered(self, answer: bytes) -> None:
        """Repeats an answer as it came. Raises RuntimeError when it has not the one tool call that was said."""
        message: dict[str, Any] = orjson.loads(answer)["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        if [call["function"]["name"] for call in calls] != ["bash"]:
            raise RuntimeError(f"not the answer that was given: {answer[:500]!r}")
        said = {"role": "assistant", "content": message["content"], "tool_calls": calls}
        result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": self._writer.text(self._result_characters)}
        self._messages += [orjson.dumps(said), orjson.dumps(result)]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model says: text and one call of `bash`, and the ids of both with the end of the turn."""

    text: str
    ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, tokens: int) -> Reply:
        """Of at most that many ids, and nearly as many."""
        writer = Writer("reply")
        words = " ".join(writer.sentence() for _ in range(tokens // 8)).split()

        def ids(count: int) -> list[int]:
            said = " ".join(words[:count]) + COMMAND
            return [
                *tokenizer.encode(said, add_special_tokens=False).ids,
                tiny_tokenizer.SPECIAL_TOKENS.index(tiny_tokenizer.TURN_END),
            ]

        count = bisect_right(range(len(words)), tokens, key=lambda count: len(ids(count))) - 1
        return cls(" ".join(words[:count]), ids(count))


_KINDS: Final = ("read", "write", "search", "list", "move")
_WHATS: Final = ("file", "folder", "notebook", "page")


def _tool(name: str, writer: Writer, length: int, parameters: int) -> dict[str, object]:
    described = {
        f"argument_{index}": {"type": "string", "description": writer.text(length // 6)} for index in range(parameters)
    }
    schema = {"type": "object", "properties": {"command": {"type": "string"}, **described}, "required": ["command"]}
    function = {"name": name, "description": writer.text(length), "parameters": schema}
    return {"type": "function", "function": function}
