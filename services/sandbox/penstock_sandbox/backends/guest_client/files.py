"""Files of a sandbox with a guest agent: few requests, pipelined, and content on streams.

Purpose: a link's round trip may take a tenth of a second; a small file is read or written in one.

Invariants: a write that is not committed is discarded; closing a read early stops the sender; a refusal by the guest
agent is the error of the operation on that path.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from pydantic import BaseModel

from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.guest_client.link import Link
from penstock_sandbox.backends.guest_client.messages import Described, Entries, Unpacked
from penstock_sandbox.backends.guest_client.stream import LinkLost, Stream, StreamReset
from penstock_sandbox.domain.backend import MAX_ARCHIVE_BYTES, MAX_ARCHIVE_ENTRIES, FileReader, FileWriter
from penstock_sandbox.domain.diffs import MAX_ENTRIES
from penstock_sandbox.domain.errno import Refused, file_error, sandbox_lost
from penstock_sandbox.domain.model import FileInfo, FileKind
from penstock_sandbox.guest import frames

_CHUNK = 256 * 1024
_D = TypeVar("_D", bound=BaseModel)


def lost(error: LinkLost) -> PenstockError:
    """Returns the error for callers of a sandbox that is gone."""
    return sandbox_lost(error.reason)


class Files:
    def __init__(self, link: Link) -> None:
        self._link = link

    async def _ask(self, op: str, path: str, **fields: object) -> frames.Message:
        try:
            return self._link.outcome(await self._link.ask(op, path=path, **fields))
        except Refused as refusal:
            raise file_error(refusal, path) from refusal
        except LinkLost as error:
            raise lost(error) from error

    def _info(self, name: str, described: Described) -> FileInfo:
        return FileInfo(
            name,
            FileKind[described.kind.upper()],
            described.size,
            described.mode,
            described.mtime_ns / 1e9,
            described.target,
        )

    # Single files ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def open_read(self, path: str, *, follow_symlink: bool) -> AsyncIterator[tuple[FileInfo, FileReader]]:
        """Opens a regular file; its content follows the reply without a further request."""
        stream = self._link.stream(window=frames.BULK_WINDOW, credit=0)
        reader = _Reader(self._link, stream, path)
        try:
            answer = await self._ask("open_read", path, follow=follow_symlink, stream=stream.number)
            yield self._info(os.path.basename(path), self._checked(Described, answer)), reader
        finally:
            reader.close()

    @asynccontextmanager
    async def open_write(self, path: str, mode: int) -> AsyncIterator[FileWriter]:
        """Writes a file; an error of the open shows at the first write that waits, at the latest at commit."""
        writer = _Writer(self._link, path, mode)
        try:
            yield writer
        finally:
            writer.close()

    async def stat(self, path: str) -> FileInfo:
        """Describes a path."""
        answer = await self._ask("stat", path)
        return self._info(os.path.basename(path.rstrip("/")) or "/", self._checked(Described, answer))

    async def entries(self, path: str, after: str, limit: int) -> tuple[list[FileInfo], str]:
        """Returns a page of a directory."""
        page = self._checked(Entries, await self._ask("list", path, after=after, limit=limit))
        return [self._info(entry.name, entry) for entry in page.entries], page.last

    async def make_directory(self, path: str, mode: int) -> None:
        """Creates a directory and its parents."""
        await self._ask("mkdir", path, mode=mode)

    async def remove(self, path: str, *, recursive: bool) -> None:
        await self._ask("remove", path, recursive=recursive)

    # Trees -------------------------------------------------------------------------------------------------------

    async def read_tree(self, path: str, max_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yields a tree as tar."""
        stream = self._link.stream(window=frames.BULK_WINDOW, credit=0)
        try:
            try:
                reply = self._link.ask(
                    "read_tree", path=path, max_bytes=max_bytes, max_entries=MAX_ENTRIES, stream=stream.number
                )
                while not reply.done() or "errno" not in reply.result():
                    data = await stream.read()
                    if not data:
                        break
                    yield data
                self._link.outcome(await reply)
            finally:
                stream.reset()
        except (Refused, StreamReset) as refusal:
            raise _refused(refusal, path) from refusal
        except LinkLost as error:
            raise lost(error) from error

    async def write_tree(self, path: str, archive: int, *, layer: bool = False) -> tuple[int, int]:
        """Sends the tar in the file ``archive``; it is unpacked when all of it has arrived."""
        stream = self._link.stream(window=0, credit=frames.BULK_WINDOW)
        try:
            opened = _opening(self._link.ask("spool", stream=stream.number), stream)
            offset = 0
            try:
                while data := await asyncio.to_thread(os.pread, archive, _CHUNK, offset):
                    await stream.write(data)
                    offset += len(data)
            except StreamReset as reset:
                self._link.outcome(await opened)
                raise Refused(reset.errno, os.strerror(reset.errno)) from reset
            unpacked = self._link.ask(
                "write_tree",
                path=path,
                layer=layer,
                stream=stream.number,
                max_bytes=MAX_ARCHIVE_BYTES,
                max_entries=MAX_ARCHIVE_ENTRIES,
            )
            self._link.outcome(await opened)
            answer = self._checked(Unpacked, self._link.outcome(await unpacked))
            return answer.entries, answer.bytes
        except Refused as refusal:
            raise file_error(refusal, path) from refusal
        except LinkLost as error:
            raise lost(error) from error
        finally:
            stream.reset()

    def _checked(self, kind: type[_D], message: frames.Message) -> _D:
        try:
            return self._link.checked(kind, message)
        except LinkLost as error:
            raise lost(error) from error


class _Reader(FileReader):
    """Reads ahead sequentially; a jump begins a new stream."""

    def __init__(self, link: Link, stream: Stream, path: str) -> None:
        self._link = link
        self._stream = stream
        self._path = path
        self._offset = 0
        self._pending = b""
        self._ended = False

    async def read(self, offset: int, length: int) -> bytes:
        try:
            if offset != self._offset:
                await self._seek(offset)
            if not self._pending and not self._ended:
                self._pending = await self._stream.read()
                self._ended = not self._pending
        except (Refused, StreamReset) as refusal:
            raise _refused(refusal, self._path) from refusal
        except LinkLost as error:
            raise lost(error) from error
        data, self._pending = self._pending[:length], self._pending[length:]
        self._offset += len(data)
        return data

    async def _seek(self, offset: int) -> None:
        before = self._stream
        self._stream = self._link.stream(window=frames.BULK_WINDOW, credit=0)
        self._offset, self._pending, self._ended = offset, b"", False
        before.close()
        await self._link.request("seek", stream=before.number, next=self._stream.number, offset=offset)

    def close(self) -> None:
        self._stream.reset()


class _Writer(FileWriter):
    def __init__(self, link: Link, path: str, mode: int) -> None:
        self._link = link
        self._path = path
        self._mode = mode
        self._stream = link.stream(window=0, credit=frames.BULK_WINDOW)
        try:
            self._opened = _opening(link.ask("open_write", path=path, stream=self._stream.number), self._stream)
        except LinkLost as error:
            raise lost(error) from error

    async def write(self, data: bytes) -> None:
        try:
            if self._opened.done():
                self._link.outcome(self._opened.result())
            await self._stream.write(data)
        except StreamReset as reset:
            raise await self._reason(reset) from reset
        except Refused as refusal:
            raise file_error(refusal, self._path) from refusal
        except LinkLost as error:
            raise lost(error) from error

    async def commit(self) -> None:
        try:
            committed = self._link.ask("commit", stream=self._stream.number, mode=self._mode)
            self._link.outcome(await self._opened)
            self._link.outcome(await committed)
        except Refused as refusal:
            raise file_error(refusal, self._path) from refusal
        except LinkLost as error:
            raise lost(error) from error
        self._stream.close()

    async def _reason(self, reset: StreamReset) -> PenstockError:
        """Returns why the stream was reset: the file could not be opened, or not be written to."""
        try:
            self._link.outcome(await self._opened)
        except Refused as refusal:
            return file_error(refusal, self._path)
        except LinkLost as error:
            return lost(error)
        return _refused(reset, self._path)

    def close(self) -> None:
        self._stream.reset()


def _opening(reply: asyncio.Future[frames.Message], stream: Stream) -> asyncio.Future[frames.Message]:
    """Fails a stream, opened ahead of the reply, if the open is refused: its bytes would never be read."""

    def answered(done: asyncio.Future[frames.Message]) -> None:
        if not done.cancelled() and done.exception() is None and "errno" in done.result():
            stream.fail(StreamReset(errno.EBADF))

    reply.add_done_callback(answered)
    return reply


def _refused(error: Refused | StreamReset, path: str) -> PenstockError:
    if isinstance(error, StreamReset):
        error = Refused(error.errno, os.strerror(error.errno))
    return file_error(error, path)
