"""The messages of the WebSocket: reset, step, state, mcp, close; one answer to each, in order.

An observation has the form that clients of every version read: `observation`, `reward`, `done` and, where there is any,
`metadata` both inside the observation and beside it. A rollout's reward is in the tool's result only, and ends no
episode; a terminal's answer ends one, and its reward is the observation's. A step after a terminal's end, however it
ended, has an error beside that reward and `done`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import orjson

from penstock.adapters.openenv import mcp
from penstock.adapters.openenv.sessions import Environment, Session, Sessions, tools
from penstock.adapters.openenv.terminals import EpisodeEnded
from penstock.client.errors import InvalidArgument, NotFound, PenstockError

READY: Final = {"status": "ready", "message": "Ready. Call run_rollout with an instruction."}

OPENED: Final = {"status": "ready", "message": "Ready. Call terminal with a command, or with the final answer."}

_log = logging.getLogger("penstock.adapters.openenv")


def observation(
    content: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    *,
    reward: float | None = None,
    done: bool = False,
) -> dict[str, Any]:
    """Returns an observation in the wire format."""
    kept = dict(metadata or {})
    whole: dict[str, Any] = {"observation": {**content, "metadata": kept}, "reward": reward, "done": done}
    return {**whole, "metadata": kept} if kept else whole


def refusal(message: str, code: str, **more: Any) -> dict[str, Any]:
    """Returns an error in the wire format."""
    return {"type": "error", "data": {"message": message, "code": code, **more}}


async def reset(environment: Environment, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Begins an episode. Raises InvalidArgument; a terminal that cannot be opened is an episode that has ended."""
    try:
        setup = await environment.reset(arguments)
    except InvalidArgument:
        raise
    except PenstockError as error:
        return observation({}, {"status": "error", "error": f"{error.reason}: {error}"}, done=True)
    if setup is None:
        return observation({}, READY)
    sandbox_id = environment.state.last_sandbox_id
    return observation({}, {**OPENED, "sandbox_id": sandbox_id, "setup_results": [asdict(item) for item in setup]})


async def step(environment: Environment, action: Mapping[str, Any]) -> dict[str, Any]:
    """Performs an action: `list_tools` or `call_tool`. Raises InvalidArgument for anything else."""
    metadata = action.get("metadata", {})
    match action.get("type"):
        case "list_tools" if action.keys() <= {"type", "metadata"} and isinstance(metadata, dict):
            return observation({"tools": tools()})
        case "call_tool" if action.keys() <= {"type", "metadata", "tool_name", "arguments"}:
            name, arguments = action.get("tool_name"), action.get("arguments", {})
            if isinstance(name, str) and isinstance(arguments, dict) and isinstance(metadata, dict):
                return await _call(environment, name, arguments)
    raise InvalidArgument(
        "an action must be {'type': 'list_tools'}, or {'type': 'call_tool', 'tool_name': ..., 'arguments': {...}}",
        reason="OPENENV_ARGUMENTS",
    )


async def answer(raw: str, session: Session, sessions: Sessions) -> dict[str, Any]:
    """Returns the answer to a message other than `close`."""
    try:
        message = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return refusal("Invalid JSON", "INVALID_JSON")
    if not isinstance(message, dict):
        return refusal("Invalid message: must be an object", "VALIDATION_ERROR")
    kind, data = message.get("type"), message.get("data", {})
    if kind in ("reset", "step", "mcp") and not isinstance(data, dict):
        return refusal("Invalid message: data must be an object", "VALIDATION_ERROR")
    environment = session.environment
    try:
        match kind:
            case "reset":
                return {"type": "observation", "data": await reset(environment, data)}
            case "step":
                return {"type": "observation", "data": await step(environment, data)}
            case "state":
                return {"type": "state", "data": asdict(environment.state)}
            case "mcp":
                return {"type": "mcp", "data": await mcp.answer(data, sessions, session)}
            case _:
                return refusal(f"Unknown message type: {str(kind)[:80]}", "UNKNOWN_TYPE")
    except InvalidArgument as error:
        return refusal(str(error), "VALIDATION_ERROR", reason=error.reason)
    except PenstockError as error:
        return refusal(str(error), "EXECUTION_ERROR", reason=error.reason)
    except Exception:  # noqa: BLE001 - a caller never sees an exception of ours, and always gets an answer (R8)
        _log.exception("a fault of the server")
        return refusal("an internal error of the server; its log has the details", "EXECUTION_ERROR")


def is_close(raw: str) -> bool:
    """Whether a message asks to close: it is handled at once, ahead of the messages before it."""
    if len(raw) > 256:
        return False
    try:
        message = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return False
    return isinstance(message, dict) and message.get("type") == "close"


async def _call(environment: Environment, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Calls a tool; a failed call is an observation with an error, not an error of the connection."""
    try:
        outcome = await environment.call_tool(name, arguments)
    except NotFound as error:
        kind = "tool_not_found" if error.reason == "OPENENV_TOOL_UNKNOWN" else "invalid_args"
        return _failed(name, kind, error)
    except InvalidArgument as error:
        return _failed(name, "invalid_args", error)
    except EpisodeEnded as error:
        return {**_failed(name, "execution_error", error), "reward": error.reward, "done": True}
    except PenstockError as error:
        return _failed(name, "execution_error", error)
    content = {"tool_name": name, "result": mcp.tool_result(outcome.text), "error": None}
    return observation(content, reward=outcome.reward, done=outcome.done)


def _failed(name: str, kind: str, error: PenstockError) -> dict[str, Any]:
    message = str(error) if error.reason.startswith("OPENENV") else f"{error.reason}: {error}"
    return observation({"tool_name": name, "result": None, "error": {"error_type": kind, "message": message}})
