"""What a process wrote, and how it ended, for who runs one to look at a sandbox: a trial's, a check's."""

from __future__ import annotations

import asyncio
from typing import Final

from penstock_sandbox.backends.base import ProcessSink, RawExit
from penstock_sandbox.model import Stream

_MOST: Final = 1 << 20


class Collected(ProcessSink):
    """The output of one process together, a mebibyte at most: an image's programs may say as much as they like.

    `closed_output` is set when there comes no more, `ended` is None when the process was lost.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self.ended: asyncio.Future[RawExit | None] = asyncio.get_running_loop().create_future()
        self.closed_output = asyncio.Event()

    @property
    def text(self) -> bytes:
        """What it wrote, from the beginning."""
        return bytes(self._text)

    def output(self, stream: Stream, data: bytes) -> None:
        self._text += data[: _MOST - len(self._text)]

    def closed(self, stream: Stream) -> None:
        if stream is Stream.STDOUT:
            self.closed_output.set()

    def exited(self, exit: RawExit) -> None:  # noqa: A002
        self.ended.set_result(exit)

    def lost(self, reason: str = "") -> None:
        self.closed_output.set()
        if not self.ended.done():
            self.ended.set_result(None)
