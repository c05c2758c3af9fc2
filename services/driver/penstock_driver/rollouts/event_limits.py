"""Limits how much of one rollout's history the driver keeps: agent output and calls cost bounded rows and bytes (R96).

Invariants: an allowance is exhausted once, by number or by bytes, and never refilled. What decides the rollout (its
phases, commands and outcome) uses no allowance.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock_driver.agents.output_events import AgentEvent, EventKind, EventParser
from penstock_driver.domain.rollout import RolloutEvent
from penstock_driver.domain.users import SEEN_BYTES

MAX_EVENTS: Final = 50_000
MAX_BYTES: Final = 32 << 20
_LINES_FOR_EACH: Final = 10
"""Lines that may be read per event that may be kept: lines that yield no event cost time as well."""
PIECE_BYTES: Final = 1 << 10
"""Output parsed at once: some milliseconds at most, when each line is a small event."""
_TURN_S: Final = 0.001
"""After this long, parsing yields to other tasks."""
TAIL_BYTES: Final = 64 << 10
TAIL_EVENTS: Final = 32
"""Number of last events kept of an output whose middle was dropped."""


@dataclass(frozen=True, slots=True)
class EventLimits:
    """Limits per rollout: events of its agent's output, and their bytes; the same again for its calls."""

    events: int = MAX_EVENTS
    size_bytes: int = MAX_BYTES


DEFAULT_LIMITS: Final = EventLimits()


@dataclass(slots=True)
class Allowance:
    """How much more may be kept of one kind of event."""

    limits: EventLimits
    events: int = 0
    size_bytes: int = 0

    @property
    def is_used_up(self) -> bool:
        """Whether nothing more may be kept."""
        return self.events >= self.limits.events or self.size_bytes >= self.limits.size_bytes

    def took(self, size_bytes: int) -> None:
        """Count a kept event of this size."""
        self.events += 1
        self.size_bytes += size_bytes


class OutputEvents:
    """Turns an agent's standard output into events while its allowance lasts.

    After that it only counts the rest and keeps the last TAIL_EVENTS events. `done` is the last event parsed by which
    the agent reported that it was done. Dropped output is not parsed: beyond the allowance a byte costs its copy.
    """

    def __init__(
        self,
        allowance: Allowance,
        record: Callable[[RolloutEvent], None],
        make_parser: Callable[[], EventParser],
        recorded: Sequence[int] = (),
    ) -> None:
        """`recorded` has the sizes of the first events of this output, which an earlier driver process recorded."""
        self._recorded = deque(recorded)
        self._allowance = allowance
        self._record = record
        self._make_parser = make_parser
        self._parser = make_parser()
        self._tail: bytearray | None = None
        """The end of the dropped output; None while all is kept."""
        self._lines = 0
        self._size_bytes = 0
        self.done: AgentEvent | None = None
        self.said = ""
        """The end of the agent's last message."""

    async def take(self, data: bytes) -> None:
        """Parse the next part of the output in turns, sleeping after each turn as long as it took.

        `sleep(0)` would not suffice: the threads of the journal and the network wait for the interpreter lock while
        this one never rests.
        """
        start, began = 0, time.monotonic()
        while self._tail is None and len(data) - start > PIECE_BYTES:
            self.feed(data[start : start + PIECE_BYTES])
            start += PIECE_BYTES
            took = time.monotonic() - began
            if took >= _TURN_S:
                await asyncio.sleep(took)
                began = time.monotonic()
        self.feed(data[start:])

    def feed(self, data: bytes) -> None:
        """Parse the next part of the output at once."""
        if self._tail is None:
            for event in self._parser.feed(data, self._may_read):
                self._record_event(event)
            data = self._parser.unread
            if self._may_read():
                return
            self._tail = bytearray()
        self._drop(data)

    def finish(self) -> None:
        """End the output; record what was dropped."""
        if self._tail is None:
            for event in self._parser.finish():
                self._record_event(event)
            return
        if not self._size_bytes:
            return  # the output ended exactly at the allowance
        parser, last = self._make_parser(), deque[AgentEvent](maxlen=TAIL_EVENTS)
        kept = bytes(self._tail)
        if self._size_bytes > len(kept):
            kept = kept.partition(b"\n")[2]  # it starts in the middle of a line
        for event in (*parser.feed(kept), *parser.finish()):
            self._note_done(event)
            last.append(event)
        dropped = {"dropped_lines": self._lines, "dropped_bytes": self._size_bytes, "last_events": len(last)}
        self._put(AgentEvent(EventKind.OTHER, dropped, b""))
        for event in last:
            self._put(event)

    def _may_read(self) -> bool:
        return not self._allowance.is_used_up and self._parser.lines < _LINES_FOR_EACH * self._allowance.limits.events

    def _record_event(self, event: AgentEvent) -> None:
        self._note_done(event)
        self._put(event)

    def _put(self, event: AgentEvent) -> None:
        if self._recorded:
            self._allowance.took(self._recorded.popleft())
        else:
            self._record(event)

    def _note_done(self, event: AgentEvent) -> None:
        self.done = event if event.kind is EventKind.DONE else self.done
        if event.kind is EventKind.ASSISTANT and isinstance(text := event.data.get("text"), str) and text.strip():
            self.said = text.encode("utf-8", "replace")[-SEEN_BYTES:].decode("utf-8", "ignore")

    def _drop(self, data: bytes) -> None:
        assert self._tail is not None
        self._lines += data.count(b"\n")
        self._size_bytes += len(data)
        self._tail += data[-TAIL_BYTES:]
        del self._tail[:-TAIL_BYTES]
