"""The gate, as the driver uses it: `ports.Gate` over gRPC, and the capture for those who read trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

import grpc
import structlog

from penstock.interception.v1 import interception_pb2, rollout_gate_service_pb2, rollout_gate_service_pb2_grpc
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.channel import typed_errors
from penstock_chassis.errors import NotFound, PenstockError, Unavailable
from penstock_driver.ports import CallEnded, CallSpent, GateClosing, GateOpening, GateOrder
from penstock_driver.rpc.values import DIALECTS, dialect_from_proto

CALL_S: Final = 60.0
_PROBE_S: Final = 30.0
"""Longer than the gate asks a model's source itself: its error says more than a deadline."""
_RETRY_FIRST_S: Final = 0.2
_RETRY_MOST_S: Final = 10.0
_ENDED: Final = frozenset(
    {
        trajectory_pb2.CALL_STATE_DELIVERED,
        trajectory_pb2.CALL_STATE_FAILED,
        trajectory_pb2.CALL_STATE_CANCELLED,
        trajectory_pb2.CALL_STATE_EXPIRED,
    }
)
_log = structlog.get_logger("penstock.driver")


class GrpcGate:
    """Speaks to one interception service over a channel that somebody else owns."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._gate = rollout_gate_service_pb2_grpc.RolloutGateServiceStub(channel)
        self._interruptions = 0

    @property
    def interruptions(self) -> int:
        """See ports.Gate: counted by the stream of calls, which is open as long as the gate is there."""
        return self._interruptions

    async def check(
        self, terms: bytes, *, rollout_id: str, group_id: str | None, labels: Mapping[str, str]
    ) -> Sequence[str]:
        """See ports.Gate."""
        order = rollout_gate_service_pb2.OpenRolloutRequest.FromString(terms)
        request = rollout_gate_service_pb2.CheckSourceRequest(
            mode=order.mode,
            rollout_id=rollout_id,
            group_id=group_id,
            run_id=order.run_id if order.HasField("run_id") else None,
            labels=labels,
        )
        if order.HasField("source"):
            request.source.CopyFrom(order.source)
        if order.HasField("run_budgets"):
            request.run_budgets.CopyFrom(order.run_budgets)
        try:
            with typed_errors():
                answer = await self._gate.CheckSource(request, timeout=_PROBE_S)
        except Unavailable as error:
            if not error.reason.startswith("TRANSPORT_"):
                raise
            message = f"the interception service cannot be reached: {error.message}"
            raise Unavailable(message, reason="INTERCEPTION_UNREACHABLE", retry_after_s=1.0) from error
        return tuple(answer.host_tools)

    async def open(self, order: GateOrder) -> GateOpening:
        """See ports.Gate."""
        request = rollout_gate_service_pb2.OpenRolloutRequest()
        request.MergeFromString(order.terms)
        request.request_id = order.request_id
        request.rollout_id = order.rollout_id
        if order.group_id is not None:
            request.group_id = order.group_id
        if order.group_index is not None:
            request.group_index = order.group_index
        if order.task_id:
            request.task_id = order.task_id
        request.dialects.extend(DIALECTS[dialect] for dialect in order.dialects)
        request.hints.CopyFrom(
            interception_pb2.CallHints(
                title_system_prompts=order.title_system_prompts,
                compaction_system_prompts=order.compaction_system_prompts,
                session_headers=order.session_headers,
                volatile_line_patterns=order.volatile_line_patterns,
            )
        )
        request.labels.update(order.labels)
        with typed_errors():
            answer = await self._gate.OpenRollout(request, timeout=CALL_S)
        return GateOpening(
            ingress_address=answer.ingress_address,
            base_paths={dialect_from_proto(item.dialect): item.base_path for item in answer.endpoints},
            token=answer.token,
            model_name=answer.rollout.model_name,
            host_tools=tuple(answer.host_tools),
            mcp_path=answer.mcp_path,
        )

    async def close(self, rollout_id: str, reason: str) -> GateClosing:
        """See ports.Gate."""
        request = rollout_gate_service_pb2.CloseRolloutRequest(rollout_id=rollout_id, reason=reason)
        try:
            with typed_errors():
                answer = await self._gate.CloseRollout(request, timeout=CALL_S)
        except NotFound:
            return GateClosing()
        totals = answer.rollout.totals
        return GateClosing(
            exhausted_budget=answer.rollout.exhausted_budget,
            calls=totals.calls,
            unanswered=totals.failed + totals.expired,
            last_failure=totals.last_failure_reason,
            gave_up=totals.last_unanswered,
            is_final=bool(totals.last_failure_reason) and not totals.last_failure_retriable and not totals.expired,
        )

    async def delete(self, rollout_id: str) -> None:
        """See ports.Gate."""
        request = rollout_gate_service_pb2.DeleteRolloutRequest(rollout_id=rollout_id)
        with typed_errors():
            await self._gate.DeleteRollout(request, timeout=CALL_S)

    async def calls(self, labels: Mapping[str, str]) -> AsyncIterator[CallEnded]:
        """See ports.Gate. A broken stream is resumed; what the gate has forgotten meanwhile is not told."""
        request = rollout_gate_service_pb2.WatchCallsRequest(labels=labels, ended_only=True)
        delay = _RETRY_FIRST_S
        while True:
            try:
                with typed_errors():
                    async for answer in self._gate.WatchCalls(request):
                        delay = _RETRY_FIRST_S
                        kind = answer.WhichOneof("event")
                        if kind == "started":
                            request.after_sequence = answer.started.sequence
                        elif kind == "closed":
                            request.after_sequence = answer.closed.sequence
                        elif kind == "changed":
                            request.after_sequence = answer.changed.sequence
                            if answer.changed.call.state in _ENDED:
                                call = answer.changed.call
                                yield CallEnded(call.rollout_id, call.SerializeToString(), spent_by(call))
            except PenstockError as error:
                _log.info("the watch of calls broke", error=repr(error))
                if error.reason == "SEQUENCE_UNKNOWN":
                    # It was too slow, or comes back late; the gate is there, and what it calls for is a fresh start.
                    request.ClearField("after_sequence")
                    continue
            self._interruptions += 1
            await asyncio.sleep(delay)
            delay = min(2 * delay, _RETRY_MOST_S)

    async def capture(self, rollout_id: str, *, include_bodies: bool) -> AsyncIterator[trajectory_pb2.Trajectory]:
        """The rollout's trajectory as the gate has it, in fragments; NotFound (ROLLOUT_UNKNOWN)."""
        request = rollout_gate_service_pb2.GetCaptureRequest(rollout_id=rollout_id, include_bodies=include_bodies)
        with typed_errors():
            async for answer in self._gate.GetCapture(request):
                yield answer.trajectory


def spent_by(call: trajectory_pb2.Call) -> CallSpent:
    """What a call came to: counted tokens, or those that a source of text says."""
    answer = call.completion
    versions = [item.policy_version for item in answer.span.versions]
    return CallSpent(
        prompt_tokens=call.prompt_count or answer.usage.prompt_tokens,
        completion_tokens=answer.span.count or answer.usage.completion_tokens,
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
    )
