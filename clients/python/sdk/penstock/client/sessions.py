"""A trainer's session at the gate: calls in, results out, over one stream that is taken up again when it breaks.

Invariants:
- A call is handed out once, also when it is leased to this session anew after a break; its result goes out under the
  newest lease.
- A result stays until the gate accepted or rejected it; after a break every such result is sent again, which the gate
  takes as the repeat that it is.
- Frames carry what is ready and never wait to fill. Something is sent at least every half heartbeat interval.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import grpc

from penstock.client.calls import ModelCall
from penstock.client.errors import (
    Aborted,
    AlreadyDelivered,
    CallEnded,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    InvalidCompletion,
    NotLeased,
    PenstockError,
    ResultRejected,
    SessionLost,
    StalePolicy,
    Unavailable,
    UnknownCall,
    from_rpc_error,
)
from penstock.client.rpc import Backoff, Service
from penstock.client.wire import duration, seconds
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import intercept_service_pb2_grpc as pb_grpc

MAX_RESULT_BYTES: Final = 32 * 1024 * 1024
"""Largest result, as the protocol bounds a frame."""

_FRAME_BYTES: Final = 8 * 1024 * 1024
_HANDSHAKE_S: Final = 20.0
_GOODBYE_S: Final = 5.0

_REJECTIONS: Final[Mapping[int, type[ResultRejected]]] = {
    pb.ResultRejected.REASON_UNKNOWN_CALL: UnknownCall,
    pb.ResultRejected.REASON_ALREADY_DELIVERED: AlreadyDelivered,
    pb.ResultRejected.REASON_CALL_ENDED: CallEnded,
    pb.ResultRejected.REASON_NOT_LEASED: NotLeased,
    pb.ResultRejected.REASON_INVALID: InvalidCompletion,
    pb.ResultRejected.REASON_STALE_POLICY: StalePolicy,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Which rollouts' calls a session wants: those that match every condition that is set; none set = all."""

    run_id: str | None = None
    group_id: str | None = None
    rollout_ids: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Held:
    """A call that is leased to this session. `result` and `accepted` are set while an answer is under way."""

    call: ModelCall
    lease_id: str
    result: pb.CallResult | None = None
    accepted: asyncio.Future[None] | None = None


class InterceptSession:
    """An `async with` block in which agents' calls come in; made by `ps.intercept`.

    Inside, `calls()` yields them. A connection that breaks is taken up again for `reconnect_timeout` seconds; after
    that, and on an error that will not pass, `calls()` and every answer under way raise.
    """

    def __init__(
        self,
        service: Service,
        selector: Selector,
        *,
        credits: int,
        credit_bytes: int | None,
        identity: str,
        policy_version: int | None,
        messages: bool,
        bodies: bool,
        reconnect_timeout: float,
    ) -> None:
        if credits < 1:
            raise InvalidArgument("A session needs at least one credit", reason="CREDITS")
        self._service = service
        self._stub = pb_grpc.InterceptServiceStub(service.channel)
        self._selector = pb.CallSelector(
            run_id=selector.run_id,
            group_id=selector.group_id,
            rollout_ids=selector.rollout_ids,
            labels=selector.labels,
        )
        self._credits = pb.Credits(calls=credits, bytes=credit_bytes)
        self._identity = identity
        self._policy_version = policy_version
        self._view = pb.CallView(messages=messages, body=bodies)
        self._reconnect_timeout = reconnect_timeout

        self.session_id = ""
        """The session's id; changes when the gate did not take the old one up again."""
        self._held: dict[str, _Held] = {}
        self._inbox: asyncio.Queue[ModelCall | None] = asyncio.Queue()
        self._outbox: deque[pb.InterceptRequest] = deque()
        self._unsent: deque[_Held] = deque()
        self._wake = asyncio.Event()
        self._pause: tuple[str, float | None] | None = None
        self._pausing: asyncio.Future[int] | None = None
        self._resuming: asyncio.Future[None] | None = None
        self._go_away: PenstockError | None = None
        self._closing = False
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Sends what is still to be sent and says goodbye: calls without an answer are queued again at once."""
        self._closing = True
        self._wake.set()
        if self._task is not None and not self._task.done():
            try:
                async with asyncio.timeout(_GOODBYE_S):
                    await asyncio.shield(self._task)
            except TimeoutError:
                pass  # the gate does not answer: it will notice that we are gone by our silence
            finally:
                await self._end_task()
        self._end(SessionLost("The session is closed", reason="SESSION_CLOSED"))

    async def calls(self) -> AsyncGenerator[ModelCall, None]:
        """Calls to answer, oldest first; ends when the session is closed or finished. Several loops may share it.

        Raises:
            PenstockError: the session broke for good.
        """
        while True:
            call = await self._inbox.get()
            if call is None:
                self._inbox.put_nowait(None)  # for the other loops
                if self._failure is not None and not self._closing:
                    raise self._failure
                return
            if not call.ended:
                yield call

    def finish(self) -> None:
        """Ends `calls()` once those that have come are handed out: nothing more is expected."""
        self._inbox.put_nowait(None)

    def announce(self, policy_version: int) -> None:
        """Tells the gate which weights are the newest: staleness bounds are judged against it."""
        self._policy_version = policy_version
        self._send(pb.InterceptRequest(policy=pb.PolicyAnnounced(policy_version=policy_version)))

    def set_credits(self, calls: int, credit_bytes: int | None = None) -> None:
        """Replaces the window: at most so many calls (0 = none for now) and bytes leased and not answered."""
        if calls < 0:
            raise InvalidArgument("Credits are not negative", reason="CREDITS")
        self._credits = pb.Credits(calls=calls, bytes=credit_bytes)
        self._send(pb.InterceptRequest(credits=self._credits))

    async def pause(self, reason: str = "", *, max_duration: float | None = None) -> int:
        """Holds the calls of this selector, for every session and for the model source; agents see keep-alives.

        Args:
            reason: for the logs, for example "weight sync".
            max_duration: seconds after which calls flow again by themselves; None = 10 min.

        Returns:
            Calls that are leased or dispatched now; answers to them are still taken.
        """
        self._raise_if_over()
        self._pause = (reason, max_duration)
        if self._pausing is None:
            self._pausing = asyncio.get_running_loop().create_future()
            self._send(self._pause_frame())
        return await asyncio.shield(self._pausing)

    async def resume(self) -> None:
        """Lets calls flow again."""
        self._raise_if_over()
        self._pause = None
        if self._resuming is None:
            self._resuming = asyncio.get_running_loop().create_future()
            self._send(pb.InterceptRequest(resume=pb.ResumeCalls()))
        await asyncio.shield(self._resuming)

    # What calls do.

    async def _answer(self, result: pb.CallResult) -> None:
        """Sends a result and waits for its acknowledgement."""
        self._raise_if_over()
        held = self._held.get(result.call_id)
        if held is None:
            raise CallEnded(f"Call {result.call_id} needs no answer any more", reason="CALL_ENDED")
        if held.accepted is not None:
            raise AlreadyDelivered(f"Call {result.call_id} is being answered already", reason="ANSWER_UNDER_WAY")
        result.lease_id = held.lease_id
        if result.ByteSize() > MAX_RESULT_BYTES:
            raise InvalidCompletion(f"A result has at most {MAX_RESULT_BYTES} bytes", reason="RESULT_TOO_LARGE")
        held.result = result
        held.accepted = asyncio.get_running_loop().create_future()
        self._unsent.append(held)
        self._wake.set()
        await held.accepted

    # The stream.

    def _send(self, frame: pb.InterceptRequest) -> None:
        self._outbox.append(frame)
        self._wake.set()

    def _pause_frame(self) -> pb.InterceptRequest:
        reason, max_duration = self._pause or ("", None)
        return pb.InterceptRequest(pause=pb.PauseCalls(reason=reason, max_duration=duration(max_duration)))

    async def _run(self) -> None:
        """Connects, converses, and connects again until the session is closed or cannot be saved."""
        loop = asyncio.get_running_loop()
        backoff = Backoff()
        try:
            while True:
                began = loop.time()
                try:
                    await self._converse()
                    return
                except PenstockError as error:
                    if not self.session_id or self._closing or not _passes(error):
                        raise
                    if self._last_received > began:
                        backoff.reset()
                    wish = self._go_away or error
                    self._go_away = None
                    if loop.time() - self._last_received > self._reconnect_timeout:
                        raise SessionLost(
                            f"The session could not be taken up again in {self._reconnect_timeout:.0f} s: {error}",
                            reason="SESSION_LOST",
                        ) from error
                await asyncio.sleep(backoff.next(wish))
        except PenstockError as error:
            self._end(error)
        except BaseException:
            self._end(SessionLost("The session was cancelled", reason="SESSION_CLOSED"))
            raise

    async def _converse(self) -> None:
        """One stream from Hello to its end; returns when it ended with our Goodbye.

        Raises:
            PenstockError: it ended otherwise.
        """
        stream = self._stub.Intercept(metadata=self._service.metadata)
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                with suppress(asyncio.InvalidStateError):  # refused already: reading tells why
                    await stream.write(pb.InterceptRequest(hello=self._hello()))
                welcome = await self._read(stream)
            if welcome is None or not welcome.HasField("welcome"):
                raise Internal("The gate did not begin with Welcome", reason="PROTOCOL")
            self._take_up(welcome.welcome)
            interval = seconds(welcome.welcome, "heartbeat_interval") or 10.0
            writer = asyncio.create_task(self._write(stream, interval), name="penstock-intercept-writer")
            while (frame := await self._read(stream)) is not None:
                self._receive(frame)
        except TimeoutError:
            raise Unavailable(f"{self._service.peer} did not answer Hello", reason="HANDSHAKE") from None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._service.peer) from None
        finally:
            stream.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.wait([writer])
                if not writer.cancelled():
                    writer.result()
        if not self._closing:
            raise Unavailable(f"{self._service.peer} ended the session", reason="STREAM_ENDED")

    def _hello(self) -> pb.Hello:
        wanted = pb.Credits()
        wanted.CopyFrom(self._credits)
        wanted.calls = max(1, wanted.calls)  # none for now is said by a frame of its own, after Welcome
        return pb.Hello(
            selector=self._selector,
            credits=wanted,
            identity=self._identity,
            policy_version=self._policy_version,
            view=self._view,
            resume_session_id=self.session_id or None,
        )

    def _take_up(self, welcome: pb.Welcome) -> None:
        """After Welcome: what was lost is told, what is unanswered is sent again."""
        self.session_id = welcome.session_id
        self._last_received = asyncio.get_running_loop().time()
        self._outbox.clear()
        self._unsent.clear()
        if self._credits.calls == 0:
            self._outbox.append(pb.InterceptRequest(credits=self._credits))
        kept = set(welcome.held_call_ids)
        for call_id, held in list(self._held.items()):
            if held.result is not None:
                self._unsent.append(held)
            elif welcome.resumed and call_id not in kept:
                self._drop(call_id, "LEASE_LOST")
        if self._pause is not None and (self._pausing is not None or not welcome.resumed):
            self._outbox.append(self._pause_frame())
        elif self._resuming is not None:
            self._outbox.append(pb.InterceptRequest(resume=pb.ResumeCalls()))
        self._wake.set()
        if self._connected is not None and not self._connected.done():
            self._connected.set_result(None)

    async def _read(self, stream: Any) -> pb.InterceptResponse | None:
        """The next frame; None at the end of the stream."""
        try:
            frame = await stream.read()
        except asyncio.CancelledError:
            # grpc raises this also for a call that was cancelled, which `_write` does to a silent gate.
            task = asyncio.current_task()
            if stream.cancelled() and not (task is not None and task.cancelling()):
                raise Unavailable(f"{self._service.peer} fell silent", reason="HEARTBEAT_MISSED") from None
            raise
        self._last_received = asyncio.get_running_loop().time()
        if frame is grpc.aio.EOF:
            return None
        response: pb.InterceptResponse = frame
        return response

    async def _write(self, stream: Any, interval: float) -> None:
        """Sends what is ready, as soon as it is; heartbeats in between; Goodbye at the end."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._wake.clear()
                while self._outbox or self._unsent:
                    await stream.write(self._outbox.popleft() if self._outbox else self._results())
                if self._closing:
                    await stream.write(pb.InterceptRequest(goodbye=pb.Goodbye(reason="closed")))
                    await stream.done_writing()
                    return
                try:
                    async with asyncio.timeout(interval / 2):
                        await self._wake.wait()
                except TimeoutError:
                    if loop.time() - self._last_received > 3 * interval:
                        stream.cancel()
                        return
                    self._outbox.append(pb.InterceptRequest(heartbeat=pb.Heartbeat()))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream is over, and the reader has its status
        except BaseException:
            stream.cancel()
            raise

    def _results(self) -> pb.InterceptRequest:
        """One frame of results that wait, as many as are there up to a bound in bytes."""
        results: list[pb.CallResult] = []
        size = 0
        while self._unsent:
            result = self._unsent[0].result
            if result is None:  # rejected or accepted while it waited to be sent again
                self._unsent.popleft()
                continue
            size += result.ByteSize()
            if results and size > _FRAME_BYTES:
                break
            self._unsent.popleft()
            results.append(result)
        return pb.InterceptRequest(results=pb.Results(results=results))

    def _receive(self, frame: pb.InterceptResponse) -> None:
        match frame.WhichOneof("frame"):
            case "calls":
                for message in frame.calls.calls:
                    self._lease(message)
            case "acknowledged":
                for call_id in frame.acknowledged.accepted_call_ids:
                    self._accepted(call_id)
                for rejected in frame.acknowledged.rejected:
                    self._rejected(rejected)
            case "cancelled":
                for call_id in frame.cancelled.call_ids:
                    self._drop(call_id, frame.cancelled.reason or "CANCELLED")
            case "rollouts_closed":
                closed = set(frame.rollouts_closed.rollout_ids)
                for call_id, held in list(self._held.items()):
                    if held.call.rollout_id in closed:
                        self._drop(call_id, "ROLLOUT_CLOSED")
            case "paused":
                if self._pausing is not None:
                    self._pausing.set_result(frame.paused.open_calls)
                    self._pausing = None
            case "resumed":
                self._pause = None
                if self._resuming is not None:
                    self._resuming.set_result(None)
                    self._resuming = None
            case "go_away":
                retry_after = seconds(frame.go_away, "retry_after")
                self._go_away = Unavailable(frame.go_away.reason, reason="GO_AWAY", retry_after=retry_after)
            case _:
                pass  # heartbeats, and what a newer gate may say

    def _lease(self, message: pb.ModelCall) -> None:
        held = self._held.get(message.call_id)
        if held is not None:
            held.lease_id = message.lease_id
            if held.result is not None:
                held.result.lease_id = message.lease_id
                self._unsent.append(held)
                self._wake.set()
            return
        call = ModelCall(message, self._answer)
        self._held[message.call_id] = _Held(call, message.lease_id)
        self._inbox.put_nowait(call)

    def _accepted(self, call_id: str) -> None:
        held = self._held.pop(call_id, None)
        if held is None:
            return
        held.call.end("ANSWERED")
        held.result = None
        if held.accepted is not None and not held.accepted.done():
            held.accepted.set_result(None)

    def _rejected(self, message: pb.ResultRejected) -> None:
        held = self._held.get(message.call_id)
        if held is None:
            return
        kind = _REJECTIONS.get(message.reason, ResultRejected)
        reason = pb.ResultRejected.Reason.Name(message.reason).removeprefix("REASON_")
        text = "; ".join((message.message or f"The gate refused the result: {reason}", *message.violations))
        accepted, held.result, held.accepted = held.accepted, None, None
        if not kind.retryable:
            del self._held[message.call_id]
            held.call.end(reason)
        if accepted is not None and not accepted.done():
            accepted.set_exception(kind(text, reason=reason))

    def _drop(self, call_id: str, reason: str) -> None:
        """Needs no answer any more. One that is under way gets its own verdict from the gate."""
        held = self._held.get(call_id)
        if held is None:
            return
        held.call.end(reason)
        if held.result is None:
            del self._held[call_id]

    def _raise_if_over(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _end(self, error: PenstockError) -> None:
        """Nothing comes or goes any more: everybody who waits is told."""
        if self._failure is not None:
            return
        self._failure = error
        held, self._held = self._held, {}
        waiting: list[asyncio.Future[Any] | None] = [item.accepted for item in held.values()]
        waiting += [self._connected, self._pausing, self._resuming]
        for item in held.values():
            item.call.end("SESSION_ENDED")
        for future in waiting:
            if future is not None and not future.done():
                future.set_exception(error)
        self._inbox.put_nowait(None)

    async def _end_task(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])


def _passes(error: PenstockError) -> bool:
    """Whether connecting again may help: the transport broke, or the gate restarts or lost our heartbeats."""
    if isinstance(error, Aborted):
        return False  # another process took the session over
    if isinstance(error, Unavailable | Cancelled | DeadlineExceeded):
        return True
    return isinstance(error, Internal) and error.reason.startswith("TRANSPORT_")
