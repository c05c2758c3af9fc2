"""Receives files over a stream, with limits, timeout and digest; also checks paths that a caller may name instead."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from penstock_chassis.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Violation,
)

_PREFIX = "running-"
_LOCK = "lock"

CHUNK_BYTES = 1 << 20
"""Maximum size of a chunk."""
_WRITE_AT_ONCE = 8 << 20

_Begin = TypeVar("_Begin")


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of a file: SHA-256 of all chunks, empty if a path was named instead."""

    sha256: bytes


class Uploads:
    """The limits of one kind of upload.

    Args:
        max_bytes: largest file accepted.
        idle_s: an upload that sends nothing for this long is aborted, since it blocks others.
    """

    def __init__(self, max_bytes: int, idle_s: float = 60.0) -> None:
        self._max_bytes = max_bytes
        self._idle_s = idle_s

    async def next(self, frames: AsyncIterator[_Begin | bytes | Commit]) -> _Begin | bytes | Commit:
        """Return the next frame. Raises InvalidArgument (UPDATE_FRAME_INVALID), DeadlineExceeded (UPDATE_STALLED)."""
        try:
            async with asyncio.timeout(self._idle_s):
                return await anext(frames)
        except StopAsyncIteration:
            raise frame_invalid("the stream ended before `commit`") from None
        except TimeoutError:
            raise DeadlineExceeded(
                f"nothing was received for {self._idle_s:g} s, so the push was cancelled", reason="UPDATE_STALLED"
            ) from None

    async def read(self, frames: AsyncIterator[_Begin | bytes | Commit]) -> tuple[bytes, bytes]:
        """Return all chunks and their digest, which the commit must confirm."""
        chunks: list[bytes] = []
        digest = await self._receive(frames, chunks, None)
        return b"".join(chunks), digest

    async def write(self, frames: AsyncIterator[_Begin | bytes | Commit], path: Path) -> bytes:
        """Write all chunks to a new file and return their digest. The file of a failed push is removed."""
        try:
            return await self._receive(frames, [], path)
        except BaseException:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise

    async def nothing(self, frames: AsyncIterator[_Begin | bytes | Commit]) -> None:
        """Read the commit that must follow at once after a path."""
        frame = await self.next(frames)
        if not isinstance(frame, Commit):
            raise frame_invalid("with a path, `commit` follows `begin`")

    def check_size(self, size: int) -> None:
        """Raises ResourceExhausted (UPDATE_TOO_LARGE)."""
        if size > self._max_bytes:
            raise ResourceExhausted(
                f"a push has at most {self._max_bytes} bytes (PENSTOCK_INFERENCE_MAX_UPDATE_BYTES)",
                reason="UPDATE_TOO_LARGE",
                metadata={"limit_bytes": str(self._max_bytes)},
            )

    async def _receive(
        self, frames: AsyncIterator[_Begin | bytes | Commit], chunks: list[bytes], path: Path | None
    ) -> bytes:
        size = kept = 0
        digest = hashlib.sha256()
        while not isinstance(frame := await self.next(frames), Commit):
            if not isinstance(frame, bytes):
                raise frame_invalid("`begin` comes once")
            if len(frame) > CHUNK_BYTES:
                raise frame_invalid(f"a chunk has at most {CHUNK_BYTES} bytes")
            size += len(frame)
            kept += len(frame)
            self.check_size(size)
            digest.update(frame)
            chunks.append(frame)
            if path is not None and kept >= _WRITE_AT_ONCE:
                await asyncio.to_thread(_append, path, chunks)
                chunks.clear()
                kept = 0
        if frame.sha256 != digest.digest():
            raise DataLoss("the chunks do not match the digest that was sent", reason="DIGEST_MISMATCH")
        if path is not None:
            await asyncio.to_thread(_append, path, chunks)
        return digest.digest()


def under(root: Path | None, path: str, setting: str, field: str) -> Path:
    """Resolve a caller's path below the operator's directory.

    Raises FailedPrecondition (PATHS_OFF) when there is no such directory, InvalidArgument (PATH_REFUSED) for a path
    that is missing or outside; the error does not reveal which.
    """
    if root is None:
        raise FailedPrecondition(
            f"paths are refused, because the operator has not set {setting}: send the file", reason="PATHS_OFF"
        )
    base = root.resolve()
    found = (base / path).resolve()
    if not found.is_relative_to(base) or not found.exists():
        text = f"does not exist under {setting}"
        raise InvalidArgument(f"{field} {text}", reason="PATH_REFUSED", violations=[Violation(field, text)])
    return found


def frame_invalid(text: str) -> InvalidArgument:
    """The error for frames in an invalid order."""
    return InvalidArgument(text, reason="UPDATE_FRAME_INVALID", violations=[Violation("frame", text)])


def _append(path: Path, chunks: list[bytes]) -> None:
    with path.open("ab") as file:
        file.writelines(chunks)


@contextmanager
def workspace(state_dir: Path) -> Iterator[Path]:
    """Create a directory for pushes in progress, and for weights and adapters in force; remove it on exit.

    It is under `state_dir`, which is created if missing. After a kill -9 the next service removes it: the owner's lock
    is free then. Raises OSError.
    """
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in state_dir.glob(f"{_PREFIX}*"):
        _remove_if_left(left)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=state_dir))
    try:
        with (directory / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield directory
    finally:
        # Also after a failed lock: without a lock no later service could know that the directory is abandoned.
        shutil.rmtree(directory, ignore_errors=True)


def _remove_if_left(directory: Path) -> None:
    try:
        with (directory / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
    except OSError:
        return  # in use, or just being created or removed
