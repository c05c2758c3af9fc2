"""How much of one rollout's history the driver keeps: what an agent says and calls costs bounded rows and bytes (R96).

Invariants: an allowance is used up once, by number or by bytes, and never filled again; what decides the rollout, its
phases, commands and outcome, draws on none.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock_driver.events import AgentEvent, EventKind, EventParser
from penstock_driver.rollouts import Happening

MOST_EVENTS: Final = 50_000
MOST_BYTES: Final = 32 << 20
_LINES_FOR_EACH: Final = 10
"""Lines that may be read for each event that may be kept: those of which rules make no event cost time as well."""
PIECE_BYTES: Final = 4 << 10
"""Of output that is parsed at once: a few milliseconds, where each line is a small event."""
TAIL_BYTES: Final = 64 << 10
TAIL_EVENTS: Final = 32
"""What is kept of the end of an output whose middle was dropped."""


@dataclass(frozen=True, slots=True)
class Most:
    """What is kept of each rollout: events, and bytes of them, of its agent's output; as much again of its calls."""

    events: int = MOST_EVENTS
    size_bytes: int = MOST_BYTES


DEFAULT_MOST: Final = Most()


@dataclass(slots=True)
class Allowance:
    """How much more may be kept of one kind of event."""

    most: Most
    events: int = 0
    size_bytes: int = 0

    @property
    def is_used_up(self) -> bool:
        """Whether nothing more may be kept."""
        return self.events >= self.most.events or self.size_bytes >= self.most.size_bytes

    def took(self, size_bytes: int) -> None:
        """An event of so many bytes was kept."""
        self.events += 1
        self.size_bytes += size_bytes


class OutputEvents:
    """An agent's standard output as events, while there is an allowance for it; afterwards how much more came, and the
    last TAIL_EVENTS of it. `done` is the last event by which the agent said that it was done, of what was read.

    What is not kept is not parsed: beyond the allowance a byte costs its copy.
    """

    def __init__(
        self, allowance: Allowance, record: Callable[[Happening], None], make_parser: Callable[[], EventParser]
    ) -> None:
        self._allowance = allowance
        self._record = record
        self._make_parser = make_parser
        self._parser = make_parser()
        self._tail: bytearray | None = None
        """The end of what is not kept; None while all is."""
        self._lines = 0
        self._size_bytes = 0
        self.done: AgentEvent | None = None

    async def take(self, data: bytes) -> None:
        """Take the next part of the output, in pieces after each of which others have as long a turn.

        A turn of no time is not enough: the threads that read the journal and the network wait for the interpreter
        while this one never rests.
        """
        while self._tail is None and len(data) > PIECE_BYTES:
            began = time.monotonic()
            self.feed(data[:PIECE_BYTES])
            data = data[PIECE_BYTES:]
            await asyncio.sleep(time.monotonic() - began)
        self.feed(data)

    def feed(self, data: bytes) -> None:
        """Take the next part of the output at once."""
        if self._tail is None:
            for event in self._parser.feed(data, self._may_read):
                self._tell(event)
            data = self._parser.unread
            if self._may_read():
                return
            self._tail = bytearray()
        self._drop(data)

    def finish(self) -> None:
        """Take the end of the output, and tell what was dropped."""
        if self._tail is None:
            for event in self._parser.finish():
                self._tell(event)
            return
        if not self._size_bytes:
            return  # it ended just where the allowance did
        parser, last = self._make_parser(), deque[AgentEvent](maxlen=TAIL_EVENTS)
        told = bytes(self._tail)
        if self._size_bytes > len(told):
            told = told.partition(b"\n")[2]  # it begins within a line
        for event in (*parser.feed(told), *parser.finish()):
            self._see(event)
            last.append(event)
        dropped = {"dropped_lines": self._lines, "dropped_bytes": self._size_bytes, "last_events": len(last)}
        self._record(AgentEvent(EventKind.OTHER, dropped, b""))
        for event in last:
            self._record(event)

    def _may_read(self) -> bool:
        return not self._allowance.is_used_up and self._parser.lines < _LINES_FOR_EACH * self._allowance.most.events

    def _tell(self, event: AgentEvent) -> None:
        self._see(event)
        self._record(event)

    def _see(self, event: AgentEvent) -> None:
        self.done = event if event.kind is EventKind.DONE else self.done

    def _drop(self, data: bytes) -> None:
        assert self._tail is not None
        self._lines += data.count(b"\n")
        self._size_bytes += len(data)
        self._tail += data[-TAIL_BYTES:]
        del self._tail[:-TAIL_BYTES]
