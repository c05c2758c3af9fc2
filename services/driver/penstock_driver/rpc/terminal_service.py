"""TerminalService: terminal episodes over gRPC."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from typing import Any, Final

from penstock.driver.v1 import terminal_service_pb2, terminal_service_pb2_grpc
from penstock_chassis.errors import InvalidArgument, Violation
from penstock_driver.records import new_id
from penstock_driver.rpc.orders import preparation_key, terminal_from_proto
from penstock_driver.rpc.terminal_forms import action_from_proto, kept_order, shown_terminal, terminal_to_proto
from penstock_driver.terminals.fleet import Terminals

MAX_ANSWER_BYTES: Final = 1 << 20
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


class TerminalServicer(terminal_service_pb2_grpc.TerminalServiceServicer):
    """See terminal_service.proto."""

    def __init__(self, terminals: Terminals) -> None:
        self._terminals = terminals

    async def OpenTerminal(  # noqa: N802
        self, request: terminal_service_pb2.OpenTerminalRequest, context: Any
    ) -> terminal_service_pb2.OpenTerminalResponse:
        """Answers when the first command may come."""
        order = terminal_from_proto(request)
        digest = hashlib.sha256(b"OpenTerminal" + request.SerializeToString(deterministic=True)).hexdigest()
        record = await self._terminals.open(
            order,
            request_id=request.request_id or new_id("q"),
            digest=digest,
            key=preparation_key(request.task, request.sandbox),
            shown=shown_terminal(request, order),
            kept=kept_order(request),
        )
        return terminal_service_pb2.OpenTerminalResponse(terminal=terminal_to_proto(record))

    async def Step(  # noqa: N802
        self, request_iterator: AsyncIterator[terminal_service_pb2.StepRequest], context: Any
    ) -> AsyncIterator[terminal_service_pb2.StepResponse]:
        """One answer for each request, in order."""
        terminal_id = ""
        async for request in request_iterator:
            terminal_id = _same_terminal(terminal_id, request.terminal_id)
            step_id = _step_id(request.step_id)
            _check_action(request)
            said = terminal_service_pb2.StepRequest()
            said.CopyFrom(request)
            said.ClearField("terminal_id")
            kept = said.SerializeToString(deterministic=True)
            given = await self._terminals.step(
                terminal_id,
                step_id,
                action_from_proto(request),
                digest=hashlib.sha256(kept).hexdigest(),
                kept=kept,
            )
            yield terminal_service_pb2.StepResponse.FromString(given)

    async def CloseTerminal(  # noqa: N802
        self, request: terminal_service_pb2.CloseTerminalRequest, context: Any
    ) -> terminal_service_pb2.CloseTerminalResponse:
        """Returns when the sandbox is gone."""
        await self._terminals.close(request.terminal_id)
        return terminal_service_pb2.CloseTerminalResponse()

    async def GetTerminal(  # noqa: N802
        self, request: terminal_service_pb2.GetTerminalRequest, context: Any
    ) -> terminal_service_pb2.GetTerminalResponse:
        """As it stands."""
        record = await self._terminals.get(request.terminal_id)
        return terminal_service_pb2.GetTerminalResponse(terminal=terminal_to_proto(record))


def _same_terminal(known: str, given: str) -> str:
    if not (known or given):
        raise _invalid("terminal_id", "is required on the first message")
    if known and given not in ("", known):
        raise _invalid("terminal_id", "a stream is of one terminal")
    return known or given


def _step_id(given: str) -> str:
    if given and not _ID.fullmatch(given):
        raise _invalid("step_id", "expected 1 to 120 letters, digits and . _ -")
    return given or new_id("a")


def _check_action(request: terminal_service_pb2.StepRequest) -> None:
    if request.WhichOneof("action") is None:
        raise _invalid("action", "is required: a command, or the final answer")
    if len(request.final_answer.encode()) > MAX_ANSWER_BYTES:
        raise _invalid("final_answer", f"at most {MAX_ANSWER_BYTES} bytes are taken")


def _invalid(field: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {problem}", reason="STEP_INVALID", violations=[Violation(field, problem)])
