"""Files of a local sandbox that its door opened, read and written here by descriptor.

Invariants: a large read or write happens in a thread; what was written becomes the file only by ``commit``.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Sequence

from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.base import FileReader, FileWriter
from penstock_sandbox.backends.local.channel import ChannelClosed, Reply
from penstock_sandbox.backends.refusals import Refused, file_error
from penstock_sandbox.model import FileInfo, FileKind
from penstock_sandbox.spawner import wire

# Below this a read or write costs less than handing it to a thread.
_INLINE_IO = 256 * 1024

Door = Callable[[wire.Message, Sequence[int]], Awaitable[Reply]]


class Reader(FileReader):
    """Reads ``descriptor``, which stays its owner's; ``path`` is for errors."""

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
    """Writes what ``opened`` and the descriptors ``given`` with it describe; both stay their owner's."""

    def __init__(
        self,
        door: Door,
        lost: Callable[[], Awaitable[PenstockError]],
        path: str,
        mode: int,
        opened: wire.Message,
        given: list[int],
    ) -> None:
        self._door = door
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
            await self._door({**self._opened, "op": "commit", "mode": self._mode}, self._given)
        except Refused as refusal:
            raise file_error(refusal, self._path) from refusal
        except ChannelClosed as error:
            raise await self._lost() from error
        self.committed = True


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


_KINDS = {"file": FileKind.FILE, "directory": FileKind.DIRECTORY, "symlink": FileKind.SYMLINK}


def info(name: str, described: wire.Message) -> FileInfo:
    """A file as the door describes it."""
    return FileInfo(
        name=name,
        kind=_KINDS.get(described["kind"], FileKind.OTHER),
        size=described["size"],
        mode=described["mode"],
        modified_at=described["mtime_ns"] / 1e9,
        target=described.get("target", ""),
    )
