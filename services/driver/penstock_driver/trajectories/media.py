"""The files of images of prompts, which trajectories only describe. The gate has them, as long as its calls.

A client asks for a trajectory's images one after the other. So what was read for one is kept for the next: which call
was the first to have each image, and the images of the last few calls.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import Final

from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import InvalidArgument, NotFound
from penstock_driver.domain.ports import Captures
from penstock_driver.domain.records import Record
from penstock_driver.trajectories.reading import calls_and_samples
from penstock_driver.trajectories.slow_readers import SlowReaders

CHUNK_BYTES: Final = 1 << 20
_LOADINGS: Final = 4
"""How many are asked for at a time: a call's images have up to 32 MiB."""
_KEPT_ROLLOUTS: Final = 16
_KEPT_BYTES: Final = 64 << 20


class MediaFiles:
    """Reads images of ended rollouts."""

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._loading = asyncio.Semaphore(_LOADINGS)
        self._sending = SlowReaders()
        self._calls: OrderedDict[str, dict[bytes, str]] = OrderedDict()
        self._images: OrderedDict[tuple[str, str], Mapping[bytes, bytes]] = OrderedDict()

    async def file(self, record: Record, sha256: bytes) -> AsyncIterator[bytes]:
        """Yield the bytes of the image with this digest, in pieces.

        NotFound (MEDIA_UNKNOWN); FailedPrecondition (TRAJECTORY_ABSENT).
        """
        async with self._sending.of(record.namespace):
            call_id = await self._call_of(record, sha256)
            async with self._loading:
                data = (await self._of_call(record, call_id)).get(sha256, b"") if call_id else b""
            if not data:
                self._calls.pop(record.rollout_id, None)
                raise NotFound(f"{record.rollout_id} has no image {sha256.hex()}", reason="MEDIA_UNKNOWN")
            for start in range(0, len(data), CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]

    async def _call_of(self, record: Record, sha256: bytes) -> str:
        """The first call that had the image; empty if none had."""
        calls = self._calls.get(record.rollout_id, {})
        if sha256 not in calls:
            calls = {}
            async for item in calls_and_samples(self._captures, record):
                if isinstance(item, trajectory_pb2.Call):
                    for one in item.media:
                        calls.setdefault(one.sha256, item.call_id)
            self._calls[record.rollout_id] = calls
        self._calls.move_to_end(record.rollout_id)
        while len(self._calls) > _KEPT_ROLLOUTS:
            self._calls.popitem(last=False)
        return calls.get(sha256, "")

    async def _of_call(self, record: Record, call_id: str) -> Mapping[bytes, bytes]:
        """The images of a call by their digests."""
        key = (record.rollout_id, call_id)
        found = self._images.get(key)
        if found is None:
            gate = record.home.gate if record.home else ""
            try:
                held = await self._captures.media(record.rollout_id, call_id, gate=gate)
            except (NotFound, InvalidArgument):  # deleted meanwhile
                return {}
            found = self._images[key] = {one.sha256: one.data for one in held}
        self._images.move_to_end(key)
        while sum(len(data) for images in self._images.values() for data in images.values()) > _KEPT_BYTES:
            self._images.popitem(last=False)
        return found
