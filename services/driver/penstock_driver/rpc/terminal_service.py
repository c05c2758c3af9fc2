"""TerminalService: terminal episodes over gRPC."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from penstock.driver.v1 import terminal_service_pb2, terminal_service_pb2_grpc
from penstock_chassis import auth, times
from penstock_chassis.auth import Owned
from penstock_chassis.validation import invalid_field
from penstock_driver.domain.records import RequestKey, new_id
from penstock_driver.domain.terminal_episode import Step
from penstock_driver.domain.validation import id_problem
from penstock_driver.terminals.manager import TerminalManager
from penstock_driver.terminals.records import TerminalRecord, TerminalRecords
from penstock_driver.wire.specs import step_action, terminal_spec, with_locks

SERVICE: Final = "penstock.driver.v1.TerminalService"
MAX_ANSWER_BYTES: Final = 1 << 20


class TerminalServicer(terminal_service_pb2_grpc.TerminalServiceServicer):
    """See terminal_service.proto."""

    def __init__(self, terminals: TerminalManager) -> None:
        self._terminals = terminals

    async def OpenTerminal(  # noqa: N802
        self, request: terminal_service_pb2.OpenTerminalRequest, context: Any
    ) -> terminal_service_pb2.OpenTerminalResponse:
        """Returns when the first command may be sent."""
        key = RequestKey.of(auth.caller().home, request.request_id, request, b"OpenTerminal")
        spec = await with_locks(request.sandbox.packages, lambda: terminal_spec(request, key.namespace))
        record = await self._terminals.open(key, spec)
        return terminal_service_pb2.OpenTerminalResponse(terminal=terminal_to_proto(record, self._terminals.home.name))

    async def Step(  # noqa: N802
        self, request_iterator: AsyncIterator[terminal_service_pb2.StepRequest], context: Any
    ) -> AsyncIterator[terminal_service_pb2.StepResponse]:
        """One response per request, in order."""
        terminal_id = ""
        async for request in request_iterator:
            terminal_id = _same_terminal(terminal_id, request.terminal_id)
            yield await self._terminals.step(terminal_id, _step(request))

    async def CloseTerminal(  # noqa: N802
        self, request: terminal_service_pb2.CloseTerminalRequest, context: Any
    ) -> terminal_service_pb2.CloseTerminalResponse:
        """Returns when the sandbox is gone."""
        await self._terminals.close(request.terminal_id)
        return terminal_service_pb2.CloseTerminalResponse()

    async def GetTerminal(  # noqa: N802
        self, request: terminal_service_pb2.GetTerminalRequest, context: Any
    ) -> terminal_service_pb2.GetTerminalResponse:
        """The current state."""
        record = await self._terminals.get(request.terminal_id)
        return terminal_service_pb2.GetTerminalResponse(terminal=terminal_to_proto(record, self._terminals.home.name))


def owned(records: TerminalRecords) -> Mapping[str, Owned]:
    """Whose the episodes are that requests name."""
    terminal = Owned(("terminal_id",), records.namespace_of)
    return {f"{SERVICE}/{method}": terminal for method in ("Step", "CloseTerminal", "GetTerminal")}


def _same_terminal(known: str, given: str) -> str:
    if not (known or given):
        raise invalid_field("terminal_id", "is required on the first message")
    if known and given not in ("", known):
        raise invalid_field("terminal_id", "a stream is for one terminal only: open another stream")
    return known or given


def _step(request: terminal_service_pb2.StepRequest) -> Step:
    if request.step_id and (problem := id_problem(request.step_id)):
        raise invalid_field("step_id", problem)
    if request.WhichOneof("action") is None:
        raise invalid_field("action", "is required: a command or the final answer")
    if len(request.final_answer.encode()) > MAX_ANSWER_BYTES:
        raise invalid_field("final_answer", f"at most {MAX_ANSWER_BYTES} bytes are allowed")
    kept = terminal_service_pb2.StepRequest()
    kept.CopyFrom(request)
    kept.ClearField("terminal_id")
    digest = hashlib.sha256(kept.SerializeToString(deterministic=True)).hexdigest()
    return Step(request.step_id or new_id("a"), step_action(request), digest, kept)


def terminal_to_proto(record: TerminalRecord, driver: str) -> terminal_service_pb2.Terminal:
    """An episode in its current state; `driver` is this driver's name."""
    wire = terminal_service_pb2.Terminal()
    wire.CopyFrom(record.public)
    wire.terminal_id = record.terminal_id
    wire.home.driver = driver
    wire.step_count = record.step_count
    wire.create_time.CopyFrom(times.timestamp(record.create_time))
    wire.setup_commands.extend(record.setup.verifier_commands)
    wire.verifier_commands.extend(record.verification.verifier_commands)
    if record.deadline is not None:
        wire.expire_time.CopyFrom(times.timestamp(record.deadline))
    if record.end_time is not None:
        wire.end_time.CopyFrom(times.timestamp(record.end_time))
    if record.place is not None:
        wire.home.sandbox_service, wire.home.sandbox_id = record.place.service, record.place.sandbox_id
    if record.place is not None and not record.released:
        wire.sandbox_id = record.place.sandbox_id
    outcome = record.outcome
    if outcome is None:
        return wire
    wire.ended = True
    if outcome.HasField("reward"):
        wire.reward.CopyFrom(outcome.reward)
    if outcome.HasField("failure"):
        wire.failure.CopyFrom(outcome.failure)
    return wire
