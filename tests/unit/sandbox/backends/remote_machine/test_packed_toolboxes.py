"""Toolboxes that are packed for machines elsewhere: once for all callers, and a few unused ones stay."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock_sandbox.backends.remote_machine.archive_store import Archives
from penstock_sandbox.domain.backend import MountedToolbox


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Archives]:
    archives = Archives(folder / "archives", 1 << 20)
    archives.open()
    try:
        yield archives
    finally:
        await archives.aclose()
        assert not (folder / "archives").exists()


def toolbox(folder: Path, name: str) -> list[MountedToolbox]:
    """One with one file, which has the toolbox's name."""
    source = folder / name
    source.mkdir(exist_ok=True)
    (source / "name").write_text(name)
    return [MountedToolbox(name, source, f"/opt/{name}", (), {})]


async def packed(archives: Archives, toolboxes: list[MountedToolbox]) -> Path:
    async with archives.packed(toolboxes) as found:
        return found[0].path


async def test_toolboxes_are_packed_once_and_the_least_recently_used_go(tmp_path: Path) -> None:
    async with opened(tmp_path) as archives:
        wanted = toolbox(tmp_path, "wanted")
        first, second = await asyncio.gather(*(packed(archives, wanted) for _ in range(2)))
        assert first == second
        with tarfile.open(first) as tar:
            assert "opt/wanted/name" in tar.getnames()
        async with archives.packed(wanted):
            others = [await packed(archives, toolbox(tmp_path, f"other-{number}")) for number in range(6)]
            assert [path.exists() for path in others] == [False, False, True, True, True, True]
            assert first.exists(), "it is in use"
        assert not first.exists(), "its use began before the others'"
        assert (await packed(archives, wanted)).exists()


async def test_what_is_packed_for_a_caller_who_went_is_there_for_the_next(tmp_path: Path) -> None:
    async with opened(tmp_path) as archives:
        wanted = toolbox(tmp_path, "wanted")
        gone = asyncio.create_task(packed(archives, wanted))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        path = await packed(archives, wanted)
        assert [path] == list((tmp_path / "archives").iterdir())


async def test_packing_that_failed_is_tried_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as archives:
        wanted = toolbox(tmp_path, "wanted")
        (tmp_path / "wanted" / "name").rename(tmp_path / "name")
        (tmp_path / "wanted").rmdir()
        with pytest.raises(FileNotFoundError):
            await packed(archives, wanted)
        assert (await packed(archives, toolbox(tmp_path, "wanted"))).exists()
