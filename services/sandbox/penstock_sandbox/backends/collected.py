"""What a process wrote, and how it ended, for who runs one to look at a sandbox: a trial's, a check's."""

from __future__ import annotations

import asyncio

from penstock_sandbox.backends.base import ProcessSink, RawExit
from penstock_sandbox.model import Stream


class Collected(ProcessSink):
    """All output of one process together; `closed_output` when there comes no more, `ended` None when it was lost."""

    def __init__(self) -> None:
        self.text = b""
        self.ended: asyncio.Future[RawExit | None] = asyncio.get_running_loop().create_future()
        self.closed_output = asyncio.Event()

    def output(self, stream: Stream, data: bytes) -> None:
        self.text += data

    def closed(self, stream: Stream) -> None:
        if stream is Stream.STDOUT:
            self.closed_output.set()

    def exited(self, exit: RawExit) -> None:  # noqa: A002
        self.ended.set_result(exit)

    def lost(self) -> None:
        self.closed_output.set()
        if not self.ended.done():
            self.ended.set_result(None)
