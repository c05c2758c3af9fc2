"""Moves what an installer made into its toolbox, also from another file system.

Purpose: an installer works in the system's temporary directory, which may be on another disk than the toolboxes. Then
the move is a copy, and the step that fills the disk whose free space is watched.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

from penstock_sandbox.backends.host import copying, layers
from penstock_sandbox.domain.free_space import Watermark


async def move(source: Path, target: Path, space: Watermark | None) -> None:
    """Moves the tree ``source`` to ``target``, which must not exist; of a copy the source stays.

    Once this is cancelled nothing more is copied, and it ends when nothing more is written.

    Raises OSError, ResourceExhausted (DISK_LOW) if it is to be copied and ``space`` has no room for it.
    """
    stopped = threading.Event()
    moving = asyncio.ensure_future(asyncio.to_thread(_move, source, target, space, stopped.is_set))
    try:
        await asyncio.shield(moving)
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.wait([moving])
        if not moving.cancelled():
            moving.exception()  # the cancellation is known
        raise


def _move(source: Path, target: Path, space: Watermark | None, stopped: Callable[[], bool]) -> None:
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        if space is not None:
            space.check(layers.size(source))
        copying.copy(source, target, stopped)
