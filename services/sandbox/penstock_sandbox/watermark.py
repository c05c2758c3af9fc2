"""Room on the disk for what the service itself must write: no more sandboxes are made where it becomes scarce (R95).

Invariant: what is looked at is the filesystem of the state directory, where the journal is, for every backend.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock_chassis.errors import ResourceExhausted

_RETRY_AFTER_S = 5.0


class Watermark:
    """What must be free on the filesystem of ``place`` for a sandbox to be made: bytes, and inodes. 0 = nothing."""

    def __init__(self, place: Path, least_bytes: int, least_inodes: int) -> None:
        self._place = place
        self._least_bytes = least_bytes
        self._least_inodes = least_inodes

    def check(self) -> None:
        """Raise ResourceExhausted (DISK_LOW) below the mark."""
        there = os.statvfs(self._place)
        # What root alone may still use is not counted, whoever this service is.
        free = there.f_bavail * there.f_frsize
        if free < self._least_bytes:
            raise self._low("bytes", free, self._least_bytes)
        # Some filesystems have no fixed number of inodes, and say 0 of 0.
        if there.f_files and there.f_favail < self._least_inodes:
            raise self._low("inodes", there.f_favail, self._least_inodes)

    def _low(self, what: str, free: int, least: int) -> ResourceExhausted:
        return ResourceExhausted(
            f"the disk of the sandbox service has {free} {what} left, and no sandbox is made with less than {least}: "
            f"delete sandboxes or snapshots, or free some (min_free_{what})",
            reason="DISK_LOW",
            retry_after_s=_RETRY_AFTER_S,
            metadata={"free": str(free), "least": str(least), "of": what},
        )
