"""Files of a local sandbox that its helper opened, read and written here by descriptor.

Invariants: a large read or write happens in a thread; written data becomes the file only by ``commit``.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Sequence

from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.local.channel import ChannelClosed, Reply
from penstock_sandbox.backends.local.spawner import wire
from penstock_sandbox.domain.backend import FileReader, FileWriter
from penstock_sandbox.domain.errno import Refused, file_error
from penstock_sandbox.domain.model import FileInfo, FileKind

# Below this size a read or write costs less than a thread.
_INLINE_IO = 256 * 1024

AskHelper = Callable[[wire.Message, Sequence[int]], Awaitable[Reply]]


class Reader(FileReader):
    """Reads ``descriptor``, which its owner closes; ``path`` is for errors."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor = descriptor
        self._path = path

    async def read(self, offset: int, length: int) -> bytes:
        try:
            if length <= _INLINE_IO and offset == 0:
                return os.pread(self._descriptor, length, offset)
            return await asyncio.to_thread(os.pread, self._descriptor, length, offset)
        except OSError as error:
            raise file_error(Refused(error.errno or errno.EIO, os.strerror(error.errno or 0)), self._path) from error


class Writer(FileWriter):
    """Writes the file that ``opened`` and its descriptors ``given`` describe; their owner closes both."""

    def __init__(
        self,
        helper: AskHelper,
        lost: Callable[[], Awaitable[PenstockError]],
        path: str,
        mode: int,
        opened: wire.Message,
        given: list[int],
    ) -> None:
        self._helper = helper
        self._lost = lost
        self._path = path
        self._mode = mode
        self._opened = opened
        self._given = given
        self._size = 0
        self.committed = False

    async def write(self, data: bytes) -> None:
        try:
            if self._size + len(data) <= _INLINE_IO:
                _write_all(self._given[0], data)
            else:
                await asyncio.to_thread(_write_all, self._given[0], data)
        except OSError as error:
            raise file_error(Refused(error.errno or errno.EIO, os.strerror(error.errno or 0)), self._path) from error
        self._size += len(data)

    async def commit(self) -> None:
        try:
            await self._helper({**self._opened, "op": "commit", "mode": self._mode}, self._given)
        except Refused as refusal:
            raise file_error(refusal, self._path) from refusal
        except ChannelClosed as error:
            raise await self._lost() from error
        self.committed = True


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def info(name: str, described: wire.Message) -> FileInfo:
    """Returns a file's metadata from the helper's description."""
    return FileInfo(
        name=name,
        kind=FileKind[described["kind"].upper()],
        size=described["size"],
        mode=described["mode"],
        modified_at=described["mtime_ns"] / 1e9,
        target=described.get("target", ""),
    )
