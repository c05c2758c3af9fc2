"""One trainer's stream of `InterceptService`.

A frame carries what is ready and never waits to fill up. Waking once for many calls keeps gRPC in Python cheap: one
message per call costs four times as much CPU.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock_chassis import auth, times
from penstock_chassis.errors import Aborted, AlreadyExists, DeadlineExceeded, FailedPrecondition
from penstock_chassis.limits import MAX_MESSAGE_BYTES
from penstock_chassis.validation import invalid_field
from penstock_interception.domain.results import Accepted, Rejection, RejectionReason
from penstock_interception.domain.state import (
    DEFAULT_CREDIT_BYTES,
    DEFAULT_MESSAGE_BYTES,
    Credits,
    Selector,
    Session,
    View,
)
from penstock_interception.interceptor import Interceptor
from penstock_interception.rpc import results, tools
from penstock_interception.rpc.frames import CallWriter, Requests, frames_of
from penstock_interception.rpc.models import announced_policy, policy_ids_from

DEFAULT_PAUSE_S = 600.0
UNREAD_REPLIES = 64
UNACKNOWLEDGED_FRAMES = 64
"""At this many unacknowledged frames no further ones are read, until the trainer reads its acknowledgements."""


class InterceptStream:
    """One session: validates incoming results in order, and sends outgoing messages in batches.

    Results are validated in order of arrival and acknowledged as they reach the disk, concurrently: answers to calls
    of different rollouts share a commit. An answer to a rollout whose last answer is not on disk yet waits for that
    commit, since its record builds on it; the frames behind it wait too.
    """

    def __init__(self, session: Session, interceptor: Interceptor, heartbeat_s: float, stopping: asyncio.Event) -> None:
        self.session = session
        self._interceptor = interceptor
        self._heartbeat_s = heartbeat_s
        self._stopping = stopping
        self._replies: list[pb.InterceptResponse] = []
        self._read = asyncio.Event()
        self._judged = _Judged()
        self._judged_tools = _Judged()
        self._last_frame_at = asyncio.get_running_loop().time()
        self._goodbye_received = False
        self._go_away_sent = False

    async def read(self, requests: AsyncIterator[pb.InterceptRequest]) -> None:
        """Reads frames until the trainer leaves or its stream ends."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._acknowledge())
                group.create_task(self._acknowledge_tool_results())
                async for request in requests:
                    self._last_frame_at = asyncio.get_running_loop().time()
                    await self._take(request)
                    if self._goodbye_received:
                        break
                self._judged.end()
                self._judged_tools.end()
        finally:
            self.session.end()

    async def _acknowledge(self) -> None:
        """Sends the acknowledgement of each frame of results, in order of arrival."""
        judged = self._judged
        while (verdicts := await judged.take()) is not None:
            acknowledged = await results.acknowledge(verdicts)
            while (more := judged.take_settled()) is not None:
                acknowledged.MergeFrom(await results.acknowledge(more))
            await self._reply(pb.InterceptResponse(acknowledged=acknowledged))

    async def _acknowledge_tool_results(self) -> None:
        while (verdicts := await self._judged_tools.take()) is not None:
            judged = await results.acknowledge(verdicts)
            acknowledged = pb.ToolResultsAcknowledged(
                accepted_tool_call_ids=judged.accepted_call_ids, rejected=judged.rejected
            )
            await self._reply(pb.InterceptResponse(tool_results_acknowledged=acknowledged))

    def _judge_tool_result(self, message: pb.HostToolResult) -> Accepted | Rejection:
        result = tools.result_from(message)
        if isinstance(result, Rejection):
            return result
        if (wrong := self._of_another_rollout(message)) is not None:
            return wrong
        return self._interceptor.tools.settle(self.session, message.tool_call_id, result)

    def _of_another_rollout(self, message: pb.HostToolResult) -> Rejection | None:
        call = self._interceptor.tools.find(message.tool_call_id) if message.rollout_id else None
        if call is None or call.rollout.id == message.rollout_id:
            return None
        violations = ("rollout_id: is not the call's rollout",)
        return Rejection(call.id, RejectionReason.INVALID, "The call is of another rollout.", violations)

    async def frames(self, writer: CallWriter) -> AsyncIterator[pb.InterceptResponse]:
        """Yields frames to send, until the session ends."""
        loop = asyncio.get_running_loop()
        session = self.session
        while True:
            ended = session.ended  # read first: acknowledgements that come while frames are sent have their turn
            box = session.drain()
            requests: Requests = {}
            if box.calls or box.tool_calls:
                # A call must survive a restart before a trainer sees it.
                await self._interceptor.store.settled()
                requests = await writer.read_large(box.calls, session.view, self._interceptor.in_thread)
                # Meanwhile another stream may have taken the session over, with a view of its own. A tool has side
                # effects: a call whose write failed is not sent.
                box.calls = [call for call in box.calls if call.holder is session]
                box.tool_calls = [call for call in box.tool_calls if call.holder is session]
            replies, self._replies = self._replies, []
            self._read.set()
            for frame in (*frames_of(box, writer, session.view, session.sent_prompts, requests), *replies):
                yield frame
            if ended:
                return
            if loop.time() - self._last_frame_at > 3 * self._heartbeat_s:
                raise DeadlineExceeded(
                    "No frame was received for three heartbeat intervals.", reason="HEARTBEAT_MISSED"
                )
            if self._stopping.is_set() and not self._go_away_sent:
                self._go_away_sent = True
                yield pb.InterceptResponse(go_away=pb.GoAway(reason="DRAINING", retry_after=times.duration(2.0)))
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await session.wait()
            except TimeoutError:
                yield pb.InterceptResponse(heartbeat=pb.Heartbeat())

    async def finish(self, reader: asyncio.Task[None]) -> None:
        """Raises the error that ended the session, if any."""
        if self.session.taken_over:
            raise Aborted("Another stream resumed this session.", reason="SESSION_TAKEN_OVER")
        if reader.done():
            await reader

    def leave(self) -> None:
        """Ends the session: normally after a goodbye, else as lost."""
        if self._goodbye_received:
            self._interceptor.leave(self.session)
        else:
            self._interceptor.sessions.lose(self.session)

    async def _take(self, request: pb.InterceptRequest) -> None:
        session, interceptor = self.session, self._interceptor
        frame = request.WhichOneof("frame")
        if session.taken_over and frame in ("credits", "pause", "resume", "policy"):
            return  # its successor speaks for it, and nothing would end what it begins
        match frame:
            case "results":
                given = request.results.results
                await self._judged.put(
                    [await results.judge_one(interceptor, result, session, session.namespace) for result in given]
                )
            case "credits":
                interceptor.sessions.set_credit(
                    session, credits_from(request.credits, least=0, bytes_now=session.credit.bytes)
                )
            case "pause":
                limit = request.pause.max_duration
                span = times.seconds(limit) if request.pause.HasField("max_duration") else DEFAULT_PAUSE_S
                session.notify_paused(interceptor.sessions.pause(session, span))
            case "resume":
                if not interceptor.resume(session):
                    session.notify_resumed()  # there was no pause: the answer is the same
            case "policy":
                policy_id = announced_policy(request.policy, "policy.")
                interceptor.sessions.announce(session, request.policy.policy_version, policy_id)
            case "goodbye":
                self._goodbye_received = True
            case "tool_results":
                brought = request.tool_results.results
                await self._judged_tools.put([self._judge_tool_result(result) for result in brought])
            case "hello":
                raise AlreadyExists("Hello is sent once.", reason="HELLO_REPEATED")
            case "heartbeat" | None:
                pass

    async def _reply(self, frame: pb.InterceptResponse) -> None:
        """Queues a frame for sending. Waits while too many earlier ones are unsent."""
        self._replies.append(frame)
        self.session.wake()
        while len(self._replies) > UNREAD_REPLIES and not self.session.ended:
            self._read.clear()
            await self._read.wait()


class _Judged:
    """Verdicts on frames of results that are not acknowledged yet, in order of arrival."""

    def __init__(self) -> None:
        self._frames: deque[list[Accepted | Rejection]] = deque()
        self._more = asyncio.Event()
        self._fewer = asyncio.Event()
        self._over = False

    async def put(self, verdicts: list[Accepted | Rejection]) -> None:
        """Adds one frame's verdicts. Waits while too many frames are unacknowledged."""
        self._frames.append(verdicts)
        self._more.set()
        while len(self._frames) > UNACKNOWLEDGED_FRAMES:
            self._fewer.clear()
            await self._fewer.wait()

    def end(self) -> None:
        """Marks the end of input."""
        self._over = True
        self._more.set()

    async def take(self) -> list[Accepted | Rejection] | None:
        """Returns the oldest frame's verdicts; None after the last."""
        while not self._frames:
            if self._over:
                return None
            self._more.clear()
            await self._more.wait()
        self._fewer.set()
        return self._frames.popleft()

    def take_settled(self) -> list[Accepted | Rejection] | None:
        """Returns the oldest frame's verdicts if none of its commits is pending: one commit covers many frames."""
        if self._frames and all(isinstance(one, Rejection) or one.committed.done() for one in self._frames[0]):
            self._fewer.set()
            return self._frames.popleft()
        return None


def selector_from(selector: pb.CallSelector) -> Selector:
    """Returns the selector of the rollouts whose calls a trainer wants.

    Raises PermissionDenied NAMESPACE_NOT_ALLOWED, InvalidArgument that names the field.
    """
    return Selector(
        selector.run_id if selector.HasField("run_id") else None,
        selector.group_id if selector.HasField("group_id") else None,
        frozenset(selector.rollout_ids),
        frozenset(selector.labels.items()),
        auth.caller().scope(selector.all_namespaces),
        policy_ids_from(selector),
    )


def credits_from(credit: pb.Credits, *, least: int, bytes_now: int = DEFAULT_CREDIT_BYTES) -> Credits:
    """Returns the credits; `bytes_now` applies if no byte limit is given.

    Raises InvalidArgument that names the field.
    """
    if credit.calls < least:
        raise invalid_field("credits.calls", f"at least {least}")
    if credit.HasField("bytes") and credit.bytes < 1:
        raise invalid_field("credits.bytes", "at least 1")
    return Credits(credit.calls, credit.bytes if credit.HasField("bytes") else bytes_now)


def view_from(request: pb.Hello | pb.LeaseCallsRequest) -> View:
    """Returns the parts of each call that this trainer wants, and the largest message that it accepts.

    Raises InvalidArgument that names the field.
    """
    limit = request.max_message_bytes if request.HasField("max_message_bytes") else DEFAULT_MESSAGE_BYTES
    if not DEFAULT_MESSAGE_BYTES <= limit <= MAX_MESSAGE_BYTES:
        raise invalid_field("max_message_bytes", f"{DEFAULT_MESSAGE_BYTES} to {MAX_MESSAGE_BYTES}")
    view = request.view
    return View(messages=view.messages, body=view.body, media=view.media, max_message_bytes=limit)


def check_features(required: Iterable[str], served: Collection[str]) -> None:
    """Raises FailedPrecondition FEATURE_MISSING, with the names, unless all required features are served."""
    missing = sorted(set(required).difference(served))
    if missing:
        raise FailedPrecondition(
            f"This service lacks {', '.join(missing)}. Use a newer version of it, or do without.",
            reason="FEATURE_MISSING",
            metadata={"features": ",".join(missing)},
        )
