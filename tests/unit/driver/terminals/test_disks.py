"""The driver's disk is full, and stays so, while terminal episodes are opened and closed."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.disks.failing_disk import FULL, IOERR, Disk, failing
from tests.support.waiting import eventually
from tests.unit.driver.terminals.test_terminals import World, world_on

from penstock_chassis.journal import journal
from penstock_driver.domain.terminal_episode import Answer
from penstock_driver.environments import cleanup


@pytest.fixture(params=[FULL, IOERR], ids=["full", "broken"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The journal's; nobody has the patience to wait for it."""
    monkeypatch.setattr(cleanup, "RELEASE_LIMIT_S", 1e6)
    monkeypatch.setattr(cleanup, "FIRST_PAUSE_S", 1e-3)
    monkeypatch.setattr(cleanup, "MOST_PAUSE_OWED_S", 1e-3)
    return Disk(request.param)


@pytest.fixture
async def world(disk: Disk, tmp_path: Path) -> AsyncIterator[World]:
    with failing(disk):
        async with world_on(tmp_path) as made:
            yield made
            disk.free()


def told(caught: pytest.ExceptionInfo[sqlite3.Error]) -> str:
    """The reason that a caller hears."""
    error = journal.refusal(caught.value)
    assert error is not None
    return error.reason


@pytest.mark.requirement("R23", "R26", "R70")
async def test_closing_on_a_full_disk_is_an_error_and_keeps_no_sandbox(world: World, disk: Disk) -> None:
    """JOURNAL_FAILED, while the disk is still full; when it takes the end, the episode has ended."""
    terminal_id = await world.open()
    disk.fill()
    with pytest.raises(sqlite3.Error) as caught:
        await world.terminals.close(terminal_id)
    assert told(caught) == "JOURNAL_FAILED"
    assert not world.sandboxes.boxes
    disk.free()
    await eventually(lambda: not world.terminals.pending_cleanups, "its end is written")
    await world.terminals.close(terminal_id)
    assert (await world.terminals.get(terminal_id)).outcome is not None


@pytest.mark.requirement("R23", "R26", "R49")
async def test_opening_on_a_filling_disk_is_an_error_and_keeps_no_sandbox(
    world: World, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JOURNAL_FAILED; the same request opens another one when the disk takes it."""
    real = world.sandboxes._called

    async def called(name: str) -> None:
        await real(name)
        if name == "fork":
            disk.fill()

    monkeypatch.setattr(world.sandboxes, "_called", called)
    with pytest.raises(sqlite3.Error) as caught:
        await world.open("q")
    assert told(caught) == "JOURNAL_FAILED"
    assert not world.sandboxes.boxes
    monkeypatch.setattr(world.sandboxes, "_called", real)
    disk.free()
    await eventually(lambda: not world.terminals.pending_cleanups, "the first one is forgotten")
    await world.terminals.close(await world.open("q"))


@pytest.mark.requirement("R23", "R26", "R78")
async def test_answer_on_a_filling_disk_is_an_error_at_once(world: World, disk: Disk) -> None:
    """Neither graded nor lost without a word."""
    terminal_id = await world.open()
    disk.fill()
    with pytest.raises(sqlite3.Error) as caught:
        await world.step(terminal_id, "a", Answer(""))
    assert told(caught) == "JOURNAL_FAILED"
    await eventually(lambda: not world.sandboxes.boxes, "the sandbox is gone")
    disk.free()
    await eventually(lambda: not world.terminals.pending_cleanups, "its end is written")
