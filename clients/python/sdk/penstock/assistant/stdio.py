"""Standard input and output as streams of the loop."""

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.assistant.server import MAX_LINE_BYTES


def can_serve() -> bool:
    """Returns whether a program is on the other side: input and output are pipes or sockets."""
    return all(_is_pipe(stream.fileno()) for stream in (sys.stdin, sys.stdout))


@asynccontextmanager
async def streams() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yields a reader and a writer. Whatever else this process prints goes to standard error: it is no message."""
    loop = asyncio.get_running_loop()
    wire = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    writing, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(wire, "wb", 0))
    writer = asyncio.StreamWriter(writing, protocol, reader, loop)
    try:
        yield reader, writer
    finally:
        reading.close()
        writing.close()


def _is_pipe(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
