"""A session's wanted flow state (paused or flowing), and its unanswered pause and resume requests.

The gate answers requests in order, and also reports resumed flow when a pause expires. So an answer belongs to the
oldest request if it is of its kind, and the wanted state ends only when no request is open.

A gate that restarts forgets a pause, even of a session that it resumes. So each new stream requests it again, for what
is left of it.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from penstock.client.errors import PenstockError
from penstock.client.wire.chat import duration
from penstock.interception.v1 import intercept_service_pb2 as pb

_LEAST_S: Final = 0.001
"""Seconds of a pause that is over and still has to be answered."""
PAUSE_S: Final = 600.0
"""Seconds of a pause without a duration."""


@dataclass(frozen=True, slots=True)
class _Pause:
    reason: str
    until: float
    """When it ends, on the loop's clock."""


@dataclass(frozen=True, slots=True)
class _Asked:
    frame: pb.InterceptRequest
    answer: asyncio.Future[int]
    """The number of open calls; 0 where calls flow again."""


class Pauses:
    """Pauses and resumes of one session; `send` queues a frame for the gate."""

    def __init__(self, send: Callable[[pb.InterceptRequest], None]) -> None:
        self._send = send
        self._wanted: _Pause | None = None
        self._asked: deque[_Asked] = deque()
        self._has_begun = False
        """Whether the newest request is of a pause that began without this gate: nobody waits for its answer."""
        self.is_unconfirmed = False
        """Whether the session is paused and this gate does not know it yet: calls that it leases are put back."""

    def pause(self, reason: str, max_duration: float | None) -> asyncio.Future[int]:
        """Requests a pause; the result is the number of open calls when the gate began to hold the others."""
        frame = _frame(reason, max_duration)
        self.adopt(reason, PAUSE_S if max_duration is None else max_duration)
        return self._answer(frame)

    def resume(self) -> asyncio.Future[int]:
        """Requests that calls flow; the future is done when they do."""
        self._wanted = None
        return self._answer(pb.InterceptRequest(resume=pb.ResumeCalls()))

    def unanswered(self) -> Iterator[pb.InterceptRequest]:
        """Yields the open requests: each new stream sends them again.

        A pause that began without this gate is requested for what is left of it. One that is over is requested too,
        for a moment, since the gate answers requests in order.
        """
        frames = [asked.frame for asked in self._asked]
        if frames and self._has_begun and self._wanted is not None:
            left = self._wanted.until - asyncio.get_running_loop().time()
            frames[-1] = _frame(self._wanted.reason, max(left, _LEAST_S))
        yield from frames

    def adopt(self, reason: str, left: float) -> None:
        """A pause of the session, with `left` seconds left of it, that this gate gets with its next stream."""
        self._wanted = _Pause(reason, asyncio.get_running_loop().time() + left)

    def began_stream(self) -> None:
        """Requests the current pause again for what is left of it, unless an open request decides: the gate may have
        forgotten it.
        """
        if self._wanted is None:
            return
        if self._asked:
            self.is_unconfirmed = True  # an older pause may be in force, which this request was to lengthen
            return
        left = self._wanted.until - asyncio.get_running_loop().time()
        self.is_unconfirmed = left > 0
        if self.is_unconfirmed:
            self._send(_frame(self._wanted.reason, left))
        else:
            self._wanted = None

    def began_without_it(self) -> None:
        """The session's pause has begun, and did not wait for this gate, which could not be reached."""
        if self._asked and self._wanted is not None:
            self._has_begun = self.is_unconfirmed = True

    def paused(self, open_calls: int) -> None:
        """The gate reports a pause in force."""
        self.is_unconfirmed = False
        self._answered("pause", open_calls)

    def resumed(self) -> None:
        """The gate reports that calls flow: on request, or because a pause expired."""
        self.is_unconfirmed = False
        self._answered("resume", 0)
        if not self._asked:
            self._wanted = None

    def end(self, error: PenstockError) -> None:
        """Fails all open requests."""
        while self._asked:
            self._asked.popleft().answer.set_exception(error)

    def _answer(self, frame: pb.InterceptRequest) -> asyncio.Future[int]:
        """Joins an identical newest request: only the newest one decides the final state."""
        self._has_begun = False
        if not self._asked or self._asked[-1].frame != frame:
            self._asked.append(_Asked(frame, asyncio.get_running_loop().create_future()))
            self._send(frame)
        return asyncio.shield(self._asked[-1].answer)

    def _answered(self, kind: str, open_calls: int) -> None:
        if self._asked and self._asked[0].frame.WhichOneof("frame") == kind:
            self._asked.popleft().answer.set_result(open_calls)


def _frame(reason: str, max_duration: float | None) -> pb.InterceptRequest:
    return pb.InterceptRequest(pause=pb.PauseCalls(reason=reason, max_duration=duration(max_duration)))
