"""Receiving files over a stream: bounded, timed, digested; and paths that a caller may name instead."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
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

CHUNK_BYTES = 1 << 20
"""Most bytes of one chunk."""
_WRITE_AT_ONCE = 8 << 20

_Begin = TypeVar("_Begin")


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of a file: SHA-256 of all chunks, empty where a path stood for them."""

    sha256: bytes


class Uploads:
    """The limits of one kind of upload.

    Args:
        max_bytes: largest file accepted.
        idle_s: an upload that sends nothing for this long is given up, since it keeps others out.
    """

    def __init__(self, max_bytes: int, idle_s: float = 60.0) -> None:
        self._max_bytes = max_bytes
        self._idle_s = idle_s

    async def next(self, frames: AsyncIterator[_Begin | bytes | Commit]) -> _Begin | bytes | Commit:
        """The next frame. Raises InvalidArgument (UPDATE_FRAME_INVALID), DeadlineExceeded (UPDATE_STALLED)."""
        try:
            async with asyncio.timeout(self._idle_s):
                return await anext(frames)
        except StopAsyncIteration:
            raise frame_invalid("the stream ended before `commit`") from None
        except TimeoutError:
            raise DeadlineExceeded(
                f"nothing came for {self._idle_s:g} s, the push was given up", reason="UPDATE_STALLED"
            ) from None

    async def read(self, frames: AsyncIterator[_Begin | bytes | Commit]) -> tuple[bytes, bytes]:
        """All chunks, and their digest, which the commit must confirm."""
        chunks: list[bytes] = []
        digest = await self._receive(frames, chunks, None)
        return b"".join(chunks), digest

    async def write(self, frames: AsyncIterator[_Begin | bytes | Commit], path: Path) -> bytes:
        """All chunks into a new file; their digest. What was written of a push that failed is removed."""
        try:
            return await self._receive(frames, [], path)
        except BaseException:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise

    async def nothing(self, frames: AsyncIterator[_Begin | bytes | Commit]) -> None:
        """The commit that follows at once where a path stood for the chunks."""
        frame = await self.next(frames)
        if not isinstance(frame, Commit):
            raise frame_invalid("with a path, `commit` follows `begin`")

    def check_size(self, size: int) -> None:
        """Raises ResourceExhausted (UPDATE_TOO_LARGE)."""
        if size > self._max_bytes:
            raise ResourceExhausted(
                f"a push holds at most {self._max_bytes} bytes (PENSTOCK_INFERENCE_MAX_UPDATE_BYTES)",
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
                raise frame_invalid(f"a chunk holds at most {CHUNK_BYTES} bytes")
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
            raise DataLoss("the chunks are not those whose digest was sent", reason="DIGEST_MISMATCH")
        if path is not None:
            await asyncio.to_thread(_append, path, chunks)
        return digest.digest()


def under(root: Path | None, path: str, setting: str, field: str) -> Path:
    """A path that a caller named, below what the operator allows.

    Raises FailedPrecondition (PATHS_OFF) when nothing is allowed, InvalidArgument (PATH_REFUSED) for what is not there
    or elsewhere: which of the two is not told.
    """
    if root is None:
        raise FailedPrecondition(
            f"paths are not taken: the operator has not set {setting}; send the file", reason="PATHS_OFF"
        )
    base = root.resolve()
    found = (base / path).resolve()
    if not found.is_relative_to(base) or not found.exists():
        text = f"is not the path of anything under {setting}"
        raise InvalidArgument(f"{field} {text}", reason="PATH_REFUSED", violations=[Violation(field, text)])
    return found


def frame_invalid(text: str) -> InvalidArgument:
    """Frames in an order that is none."""
    return InvalidArgument(text, reason="UPDATE_FRAME_INVALID", violations=[Violation("frame", text)])


def _append(path: Path, chunks: list[bytes]) -> None:
    with path.open("ab") as file:
        file.writelines(chunks)
