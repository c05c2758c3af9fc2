"""A trainer's session at the gate: calls in, results out, over one stream that reconnects when it breaks.

`leases.py` has the open calls and results, `pauses.py` the flow state. Frames are sent as soon as there is something to
send and never wait to fill. At least every half heartbeat interval something is sent; a gate that is silent for three
intervals is considered gone.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self

import grpc

from penstock.client.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    PenstockError,
    SessionLost,
    Unavailable,
    is_broken,
)
from penstock.client.intercept.calls import ModelCall
from penstock.client.intercept.host_tools import HostTool, Serving
from penstock.client.intercept.leases import Leases
from penstock.client.intercept.pauses import Pauses
from penstock.client.intercept.prompts import Prompts
from penstock.client.transport import tracing
from penstock.client.transport.rpc import MAX_MESSAGE_BYTES, Backoff, Service
from penstock.client.wire.chat import seconds
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import intercept_service_pb2_grpc as pb_grpc

_log = logging.getLogger("penstock.intercept")

_HANDSHAKE_S: Final = 20.0
_GOODBYE_S: Final = 5.0
_SETTLED_S: Final = 5.0
_REFUSALS: Final = 2
"""How often a session is reopened at once after a refusal whose status grpc.aio lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """The rollouts whose calls a session wants: those that match every condition that is set; none set = all.

    They are of the connection's namespace; `all_namespaces`, for an operator, selects those of all.
    """

    run_id: str | None = None
    group_id: str | None = None
    rollout_ids: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    all_namespaces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How a session receives calls; `Penstock.intercept` describes each."""

    credits: int
    credit_bytes: int | None
    identity: str
    policy_version: int | None
    messages: bool
    bodies: bool
    reconnect_timeout: float


class InterceptSession:
    """An `async with` block that receives agents' calls; made by `ps.intercept`.

    Inside, `calls()` yields them. On entry it waits for an unreachable gate, and a broken connection is reopened, for
    `reconnect_timeout` seconds; after that, and on a permanent error, `calls()` and every answer in flight raise.
    """

    def __init__(self, service: Service, selector: Selector, options: SessionOptions) -> None:
        if options.credits < 1:
            raise InvalidArgument("A session needs at least one credit", reason="CREDITS")
        self._service = service
        self._stub = pb_grpc.InterceptServiceStub(service.channel)
        self._selector = selector_to(selector)
        self._credits = pb.Credits(calls=options.credits, bytes=options.credit_bytes)
        self._identity = options.identity
        self._policy_version = options.policy_version
        self._view = pb.CallView(messages=options.messages, body=options.bodies, suffix_only=True)
        self._reconnect_timeout = options.reconnect_timeout

        self.session_id: str = ""
        """The session's id; changes when the gate could not resume the old one."""
        self._outbox: deque[pb.InterceptRequest] = deque()
        self._wake = asyncio.Event()
        self._leases = Leases(self._wake)
        self._tools = Serving(self._wake)
        self._pauses = Pauses(self._send)
        self._prompts = Prompts(service)
        self._go_away: PenstockError | None = None
        self._closing = asyncio.Event()
        self._last_received = 0.0
        self._failure: PenstockError | None = None
        self._connected: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._connected = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="penstock-intercept")
        try:
            await self._connected
        except BaseException:
            await self._end_task()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Sends the remaining results and ends the session: calls without an answer are queued again at once."""
        self._closing.set()
        self._wake.set()
        if self._task is not None and not self._task.done():
            try:
                async with asyncio.timeout(_GOODBYE_S):
                    await asyncio.shield(self._task)
            except TimeoutError:
                pass  # the gate does not answer: it will notice our silence
            finally:
                await self._end_task()
        self._end(SessionLost("The session is closed", reason="SESSION_CLOSED"))
        await self._tools.ended()

    async def calls(self) -> AsyncGenerator[ModelCall, None]:
        """Yields calls to answer, oldest first; ends when the session is closed or finished. Several loops may share
        it.

        Raises:
            PenstockError: the session failed permanently.
        """
        try:
            while (call := await self._leases.next_call()) is not None:
                call.taken()
                yield call
        finally:
            tracing.taken(None)
        if self._failure is not None and not self._closing.is_set():
            raise self._failure

    def finish(self) -> None:
        """Ends `calls()` once all calls that have arrived are handed out: no more are expected."""
        self._leases.finish()

    def announce(self, policy_version: int) -> None:
        """Announces the newest policy version to the gate, for its staleness bounds."""
        frame = pb.InterceptRequest(policy=pb.PolicyAnnounced(policy_version=policy_version))
        self._policy_version = policy_version
        self._send(frame)

    def set_credits(self, calls: int, credit_bytes: int | None = None) -> None:
        """Replaces the window: maximum calls (0 = none for now) and bytes (None = unchanged) leased at once."""
        if calls < 0:
            raise InvalidArgument("Credits must not be negative", reason="CREDITS")
        if credit_bytes is None and self._credits.HasField("bytes"):
            credit_bytes = self._credits.bytes
        self._credits = pb.Credits(calls=calls, bytes=credit_bytes)
        self._send(pb.InterceptRequest(credits=self._credits))

    async def offer_tools(self, tools: Sequence[HostTool], *, selector: Selector | None = None) -> None:
        """Offers tools of this program to the agents of rollouts created from now on; their calls run here.

        Args:
            tools: replace this session's earlier offer to the same selector; none = withdraws it. Open rollouts
                keep what they were offered.
            selector: which rollouts' agents, in any mode; None = those whose calls the session wants.

        Raises:
            InvalidArgument: `TOOL_NAME_RESERVED`, `TOOL_NOT_ALLOWED`, `FIELD_INVALID`, `HOST_TOOL`; violations name
                the fields.
        """
        self._raise_if_over()
        whose = self._selector if selector is None else selector_to(selector)
        request = pb.RegisterToolsRequest(
            session_id=self.session_id, selector=whose, tools=self._tools.check(tools, whose)
        )
        before = self._tools.offers(whose)
        self._tools.offered(tools, whose)  # first: a call may arrive before the answer
        try:
            await self._service.call(self._stub.RegisterTools, request, repeatable=True)
        except BaseException:
            self._tools.offered(before, whose)
            raise

    async def pause(self, reason: str = "", *, max_duration: float | None = None) -> int:
        """Pauses the calls of this selector, for every session and for the model source; agents see keep-alives.

        Args:
            reason: for the logs, for example "weight sync".
            max_duration: seconds after which calls flow again by themselves; None = 10 min.

        Returns:
            The number of calls leased or dispatched now; answers to them are still accepted.
        """
        self._raise_if_over()
        return await self._pauses.pause(reason, max_duration)

    async def resume(self) -> None:
        """Lets calls flow again."""
        self._raise_if_over()
        await self._pauses.resume()

    # The stream.

    def _send(self, frame: pb.InterceptRequest) -> None:
        self._outbox.append(frame)
        self._wake.set()

    async def _run(self) -> None:
        """Connects, exchanges frames, and reconnects until the session is closed or has failed."""
        loop = asyncio.get_running_loop()
        backoff = Backoff()
        refusals_left, announced = _REFUSALS, False
        self._last_received = loop.time()
        try:
            while True:
                began = loop.time()
                try:
                    await self._converse()
                    return
                except PenstockError as error:
                    if (
                        not self.session_id
                        and error.reason == "STREAM_BROKEN"
                        and refusals_left
                        and not self._closing.is_set()
                    ):
                        refusals_left -= 1  # refused, and grpc.aio lost the status
                        continue
                    if self._closing.is_set() or not (_passes(error) if self.session_id else _is_away(error)):
                        raise
                    if loop.time() - began > _SETTLED_S:
                        backoff.reset()
                    wish = self._go_away or error
                    self._go_away = None
                    if loop.time() - self._last_received > self._reconnect_timeout:
                        if not self.session_id:
                            raise
                        raise SessionLost(
                            f"The session could not be resumed in {self._reconnect_timeout:.0f} s: {error}",
                            reason="SESSION_LOST",
                        ) from error
                if not self.session_id and not announced:
                    announced = True
                    _log.warning("waiting for the gate, %.0f s at most: %s", self._reconnect_timeout, wish)
                with suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next(wish)):
                        await self._closing.wait()
                        return
        except PenstockError as error:
            self._end(error)
        except BaseException:
            self._end(SessionLost("The session was cancelled", reason="SESSION_CLOSED"))
            raise

    async def _converse(self) -> None:
        """Runs one stream from Hello to its end; returns when it ended with our Goodbye.

        Raises:
            PenstockError: it ended otherwise.
        """
        hello = pb.InterceptRequest(hello=self._hello())
        begin: Any = self._stub.Intercept
        stream = begin(metadata=self._service.metadata, routed=hello)
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                with suppress(asyncio.InvalidStateError):  # refused already: reading raises the cause
                    await stream.write(hello)
                welcome = await self._read(stream)
            if welcome is None or not welcome.HasField("welcome"):
                raise Internal("The gate's first message was not Welcome", reason="PROTOCOL")
            self._take_up(welcome.welcome)
            if not welcome.welcome.resumed:
                for request in self._tools.registrations(self.session_id):
                    await self._service.call(self._stub.RegisterTools, request)
            interval = seconds(welcome.welcome, "heartbeat_interval") or 10.0
            tasks.append(asyncio.create_task(self._write(stream, interval), name="penstock-intercept-writer"))
            tasks.append(asyncio.create_task(self._guard(stream, interval), name="penstock-intercept-guard"))
            while (frame := await self._read(stream)) is not None:
                for call in frame.calls.calls:
                    self._leases.leased(call, await self._prompts.whole(call))
                self._receive(frame)
        except TimeoutError:
            raise Unavailable(f"{self._service.peer} did not answer Hello", reason="HANDSHAKE") from None
        except grpc.aio.AioRpcError as error:
            raise self._service.error(error) from None
        finally:
            stream.cancel()
            for task in tasks:
                task.cancel()
                await asyncio.wait([task])
            for task in tasks:
                if not task.cancelled():
                    task.result()
        if not self._closing.is_set():
            raise Unavailable(f"{self._service.peer} ended the session", reason="STREAM_ENDED")

    def _hello(self) -> pb.Hello:
        """Returns the session's current wishes. Frames queued from here on are sent after Welcome."""
        self._outbox.clear()
        if self._credits.calls == 0:
            self._outbox.append(pb.InterceptRequest(credits=self._credits))
        self._outbox.extend(self._pauses.unanswered())
        wanted = pb.Credits()
        wanted.CopyFrom(self._credits)
        wanted.calls = max(1, wanted.calls)  # zero credits need a frame of their own, after Welcome
        return pb.Hello(
            selector=self._selector,
            credits=wanted,
            identity=self._identity,
            policy_version=self._policy_version,
            view=self._view,
            resume_session_id=self.session_id or None,
            held=pb.HeldCalls(call_ids=self._leases.call_ids) if self.session_id else None,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )

    def _take_up(self, welcome: pb.Welcome) -> None:
        """After Welcome: ends calls that were lost and resends what is unanswered."""
        self.session_id = welcome.session_id
        self._last_received = asyncio.get_running_loop().time()
        self._leases.taken_up(set(welcome.held_call_ids) if welcome.resumed else None)
        self._tools.taken_up(resumed=welcome.resumed)
        self._prompts.clear()
        if not welcome.resumed:
            self._pauses.forgotten()
        self._wake.set()
        if self._connected is not None and not self._connected.done():
            self._connected.set_result(None)

    async def _read(self, stream: Any) -> pb.InterceptResponse | None:
        """Returns the next frame; None at the end of the stream."""
        try:
            frame = await stream.read()
        except asyncio.CancelledError:
            # grpc raises this also for a cancelled call, and `_guard` cancels the call of a silent gate. The call
            # itself does not always say so: with a blocked write, `stream.cancelled()` was false.
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise Unavailable(
                    f"{self._service.peer} stopped sending heartbeats", reason="HEARTBEAT_MISSED"
                ) from None
            raise
        if frame is grpc.aio.EOF:
            return None
        self._last_received = asyncio.get_running_loop().time()
        response: pb.InterceptResponse = frame
        return response

    async def _write(self, stream: Any, interval: float) -> None:
        """Sends what is ready at once; heartbeats in between; Goodbye at the end."""
        try:
            while True:
                self._wake.clear()
                while (frame := self._next_frame()) is not None:
                    await stream.write(frame)
                if self._closing.is_set():
                    await stream.write(pb.InterceptRequest(goodbye=pb.Goodbye(reason="closed")))
                    await stream.done_writing()
                    return
                try:
                    async with asyncio.timeout(interval / 2):
                        await self._wake.wait()
                except TimeoutError:
                    self._outbox.append(pb.InterceptRequest(heartbeat=pb.Heartbeat()))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream is over, and the reader has its status
        except BaseException:
            stream.cancel()
            raise

    async def _guard(self, stream: Any, interval: float) -> None:
        """Cancels the call of a gate that is silent for three intervals, even while a write is blocked.

        Intervals are counted, not measured: a program whose loop was blocked for a minute did not listen meanwhile.
        """
        silent = 0
        while silent < 3:
            before = self._last_received
            await asyncio.sleep(interval)
            silent = silent + 1 if self._last_received == before else 0
        stream.cancel()

    def _next_frame(self) -> pb.InterceptRequest | None:
        if self._outbox:
            return self._outbox.popleft()
        if (results := self._leases.next_results()) is not None:
            return pb.InterceptRequest(results=results)
        tool_results = self._tools.next_results()
        return None if tool_results is None else pb.InterceptRequest(tool_results=tool_results)

    def _receive(self, frame: pb.InterceptResponse) -> None:
        match frame.WhichOneof("frame"):
            case "acknowledged":
                for call_id in frame.acknowledged.accepted_call_ids:
                    self._leases.accepted(call_id)
                for rejected in frame.acknowledged.rejected:
                    self._leases.rejected(rejected)
            case "cancelled":
                for call_id in frame.cancelled.call_ids:
                    self._leases.cancelled(call_id, frame.cancelled.reason or "CANCELLED")
            case "rollouts_closed":
                closed = frozenset(frame.rollouts_closed.rollout_ids)
                self._leases.closed(closed)
                self._prompts.forget(closed)
            case "paused":
                self._pauses.paused(frame.paused.open_calls)
            case "resumed":
                self._pauses.resumed()
            case "tool_calls":
                for call in frame.tool_calls.calls:
                    self._tools.called(call)
            case "tool_calls_cancelled":
                self._tools.cancelled(frame.tool_calls_cancelled.tool_call_ids)
            case "tool_results_acknowledged":
                self._tools.acknowledged(frame.tool_results_acknowledged)
            case "go_away":
                retry_after = seconds(frame.go_away, "retry_after")
                self._go_away = Unavailable(frame.go_away.reason, reason="GO_AWAY", retry_after=retry_after)
            case _:
                pass  # calls, which are taken; heartbeats, and frames of newer gates

    def _raise_if_over(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _end(self, error: PenstockError) -> None:
        """Ends the session: all waiters get `error`."""
        if self._failure is not None:
            return
        self._failure = error
        if self._connected is not None and not self._connected.done():
            self._connected.set_exception(error)
        self._pauses.end(error)
        self._leases.end(error)
        self._tools.end()

    async def _end_task(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])


def selector_to(selector: Selector) -> pb.CallSelector:
    """Converts a selector."""
    return pb.CallSelector(
        run_id=selector.run_id,
        group_id=selector.group_id,
        rollout_ids=selector.rollout_ids,
        labels=selector.labels,
        all_namespaces=selector.all_namespaces,
    )


def _is_away(error: PenstockError) -> bool:
    """Whether a gate that was never reached may still come up; STREAM_BROKEN means that it was reached."""
    return isinstance(error, Unavailable) and error.reason != "STREAM_BROKEN"


def _passes(error: PenstockError) -> bool:
    """Whether reconnecting may help: the transport broke, or the gate restarts or lost our heartbeats."""
    if isinstance(error, Aborted):
        return False  # another process took over the session
    if is_broken(error) or isinstance(error, Cancelled | DeadlineExceeded):
        return True
    return isinstance(error, Internal) and error.reason.startswith("TRANSPORT_")
