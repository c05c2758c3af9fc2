"""One trainer's stream of `InterceptService`: results as they come, calls as they gather.

Frames carry what is ready and never wait to fill: one wake-up for many calls is what keeps gRPC in Python cheap (a
message per call costs four times as much CPU as frames that carry what has gathered).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock_chassis import times
from penstock_chassis.errors import Aborted, AlreadyExists, DeadlineExceeded
from penstock_interception.ports import Accepted, Rejection
from penstock_interception.rpc import results, tools
from penstock_interception.rpc.frames import CallWriter, frames_of
from penstock_interception.rpc.sessions import credits_from
from penstock_interception.sessions import Session
from penstock_interception.turns import Turns

DEFAULT_PAUSE_S = 600.0
UNREAD_REPLIES = 64
UNACKNOWLEDGED_FRAMES = 64
"""From so many on a trainer's further frames are not read, until it reads what it is told."""


class InterceptStream:
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
        self._read = asyncio.Event()
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
            acknowledged = await results.told(verdicts)
            while (more := judged.take_settled()) is not None:
                acknowledged.MergeFrom(await results.told(more))
            await self._reply(pb.InterceptResponse(acknowledged=acknowledged))

    async def _acknowledge_tool_results(self) -> None:
        while (verdicts := await self._judged_tools.take()) is not None:
            told = await results.told(verdicts)
            acknowledged = pb.ToolResultsAcknowledged(
                accepted_tool_call_ids=told.accepted_call_ids, rejected=told.rejected
            )
            await self._reply(pb.InterceptResponse(tool_results_acknowledged=acknowledged))

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
                # A tool has effects: what the disk refused is not asked for.
                box.tool_calls = [call for call in box.tool_calls if call.holder is session]
            replies, self._replies = self._replies, []
            self._read.set()
            for frame in (*frames_of(box, writer, session.view), *replies):
                yield frame
            if session.ended:
                return
            if self._stopping.is_set() and not self._told_go_away:
                self._told_go_away = True
                yield pb.InterceptResponse(go_away=pb.GoAway(reason="DRAINING", retry_after=times.duration(2.0)))
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
                given = request.results.results
                await self._judged.put([await results.judge_one(self._turns, result, session) for result in given])
            case "credits":
                dispatcher.set_credit(session, credits_from(request.credits, least=0, bytes_now=session.credit.bytes))
            case "pause":
                limit = request.pause.max_duration
                span = times.seconds(limit) if request.pause.HasField("max_duration") else DEFAULT_PAUSE_S
                session.tell_paused(dispatcher.pause(session, span))
            case "resume":
                if not dispatcher.resume(session):
                    session.tell_resumed()  # nothing was held: the answer is the same
            case "policy":
                dispatcher.announce(session, request.policy.policy_version)
            case "goodbye":
                self._said_goodbye = True
            case "tool_results":
                brought = request.tool_results.results
                await self._judged_tools.put([self._judge_tool_result(result) for result in brought])
            case "hello":
                raise AlreadyExists("Hello is sent once.", reason="HELLO_REPEATED")
            case "heartbeat" | None:
                pass

    async def _reply(self, frame: pb.InterceptResponse) -> None:
        """Sends a frame with the next ones. Waits while those before it are not read."""
        self._replies.append(frame)
        self.session.wake()
        while len(self._replies) > UNREAD_REPLIES and not self.session.ended:
            self._read.clear()
            await self._read.wait()


class _Judged:
    """Frames of results that were judged and are not yet acknowledged, in the order in which they came."""

    def __init__(self) -> None:
        self._frames: deque[list[Accepted | Rejection]] = deque()
        self._more = asyncio.Event()
        self._fewer = asyncio.Event()
        self._over = False

    async def put(self, verdicts: list[Accepted | Rejection]) -> None:
        """One frame's. Waits while a trainer that sends more reads nothing."""
        self._frames.append(verdicts)
        self._more.set()
        while len(self._frames) > UNACKNOWLEDGED_FRAMES:
            self._fewer.clear()
            await self._fewer.wait()

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
        self._fewer.set()
        return self._frames.popleft()

    def take_settled(self) -> list[Accepted | Rejection] | None:
        """The oldest frame's when nothing of it is on its way to the disk any more: one commit takes many frames."""
        if self._frames and all(isinstance(one, Rejection) or one.committed.done() for one in self._frames[0]):
            self._fewer.set()
            return self._frames.popleft()
        return None
