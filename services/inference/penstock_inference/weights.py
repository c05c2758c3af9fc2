"""Receiving new weights: begin, chunks of one safetensors file, commit with its digest.

All or nothing: whatever goes wrong, from a broken stream to a tensor that does not fit, the engine keeps weights and
version. The version and digest in force are a success when they are pushed again, so a trainer whose answer was lost
can simply repeat its push.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from penstock_chassis.errors import (
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    Unsupported,
    Violation,
)
from penstock_inference.engines.base import Engine, PauseMode, UpdateFormat
from penstock_inference.safetensors_file import parse_safetensors

CHUNK_BYTES = 1 << 20
"""Most bytes of one chunk."""


@dataclass(frozen=True, slots=True)
class UpdateBegin:
    """What is to come."""

    policy_version: int
    update_format: UpdateFormat
    mode: PauseMode = PauseMode.KEEP
    size_bytes: int | None = None
    sha256: bytes | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class UpdateCommit:
    """The end of the file: SHA-256 of all chunks."""

    sha256: bytes


UpdateFrame = UpdateBegin | bytes | UpdateCommit


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The version in force, and the seconds that getting there took."""

    policy_version: int
    transfer_s: float = 0.0
    load_s: float = 0.0
    pause_s: float = 0.0


class WeightUpdates:
    """Takes pushes for one engine.

    Args:
        engine: where the weights go.
        max_bytes: largest file accepted.
        idle_s: a push that sends nothing for this long is given up, since it keeps others out.
    """

    def __init__(self, engine: Engine, max_bytes: int, idle_s: float = 60.0) -> None:
        self._engine = engine
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._in_force: tuple[int, bytes] | None = None

    async def receive(self, frames: AsyncIterator[UpdateFrame]) -> UpdateResult:
        """Read one push to its end and put it in force.

        Raises InvalidArgument (UPDATE_FRAME_INVALID), Unsupported (CAPABILITY_MISSING), ResourceExhausted
        (UPDATE_TOO_LARGE), DataLoss (DIGEST_MISMATCH), DeadlineExceeded (UPDATE_STALLED), and what the engine raises.
        """
        if not self._engine.info().capabilities.weight_update:
            raise Unsupported("this engine's weights cannot be replaced", reason="CAPABILITY_MISSING")
        began = time.monotonic()
        begin = await self._next(frames)
        if not isinstance(begin, UpdateBegin):
            raise _invalid("the first message must be `begin`")
        if begin.sha256 is not None and self._in_force == (begin.policy_version, begin.sha256):
            return UpdateResult(begin.policy_version)
        if begin.size_bytes is not None:
            self._check_size(begin.size_bytes)
        if self._in_force is not None and self._in_force[0] == begin.policy_version:
            # Whether it is a mere repetition shows only in the digest at the end.
            _, digest = await self._file(frames)
            if self._in_force == (begin.policy_version, digest):
                return UpdateResult(begin.policy_version, time.monotonic() - began)
        await self._engine.begin_update(begin.policy_version, begin.label, begin.update_format)
        try:
            data, digest = await self._file(frames)
            transferred = time.monotonic()
            await self._engine.push_tensors(await asyncio.to_thread(parse_safetensors, data))
            parsed = time.monotonic()
            del data
            phases = await self._engine.commit_update(begin.mode)
        except BaseException:
            await self._engine.abort_update()
            raise
        self._in_force = (begin.policy_version, digest)
        return UpdateResult(
            begin.policy_version, transferred - began, parsed - transferred + phases.load_s, phases.pause_s
        )

    async def _file(self, frames: AsyncIterator[UpdateFrame]) -> tuple[bytes, bytes]:
        """All chunks and their digest, which the commit must confirm."""
        chunks: list[bytes] = []
        size = 0
        digest = hashlib.sha256()
        while not isinstance(frame := await self._next(frames), UpdateCommit):
            if isinstance(frame, UpdateBegin):
                raise _invalid("`begin` comes once")
            if len(frame) > CHUNK_BYTES:
                raise _invalid(f"a chunk holds at most {CHUNK_BYTES} bytes")
            size += len(frame)
            self._check_size(size)
            digest.update(frame)
            chunks.append(frame)
        if frame.sha256 != digest.digest():
            raise DataLoss("the chunks are not those whose digest was sent", reason="DIGEST_MISMATCH")
        return b"".join(chunks), digest.digest()

    async def _next(self, frames: AsyncIterator[UpdateFrame]) -> UpdateFrame:
        try:
            async with asyncio.timeout(self._idle_s):
                return await anext(frames)
        except StopAsyncIteration:
            raise _invalid("the stream ended before `commit`") from None
        except TimeoutError:
            raise DeadlineExceeded(
                f"nothing came for {self._idle_s:g} s, the push was given up", reason="UPDATE_STALLED"
            ) from None

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise ResourceExhausted(
                f"a push holds at most {self._max_bytes} bytes (PENSTOCK_INFERENCE_MAX_UPDATE_BYTES)",
                reason="UPDATE_TOO_LARGE",
                metadata={"limit_bytes": str(self._max_bytes)},
            )


def _invalid(text: str) -> InvalidArgument:
    return InvalidArgument(text, reason="UPDATE_FRAME_INVALID", violations=[Violation("frame", text)])
