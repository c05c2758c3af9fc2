"""The watches of one stream: many processes, each with a window, and one reader of them all.

Purpose: one more watched process costs an object here, and neither a task nor a stream.

Invariants
- A watch has no more sent and not credited than its window, so a process that floods holds up no other.
- Each watch ends with one exit or refusal, after the process's last output.
- Watches with something to send take turns, a piece each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Final, TypeAlias

from penstock_chassis.aio.broadcast import Signal
from penstock_chassis.errors import PenstockError, ResourceExhausted
from penstock_chassis.validation import invalid_field
from penstock_sandbox.domain.model import Chunk, Exit, Gap, Stream
from penstock_sandbox.processes.process import HEARTBEAT_S, MOST_CHUNK, Cursor, RunningProcess

CHUNK_COST: Final = 256
"""What a chunk takes of the window beside its bytes: small ones have a cost for the caller too."""
MOST_WATCHES: Final = 65_536
"""Of one stream, with refusals that are not sent yet."""
LEAST_WINDOW: Final = 64 << 10
MOST_WINDOW: Final = 16 << 20
_LEAST_CHUNK: Final = 4 << 10
"""With less room in the window than this, credit is awaited."""

Event: TypeAlias = Chunk | Gap | Exit | PenstockError


class _Watch:
    __slots__ = ("_cursor", "_owner", "_window", "id", "is_ready")

    def __init__(self, owner: Watches, watch_id: int, cursor: Cursor, window: int) -> None:
        self._owner = owner
        self._cursor = cursor
        self._window = window
        self.id = watch_id
        self.is_ready = False
        cursor.process.changed.call_on_change(self.wake)

    def wake(self) -> None:
        """Wakes the watch: it may have something to send."""
        if not self.is_ready:
            self.is_ready = True
            self._owner.enqueue(self)

    def credit(self, count: int) -> None:
        self._window += count
        self.wake()

    def next(self) -> Chunk | Gap | Exit | None:
        most = min(self._window - CHUNK_COST, MOST_CHUNK)
        if most < _LEAST_CHUNK:
            return None
        # Looked at first: what is read after the end is all there is.
        end = self._cursor.process.exit
        piece = self._cursor.next(most)
        if isinstance(piece, Chunk):
            self._window -= len(piece.data) + CHUNK_COST
        return end if piece is None else piece

    def close(self) -> None:
        self._cursor.process.changed.forget(self.wake)


class Watches:
    """The watches of one stream. `close` it when the stream is over."""

    def __init__(self) -> None:
        self._watches: dict[int, _Watch] = {}
        self._queue: deque[_Watch | tuple[int, PenstockError]] = deque()
        self._changed = Signal()
        self._last_id = 0
        self._refused = 0
        """Refusals that are not sent yet."""
        self._is_complete = False
        self._error: BaseException | None = None

    def check_id(self, watch_id: int) -> None:
        """Takes the id of a new watch.

        Raises InvalidArgument: not after those before it; ResourceExhausted: WATCH_LIMIT.
        """
        if len(self._watches) + self._refused >= MOST_WATCHES:
            raise ResourceExhausted(
                f"A stream has at most {MOST_WATCHES} watches: open another one.", reason="WATCH_LIMIT"
            )
        if watch_id <= self._last_id:
            raise invalid_field("start.watch_id", "must be positive, and greater than those before it in the stream")
        self._last_id = watch_id

    def begin(self, watch_id: int, process: RunningProcess, offsets: Mapping[Stream, int], window: int) -> None:
        """Watches a process from the offsets on."""
        self._watches[watch_id] = watch = _Watch(self, watch_id, Cursor(process, offsets), window)
        watch.wake()

    def refuse(self, watch_id: int, error: PenstockError) -> None:
        """Ends a watch that could not begin."""
        self._refused += 1
        self._queue.append((watch_id, error))
        self._changed.notify()

    def credit(self, watch_id: int, count: int) -> None:
        """Adds to a watch's window; nothing if it is over."""
        if (watch := self._watches.get(watch_id)) is not None:
            watch.credit(count)

    def stop(self, watch_id: int) -> None:
        """Ends a watch early; nothing if it is over."""
        if (watch := self._watches.pop(watch_id, None)) is not None:
            watch.close()
            self._changed.notify()

    def complete(self, error: BaseException | None = None) -> None:
        """No watch begins any more; `error` ends `events` at once."""
        self._is_complete, self._error = True, error
        self._changed.notify()

    def enqueue(self, watch: _Watch) -> None:
        """Of a watch that may have something to send."""
        self._queue.append(watch)
        self._changed.notify()

    async def events(self) -> AsyncGenerator[tuple[int, Event] | None, None]:
        """Yields what is to be sent, with the id of its watch; None after a silence of HEARTBEAT_S.

        Ends once it is complete and no watch is left.
        """
        while True:
            number = self._changed.number
            while self._queue:
                if self._error is not None:
                    raise self._error
                one = self._queue.popleft()
                if isinstance(one, tuple):
                    self._refused -= 1
                    yield one
                    continue
                one.is_ready = False
                if one.id not in self._watches or (event := one.next()) is None:
                    continue
                if isinstance(event, Exit):
                    self.stop(one.id)
                else:
                    one.wake()  # behind the others
                yield one.id, event
            if self._error is not None:
                raise self._error
            if self._is_complete and not self._watches:
                return
            if not await self._changed.wait(number, HEARTBEAT_S):
                yield None

    def close(self) -> None:
        """Ends all watches."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
