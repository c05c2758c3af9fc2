"""`InterceptService`: the trainers' stream and its unary counterparts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

import grpc
import structlog
from google.protobuf.message import Message as ProtoMessage

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import intercept_service_pb2_grpc as pb_grpc
from penstock_chassis import auth, times
from penstock_chassis.auth import Owned
from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.operations import server_info
from penstock_chassis.validation import invalid_field, refuse_unknown
from penstock_interception.domain.sent_prompts import SentPrompts
from penstock_interception.domain.state import Call, Credits, Session, SessionRequest
from penstock_interception.gate.host_tools import offers
from penstock_interception.interceptor import Interceptor
from penstock_interception.rpc import results, tools, trajectory
from penstock_interception.rpc.frames import CallWriter
from penstock_interception.rpc.gate_service import paged
from penstock_interception.rpc.intercept_stream import (
    InterceptStream,
    check_features,
    credits_from,
    selector_from,
    view_from,
)
from penstock_interception.rpc.models import versions_from
from penstock_interception.rpc.polling import CREDIT_BYTES, PollingLeases
from penstock_interception.store.commits import durable
from penstock_interception.wire import convert

_log = structlog.get_logger(__name__)

DEFAULT_WAIT_S = 20.0
DEFAULT_LEASE_S = 300.0
MAX_LEASE_S = 3600.0
MAX_LEASED_AT_ONCE = 256
MAX_KNOWN_CALLS = 4096
_SHOWN_CLIENT = 200
FEATURES = (
    "call_view.suffix_only",
    "hello.max_message_bytes",
    "hello.required_features",
    "media",
    "policies",
    "token_tensors",
    "top_logprobs",
    "users",
)
"""What the gate serves of the contract beyond revision 1."""
SERVICE = "penstock.interception.v1.InterceptService"
register_intercept = pb_grpc.add_InterceptServiceServicer_to_server


class InterceptServicer(pb_grpc.InterceptServiceServicer):
    """See protos/penstock/interception/v1/intercept_service.proto."""

    def __init__(
        self,
        interceptor: Interceptor,
        writer: CallWriter,
        stopping: asyncio.Event,
        *,
        heartbeat_s: float = 15.0,
        allowed_tools: tuple[str, ...] = ("*",),
        name: str = "",
    ) -> None:
        self._interceptor = interceptor
        self._leases = PollingLeases(interceptor)
        self._writer = writer
        self._stopping = stopping
        self._heartbeat_s = heartbeat_s
        self._allowed_tools = allowed_tools
        self._info = server_info("interception", FEATURES, name)

    async def Intercept(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.InterceptRequest],
        context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage],
    ) -> AsyncIterator[pb.InterceptResponse]:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("frame") != "hello":
            raise FailedPrecondition("The first frame of a session must be Hello.", reason="HELLO_EXPECTED")
        hello = first.hello
        refuse_unknown(hello.selector, "hello.selector")
        check_features(hello.required_features, self._info.features)
        asked = SessionRequest(
            selector_from(hello.selector),
            credits_from(hello.credits, least=1),
            identity=hello.identity,
            view=view_from(hello),
            versions=versions_from(hello),
            has=frozenset(hello.held.call_ids) if hello.HasField("held") else None,
            sent_prompts=SentPrompts() if hello.view.suffix_only else None,
        )
        session = self._interceptor.join(asked, resume=hello.resume_session_id)
        _log.info(
            "a session began",
            session_id=session.id,
            identity=hello.identity,
            client=_client(context),
            resumed=session.resumed,
        )
        stream = InterceptStream(session, self._interceptor, self._heartbeat_s, self._stopping)
        reader = asyncio.create_task(stream.read(request_iterator))
        try:
            if session.resumed:
                # A restart finds its calls under its id, so the trainer has that id only afterwards.
                await self._interceptor.store.settled()
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
            raise invalid_field("max_calls", f"1 to {MAX_LEASED_AT_ONCE}")
        lease_s = times.seconds(request.lease) if request.HasField("lease") else DEFAULT_LEASE_S
        if not 0 < lease_s <= MAX_LEASE_S:
            raise invalid_field("lease", "positive, at most 1 h")
        wait_s = times.seconds(request.wait) if request.HasField("wait") else DEFAULT_WAIT_S
        remaining = context.time_remaining()
        if remaining is not None:
            wait_s = min(wait_s, 0.8 * remaining)
        refuse_unknown(request.selector, "selector")
        view = view_from(request)
        asked = SessionRequest(
            selector_from(request.selector),
            Credits(count, min(CREDIT_BYTES, view.max_message_bytes)),
            identity=request.identity,
            view=view,
            versions=versions_from(request),
            lease_s=lease_s,
            sent_prompts=self._known_prompts(request) if request.view.suffix_only else None,
        )
        leased = await self._leases.lease(asked, wait_s=max(0.0, wait_s), request_id=request.request_id)
        await self._interceptor.store.settled()
        requests = await self._writer.read_large((call for call, _ in leased), view, self._interceptor.in_thread)
        response, size, too_many = pb.LeaseCallsResponse(), 0, list[tuple[str, str]]()
        for call, lease in leased:
            if call.plan is None or call.lease_id != lease:  # it has ended meanwhile, or its lease has
                continue
            added = self._writer.add(response.calls, call, view, asked.sent_prompts, requests)
            if size and size + added > view.max_message_bytes:
                del response.calls[-1]
                too_many.append((call.id, lease))
            else:
                size += added
        for call_id, lease in reversed(too_many):  # each goes to the head of the queue
            await self._interceptor.release(call_id, lease)
        return response

    async def CompleteCalls(  # noqa: N802
        self, request: pb.CompleteCallsRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.CompleteCallsResponse:
        namespace, extend = auth.caller().namespace, self._interceptor.sessions.unary.extend
        acknowledged = await results.judge(self._interceptor, request.results, namespace, request.rollout_id)
        lost = [lease for lease in request.extend_lease_ids if not extend(lease, namespace, request.rollout_id)]
        return pb.CompleteCallsResponse(acknowledged=acknowledged, lost_lease_ids=lost)

    async def RegisterTools(  # noqa: N802
        self, request: pb.RegisterToolsRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.RegisterToolsResponse:
        session = self._interceptor.registry.session(request.session_id)
        proposals = tools.proposals_from(request.tools)
        offered = await self._interceptor.in_thread(lambda: offers.accepted(proposals, self._allowed_tools))
        if request.selector.policy_ids:
            raise invalid_field("selector.policy_ids", "tools are of rollouts, whichever policy calls them")
        selector = (
            selector_from(request.selector)
            if request.HasField("selector")
            else replace(session.queue.selector, policy_ids=frozenset())
        )
        await durable(self._interceptor.tools.offer(session, selector, offered))
        return pb.RegisterToolsResponse()

    async def ListCalls(  # noqa: N802
        self, request: pb.ListCallsRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.ListCallsResponse:
        rollout = self._interceptor.registry.rollout(request.rollout_id)
        await self._interceptor.conversations.of(rollout)
        page, token = paged(rollout.calls, request.page_size, request.page_token, _call_id)
        return pb.ListCallsResponse(calls=[trajectory.call_to(call) for call in page], next_page_token=token)

    async def GetCall(  # noqa: N802
        self, request: pb.GetCallRequest, context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]
    ) -> pb.GetCallResponse:
        call = await self._interceptor.find_call(request.call_id)
        if request.rollout_id not in ("", call.rollout.id):
            raise invalid_field("rollout_id", "is not the call's rollout")
        conversation = await self._interceptor.conversations.of(call.rollout)
        body = await self._interceptor.store.body(call.id) if request.include_body else b""
        prompt = b""
        if call.plan is not None:
            prompt = convert.ids_to(call.plan.prompt_ids)
        elif (node := conversation.graph.calls.get(call.id)) is not None:
            prompt = convert.ids_to(conversation.graph.path(call.id)[: node.prompt_count])
        found = trajectory.call_to(call, conversation=conversation, body=body, include_top=True, tensor_data=True)
        if request.include_media and found.media:
            data = await self._interceptor.store.media.read(call.rollout.id, {one.sha256 for one in found.media})
            for one in found.media:
                one.data = data.get(one.sha256, b"")
        return pb.GetCallResponse(call=found, prompt_token_ids=prompt)

    def _known_prompts(self, request: pb.LeaseCallsRequest) -> SentPrompts:
        if len(request.known_call_ids) > MAX_KNOWN_CALLS:
            raise invalid_field("known_call_ids", f"at most {MAX_KNOWN_CALLS}")
        known = {}
        for call_id in request.known_call_ids:
            call = self._interceptor.registry.find_call(call_id)
            if call is not None and call.prompt is not None:
                known[call_id] = call.prompt.count
        return SentPrompts(known)

    def _welcome(self, session: Session) -> pb.InterceptResponse:
        resumed_calls = list(session.held) if session.resumed else ()
        return pb.InterceptResponse(
            welcome=pb.Welcome(
                session_id=session.id,
                credits=pb.Credits(calls=session.credit.calls, bytes=session.credit.bytes),
                heartbeat_interval=times.duration(self._heartbeat_s),
                resume_window=times.duration(self._interceptor.limits.leasing.resume_window_s),
                queued_calls=session.queue.waiting,
                resumed=session.resumed,
                held_call_ids=resumed_calls,
                server=self._info,
            )
        )


def owned(interceptor: Interceptor) -> Mapping[str, Owned]:
    """Whose the sessions, rollouts and calls are that requests name."""
    registry = interceptor.registry

    async def of_session(session_id: str) -> str | None:
        session = registry.find_session(session_id)
        return None if session is None else session.namespace or ""  # one of all namespaces is nobody's in one

    async def of_rollout(rollout_id: str) -> str | None:
        rollout = registry.find(rollout_id)
        return None if rollout is None else rollout.spec.namespace

    return {
        f"{SERVICE}/RegisterTools": Owned(("session_id",), of_session),
        f"{SERVICE}/ListCalls": Owned(("rollout_id",), of_rollout),
        f"{SERVICE}/GetCall": Owned(("call_id",), interceptor.namespace_of_call),
    }


def _call_id(call: Call) -> str:
    return call.id


def _client(context: grpc.aio.ServicerContext[ProtoMessage, ProtoMessage]) -> str:
    """The client's name and version as it states them, for the log."""
    metadata: Iterable[tuple[str, str | bytes]] = context.invocation_metadata() or ()
    return next((str(value)[:_SHOWN_CLIENT] for name, value in metadata if name == "user-agent"), "")
