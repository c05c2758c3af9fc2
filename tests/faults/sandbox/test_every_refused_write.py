"""Each write of the sandbox service's journal is refused once, by the errors of a disk in turn (R50, R146).

The scenario has whatever it writes: sandboxes made, deleted, lost and left behind by a kill; snapshots prepared, stood
upon, deleted, evicted, and taken over by the next service. The provider is a set of names. Clients ask again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from tests.support.disks.failing_disk import Disk, failing
from tests.support.disks.refused_writes import IN_TURN, KINDS, Error, in_turn, sweep
from tests.unit.sandbox.scripted_backend import World
from tests.unit.sandbox.scripted_domain import pass_turns
from tests.unit.sandbox.snapshots.test_manager import Cache, cache

from penstock_chassis import rpc_status
from penstock_chassis.errors import NotFound, Unavailable

T = TypeVar("T")


async def insisting(cache: Cache, work: Callable[[], Awaitable[T]]) -> T:
    """As a client does: what may pass is asked for again; what is to be deleted is tried again meanwhile."""
    for _ in range(6):
        try:
            return await work()
        except Exception as error:
            told = rpc_status.expected(error)
            if not isinstance(told, Unavailable) or told.reason not in ("JOURNAL_FAILED", "DELETE_PENDING"):
                raise
            await cache.domain.try_again()
    return await work()


async def play(directory: Path, disk: Disk) -> None:
    """Everything, over a kill of the service. AssertionError for what does not hold."""
    world = World()
    with failing(disk):
        disk.armed = False
        async with cache(directory, world, killed=True) as it:
            disk.armed = True
            domain = it.domain
            kept, gone = [
                await insisting(it, lambda name=name: domain.create(request=name))  # type: ignore[misc]
                for name in ("kept", "gone")
            ]
            again = await insisting(it, lambda: domain.create(request="kept"))
            assert again.id == kept.id
            await insisting(it, lambda: domain.sandboxes.delete(gone.id))
            assert gone.id not in world.sandboxes
            domain.lose(kept.id)
            await domain.try_again()
            other = await insisting(it, lambda: it.prepare("other"))
            await insisting(it, lambda: it.snapshots.delete(other))
            assert other not in it.known
            below = await insisting(it, lambda: it.prepare("below"))
            above = await insisting(it, lambda: it.prepare("above", below))
            left = await insisting(it, domain.create)
            disk.armed = False
        assert world.sandboxes == {left.id}
        disk.armed = True
        started = False
        while not started:
            try:
                async with cache(directory, world, killed=True) as it:
                    started = True
                    await it.domain.try_again()
                    await it.domain.try_again()
                    assert not world.sandboxes and not await insisting(it, it.domain.rows)
                    assert world.layers == it.known == {below, above}
                    assert it.snapshots.get(above).id == above
                    await insisting(it, lambda: it.snapshots.delete(above))
                    await insisting(it, lambda: it.snapshots.delete(below))
                    for _ in range(3):
                        await it.domain.try_again()
                    with pytest.raises(NotFound):
                        it.snapshots.get(below)
                    assert not world.layers and not await insisting(it, it.rows)
                    await pass_turns()
            except Exception as error:
                told = rpc_status.expected(error)
                if started or not isinstance(told, Unavailable):
                    raise


@pytest.mark.requirement("R49", "R50", "R146")
@KINDS
@IN_TURN
async def test_refused_write_leaves_nothing_and_loses_nothing_reported(
    tmp_path: Path, errors: tuple[Error, ...], commits: bool
) -> None:
    """Of every sandbox and layer that was to go nothing is left; what was told to be there is there."""
    swept = await sweep(play, tmp_path, in_turn(errors, commits=commits))
    assert len(swept.refused) > 8
    if not commits:
        for kind in ("INSERT INTO sandbox", "DELETE FROM sandbox", "INSERT INTO snapshot", "DELETE FROM snapshot"):
            assert any(statement.startswith(kind) for statement in swept.refused), (kind, swept.refused)
