"""A session's leased calls and its results in flight. No stream: `session.py` moves the frames.

Invariants:
- A call is handed out once, even if it is leased to this session again; its result is sent under the newest lease.
- A result stays until the gate accepted or rejected it; after a reconnect every such result is sent again, which the
  gate recognises as a repeat.
- Calls and results are in memory only while they are open.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.client.errors import (
    AlreadyDelivered,
    CallEnded,
    InvalidCompletion,
    NotLeased,
    PenstockError,
    ResultRejected,
    StalePolicy,
    UnknownCall,
    Violation,
)
from penstock.client.intercept.calls import ModelCall
from penstock.client.wire.chat import word
from penstock.interception.v1 import intercept_service_pb2 as pb

MAX_RESULT_BYTES: Final = 32 * 1024 * 1024
"""Maximum size of a result, as the protocol bounds a frame."""

_FRAME_BYTES: Final = 8 * 1024 * 1024

_REJECTIONS: Final[Mapping[int, type[ResultRejected]]] = {
    pb.ResultRejected.REASON_UNKNOWN_CALL: UnknownCall,
    pb.ResultRejected.REASON_ALREADY_DELIVERED: AlreadyDelivered,
    pb.ResultRejected.REASON_CALL_ENDED: CallEnded,
    pb.ResultRejected.REASON_NOT_LEASED: NotLeased,
    pb.ResultRejected.REASON_INVALID: InvalidCompletion,
    pb.ResultRejected.REASON_STALE_POLICY: StalePolicy,
}


@dataclass(slots=True)
class _Held:
    """A call leased to this session. `result` and `accepted` are set while an answer is in flight."""

    call: ModelCall
    lease_id: str
    result: pb.CallResult | None = None
    accepted: asyncio.Future[None] | None = None


class Inbox:
    """The calls of a session that are not handed out yet, of all gates."""

    def __init__(self) -> None:
        self._calls: asyncio.Queue[ModelCall | None] = asyncio.Queue()

    def put(self, call: ModelCall) -> None:
        """Adds a call."""
        self._calls.put_nowait(call)

    async def next_call(self) -> ModelCall | None:
        """Returns the oldest call that is not handed out; waits for one. None = there will be no more."""
        while True:
            call = await self._calls.get()
            if call is None:
                self._calls.put_nowait(None)  # for other waiters
                return None
            if not call.ended:
                return call

    def finish(self) -> None:
        """Hands out no more calls than have already arrived."""
        self._calls.put_nowait(None)


class Leases:
    """The leases of a session at one gate. Belongs to one event loop.

    `wake` is set whenever there is something to send. New calls go to `inbox`.
    """

    def __init__(self, wake: asyncio.Event, inbox: Inbox) -> None:
        self._wake = wake
        self._inbox = inbox
        self._held: dict[str, _Held] = {}
        self._unsent: dict[str, _Held] = {}
        self._over: PenstockError | None = None

    def __len__(self) -> int:
        return len(self._held)

    # For the trainer.

    def answer(self, result: pb.CallResult) -> asyncio.Future[None]:
        """Queues a result; the future is done when the gate has accepted it.

        Raises:
            CallEnded: the call no longer needs an answer.
            AlreadyDelivered: an answer is already in flight.
            InvalidCompletion: `RESULT_TOO_LARGE`.
            PenstockError: the error that ended the session.
        """
        if self._over is not None:
            raise self._over
        held = self._held.get(result.call_id)
        if held is None:
            raise CallEnded(f"Call {result.call_id} no longer needs an answer", reason="CALL_ENDED")
        if held.accepted is not None:
            raise AlreadyDelivered(f"Call {result.call_id} is already being answered", reason="ANSWER_UNDER_WAY")
        result.lease_id = held.lease_id
        check_size(result)
        held.result = result
        held.accepted = asyncio.get_running_loop().create_future()
        self._send(held)
        return held.accepted

    # For the stream.

    @property
    def call_ids(self) -> list[str]:
        """Returns the ids of all open calls."""
        return list(self._held)

    def has(self, call_id: str) -> bool:
        """Whether a call is open here."""
        return call_id in self._held

    def leased(self, message: pb.ModelCall, prompt: bytes | None = None) -> None:
        """The gate leased a call: a new one is handed out with its whole `prompt`, a known one gets its new lease."""
        held = self._held.get(message.call_id)
        if held is None:
            call = ModelCall(message, self._answer_and_wait, prompt)
            self._held[message.call_id] = _Held(call, message.lease_id)
            self._inbox.put(call)
            return
        held.lease_id = message.lease_id
        if held.result is not None:
            held.result.lease_id = message.lease_id
            self._send(held)

    def accepted(self, call_id: str) -> None:
        """A result is on the gate's disk."""
        held = self._forget(call_id)
        if held is None:
            return
        held.call.end("ANSWERED")
        if held.accepted is not None and not held.accepted.done():
            held.accepted.set_result(None)

    def rejected(self, message: pb.ResultRejected) -> None:
        """The gate rejected a result; the call may be answered again where it is still leased."""
        held = self._held.get(message.call_id)
        if held is None:
            return
        error = rejection(message)
        accepted, held.result, held.accepted = held.accepted, None, None
        self._unsent.pop(message.call_id, None)
        if not error.retryable or held.call.ended:
            self._forget(message.call_id)
            held.call.end(error.reason)
        if accepted is not None and not accepted.done():
            accepted.set_exception(error)

    def cancelled(self, call_id: str, reason: str) -> None:
        """A call no longer needs an answer. The gate still accepts or rejects an answer in flight."""
        held = self._held.get(call_id)
        if held is None:
            return
        held.call.end(reason)
        if held.result is None:
            self._forget(call_id)

    def closed(self, rollout_ids: Collection[str]) -> None:
        """Rollouts were closed."""
        for call_id, held in list(self._held.items()):
            if held.call.rollout_id in rollout_ids:
                self.cancelled(call_id, "ROLLOUT_CLOSED")

    def taken_up(self, kept: Collection[str] | None) -> None:
        """Handles a new stream: unacknowledged results are sent again.

        Args:
            kept: calls still leased to this session; None = the gate forgot the session, and leases them again.
        """
        self._unsent.clear()
        for call_id, held in list(self._held.items()):
            if held.result is not None:
                self._send(held)
            elif kept is not None and call_id not in kept:
                self.cancelled(call_id, "LEASE_LOST")

    def next_results(self) -> pb.Results | None:
        """Returns results to send, as many as fit a limit in bytes; None = there are none."""
        results: list[pb.CallResult] = []
        size = 0
        for call_id, held in list(self._unsent.items()):
            if held.result is None:
                raise AssertionError("what is unsent has a result")
            size += held.result.ByteSize()
            if results and size > _FRAME_BYTES:
                break
            del self._unsent[call_id]
            results.append(held.result)
        return pb.Results(results=results) if results else None

    def end(self, error: PenstockError) -> None:
        """Ends the exchange: all waiters get `error`."""
        self._over = error
        held, self._held = self._held, {}
        self._unsent.clear()
        for item in held.values():
            item.call.end("SESSION_ENDED")
            if item.accepted is not None and not item.accepted.done():
                item.accepted.set_exception(error)

    async def _answer_and_wait(self, result: pb.CallResult) -> None:
        await self.answer(result)

    def _send(self, held: _Held) -> None:
        self._unsent[held.call.call_id] = held
        self._wake.set()

    def _forget(self, call_id: str) -> _Held | None:
        self._unsent.pop(call_id, None)
        return self._held.pop(call_id, None)


def check_size(result: pb.CallResult) -> None:
    """Raises InvalidCompletion `RESULT_TOO_LARGE` for a result that the gate would not read."""
    if result.ByteSize() > MAX_RESULT_BYTES:
        raise InvalidCompletion(f"A result must have at most {MAX_RESULT_BYTES} bytes", reason="RESULT_TOO_LARGE")


def rejection(message: pb.ResultRejected) -> ResultRejected:
    """Returns the typed error of a rejected result."""
    kind = _REJECTIONS.get(message.reason, ResultRejected)
    reason = word(pb.ResultRejected.Reason, message.reason, "REASON_").upper()
    text = "; ".join((message.message or f"The gate refused the result: {reason}", *message.violations))
    return kind(text, reason=reason, violations=tuple(map(_violation, message.violations)))


def _violation(text: str) -> Violation:
    """Parses `completion.span: no tokens`."""
    field, colon, description = text.partition(": ")
    return Violation(field, description) if colon else Violation("completion", text)
