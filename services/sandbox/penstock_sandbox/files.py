"""Files in sandboxes: ranges, digests and atomic writes on top of the backend's open files.

Invariants: content is bytes; a path is absolute or relative to the sandbox's working directory; an upload is put in
place only when all of it has arrived and matches its digest, if one was given (R44). Chunks are at most 256 KiB.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import BinaryIO, Final, cast

from penstock_chassis.errors import DataLoss, InvalidArgument, ResourceExhausted
from penstock_chassis.validation import invalid_field
from penstock_sandbox.domain.backend import MAX_ARCHIVE_BYTES, SandboxHandle
from penstock_sandbox.domain.diffs import DEFAULT_BYTES
from penstock_sandbox.domain.model import FileInfo

CHUNK = 256 * 1024
DEFAULT_TREE_BYTES = DEFAULT_BYTES
# Below this size a thread costs more than it saves the event loop.
_HASHED_AT_ONCE = 32 * 1024
_SMALL_ARCHIVE: Final = 64 * 1024
"""An archive of at most so many bytes is never on disk: making and removing the file costs more than all else."""


def absolute(handle: SandboxHandle, path: str) -> str:
    """Returns the absolute path of ``path`` in a sandbox. Raises InvalidArgument (FIELD_INVALID)."""
    problem = "is empty" if not path else "contains a NUL byte" if "\0" in path else ""
    if problem:
        raise invalid_field("path", problem)
    return path if path.startswith("/") else f"{handle.workdir}/{path}"


async def read(
    handle: SandboxHandle, path: str, offset: int, length: int | None, *, follow_symlink: bool
) -> AsyncGenerator[FileInfo | bytes, None]:
    """Yields the file's metadata, its bytes from ``offset`` (at most ``length``) in chunks, then their SHA-256."""
    if offset < 0 or (length is not None and length < 0):
        raise invalid_field("offset" if offset < 0 else "length", "must not be negative")
    digest = hashlib.sha256()
    async with handle.open_read(absolute(handle, path), follow_symlink=follow_symlink) as (info, reader):
        yield info
        left = length
        while left is None or left > 0:
            data = await reader.read(offset, CHUNK if left is None else min(CHUNK, left))
            if not data:
                break
            async with _beside(digest, data):
                yield data
            offset += len(data)
            left = None if left is None else left - len(data)
    yield digest.digest()


@asynccontextmanager
async def _beside(digest: hashlib._Hash, data: bytes) -> AsyncIterator[None]:
    """Hashes a chunk in a thread while the body runs; a small one is hashed at once."""
    if len(data) < _HASHED_AT_ONCE:
        digest.update(data)
        yield
        return
    hashing = asyncio.ensure_future(asyncio.to_thread(digest.update, data))
    try:
        yield
    finally:
        await hashing


class Upload:
    """Bytes being written to a file: counted, hashed, and checked at the end."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.size = 0

    @asynccontextmanager
    async def adding(self, data: bytes) -> AsyncIterator[None]:
        """Counts and hashes a chunk while the body runs."""
        self.size += len(data)
        async with _beside(self._digest, data):
            yield

    def check(self, expected: bytes) -> bytes:
        """Returns the digest. Raises DataLoss (DIGEST_MISMATCH) when ``expected`` is given and differs."""
        found = self._digest.digest()
        if expected and expected != found:
            raise DataLoss("the content does not match the announced digest", reason="DIGEST_MISMATCH")
        return found


async def write(
    handle: SandboxHandle, path: str, mode: int, chunks: AsyncIterator[bytes | None], expected: list[bytes]
) -> tuple[int, bytes]:
    """Writes a file from chunks; ``None`` ends them (without it nothing is written). Returns size and digest.

    ``expected`` must hold the announced digest when the None arrives.
    """
    upload = Upload()
    async with handle.open_write(absolute(handle, path), mode) as writer:
        async for chunk in chunks:
            if chunk is None:
                digest = upload.check(expected[0] if expected else b"")
                await writer.commit()
                return upload.size, digest
            async with upload.adding(chunk):
                await writer.write(chunk)
    raise InvalidArgument("the stream ended without an end frame; nothing was written", reason="STREAM_INCOMPLETE")


async def read_first(handle: SandboxHandle, path: str, most: int) -> tuple[bytes, int]:
    """Returns the first bytes of a file, ``most`` of them, and its size. Follows no link."""
    content = bytearray()
    async with handle.open_read(absolute(handle, path), follow_symlink=False) as (info, reader):
        while len(content) < most and (data := await reader.read(len(content), most - len(content))):
            content += data
    return bytes(content), info.size


async def write_whole(handle: SandboxHandle, path: str, content: bytes, mode: int) -> None:
    """Writes a small file from memory."""
    async with handle.open_write(path, mode) as writer:
        for start in range(0, len(content), CHUNK):
            await writer.write(content[start : start + CHUNK])
        await writer.commit()


def _in_memory(spool: Path) -> BinaryIO:
    """Opens a file without a disk, where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("penstock-archive"), "w+b")
    return cast("BinaryIO", tempfile.TemporaryFile(dir=spool))


def tree_limit(asked: int | None) -> int:
    """Returns the size limit of a tree or a diff for a caller's requested limit (None: not given).

    Raises InvalidArgument (FIELD_INVALID).
    """
    if asked is not None and asked < 0:
        raise invalid_field("max_bytes", "must not be negative")
    return DEFAULT_TREE_BYTES if asked is None else asked


async def read_tree(handle: SandboxHandle, path: str, max_bytes: int) -> AsyncGenerator[tuple[bytes, bytes], None]:
    """Yields a tree as tar chunks, each (chunk, b""), then (b"", SHA-256 of the tar)."""
    digest = hashlib.sha256()
    async with aclosing(handle.read_tree(absolute(handle, path), max_bytes)) as chunks:
        async for chunk in chunks:
            async with _beside(digest, chunk):
                for start in range(0, len(chunk), CHUNK):
                    yield chunk[start : start + CHUNK], b""
    yield b"", digest.digest()


async def diff(
    handle: SandboxHandle, below: Sequence[str], max_bytes: int
) -> AsyncGenerator[tuple[bytes, list[str], bytes], None]:
    """Yields a diff as tar chunks, each (chunk, [], b""), then (b"", deleted absolute paths, SHA-256 of the tar)."""
    digest = hashlib.sha256()
    async with aclosing(handle.diff(below, max_bytes)) as pieces:
        async for piece in pieces:
            if isinstance(piece, bytes):
                async with _beside(digest, piece):
                    yield piece, [], b""
            else:
                yield b"", piece, digest.digest()


async def write_tree(
    handle: SandboxHandle,
    path: str,
    spool: Path,
    chunks: AsyncIterator[bytes | None],
    expected: list[bytes],
    *,
    layer: bool = False,
) -> tuple[int, int]:
    """Unpacks a tar from chunks, after it is complete and checked."""
    upload, small = Upload(), bytearray()
    with ExitStack() as held:
        archive: BinaryIO | None = None
        async for chunk in chunks:
            if chunk is None:
                upload.check(expected[0] if expected else b"")
                if archive is None:
                    archive = held.enter_context(_in_memory(spool))
                    archive.write(small)
                archive.flush()
                return await handle.write_tree(absolute(handle, path), archive.fileno(), layer=layer)
            if upload.size + len(chunk) > MAX_ARCHIVE_BYTES:
                raise ResourceExhausted(
                    f"the archive is larger than {MAX_ARCHIVE_BYTES} bytes", reason="TREE_TOO_LARGE"
                )
            async with upload.adding(chunk):
                if archive is None and len(small) + len(chunk) <= _SMALL_ARCHIVE:
                    small += chunk
                    continue
                if archive is None:
                    archive = held.enter_context(tempfile.TemporaryFile(dir=spool))
                    chunk = bytes(small) + chunk
                await asyncio.to_thread(archive.write, chunk)
    raise InvalidArgument("the stream ended without an end frame; nothing was written", reason="STREAM_INCOMPLETE")
