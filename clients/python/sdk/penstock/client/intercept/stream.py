"""A session's part at one gate: calls in, results out, over one stream that reconnects when it breaks.

`leases.py` has the open calls and results, `pauses.py` the flow state. Frames are sent as soon as there is something to
send and never wait to fill. At least every half heartbeat interval something is sent; a gate that is silent for three
intervals is considered gone. `session.py` has the session over all gates.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from penstock.client.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    Internal,
    PenstockError,
    SessionLost,
    Unavailable,
    is_broken,
)
from penstock.client.intercept.host_tools import HostTool, Serving
from penstock.client.intercept.leases import Inbox, Leases
from penstock.client.intercept.pauses import Pauses
from penstock.client.intercept.prompts import Prompts
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
class SessionOptions:
    """How a session receives calls; `Penstock.intercept` describes each."""

    credits: int
    credit_bytes: int | None
    identity: str
    policy_version: int | None
    messages: bool
    bodies: bool
    images: bool
    reconnect_timeout: float
    policies: Mapping[str, int] = field(default_factory=dict)


def announced(policies: Mapping[str, int]) -> list[pb.PolicyAnnounced]:
    """Converts the newest version of each policy."""
    return [pb.PolicyAnnounced(policy_id=name, policy_version=version) for name, version in policies.items()]


class GateStream:
    """A session at one gate. `start` connects, `close` ends it; `failure` is set once it has failed for good.

    Its first Hello has the state of the session: policy version and credits; tools and a pause follow before any call
    is handed out.
    """

    def __init__(
        self,
        service: Service,
        selector: pb.CallSelector,
        options: SessionOptions,
        inbox: Inbox,
        changed: Callable[[], None],
        moved: Callable[[], None],
    ) -> None:
        """`inbox` gets the calls. `changed` is called after a change of `is_connected` or `failure`, `moved` after
        frames that may change `held`.
        """
        self.service = service
        self._stub = pb_grpc.InterceptServiceStub(service.channel)
        self._selector = selector
        self.credits = pb.Credits(calls=options.credits, bytes=options.credit_bytes)
        """The window at this gate."""
        self._identity = options.identity
        self._policy_version = options.policy_version
        self._policies = dict(options.policies)
        self._view = pb.CallView(messages=options.messages, body=options.bodies, media=options.images, suffix_only=True)
        self.reconnect_timeout = options.reconnect_timeout
        """Seconds to wait for the gate, at first and on reconnects."""

        self.session_id: str = ""
        """The session's id; changes when the gate could not resume the old one."""
        self.is_connected = False
        self.failure: PenstockError | None = None
        """The error that ended the session here."""
        self.is_away = False
        """Whether `failure` is that the gate did not come back in time."""
        self._outbox: deque[pb.InterceptRequest] = deque()
        self._wake = asyncio.Event()
        self._changed = changed
        self._moved = moved
        self._leases = Leases(self._wake, inbox)
        self.tools = Serving(self._wake)
        """The tools that are offered here."""
        self.pauses = Pauses(self._send)
        """The flow state here."""
        self._has_unregistered = False
        self._prompts = Prompts(service)
        self._go_away: PenstockError | None = None
        self._closing = asyncio.Event()
        self._last_received = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to connect."""
        self._task = asyncio.create_task(self._run(), name="penstock-intercept")

    @property
    def held(self) -> int:
        """How many calls are leased from here and not answered."""
        return len(self._leases)

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
        await self.tools.ended()

    async def lose(self, error: PenstockError) -> None:
        """Ends the session here without a word to the gate: who waits for it gets `error`."""
        self.is_away = True
        self.fail(error)
        await self._end_task()
        await self.tools.ended()

    def fail(self, error: PenstockError) -> None:
        """Ends the session here: who waits for it gets `error`."""
        self._end(error)
        self._closing.set()
        self._wake.set()

    def announce(self, policy_version: int, policy_id: str = "") -> None:
        """Announces the newest version of a policy; empty = the only trained one of each rollout."""
        frame = pb.PolicyAnnounced(policy_version=policy_version, policy_id=policy_id)  # first: it checks them
        if policy_id:
            self._policies[policy_id] = policy_version
        else:
            self._policy_version = policy_version
        self._send(pb.InterceptRequest(policy=frame))

    def set_credits(self, credits: pb.Credits) -> None:
        """Replaces the window."""
        if credits != self.credits:
            self.credits = credits
            self._send(pb.InterceptRequest(credits=credits))

    async def offer_tools(self, tools: Sequence[HostTool], whose: pb.CallSelector) -> None:
        """Offers tools to the agents of rollouts created from now on. Raises InvalidArgument and others."""
        self.raise_if_over()
        request = pb.RegisterToolsRequest(
            session_id=self.session_id, selector=whose, tools=self.tools.check(tools, whose)
        )
        before = self.tools.offers(whose)
        self.tools.offered(tools, whose)  # first: a call may arrive before the answer
        try:
            await self.service.call(self._stub.RegisterTools, request, repeatable=True)
        except BaseException:
            self.tools.offered(before, whose)
            raise
        self.tools.registered(request)

    def adopt_tools(self, tools: Sequence[HostTool], whose: pb.CallSelector) -> None:
        """Tools that are offered, or withdrawn, with the next stream, before any call of it is handed out."""
        self.tools.offered(tools, whose)
        if not tools and self.session_id:
            self.tools.withdrawn(whose)  # a session that is resumed keeps them
        self._has_unregistered = True

    def raise_if_over(self) -> None:
        """Raises the error that ended the session here."""
        if self.failure is not None:
            raise self.failure

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
                    if loop.time() - self._last_received > self.reconnect_timeout:
                        self.is_away = True
                        if not self.session_id:
                            raise
                        raise SessionLost(
                            f"The session could not be resumed in {self.reconnect_timeout:.0f} s: {error}",
                            reason="SESSION_LOST",
                        ) from error
                if not self.session_id and not announced:
                    announced = True
                    _log.warning("waiting for the gate, %.0f s at most: %s", self.reconnect_timeout, wish)
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
        stream = begin(metadata=self.service.metadata, routed=hello)
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                with suppress(asyncio.InvalidStateError):  # refused already: reading raises the cause
                    await stream.write(hello)
                welcome = await self._read(stream)
            if welcome is None or not welcome.HasField("welcome"):
                raise Internal("The gate's first message was not Welcome", reason="PROTOCOL")
            self._take_up(welcome.welcome)
            self._has_unregistered |= not welcome.welcome.resumed
            while self._has_unregistered:  # more may be adopted meanwhile
                await self._register()
            self.is_connected = True
            self._changed()
            interval = seconds(welcome.welcome, "heartbeat_interval") or 10.0
            tasks.append(asyncio.create_task(self._write(stream, interval), name="penstock-intercept-writer"))
            tasks.append(asyncio.create_task(self._guard(stream, interval), name="penstock-intercept-guard"))
            while (frame := await self._read(stream)) is not None:
                for call in frame.calls.calls:
                    prompt = await self._prompts.whole(call)
                    if self.pauses.is_unconfirmed and not self._leases.has(call.call_id):
                        self._outbox.append(_released(call))  # leased before this gate knew of the pause
                        self._wake.set()
                    else:
                        self._leases.leased(call, prompt)
                self._receive(frame)
                self._moved()
        except TimeoutError:
            raise Unavailable(f"{self.service.peer} did not answer Hello", reason="HANDSHAKE") from None
        except grpc.aio.AioRpcError as error:
            raise self.service.error(error) from None
        finally:
            self.is_connected = False
            self._changed()
            stream.cancel()
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.result()
        if not self._closing.is_set():
            raise Unavailable(f"{self.service.peer} ended the session", reason="STREAM_ENDED")

    async def _register(self) -> None:
        """Sends the gate which tools are offered and which are not any more."""
        self._has_unregistered = False
        try:
            for request in self.tools.registrations(self.session_id):
                await self.service.call(self._stub.RegisterTools, request)
                self.tools.registered(request)
        except BaseException:
            self._has_unregistered = True  # the next stream does it
            raise

    def _hello(self) -> pb.Hello:
        """Returns the session's current wishes. Frames queued from here on are sent after Welcome."""
        self._outbox.clear()
        if self.credits.calls == 0:
            self._outbox.append(pb.InterceptRequest(credits=self.credits))
        self._outbox.extend(self.pauses.unanswered())
        wanted = pb.Credits()
        wanted.CopyFrom(self.credits)
        wanted.calls = max(1, wanted.calls)  # zero credits need a frame of their own, after Welcome
        return pb.Hello(
            selector=self._selector,
            credits=wanted,
            identity=self._identity,
            policy_version=self._policy_version,
            policies=announced(self._policies),
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
        self.tools.taken_up(resumed=welcome.resumed)
        self._prompts.clear()
        self.pauses.began_stream()
        self._wake.set()

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
                    f"{self.service.peer} stopped sending heartbeats", reason="HEARTBEAT_MISSED"
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
        tool_results = self.tools.next_results()
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
                self.pauses.paused(frame.paused.open_calls)
            case "resumed":
                self.pauses.resumed()
            case "tool_calls":
                for call in frame.tool_calls.calls:
                    self.tools.called(call)
            case "tool_calls_cancelled":
                self.tools.cancelled(frame.tool_calls_cancelled.tool_call_ids)
            case "tool_results_acknowledged":
                self.tools.acknowledged(frame.tool_results_acknowledged)
            case "go_away":
                retry_after = seconds(frame.go_away, "retry_after")
                self._go_away = Unavailable(frame.go_away.reason, reason="GO_AWAY", retry_after=retry_after)
            case _:
                pass  # calls, which are taken; heartbeats, and frames of newer gates

    def _end(self, error: PenstockError) -> None:
        """Ends the session: all waiters get `error`."""
        if self.failure is not None:
            return
        self.failure = error
        self.is_connected = False
        self.pauses.end(error)
        self._leases.end(error)
        self.tools.end()
        self._changed()

    async def _end_task(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])


def _released(call: pb.ModelCall) -> pb.InterceptRequest:
    result = pb.CallResult(
        call_id=call.call_id, rollout_id=call.rollout_id, lease_id=call.lease_id, release=pb.Release()
    )
    return pb.InterceptRequest(results=pb.Results(results=[result]))


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
