"""Host tools: tools of this program that agents call through the gate, and their running calls.

Invariants of `Serving`:
- a call runs once, however often the gate sends it; its result stays until the gate has it on disk;
- a tool's exception goes to this program's log; the agent sees no more of it than the message of `ToolFailed`.
"""

import asyncio
import base64
import dataclasses
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Generic, TypeAlias, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from penstock.chat.v1 import chat_pb2
from penstock.client.errors import InvalidArgument
from penstock.client.types.chat import Image, Text
from penstock.client.wire.chat import optional, time
from penstock.client.wire.specs import struct
from penstock.interception.v1 import intercept_service_pb2 as pb

_log: Final = logging.getLogger("penstock.client.intercept.host_tools")
_FRAME_BYTES: Final = 8 * 1024 * 1024
_MAX_WHOLE: Final = 2**53

Arguments = TypeVar("Arguments", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostToolCall(Generic[Arguments]):
    """One call of a tool by an agent.

    Attributes:
        tool_call_id: never used for another call.
        name: the tool's.
        arguments: a dict that satisfies the tool's schema, or the tool's pydantic model.
        expire_time: when the call times out for the agent.
    """

    tool_call_id: str
    name: str
    arguments: Arguments
    rollout_id: str
    group_id: str | None
    group_index: int | None
    run_id: str | None
    task_id: str | None
    labels: Mapping[str, str]
    receive_time: datetime | None
    expire_time: datetime | None
    namespace: str = "default"


ToolFunction: TypeAlias = Callable[[HostToolCall[Any]], Awaitable[object]] | Callable[[HostToolCall[Any]], object]
"""Runs a call. An async function runs on the session's loop, any other in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTool:
    """A tool that agents of rollouts may call.

    Attributes:
        name: a letter, then letters, digits, _ and -, 48 at most; none that agents have themselves, as `bash`.
        function: gets the call, returns the agent's result: a text, Text and Image parts, or any JSON value
            (mappings, pydantic models and dataclasses too). Raises `ToolFailed` with an error message for the agent.
        description: for the model.
        parameters: JSON Schema of the arguments, or a pydantic model of them; None = any object. The
            gate refuses invalid arguments before they come here.
    """

    name: str
    function: ToolFunction
    description: str = ""
    parameters: Mapping[str, Any] | type[BaseModel] | None = None


class ToolFailed(Exception):
    """Raised by a tool: its message is the agent's tool error."""


class Serving:
    """The tools of one session and the calls that run. Belongs to one event loop.

    `wake` is set whenever there is something to send.
    """

    def __init__(self, wake: asyncio.Event) -> None:
        self._wake = wake
        self._offers: dict[bytes, tuple[pb.CallSelector, dict[str, HostTool]]] = {}
        # Of offers that the gate may still have: none of its streams stood.
        self._withdrawn: dict[bytes, pb.CallSelector] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._results: dict[str, pb.HostToolResult] = {}
        self._unsent: dict[str, pb.HostToolResult] = {}

    # Offers.

    def check(self, tools: Sequence[HostTool], selector: pb.CallSelector) -> list[chat_pb2.Tool]:
        """Converts the tools to messages.

        Raises:
            InvalidArgument: `HOST_TOOL`, another tool of this session has the name, or a schema is no JSON.
        """
        key = selector.SerializeToString(deterministic=True)
        taken = {name: tool for at, (_, offer) in self._offers.items() if at != key for name, tool in offer.items()}
        for tool in tools:
            if taken.get(tool.name, tool) != tool:
                raise InvalidArgument(f"This session has another tool {tool.name}", reason="HOST_TOOL")
        return [_tool_to(tool) for tool in tools]

    def offered(self, tools: Sequence[HostTool], selector: pb.CallSelector) -> None:
        """The gate accepted them; they replace the earlier offer to this selector."""
        key = selector.SerializeToString(deterministic=True)
        self._offers.pop(key, None)
        if tools:
            self._offers[key] = (selector, {tool.name: tool for tool in tools})

    def offers(self, selector: pb.CallSelector) -> list[HostTool]:
        """Returns the current offer to this selector."""
        _, tools = self._offers.get(selector.SerializeToString(deterministic=True), (selector, {}))
        return list(tools.values())

    def everything(self) -> list[tuple[pb.CallSelector, list[HostTool]]]:
        """Returns all current offers."""
        return [(selector, list(tools.values())) for selector, tools in self._offers.values()]

    def withdrawn(self, selector: pb.CallSelector) -> None:
        """The offer to this selector was withdrawn, and the gate does not know it yet."""
        self._withdrawn[selector.SerializeToString(deterministic=True)] = selector

    def registrations(self, session_id: str) -> list[pb.RegisterToolsRequest]:
        """Returns the registrations that a stream has to send; withdrawals first, as a gate limits the selectors."""
        withdrawn = [
            pb.RegisterToolsRequest(session_id=session_id, selector=selector)
            for key, selector in self._withdrawn.items()
            if key not in self._offers
        ]
        return withdrawn + [
            pb.RegisterToolsRequest(session_id=session_id, selector=selector, tools=map(_tool_to, tools.values()))
            for selector, tools in self._offers.values()
        ]

    def registered(self, request: pb.RegisterToolsRequest) -> None:
        """The gate has these tools in place of what it had."""
        key = request.selector.SerializeToString(deterministic=True)
        if not request.tools or key in self._offers:  # else they were withdrawn meanwhile
            self._withdrawn.pop(key, None)

    # For the stream.

    def called(self, message: pb.HostToolCall) -> None:
        """Handles a call from the gate, which may be a repeat."""
        call_id = message.tool_call_id
        if call_id in self._results:
            self._send(self._results[call_id])
        elif call_id not in self._running:
            self._running[call_id] = asyncio.create_task(self._run(message), name=f"penstock-tool-{call_id}")

    def cancelled(self, call_ids: Collection[str]) -> None:
        """Handles cancelled calls: they need no result any more."""
        for call_id in call_ids:
            self._forget(call_id)
            if (task := self._running.pop(call_id, None)) is not None:
                task.cancel()

    def acknowledged(self, frame: pb.ToolResultsAcknowledged) -> None:
        """Handles results that the gate has on disk, or rejected: then the agent gets a tool error."""
        for call_id in frame.accepted_tool_call_ids:
            self._forget(call_id)
        for rejected in frame.rejected:
            result = self._forget(rejected.call_id)
            if rejected.reason != pb.ResultRejected.REASON_INVALID or result is None:
                continue  # the call is over
            _log.error("the gate refused a tool's result: %s", "; ".join(rejected.violations) or rejected.message)
            if not (result.is_error and result.result == _FAILED):
                self._finish(rejected.call_id, result.rollout_id, _FAILED, is_error=True)

    def taken_up(self, *, resumed: bool) -> None:
        """Handles a new stream: unacknowledged results are sent again if their calls are still open."""
        self._unsent.clear()
        if not resumed:
            self._withdrawn.clear()  # the gate has nothing of the old session
            self._results.clear()
            self.cancelled(list(self._running))
        for result in self._results.values():
            self._send(result)

    def next_results(self) -> pb.ToolResults | None:
        """Returns results to send, up to a limit in bytes; None = there are none."""
        results: list[pb.HostToolResult] = []
        size = 0
        for call_id, result in list(self._unsent.items()):
            size += result.ByteSize()
            if results and size > _FRAME_BYTES:
                break
            del self._unsent[call_id]
            results.append(result)
        return pb.ToolResults(results=results) if results else None

    def end(self) -> None:
        """Ends the exchange: running calls are cancelled."""
        self._results.clear()
        self._unsent.clear()
        for task in self._running.values():
            task.cancel()

    async def ended(self) -> None:
        """Waits, after `end`, until nothing runs any more."""
        if tasks := list(self._running.values()):
            await asyncio.wait(tasks)

    # Private.

    async def _run(self, message: pb.HostToolCall) -> None:
        try:
            try:
                result, is_error = await self._carried_out(message), False
            except ToolFailed as error:
                result, is_error = struct({"text": str(error) or "The tool failed."}, "a tool's words"), True
        except asyncio.CancelledError:
            self._running.pop(message.tool_call_id, None)
            raise
        except Exception:  # noqa: BLE001 - logged; nothing of it reaches the agent (R8)
            _log.exception("tool %s failed in rollout %s", message.name, message.rollout_id)
            result, is_error = _FAILED, True
        if self._running.pop(message.tool_call_id, None) is not None:
            self._finish(message.tool_call_id, message.rollout_id, result, is_error=is_error)

    async def _carried_out(self, message: pb.HostToolCall) -> Any:
        tool = next((offer[message.name] for _, offer in self._offers.values() if message.name in offer), None)
        if tool is None:
            raise ToolFailed("The tool is no longer available.")
        call = _call_from(message, tool)
        if inspect.iscoroutinefunction(tool.function):
            given = await tool.function(call)
        else:
            given = await asyncio.to_thread(tool.function, call)
            if inspect.isawaitable(given):
                given = await given
        return struct(_result_fields(given), f"the result of tool {tool.name}")

    def _finish(self, call_id: str, rollout_id: str, result: Any, *, is_error: bool) -> None:
        made = pb.HostToolResult(tool_call_id=call_id, rollout_id=rollout_id, result=result, is_error=is_error)
        self._results[call_id] = made
        self._send(made)

    def _send(self, result: pb.HostToolResult) -> None:
        self._unsent[result.tool_call_id] = result
        self._wake.set()

    def _forget(self, call_id: str) -> pb.HostToolResult | None:
        self._unsent.pop(call_id, None)
        return self._results.pop(call_id, None)


_FAILED: Final = struct({"text": "The tool failed."}, "a tool's words")


def _tool_to(tool: HostTool) -> chat_pb2.Tool:
    parameters = tool.parameters
    if isinstance(parameters, type):
        parameters = parameters.model_json_schema()
    try:
        schema = "" if parameters is None else orjson.dumps(dict(parameters)).decode()
    except TypeError as error:
        raise InvalidArgument(f"The schema of tool {tool.name} is not JSON: {error}", reason="HOST_TOOL") from None
    return chat_pb2.Tool(name=tool.name, description=tool.description, parameters_json_schema=schema)


def _call_from(message: pb.HostToolCall, tool: HostTool) -> HostToolCall[Any]:
    arguments = orjson.loads(message.arguments_json)
    if isinstance(tool.parameters, type):
        try:
            arguments = tool.parameters.model_validate(arguments)
        except ValidationError as error:
            wrong = [
                f"{'.'.join(map(str, item['loc'])) or 'arguments'}: {item['msg']}"
                for item in error.errors(include_url=False, include_context=False, include_input=False)
            ]
            raise ToolFailed("Invalid arguments:\n" + "\n".join(wrong)) from None
    return HostToolCall(
        tool_call_id=message.tool_call_id,
        name=message.name,
        arguments=arguments,
        rollout_id=message.rollout_id,
        group_id=optional(message, "group_id"),
        group_index=optional(message, "group_index"),
        run_id=optional(message, "run_id"),
        task_id=optional(message, "task_id"),
        labels=dict(message.labels),
        receive_time=time(message, "receive_time"),
        expire_time=time(message, "expire_time"),
        namespace=message.namespace,
    )


def _result_fields(given: object) -> Mapping[str, Any]:
    """Converts a tool's result for the gate."""
    if given is None or isinstance(given, str):
        return {"text": given or ""}
    items = list(given) if isinstance(given, list | tuple) else [given]
    parts = [item for item in items if isinstance(item, Text | Image)]
    if parts and len(parts) == len(items):
        return {"content": [_block(part) for part in parts]}
    if isinstance(given, BaseModel):
        given = given.model_dump(mode="json")
    elif dataclasses.is_dataclass(given) and not isinstance(given, type):
        given = dataclasses.asdict(given)
    value = dict(given) if isinstance(given, Mapping) else {"result": given}
    _check(value)
    return value


def _block(part: Text | Image) -> dict[str, str]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if not part.data:
        raise ValueError("an image of a tool must have its data")
    return {"type": "image", "data": base64.b64encode(part.data).decode(), "mimeType": part.media_type}


def _check(value: object) -> None:
    """Refuses numbers that would change in transit: a Struct has doubles only."""
    if isinstance(value, Mapping):
        for item in value.values():
            _check(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check(item)
    elif isinstance(value, int) and abs(value) > _MAX_WHOLE:
        raise ValueError("an integer beyond 2**53 cannot be sent exactly: return it as text")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")
