"""The minimum of free space: what takes much more is refused below it, and ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock_chassis.errors import ResourceExhausted
from penstock_sandbox.domain.free_space import Free, Watermark


class Disk:
    """A disk whose free space the test sets, which is looked at when the test says so."""

    def __init__(self, free: int, inodes: int | None = None) -> None:
        self.free = Free(free, inodes)
        self._looks = asyncio.Semaphore(0)

    def fills(self, left: int) -> None:
        self.free = Free(left, None)
        self._looks.release()

    def watermark(self, least: int, inodes: int = 0) -> Watermark:
        async def pause(_: float) -> None:
            await self._looks.acquire()

        return Watermark(Path("/nowhere"), least, inodes, free=lambda _: self.free, pause=pause)


@pytest.mark.requirement("R95")
async def test_what_would_leave_less_than_the_minimum_is_refused() -> None:
    watermark = Disk(100).watermark(80)
    watermark.check(20)
    assert watermark.allows(20) and not watermark.allows(21)
    with pytest.raises(ResourceExhausted, match="100 bytes left, but needs 80 beside the 21") as low:
        watermark.check(21)
    assert low.value.reason == "DISK_LOW" and low.value.retry_after_s
    assert low.value.metadata == {"free": "100", "least": "80", "of": "bytes"}


@pytest.mark.requirement("R95")
async def test_inodes_count_where_their_number_is_fixed() -> None:
    Disk(0, None).watermark(0, 5).check()
    with pytest.raises(ResourceExhausted, match="min_free_inodes"):
        Disk(0, 4).watermark(0, 5).check()


@pytest.mark.requirement("R95")
async def test_work_ends_when_the_disk_gets_low_and_has_cleaned_up() -> None:
    disk, cleaned = Disk(100), False
    with pytest.raises(ResourceExhausted, match="79 bytes"):
        async with disk.watermark(80).kept():
            try:
                disk.fills(79)
                await asyncio.Event().wait()
            finally:
                cleaned = True
    assert cleaned


@pytest.mark.requirement("R95")
async def test_work_that_ends_in_time_has_its_own_outcome() -> None:
    disk, cause = Disk(100), OSError("its cause")
    async with disk.watermark(80).kept():
        disk.fills(80)
    with pytest.raises(ValueError, match="its own") as failed:
        async with disk.watermark(80).kept():
            raise ValueError("its own") from cause
    assert failed.value.__cause__ is cause
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), disk.watermark(80).kept():
            await asyncio.Event().wait()
