"""The files of images of prompts, which trajectories only describe. The gate has them, as long as its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import InvalidArgument, NotFound
from penstock_driver.domain.ports import Captures
from penstock_driver.domain.records import Record
from penstock_driver.trajectories.reading import calls_and_samples

CHUNK_BYTES: Final = 1 << 20
_LOADINGS: Final = 4
"""How many are asked for and sent at a time: a call's images have up to 32 MiB."""


class MediaFiles:
    """Reads images of ended rollouts."""

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._loading = asyncio.Semaphore(_LOADINGS)

    async def file(self, record: Record, sha256: bytes) -> AsyncIterator[bytes]:
        """Yield the bytes of the image with this digest, in pieces.

        NotFound (MEDIA_UNKNOWN); FailedPrecondition (TRAJECTORY_ABSENT).
        """
        call_id = await self._call_of(record, sha256)
        async with self._loading:
            data = await self._data(record, call_id, sha256) if call_id else b""
            if not data:
                raise NotFound(f"{record.rollout_id} has no image {sha256.hex()}", reason="MEDIA_UNKNOWN")
            for start in range(0, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]

    async def _call_of(self, record: Record, sha256: bytes) -> str:
        """The first call that had the image; empty if none had."""
        found = ""
        async for item in calls_and_samples(self._captures, record):
            if not found and isinstance(item, trajectory_pb2.Call) and any(one.sha256 == sha256 for one in item.media):
                found = item.call_id
        return found

    async def _data(self, record: Record, call_id: str, sha256: bytes) -> bytes:
        gate = record.home.gate if record.home else ""
        try:
            held = await self._captures.media(record.rollout_id, call_id, gate=gate)
        except (NotFound, InvalidArgument):  # deleted meanwhile
            return b""
        return next((one.data for one in held if one.sha256 == sha256), b"")
