"""Frames of a session's pending messages: several calls in at most 4 MiB, or one call; never more than it accepts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

import structlog
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock_chassis import times
from penstock_interception.domain.calls import Dialect, RolloutState
from penstock_interception.domain.completions import Failure
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.sent_prompts import SentPrompts
from penstock_interception.domain.state import CALL_BYTES, Call, Outbox, View
from penstock_interception.gate import telemetry
from penstock_interception.rpc import tools
from penstock_interception.wire import convert

_log = structlog.get_logger(__name__)

FRAME_BYTES = 4 << 20
ENVELOPE_BYTES = 16
"""At most what a frame adds to its only call, and to its size for each further one: tags and lengths."""
INLINE_BODY_BYTES: Final = 64 << 10
"""Bodies up to this size are parsed on the event loop: a thread handover would cost more (R32)."""
_TOO_LARGE = Failure("CALL_TOO_LARGE", f"The call has more than {CALL_BYTES} bytes.", retriable=False)

Requests: TypeAlias = Mapping[str, ChatRequest]
"""Requests of calls by call id, parsed again from their bodies."""


class CallWriter:
    """Writes calls. A call that cannot be written fails alone: it must not end the session."""

    def __init__(self, parse: Callable[[Dialect, bytes], ChatRequest], fail: Callable[[Call, Failure], None]) -> None:
        """`parse` parses a stored body again if a view needs messages; `fail` ends a call."""
        self._parse = parse
        self._fail = fail

    async def read_large(
        self,
        calls: Iterable[Call],
        view: View,
        in_thread: Callable[[Callable[[], dict[str, ChatRequest]]], Awaitable[dict[str, ChatRequest]]],
    ) -> Requests:
        """Parses in a thread the large bodies that a view of these calls needs, for `add`.

        A body that cannot be parsed is left out: `add` tries it again, and its call fails alone.
        """
        limit = min(CALL_BYTES, view.max_message_bytes)
        bodies = {
            call.id: (call.request.dialect, call.request.body)
            for call in calls
            if INLINE_BODY_BYTES < len(call.request.body) <= limit and any(_needed(call, view))
        }
        return await in_thread(partial(self._read, bodies)) if bodies else {}

    def add(
        self,
        calls: RepeatedCompositeFieldContainer[pb.ModelCall],
        call: Call,
        view: View,
        sent_prompts: SentPrompts | None = None,
        requests: Requests | None = None,
    ) -> int:
        """Appends a call to `calls`, built in place, since copying a long prompt is expensive.

        `sent_prompts`: what its prompt leaves out; None = it is whole. `requests`: those that are parsed already.

        Returns its size in a frame, in bytes; 0 if the call failed and was not written.
        """
        before, limit = len(calls), min(CALL_BYTES, view.max_message_bytes - ENVELOPE_BYTES)
        failure = _TOO_LARGE if limit == CALL_BYTES else _over_session_limit(view)
        try:
            size = self._write(calls.add(**_fields(call, sent_prompts)), call, view, limit, requests or {})
        except Exception:  # noqa: BLE001 - logged, and the call fails
            _log.exception("a call could not be serialised", call_id=call.id, rollout_id=call.rollout.id)
            size, failure = 0, Failure("INTERNAL")
        if 0 < size <= limit:
            return size + ENVELOPE_BYTES
        del calls[before:]
        self._fail(call, failure)
        return 0

    def _read(self, bodies: Mapping[str, tuple[Dialect, bytes]]) -> dict[str, ChatRequest]:
        requests: dict[str, ChatRequest] = {}
        for call_id, (dialect, body) in bodies.items():
            with suppress(Exception):
                requests[call_id] = self._parse(dialect, body)
        return requests

    def _write(self, message: pb.ModelCall, call: Call, view: View, limit: int, requests: Requests) -> int:
        textual = call.plan is not None and not call.plan.exact
        shown, with_data = _needed(call, view)
        wanted = int(shown or with_data) + int(view.body)
        fits = message.ByteSize() + wanted * len(call.request.body) <= limit
        if wanted and fits:
            if view.body:
                message.request_body = call.request.body
            if shown or with_data:
                request = requests.get(call.id) or self._parse(call.request.dialect, call.request.body)
                _add_request(message, request, shown, with_data)
            fits = message.ByteSize() <= limit  # what the body's length could not show
        if wanted and not fits and not textual:  # without tokens the messages are the prompt
            for name in ("messages", "tools", "tool_choice", "request_body"):
                message.ClearField(name)
            for media in message.media:
                media.ClearField("data")
            message.view_truncated = True
        return message.ByteSize() if fits or not textual else limit + 1


def _needed(call: Call, view: View) -> tuple[bool, bool]:
    """Whether a view of a call needs its messages, and the bytes of its images."""
    if (plan := call.plan) is None:
        return False, False
    return view.messages or not plan.exact, view.media and bool(plan.media)


def _add_request(message: pb.ModelCall, request: ChatRequest, messages: bool, media: bool) -> None:
    if media:
        data = {image.sha256: image.data for image in request.images}
        for one in message.media:
            one.data = data[one.sha256]
    if messages:
        # Without tokens, no Media has the bytes of an image.
        inline = not message.media
        message.messages.extend(convert.message_to(item, image_data=inline) for item in request.messages)
        message.tools.extend(convert.tool_to(tool) for tool in request.tools)
        message.tool_choice.CopyFrom(convert.choice_to(request.tool_choice))


def _over_session_limit(view: View) -> Failure:
    message = f"The call is larger than the {view.max_message_bytes} bytes that the trainer's session accepts."
    return Failure("SESSION_MESSAGE_LIMIT", message, retriable=False)


def frames_of(
    box: Outbox,
    writer: CallWriter,
    view: View,
    sent_prompts: SentPrompts | None = None,
    requests: Requests | None = None,
) -> Iterator[pb.InterceptResponse]:
    """Yields the frames of an outbox, cancellations before calls. Prompts leave out what is in `sent_prompts`.

    `requests`: those of `CallWriter.read_large`.
    """
    for reason, ids in box.cancelled.items():
        yield pb.InterceptResponse(cancelled=pb.CallsCancelled(call_ids=ids, reason=reason))
    for reason, ids in box.tool_calls_cancelled.items():
        gone = pb.ToolCallsCancelled(tool_call_ids=ids, reason=reason)
        yield pb.InterceptResponse(tool_calls_cancelled=gone)
    if box.closed:
        yield pb.InterceptResponse(rollouts_closed=pb.RolloutsClosed(rollout_ids=box.closed))
    limit = min(FRAME_BYTES, view.max_message_bytes)
    yield from _call_frames(box.calls, writer, view, limit, sent_prompts, requests)
    yield from tools.frames_of(box.tool_calls, limit)
    for open_calls in box.pauses:
        if open_calls is None:
            yield pb.InterceptResponse(resumed=pb.CallsResumed())
        else:
            yield pb.InterceptResponse(paused=pb.CallsPaused(open_calls=open_calls))


def _call_frames(
    calls: Iterable[Call],
    writer: CallWriter,
    view: View,
    limit: int,
    sent_prompts: SentPrompts | None,
    requests: Requests | None,
) -> Iterator[pb.InterceptResponse]:
    frame, size = pb.InterceptResponse(), 0
    for call in calls:
        if (plan := call.plan) is None:
            continue  # it ended while an earlier frame was sent
        added = writer.add(frame.calls.calls, call, view, sent_prompts, requests)
        if not added:
            continue
        if size and size + added > limit:
            del frame.calls.calls[-1]
            yield frame
            frame, size = pb.InterceptResponse(), 0
            writer.add(frame.calls.calls, call, view, sent_prompts, requests)
        size += added
        if sent_prompts is not None and call.rollout.state is not RolloutState.CLOSED:
            sent_prompts.add(call.id, plan)
    if size:
        yield frame


def _fields(call: Call, sent_prompts: SentPrompts | None) -> dict[str, Any]:
    """Returns a ModelCall's fields without its view. None is unset."""
    spec, facts = call.rollout.spec, call.rollout.facts
    fields: dict[str, Any] = {
        "call_id": call.id,
        "lease_id": call.lease_id,
        "rollout_id": spec.rollout_id,
        "group_id": spec.group_id,
        "run_id": spec.run_id,
        "namespace": spec.namespace,
        "index": call.index,
        "sampling": convert.sampling_to(call.sampling),
        "min_policy_version": call.min_policy_version,
        "dialect": convert.DIALECTS[call.request.dialect],
        "lease_attempt": call.leases,
        "receive_time": times.timestamp(call.received),
        "expire_time": times.timestamp(call.expires),
        "stream": call.request.stream,
        "task_id": spec.task_id,
        "group_index": spec.group_index,
        "tokenizer_sha256": bytes.fromhex(facts.tokenizer_sha256),
        "chat_template_sha256": bytes.fromhex(facts.template_sha256),
        "model": call.request.model_requested,
        "trace_parent": telemetry.trace_parent(call),
        "policy_id": call.policy_id,
    }
    if spec.labels:
        fields["labels"] = dict(spec.labels)
    if (plan := call.plan) is not None:
        fields["call_class"] = convert.CLASSES[plan.call_class]
        fields["branch_id"] = plan.branch_id
        fields["parent_call_id"] = plan.parent_call_id
        omitted = 0 if sent_prompts is None else sent_prompts.omitted(plan)
        fields["prompt_token_ids"] = convert.ids_to(plan.prompt_ids[omitted:])
        fields["prompt_count"] = int(plan.prompt_ids.size)
        if sent_prompts is not None and plan.exact:
            fields["omitted_prefix_count"] = omitted
            fields["prompt_sha256"] = plan.prompt_sha256
        fields["shared_prefix_count"] = plan.shared_prefix_len
        if plan.media:
            fields["media"] = [convert.media_to(one) for one in plan.media]
    return fields
