"""The client of the gate: `ports.Gate` over gRPC, and the capture for readers of trajectories."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Final

import grpc
import structlog

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.interception.v1 import (
    intercept_service_pb2,
    intercept_service_pb2_grpc,
    interception_pb2,
    rollout_gate_service_pb2,
    rollout_gate_service_pb2_grpc,
)
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.aio.retry import Backoff, Delays
from penstock_chassis.channel import read, streaming, typed_errors
from penstock_chassis.errors import Internal, NotFound, PenstockError, Unavailable
from penstock_driver.domain.failures import is_of_the_request
from penstock_driver.domain.ports import (
    CallEnded,
    CallSpent,
    GateClosing,
    GateOpening,
    Load,
    ModelRequest,
    OpenRequest,
)
from penstock_driver.domain.rollout import judge_id
from penstock_driver.domain.users import user_id
from penstock_driver.environments.cleanup import DRIVER_LABEL
from penstock_driver.wire.converters import DIALECTS, dialect_from_proto

CALL_S: Final = 60.0
_PROBE_S: Final = 30.0
"""Longer than the gate's own probe of a model source, whose error is more specific than a timeout."""
_PAGE_SIZE: Final = 1000
_DELAYS: Final = Delays(0.2, 10.0)
_NO_CALLS: Final = (1 << 31) - 1
"""A position after that of every call."""
_ENDED: Final = frozenset(
    {
        trajectory_pb2.CALL_STATE_DELIVERED,
        trajectory_pb2.CALL_STATE_FAILED,
        trajectory_pb2.CALL_STATE_CANCELLED,
        trajectory_pb2.CALL_STATE_EXPIRED,
    }
)
_DIVERGED: Final = "REPLAY_DIVERGED"
_LEASE_ENDED: Final = "DRIVER_LOST"
"""Why a gate closes the rollouts of a driver that it has not seen for its `driver_lease_s`."""
_log = structlog.get_logger("penstock.driver")


class GrpcGate:
    """Calls one interception service over a channel that the caller owns."""

    def __init__(self, channel: grpc.aio.Channel, *, keep_captures: bool = False) -> None:
        """`keep_captures`: the gate keeps each capture until `stored` says that it is stored."""
        self._gate = rollout_gate_service_pb2_grpc.RolloutGateServiceStub(channel)
        self._calls = intercept_service_pb2_grpc.InterceptServiceStub(channel)
        self._keep_captures = keep_captures
        self._interruptions = 0

    @property
    def interruptions(self) -> int:
        """See ports.Gate: counted by the stream of calls, which stays open while the gate is reachable."""
        return self._interruptions

    async def check(
        self,
        terms: rollout_gate_service_pb2.OpenRolloutRequest,
        *,
        rollout_id: str,
        group_id: str | None,
        labels: Mapping[str, str],
    ) -> Sequence[str]:
        """See ports.Gate."""
        request = rollout_gate_service_pb2.CheckSourceRequest(
            mode=terms.mode,
            rollout_id=rollout_id,
            group_id=group_id,
            run_id=terms.run_id if terms.HasField("run_id") else None,
            labels=labels,
            models=terms.models,
        )
        if terms.HasField("source"):
            request.source.CopyFrom(terms.source)
        if terms.HasField("run_budgets"):
            request.run_budgets.CopyFrom(terms.run_budgets)
        try:
            with typed_errors():
                answer = await self._gate.CheckSource(request, timeout=_PROBE_S)
        except Unavailable as error:
            if not error.reason.startswith("TRANSPORT_"):
                raise
            message = f"the interception service cannot be reached: {error.message}"
            raise Unavailable(message, reason="INTERCEPTION_UNREACHABLE", retry_after_s=1.0) from error
        return tuple(answer.host_tools)

    async def open(self, opening: OpenRequest) -> GateOpening:
        """See ports.Gate."""
        request = rollout_gate_service_pb2.OpenRolloutRequest()
        request.MergeFrom(opening.terms)
        request.request_id = opening.request_id
        request.rollout_id = opening.rollout_id
        if opening.group_id is not None:
            request.group_id = opening.group_id
        if opening.group_index is not None:
            request.group_index = opening.group_index
        if opening.task_id:
            request.task_id = opening.task_id
        request.dialects.extend(DIALECTS[dialect] for dialect in opening.dialects)
        request.hints.CopyFrom(
            interception_pb2.CallHints(
                title_system_prompts=opening.title_system_prompts,
                compaction_system_prompts=opening.compaction_system_prompts,
                session_headers=opening.session_headers,
                volatile_line_patterns=opening.volatile_line_patterns,
            )
        )
        request.labels.update(opening.labels)
        request.driver_id = opening.labels.get(DRIVER_LABEL, "")
        request.keep_capture = self._keep_captures
        request.attempt = opening.attempt
        if opening.branched_from is not None:
            request.branched_from.CopyFrom(opening.branched_from)
        with typed_errors():
            return _opened(await self._gate.OpenRollout(request, timeout=CALL_S))

    async def open_judge(self, opening: ModelRequest) -> GateOpening | None:
        """See ports.Gate."""
        request = rollout_gate_service_pb2.OpenRolloutRequest(
            rollout_id=judge_id(opening.rollout_id), judge_of=opening.rollout_id
        )
        return await self._open_beside(request, opening)

    async def open_user(self, opening: ModelRequest) -> GateOpening | None:
        """See ports.Gate."""
        request = rollout_gate_service_pb2.OpenRolloutRequest(
            rollout_id=user_id(opening.rollout_id), user_of=opening.rollout_id
        )
        return await self._open_beside(request, opening)

    async def _open_beside(
        self, request: rollout_gate_service_pb2.OpenRolloutRequest, opening: ModelRequest
    ) -> GateOpening | None:
        """Open what belongs to another rollout; None if it is closed."""
        request.request_id, request.driver_id = opening.request_id, opening.driver_id
        request.keep_capture = self._keep_captures
        if opening.task_id:
            request.task_id = opening.task_id
        request.MergeFrom(opening.terms)
        with typed_errors():
            answer = await self._gate.OpenRollout(request, timeout=CALL_S)
        if answer.rollout.state == rollout_gate_service_pb2.GATE_ROLLOUT_STATE_CLOSED:
            return None
        return _opened(answer)

    async def ask_user(self, rollout_id: str, body: bytes, timeout_s: float) -> str:
        """See ports.Gate."""
        request = rollout_gate_service_pb2.AskUserRequest(rollout_id=user_id(rollout_id), body=body)
        with typed_errors():
            return (await self._gate.AskUser(request, timeout=timeout_s)).text

    async def load_recording(self, part: rollout_gate_service_pb2.LoadRecordingRequest) -> int:
        """See ports.Gate."""
        with typed_errors():
            return (await self._gate.LoadRecording(part, timeout=CALL_S)).calls

    async def load(self, timeout_s: float) -> Load:
        """How many rollouts are open there, of all drivers."""
        request = rollout_gate_service_pb2.WatchGateRequest(all_namespaces=True)
        with streaming(self._gate.WatchGate(request, timeout=timeout_s)) as answers:
            async for answer in answers:
                return Load(answer.open_rollouts, unreachable_inference=frozenset(answer.unreachable_inference))
        raise Internal("the gate ended its status", reason="PROTOCOL_BROKEN")

    async def close(self, rollout_id: str, reason: str) -> GateClosing:
        """See ports.Gate."""
        request = rollout_gate_service_pb2.CloseRolloutRequest(rollout_id=rollout_id, reason=reason)
        try:
            with typed_errors():
                answer = await self._gate.CloseRollout(request, timeout=CALL_S)
        except NotFound:
            return GateClosing(is_unknown=True)
        return _closing(answer.rollout)

    async def answered(self, rollout_id: str) -> GateClosing:
        """See ports.Gate."""
        request = rollout_gate_service_pb2.GetRolloutRequest(rollout_id=rollout_id)
        try:
            with typed_errors():
                answer = await self._gate.GetRollout(request, timeout=CALL_S)
        except NotFound:
            return GateClosing(is_unknown=True)
        return _closing(answer.rollout)

    async def delete(self, rollout_id: str) -> None:
        """See ports.Gate."""
        request = rollout_gate_service_pb2.DeleteRolloutRequest(rollout_id=rollout_id)
        with typed_errors():
            await self._gate.DeleteRollout(request, timeout=CALL_S)

    async def hold_calls(self, rollout_id: str, *, held: bool) -> None:
        """See ports.Gate."""
        request = rollout_gate_service_pb2.HoldCallsRequest(rollout_id=rollout_id, held=held)
        with typed_errors():
            await self._gate.HoldCalls(request, timeout=CALL_S)

    async def has(self, rollout_id: str) -> bool:
        """See ports.Gate."""
        request = rollout_gate_service_pb2.GetRolloutRequest(rollout_id=rollout_id)
        try:
            with typed_errors():
                answer = await self._gate.GetRollout(request, timeout=CALL_S)
        except NotFound:
            return False
        return bool(answer.rollout.close_reason != _LEASE_ENDED)

    async def ended_calls(self, rollout_id: str) -> Sequence[CallEnded]:
        """See ports.Gate."""
        found: list[CallEnded] = []
        request = intercept_service_pb2.ListCallsRequest(rollout_id=rollout_id, page_size=_PAGE_SIZE)
        while True:
            try:
                with typed_errors():
                    answer = await self._calls.ListCalls(request, timeout=CALL_S)
            except NotFound:
                return found
            found += [CallEnded(rollout_id, call, spent_by(call)) for call in answer.calls if call.state in _ENDED]
            if not answer.next_page_token:
                return found
            request.page_token = answer.next_page_token

    async def stored(self, rollout_id: str, gates: Sequence[str]) -> None:
        """See ports.Captures."""
        request = rollout_gate_service_pb2.CloseRolloutRequest(
            rollout_id=rollout_id, reason="ROLLOUT_ENDED", capture_stored=True
        )
        try:
            with typed_errors():
                await self._gate.CloseRollout(request, timeout=CALL_S)
        except NotFound:
            return  # nothing of it is there

    async def calls(self, labels: Mapping[str, str]) -> AsyncIterator[CallEnded]:
        """See ports.Gate. A broken stream is resumed; calls that the gate has dropped meanwhile are skipped."""
        request = rollout_gate_service_pb2.WatchCallsRequest(
            labels=labels,
            ended_only=True,
            all_namespaces=True,
            driver_id=labels.get(DRIVER_LABEL, ""),  # the stream holds the leases of this driver's rollouts
        )
        backoff = Backoff(_DELAYS)
        while True:
            try:
                with typed_errors():
                    async for answer in self._gate.WatchCalls(request):
                        backoff.reset()
                        kind = answer.WhichOneof("event")
                        if kind == "started":
                            request.after_sequence = answer.started.sequence
                        elif kind == "closed":
                            request.after_sequence = answer.closed.sequence
                        elif kind == "changed":
                            request.after_sequence = answer.changed.sequence
                            if answer.changed.call.state in _ENDED:
                                call = answer.changed.call
                                yield CallEnded(call.rollout_id, call, spent_by(call))
            except PenstockError as error:
                _log.info("the watch of calls broke", error=repr(error))
                if error.reason == "SEQUENCE_UNKNOWN":
                    # This watcher was too slow, or reconnected too late: start over from now.
                    request.ClearField("after_sequence")
                    continue
            self._interruptions += 1
            await backoff.wait()

    async def capture(
        self, rollout_id: str, *, gate: str = "", include_bodies: bool, include_top: bool
    ) -> AsyncIterator[trajectory_pb2.Trajectory]:
        """Yield the rollout's trajectory as the gate recorded it, in fragments; NotFound (ROLLOUT_UNKNOWN)."""
        request = rollout_gate_service_pb2.GetCaptureRequest(
            rollout_id=rollout_id, include_bodies=include_bodies, include_top=include_top
        )
        async with aclosing(read(self._gate.GetCapture, request)) as answers:
            async for answer in answers:
                yield answer.trajectory

    async def tensors(self, rollout_id: str, call_id: str, *, gate: str = "") -> Sequence[completion_pb2.TokenTensor]:
        """See ports.Captures."""
        request = intercept_service_pb2.GetCallRequest(call_id=call_id, rollout_id=rollout_id)
        with typed_errors():
            answer = await self._calls.GetCall(request, timeout=CALL_S)
        return answer.call.completion.tensors

    async def media(self, rollout_id: str, call_id: str, *, gate: str = "") -> Sequence[chat_pb2.Media]:
        """See ports.Captures."""
        request = intercept_service_pb2.GetCallRequest(call_id=call_id, rollout_id=rollout_id, include_media=True)
        with typed_errors():
            answer = await self._calls.GetCall(request, timeout=CALL_S)
        return answer.call.media

    async def tool_results(self, rollout_id: str, *, gate: str = "") -> AsyncIterator[trajectory_pb2.HostToolCall]:
        """See ports.Captures."""
        request = rollout_gate_service_pb2.GetCaptureRequest(
            rollout_id=rollout_id, include_bodies=True, after_index=_NO_CALLS, after_tool_call_index=-1
        )
        async with aclosing(read(self._gate.GetCapture, request)) as answers:
            async for answer in answers:
                for call in answer.trajectory.host_tool_calls:
                    yield call


def _opened(answer: rollout_gate_service_pb2.OpenRolloutResponse) -> GateOpening:
    return GateOpening(
        ingress_address=answer.ingress_address,
        base_paths={dialect_from_proto(item.dialect): item.base_path for item in answer.endpoints},
        token=answer.token,
        model_name=answer.rollout.model_name,
        host_tools=tuple(answer.host_tools),
        mcp_path=answer.mcp_path,
        home=answer.rollout.home,
    )


def _closing(rollout: rollout_gate_service_pb2.GateRollout) -> GateClosing:
    totals = rollout.totals
    fails = any(one.reason == _DIVERGED for one in totals.failures)
    return GateClosing(
        exhausted_budget=rollout.exhausted_budget,
        lease_ended=rollout.close_reason == _LEASE_ENDED,
        restored=rollout.restored,
        diverged=(rollout.divergence or "A call differs from what is recorded at its place.") if fails else "",
        calls=totals.calls,
        unanswered=totals.failed + totals.expired,
        last_failure=totals.last_failure_reason,
        gave_up=totals.last_unanswered,
        is_final=bool(totals.last_failure_reason) and not totals.last_failure_retriable and not totals.expired,
        refused=sum(one.calls for one in totals.failures if is_of_the_request(one.reason, one.retriable)),
        lost=totals.expired_since_answer
        + sum(one.calls_since_answer for one in totals.failures if not is_of_the_request(one.reason, one.retriable)),
    )


def spent_by(call: trajectory_pb2.Call) -> CallSpent:
    """The cost of a call: counted tokens, or the usage that a text-only source reports.

    A replayed call costs nothing. Of several policies each counts its own versions, which have no common oldest one.
    """
    answer = call.completion
    versions = [] if call.policy_id else [item.policy_version for item in answer.span.versions]
    if call.HasField("replayed_from"):
        return CallSpent(0, 0, min(versions, default=None), max(versions, default=None))
    logprob_sum, logprob_count = _logprobs_of(answer.span)
    return CallSpent(
        prompt_tokens=call.prompt_count or answer.usage.prompt_tokens,
        completion_tokens=answer.span.count or answer.usage.completion_tokens,
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        logprob_sum=logprob_sum,
        logprob_count=logprob_count,
    )


def _logprobs_of(span: completion_pb2.TokenSpan) -> tuple[float, int]:
    """A call's sum of logprobs, and the number of its tokens; (0, 0) without logprobs, or with those of a script."""
    is_sampled = span.logprobs_mode != completion_pb2.LOGPROBS_MODE_SCRIPTED
    # A sum that is no number would stay one in the rollout's.
    if not is_sampled or not span.HasField("logprob_sum") or not math.isfinite(span.logprob_sum):
        return 0.0, 0
    return span.logprob_sum, span.count
