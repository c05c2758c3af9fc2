"""Rows of the table `chat`: a conversation per branch of a rollout, as messages for supervised fine-tuning.

Messages have the form that chat templates of transformers take: tool calls with their arguments as objects, results
with the id and the name of their call. They are the agent's last request of the branch, and the answer to it. They are
texts: a template may render other tokens from them than were sampled. The sampled tokens are in `sequences`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any, TypeAlias

import orjson

from penstock.analysis.readable_calls import MessagePart, answered, messages
from penstock.chat.v1 import chat_pb2
from penstock.tables import rows
from penstock.tables.columns import Row, sealed
from penstock.trajectory.v1 import trajectory_pb2 as pb

_Heart: TypeAlias = tuple[str, list[tuple[str, Any]]]


class BodiesMissing(ValueError):
    """The trajectory was read without the agents' request bodies."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and the kinds of those parts that have no place in them, such as images."""

    messages: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BranchConversation:
    """The conversation of a branch, whose last call with an answer is the leaf.

    `calls` are those that answered an assistant's messages, by the messages' places. `shared` messages at the beginning
    are those of an earlier conversation of the rollout.
    """

    branch: pb.Branch
    leaf: pb.Call
    calls: Mapping[int, pb.Call]
    messages: list[Row]
    left_out: list[str]
    tools: list[Row]
    shared: int

    @property
    def line(self) -> tuple[pb.Call, ...]:
        """The calls whose answers the conversation holds, in its order; the leaf, last, even if its answer is empty."""
        line = [self.calls[place] for place in sorted(self.calls)]
        return tuple(line if self.leaf in line[-1:] else [*line, self.leaf])


def chat(trajectory: pb.Trajectory) -> Iterator[Row]:
    """Yields a row per branch that has an answer.

    Raises:
        BodiesMissing: a call has no request body here.
    """
    made = list(conversations(trajectory))
    for index, one in enumerate(made):
        done = one.leaf.completion
        row = {
            **rows.common(trajectory),
            "conversation_index": index,
            "branch_id": one.branch.branch_id,
            "role": rows.word(pb.CallClass, one.branch.branch_class),
            "call_id": one.leaf.call_id,
            "call_ids": [call.call_id for call in one.line],
            "messages": one.messages,
            "tools": one.tools,
            "shared_messages": one.shared,
            "left_out": one.left_out,
            "model": done.model or one.leaf.model_requested,
            "finish_reason": rows.word(chat_pb2.FinishReason, done.finish_reason),
            "injected": any(call.injected for call in one.line),
            **rows.reward(trajectory),
            "grade": rows.word(pb.Grade, trajectory.grade),
            "parent_rollout_id": trajectory.branched_from.parent_rollout_id or None,
            "branch_call_id": trajectory.branched_from.call_id or None,
        }
        yield sealed(row, len(made))


def conversations(trajectory: pb.Trajectory) -> Iterator[BranchConversation]:
    """Yields the conversation of each branch that has an answer.

    Raises:
        BodiesMissing: a call has no request body here.
    """
    calls = {call.call_id: call for call in trajectory.calls}
    tools = {call.tools_sha256: call.tools for call in trajectory.calls if call.tools}
    answers = _Answers(trajectory.calls)
    earlier: list[list[Row]] = []
    for branch in trajectory.branches:
        leaf = _leaf(branch, calls)
        if leaf is None:
            continue
        found = conversation(_body(leaf), rows.message_row(leaf.completion.message))
        shared = max((_shared(found.messages, other) for other in earlier), default=0)
        earlier.append(found.messages)
        own = [_tool(tool) for tool in tools.get(leaf.tools_sha256, ())]
        paired = answers.of(leaf, found.messages)
        yield BranchConversation(branch, leaf, paired, found.messages, found.left_out, own, shared)


def conversation(body: object, answer: object = None) -> Conversation:
    """Returns a parsed request body of any dialect as messages, with a recorded answer (`response_message`) to it."""
    found = Conversation()
    names: dict[str, str] = {}
    waiting: list[tuple[str, str]] = []
    # Responses and generateContent spread one turn of a model over several items.
    is_spread = isinstance(body, Mapping) and "messages" not in body
    for _, grouped in groupby(messages(body), key=lambda part: _message_of(part, is_spread=is_spread)):
        _add(found, list(grouped), names, waiting)
    if parts := answered(answer):
        _add(found, list(parts), names, waiting)
    return found


def _message_of(part: MessagePart, *, is_spread: bool) -> tuple[object, ...]:
    role = _role(part)
    if role == "assistant" and is_spread:
        return (role,)
    return role, part.place


def _role(part: MessagePart) -> str:
    return {"model": "assistant", "developer": "system"}.get(part.role, part.role)


def _add(found: Conversation, parts: list[MessagePart], names: dict[str, str], waiting: list[tuple[str, str]]) -> None:
    """Adds a message. `names` has the tools' names by the ids of their calls; `waiting` are calls without a result."""
    role = _role(parts[0])
    for part in parts:
        if part.kind == "tool_result":
            found.messages.append(_result(part, names, waiting))
        elif part.kind == "other":
            found.left_out.append(_kind_of(part.text))
    texts = [part.text for part in parts if part.kind == "text"]
    calls = [part for part in parts if part.kind == "tool_call"]
    thoughts = [part.text for part in parts if part.kind == "reasoning" and part.text]
    if not (texts or calls or thoughts):
        return
    message: Row = {"role": role, "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [_call(part, names, waiting) for part in calls]
    found.messages.append(message)


def _call(part: MessagePart, names: dict[str, str], waiting: list[tuple[str, str]]) -> Row:
    name = part.tool_call_id or f"call_{len(names)}"  # generateContent may leave ids out
    names[name] = part.name
    waiting.append((name, part.name))
    return {"id": name, "type": "function", "function": {"name": part.name, "arguments": _arguments(part.text)}}


def _result(part: MessagePart, names: dict[str, str], waiting: list[tuple[str, str]]) -> Row:
    name = part.tool_call_id or next((call for call, tool in waiting if tool == part.name), "")
    waiting[:] = [item for item in waiting if item[0] != name]
    return {"role": "tool", "tool_call_id": name, "name": part.name or names.get(name, ""), "content": part.text}


def _arguments(text: str) -> Any:
    if not text.strip():
        return {}
    value = _parsed(text)
    return value if isinstance(value, dict) else text


def _kind_of(text: str) -> str:
    """Returns the type of a part that is shown as JSON."""
    value = _parsed(text)
    if not isinstance(value, dict):
        return "unknown"
    return str(value.get("type") or next(iter(value), "unknown"))


def _tool(tool: chat_pb2.Tool) -> Row:
    schema = _parsed(tool.parameters_json_schema)
    function = {"name": tool.name, "description": tool.description, "parameters": schema}
    return {"type": "function", "function": function}


def _parsed(text: str | bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _leaf(branch: pb.Branch, calls: Mapping[str, pb.Call]) -> pb.Call | None:
    """Returns the branch's last call that has an answer."""
    for call_id in reversed(branch.call_ids):
        call = calls.get(call_id)
        if call is not None and call.HasField("completion") and call.completion.HasField("message"):
            return call
    return None


class _Answers:
    """The answered calls of a rollout, by what they answered.

    A call's parent does not show it: what continues an answer without tokens, such as a written one, has the call
    before that as parent, and a new root has one of another line with which it shares tokens.
    """

    def __init__(self, calls: Sequence[pb.Call]) -> None:
        self._calls = calls
        self._numbers = {call.call_id: number for number, call in enumerate(calls)}
        self._hearts: dict[int, _Heart] = {}
        self._saying: dict[str, list[int]] = {}
        """By the text alone."""
        self._asked: dict[int, int | None] = {}
        for number, call in enumerate(calls):
            made = conversation(None, rows.message_row(call.completion.message)).messages
            if len(made) == 1:
                heart = self._hearts[number] = _heart(made[0])
                self._saying.setdefault(heart[0], []).append(number)

    def of(self, leaf: pb.Call, messages: Sequence[Row]) -> dict[int, pb.Call]:
        """Returns the call that answered each assistant's message of the leaf's conversation, by the message's place.

        They are paired from the last backwards: the agent may have put messages of an assistant into its first request,
        or have removed some later.
        """
        found: dict[int, pb.Call] = {}
        after = self._numbers[leaf.call_id]
        line = self._line(leaf)
        for place in range(len(messages) - 1, -1, -1):
            if messages[place]["role"] != "assistant":
                continue
            heart = _heart(messages[place])
            if place == len(messages) - 1 and self._hearts.get(after) == heart:
                match: int | None = after
            else:
                match = self._before(after, line, place, heart)
            if match is not None:
                found[place] = self._calls[match]
                after = match
        return found

    def _before(self, after: int, line: Collection[str], place: int, heart: _Heart) -> int | None:
        """Returns the call before this one that answered so; of several the one that was asked at this place.

        If that does not decide, it is one of the leaf's own line, or a written one beside it, or else the last.
        """
        fitting = [n for n in self._saying.get(heart[0], ()) if n < after and self._hearts[n] == heart]
        if len(fitting) < 2:
            return fitting[0] if fitting else None

        def rank(number: int) -> tuple[bool, int, int]:
            call = self._calls[number]
            own = 2 if call.call_id in line else int(call.injected and call.parent_call_id in line)
            return self._asked_after(number) == place, own, number

        return max(fitting, key=rank)

    def _asked_after(self, number: int) -> int | None:
        """How many messages the request of a call has; None without its body."""
        if number not in self._asked:
            body = self._calls[number].request_body
            self._asked[number] = len(conversation(_parsed(body)).messages) if body else None
        return self._asked[number]

    def _line(self, leaf: pb.Call) -> set[str]:
        """The ids of the calls from the leaf to its root, by parents."""
        line = {leaf.call_id}
        parent = leaf.parent_call_id
        while parent in self._numbers and parent not in line:
            line.add(parent)
            parent = self._calls[self._numbers[parent]].parent_call_id
        return line


def _heart(message: Row) -> _Heart:
    """What an agent repeats of an answer: it may drop reasoning, and trims."""
    calls = message.get("tool_calls", ())
    return message["content"].strip(), [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def _body(call: pb.Call) -> object:
    if not call.request_body:
        raise BodiesMissing(f"call {call.call_id} has no request body")
    return _parsed(call.request_body)


def _shared(one: list[Row], other: list[Row]) -> int:
    """Returns how many messages at the beginning are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
