"""Moves of an installer's result to another disk."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_sandbox.backends.host import copying
from penstock_sandbox.toolboxes import moving


@pytest.mark.requirement("R23", "R95")
async def test_a_cancelled_move_copies_no_further_and_ends_when_nothing_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, begun, ends = asyncio.get_running_loop(), asyncio.Event(), []
    copy = copying.copy

    def across(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    def copied(source: Path, target: Path, stopped: Callable[[], bool]) -> None:
        loop.call_soon_threadsafe(begun.set)
        while not stopped():
            os.sched_yield()
        try:
            copy(source, target, stopped)
        except OSError as error:
            ends.append(error.errno)
            raise

    monkeypatch.setattr(os, "rename", across)
    monkeypatch.setattr(copying, "copy", copied)
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(b"x")
    work = asyncio.create_task(moving.move(source, tmp_path / "target", None))
    async with asyncio.timeout(60):
        await begun.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert ends == [errno.ECANCELED] and not (tmp_path / "target" / "file").exists()
