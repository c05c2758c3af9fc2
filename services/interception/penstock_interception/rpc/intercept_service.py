"""`InterceptService`: the trainers' stream and its unary twin, translated.

Frames carry what is ready and never wait to fill: one wake-up for many calls is what keeps gRPC in Python cheap (a
message per call costs four times as much CPU as frames that carry what has gathered).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import grpc
from google.protobuf.message import Message as ProtoMessage

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import intercept_service_pb2_grpc as pb_grpc
from penstock_chassis.errors import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
)
from penstock_interception.calls import Call
from penstock_interception.completions import Failure
from penstock_interception.metrics import REJECTED
from penstock_interception.ports import Accepted, Rejection, RejectionReason
from penstock_interception.rpc import convert, tools, trajectory
from penstock_interception.rpc.frames import CallWriter, frames_of
from penstock_interception.rpc.gate_service import paged
from penstock_interception.sessions import DEFAULT_CREDIT_BYTES, Credits, Selector, Session, View
from penstock_interception.tools import offers
from penstock_interception.turns import Turns
from penstock_interception.unary import UnaryLeases

DEFAULT_WAIT_S = 20.0
DEFAULT_LEASE_S = 300.0
MAX_LEASE_S = 3600.0
MAX_LEASED_AT_ONCE = 256
DEFAULT_PAUSE_S = 600.0
_REASONS = {
    RejectionReason.UNKNOWN_CALL: pb.ResultRejected.REASON_UNKNOWN_CALL,
    RejectionReason.ALREADY_DELIVERED: pb.ResultRejected.REASON_ALREADY_DELIVERED,
    RejectionReason.CALL_ENDED: pb.ResultRejected.REASON_CALL_ENDED,
    RejectionReason.NOT_LEASED: pb.ResultRejected.REASON_NOT_LEASED,
    RejectionReason.INVALID: pb.ResultRejected.REASON_INVALID,
    RejectionReason.STALE_POLICY: pb.ResultRejected.REASON_STALE_POLICY,
}
register_intercept = pb_grpc.add_InterceptServiceServicer_to_server


class InterceptServicer(pb_grpc.InterceptServiceServicer):
    """See protos/penstock/interception/v1/intercept_service.proto."""

    def __init__(
        self,
        turns: Turns,
        writer: CallWriter,
        stopping: asyncio.Event,
        *,
        heartbeat_s: float = 15.0,
        allowed_tools: tuple[str, ...] = ("*",),
    ) -> None:
        self._turns = turns
        self._gate = turns.gate
        self._leases = UnaryLeases(turns.gate.dispatcher)
        self._writer = writer
        self._stopping = stopping
        self._heartbeat_s = heartbeat_s
        self._allowed_tools = allowed_tools

    async def Intercept(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.InterceptRequest],
        context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage],
    ) -> AsyncIterator[pb.InterceptResponse]:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("frame") != "hello":
            raise FailedPrecondition("The first frame of a session is Hello.", reason="HELLO_EXPECTED")
        hello = first.hello
        resume = hello.resume_session_id if hello.HasField("resume_session_id") else None
        session = self._gate.dispatcher.join(
            _selector(hello.selector),
            _credits(hello.credits, least=1),
            identity=hello.identity,
            view=_view(hello.view),
            policy_version=hello.policy_version if hello.HasField("policy_version") else None,
            resume=resume,
            has=frozenset(hello.held.call_ids) if hello.HasField("held") else None,
        )
        stream = _Stream(session, self._turns, self._heartbeat_s, self._stopping)
        reader = asyncio.create_task(stream.read(request_iterator))
        try:
            yield self._welcome(session)
            async for frame in stream.frames(self._writer):
                yield frame
            await stream.finish(reader)
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await reader
            stream.leave()

    async def LeaseCalls(  # noqa: N802
        self, request: pb.LeaseCallsRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.LeaseCallsResponse:
        count = request.max_calls or 1
        if not 1 <= count <= MAX_LEASED_AT_ONCE:
            raise convert.invalid("max_calls", f"1 to {MAX_LEASED_AT_ONCE}")
        lease_s = convert.seconds(request.lease) if request.HasField("lease") else DEFAULT_LEASE_S
        if not 0 < lease_s <= MAX_LEASE_S:
            raise convert.invalid("lease", "positive, at most 1 h")
        wait_s = convert.seconds(request.wait) if request.HasField("wait") else DEFAULT_WAIT_S
        remaining = context.time_remaining()
        if remaining is not None:
            wait_s = min(wait_s, 0.8 * remaining)
        calls = await self._leases.lease(
            _selector(request.selector),
            count,
            identity=request.identity,
            view=_view(request.view),
            lease_s=lease_s,
            wait_s=max(0.0, wait_s),
            request_id=request.request_id,
            policy_version=request.policy_version if request.HasField("policy_version") else None,
        )
        await self._turns.store.settled()
        view = _view(request.view)
        response = pb.LeaseCallsResponse()
        for call in calls:
            self._writer.add(response.calls, call, view)
        return response

    async def CompleteCalls(  # noqa: N802
        self, request: pb.CompleteCallsRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.CompleteCallsResponse:
        acknowledged = await judge(self._turns, request.results)
        lost = [lease for lease in request.extend_lease_ids if not self._gate.dispatcher.extend(lease)]
        return pb.CompleteCallsResponse(acknowledged=acknowledged, lost_lease_ids=lost)

    async def RegisterTools(  # noqa: N802
        self, request: pb.RegisterToolsRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.RegisterToolsResponse:
        session = self._gate.dispatcher.session(request.session_id)
        offered = offers.accepted(tools.proposals_from(request.tools), self._allowed_tools)
        selector = _selector(request.selector) if request.HasField("selector") else session.lane.selector
        await asyncio.shield(self._gate.tools.offer(session, selector, offered))
        return pb.RegisterToolsResponse()

    async def ListCalls(  # noqa: N802
        self, request: pb.ListCallsRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.ListCallsResponse:
        rollout = self._gate.rollout(request.rollout_id)
        await self._turns.conversation(rollout)
        page, token = paged(rollout.calls, request.page_size, request.page_token, _call_id)
        return pb.ListCallsResponse(calls=[trajectory.call_to(call) for call in page], next_page_token=token)

    async def GetCall(  # noqa: N802
        self, request: pb.GetCallRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.GetCallResponse:
        call = await self._turns.find_call(request.call_id)
        conversation = await self._turns.conversation(call.rollout)
        body = await self._turns.store.body(call.id) if request.include_body else b""
        prompt = b""
        if call.plan is not None:
            prompt = convert.ids_to(call.plan.prompt_ids)
        elif (node := conversation.graph.calls.get(call.id)) is not None:
            prompt = convert.ids_to(conversation.graph.path(call.id)[: node.prompt_count])
        return pb.GetCallResponse(
            call=trajectory.call_to(call, conversation=conversation, body=body), prompt_token_ids=prompt
        )

    def _welcome(self, session: Session) -> pb.InterceptResponse:
        resumed_calls = list(session.held) if session.resumed else ()
        return pb.InterceptResponse(
            welcome=pb.Welcome(
                session_id=session.id,
                credits=pb.Credits(calls=session.credit.calls, bytes=session.credit.bytes),
                heartbeat_interval=convert.duration(self._heartbeat_s),
                resume_window=convert.duration(self._gate.limits.dispatch.resume_window_s),
                queued_calls=self._gate.dispatcher.queued_for(session),
                resumed=session.resumed,
                held_call_ids=resumed_calls,
            )
        )


class _Judged:
    """Frames of results that were judged and are not yet acknowledged, in the order in which they came."""

    def __init__(self) -> None:
        self._frames: deque[list[Accepted | Rejection]] = deque()
        self._more = asyncio.Event()
        self._over = False

    def put(self, verdicts: list[Accepted | Rejection]) -> None:
        """One frame's."""
        self._frames.append(verdicts)
        self._more.set()

    def end(self) -> None:
        """No further frame comes."""
        self._over = True
        self._more.set()

    async def take(self) -> list[Accepted | Rejection] | None:
        """The oldest frame's; None after the last."""
        while not self._frames:
            if self._over:
                return None
            self._more.clear()
            await self._more.wait()
        return self._frames.popleft()

    def take_settled(self) -> list[Accepted | Rejection] | None:
        """The oldest frame's when nothing of it is on its way to the disk any more: one commit takes many frames."""
        if self._frames and all(isinstance(one, Rejection) or one.committed.done() for one in self._frames[0]):
            return self._frames.popleft()
        return None


class _Stream:
    """One session's two halves: what comes in is judged in order, what goes out is whatever has gathered.

    Results are judged as they come and acknowledged as they reach the disk, beside each other: a trainer that answers
    many calls waits for a commit once and not once a frame.
    """

    def __init__(self, session: Session, turns: Turns, heartbeat_s: float, stopping: asyncio.Event) -> None:
        self.session = session
        self._turns = turns
        self._gate = turns.gate
        self._heartbeat_s = heartbeat_s
        self._stopping = stopping
        self._replies: list[pb.InterceptResponse] = []
        self._judged = _Judged()
        self._judged_tools = _Judged()
        self._heard = asyncio.get_running_loop().time()
        self._said_goodbye = False
        self._told_go_away = False

    async def read(self, requests: AsyncIterator[pb.InterceptRequest]) -> None:
        """Takes frames until the trainer leaves or its stream ends."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._acknowledge())
                group.create_task(self._acknowledge_tool_results())
                async for request in requests:
                    self._heard = asyncio.get_running_loop().time()
                    await self._take(request)
                    if self._said_goodbye:
                        break
                self._judged.end()
                self._judged_tools.end()
        finally:
            self.session.end()

    async def _acknowledge(self) -> None:
        """Tells what became of each frame of results, in the order in which they came."""
        judged = self._judged
        while (verdicts := await judged.take()) is not None:
            acknowledged = await _told(verdicts)
            while (more := judged.take_settled()) is not None:
                acknowledged.MergeFrom(await _told(more))
            self._reply(pb.InterceptResponse(acknowledged=acknowledged))

    async def _acknowledge_tool_results(self) -> None:
        while (verdicts := await self._judged_tools.take()) is not None:
            told = await _told(verdicts)
            acknowledged = pb.ToolResultsAcknowledged(
                accepted_tool_call_ids=told.accepted_call_ids, rejected=told.rejected
            )
            self._reply(pb.InterceptResponse(tool_results_acknowledged=acknowledged))

    def _judge_tool_result(self, message: pb.HostToolResult) -> Accepted | Rejection:
        result = tools.result_from(message)
        if isinstance(result, Rejection):
            return result
        return self._gate.tools.settle(self.session, message.tool_call_id, result)

    async def frames(self, writer: CallWriter) -> AsyncIterator[pb.InterceptResponse]:
        """Frames to send, until the session ends."""
        loop = asyncio.get_running_loop()
        session = self.session
        while True:
            box = session.drain()
            if box.calls or box.tool_calls:
                # A call that a trainer has seen is one that a restart still knows.
                await self._turns.store.settled()
            replies, self._replies = self._replies, []
            for frame in (*frames_of(box, writer, session.view), *replies):
                yield frame
            if session.ended:
                return
            if self._stopping.is_set() and not self._told_go_away:
                self._told_go_away = True
                yield pb.InterceptResponse(go_away=pb.GoAway(reason="DRAINING", retry_after=convert.duration(2.0)))
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await session.wait()
            except TimeoutError:
                if loop.time() - self._heard > 3 * self._heartbeat_s:
                    raise DeadlineExceeded("No frame came for three intervals.", reason="HEARTBEAT_MISSED") from None
                yield pb.InterceptResponse(heartbeat=pb.Heartbeat())

    async def finish(self, reader: asyncio.Task[None]) -> None:
        """Raises what ended the session, when that was an error."""
        if self.session.taken_over:
            raise Aborted("Another stream resumed this session.", reason="SESSION_TAKEN_OVER")
        if reader.done():
            await reader

    def leave(self) -> None:
        """The stream is over: in order, or lost."""
        if self._said_goodbye:
            self._gate.dispatcher.leave(self.session)
        else:
            self._gate.dispatcher.lose(self.session)

    async def _take(self, request: pb.InterceptRequest) -> None:
        session, dispatcher = self.session, self._gate.dispatcher
        match request.WhichOneof("frame"):
            case "results":
                results = request.results.results
                self._judged.put([await _judge_one(self._turns, result, session) for result in results])
            case "credits":
                dispatcher.set_credit(session, _credits(request.credits, least=0, bytes_now=session.credit.bytes))
            case "pause":
                limit = request.pause.max_duration
                span = convert.seconds(limit) if request.pause.HasField("max_duration") else DEFAULT_PAUSE_S
                session.tell_paused(dispatcher.pause(session, span))
            case "resume":
                if not dispatcher.resume(session):
                    session.tell_resumed()  # nothing was held: the answer is the same
            case "policy":
                dispatcher.announce(session, request.policy.policy_version)
            case "goodbye":
                self._said_goodbye = True
            case "tool_results":
                given = request.tool_results.results
                self._judged_tools.put([self._judge_tool_result(result) for result in given])
            case "hello":
                raise AlreadyExists("Hello is sent once.", reason="HELLO_REPEATED")
            case "heartbeat" | None:
                pass

    def _reply(self, frame: pb.InterceptResponse) -> None:
        self._replies.append(frame)
        self.session.wake()


async def judge(turns: Turns, results: Sequence[pb.CallResult]) -> pb.ResultsAcknowledged:
    """Each result by itself; returns when all that were accepted are on disk."""
    return await _told([await _judge_one(turns, result, None) for result in results])


async def _told(verdicts: Sequence[Accepted | Rejection]) -> pb.ResultsAcknowledged:
    """What became of results, once all that were accepted are on disk."""
    acknowledged = pb.ResultsAcknowledged()
    for verdict in verdicts:
        if isinstance(verdict, Rejection):
            acknowledged.rejected.append(
                pb.ResultRejected(
                    call_id=verdict.call_id,
                    reason=_REASONS[verdict.reason],
                    message=verdict.message,
                    violations=verdict.violations,
                )
            )
        else:
            if not verdict.committed.done():
                await asyncio.shield(verdict.committed)
            verdict.committed.result()
            acknowledged.accepted_call_ids.append(verdict.call_id)
    return acknowledged


async def _judge_one(turns: Turns, result: pb.CallResult, session: Session | None) -> Accepted | Rejection:
    verdict = await _judged(turns, result, session)
    if isinstance(verdict, Rejection):
        REJECTED.labels(verdict.reason.value).inc()
    return verdict


async def _judged(turns: Turns, result: pb.CallResult, session: Session | None) -> Accepted | Rejection:
    gate = turns.gate
    if not gate.knows(result.call_id):
        with suppress(NotFound):  # what is nobody's is judged below like everything else
            await turns.find_call(result.call_id)
    call_id, lease_id = result.call_id, result.lease_id
    match result.WhichOneof("result"):
        case "completion":
            try:
                completion = convert.completion_from(result.completion)
            except InvalidArgument as error:
                told = tuple(f"{v.field}: {v.description}" for v in error.violations)
                return Rejection(call_id, RejectionReason.INVALID, error.message, told)
            return await gate.answers.accept(call_id, lease_id, completion, session=session)
        case "failure":
            failure = Failure(
                result.failure.reason or "TRAINER_FAILED", result.failure.message, result.failure.retriable
            )
            return await gate.answers.accept(call_id, lease_id, failure, session=session)
        case "delegation":
            asked = result.delegation
            override = convert.sampling_from(asked.sampling_override) if asked.HasField("sampling_override") else None
            return gate.answers.delegate(call_id, lease_id, override, session=session)
        case "release":
            return gate.answers.release(call_id, lease_id, session=session)
    return Rejection(call_id, RejectionReason.INVALID, "The result is empty.", ("result: unset",))


def _selector(selector: pb.CallSelector) -> Selector:
    return Selector(
        selector.run_id if selector.HasField("run_id") else None,
        selector.group_id if selector.HasField("group_id") else None,
        frozenset(selector.rollout_ids),
        frozenset(selector.labels.items()),
    )


def _credits(credit: pb.Credits, *, least: int, bytes_now: int = DEFAULT_CREDIT_BYTES) -> Credits:
    if credit.calls < least:
        raise convert.invalid("credits.calls", f"at least {least}")
    if credit.HasField("bytes") and credit.bytes < 1:
        raise convert.invalid("credits.bytes", "at least 1")
    return Credits(credit.calls, credit.bytes if credit.HasField("bytes") else bytes_now)


def _view(view: pb.CallView) -> View:
    return View(messages=view.messages, body=view.body)


def _call_id(call: Call) -> str:
    return call.id
