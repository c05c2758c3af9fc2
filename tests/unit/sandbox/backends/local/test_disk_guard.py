"""Who is ended when the disk becomes full, and how often anybody looks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock_sandbox.backends.local.disk.guard import DiskGuard
from penstock_sandbox.backends.local.disk.usage import Limit, Use
from penstock_sandbox.domain.free_space import Free

MIB = 1 << 20


@dataclass
class Allotted:
    """What is told of it, in turn; the last again and again."""

    limit: Limit
    told: list[Use | None]
    held: Use = field(default_factory=Use)
    unmeasured: int = 0
    looks: int = 0

    async def look(self, first_pid: int) -> Use | None:
        self.looks += 1
        found = self.told.pop(0) if len(self.told) > 1 else self.told[0]
        if found is None:
            self.unmeasured += 1
        else:
            self.held, self.unmeasured = found, 0
        return found


@dataclass
class Box:
    id: str
    disk: Allotted
    world: World
    first_pid: int = 1
    lost: str = ""
    gone: bool = False

    @property
    def at_work(self) -> bool:
        return not self.lost

    def lose(self, reason: str) -> None:
        self.lost = reason

    async def destroy(self) -> None:
        assert self.lost
        self.gone = True


class World:
    """A file system with sandboxes; what is deleted comes free once somebody waits for that."""

    def __init__(self, free: int, inodes: int | None = None) -> None:
        self.free, self.inodes = free, inodes
        self.now = 0.0
        self.boxes: list[Box] = []

    def box(self, name: str, mebibytes: int, *, limit: int | None = None, inodes: int = 1) -> Box:
        made = Box(name, Allotted(Limit(limit and limit * MIB), [Use(mebibytes * MIB, inodes)]), self)
        self.boxes.append(made)
        return made

    def guard(self, floor: Use, *, watches: bool = True) -> DiskGuard:
        return DiskGuard(
            Path("/nowhere"),
            lambda: [box for box in self.boxes if not box.gone],
            floor,
            self.removed,
            watches=watches,
            free=lambda _: Free(self.free, self.inodes),
            clock=lambda: self.now,
        )

    async def removed(self) -> None:
        for box in [box for box in self.boxes if box.gone]:
            self.free += box.disk.held.bytes
            self.inodes = self.inodes and self.inodes + box.disk.held.inodes
            self.boxes.remove(box)

    def lost(self, *boxes: Box) -> list[str]:
        return [box.lost for box in boxes]


@pytest.mark.requirement("R95")
async def test_largest_sandboxes_end_until_twice_the_floor_is_free() -> None:
    """An agent's failure only where it is over its own limit; the rest goes on."""
    world = World(free=50 * MIB)
    small, large, over, larger = (
        world.box("small", 10),
        world.box("large", 80),
        world.box("over", 20, limit=15),
        world.box("larger", 90),
    )
    guard = world.guard(Use(100 * MIB), watches=False)
    await guard.look()
    assert world.lost(small, large, over, larger) == ["", "DISK_LOW", "DISK_EXHAUSTED", "DISK_LOW"]
    assert world.free == 240 * MIB
    await guard.look()
    assert world.lost(small) == [""]


@pytest.mark.requirement("R95")
async def test_inodes_are_made_room_for_likewise() -> None:
    world = World(free=1 << 40, inodes=50)
    bytes_, files = world.box("bytes", 900), world.box("files", 1, inodes=5000)
    await world.guard(Use(100 * MIB, 100)).look()
    assert world.lost(bytes_, files) == ["", "DISK_LOW"]


@pytest.mark.requirement("R95")
async def test_sandboxes_whose_end_frees_nothing_are_not_ended() -> None:
    """What else fills a disk is not the agents' doing."""
    world = World(free=0)
    tiny = world.box("tiny", 0)
    await world.guard(Use(100 * MIB)).look()
    assert world.lost(tiny) == [""]


@pytest.mark.requirement("R95")
async def test_sandbox_over_its_limit_is_ended_alone() -> None:
    world = World(free=1 << 40)
    within, over = world.box("within", 10, limit=20), world.box("over", 30, limit=20)
    guard = world.guard(Use(100 * MIB))
    await guard.look()
    assert world.lost(within, over) == ["", ""], "it was not time yet"
    world.now = 2.0
    await guard.look()
    assert world.lost(within, over) == ["", "DISK_EXHAUSTED"]


@pytest.mark.requirement("R95")
async def test_disk_growth_by_one_allowance_is_checked_at_once() -> None:
    """So what is written beyond a limit is bounded; small growth waits for its time."""
    world = World(free=1 << 40)
    box = world.box("box", 10, limit=1000)
    guard = world.guard(Use(100 * MIB))
    world.free -= 400 * MIB
    await guard.look()
    assert box.disk.looks == 0
    world.free -= 200 * MIB
    world.now = 0.5
    await guard.look()
    assert box.disk.looks == 1
    await guard.look()
    assert box.disk.looks == 1


@pytest.mark.requirement("R95")
async def test_repeatedly_unmeasurable_sandbox_counts_as_over() -> None:
    """Making more than can be counted is no way out; failing once is nothing."""
    world = World(free=1 << 40)
    hiding, unlucky = world.box("hiding", 0, limit=100), world.box("unlucky", 0, limit=100)
    hiding.disk.told = [None]
    unlucky.disk.told = [None, None, Use(1, 1), None, Use(1, 1)]
    guard = world.guard(Use(100 * MIB))
    for now in (2.0, 4.0, 6.0, 8.0):
        world.now = now
        await guard.look()
    assert world.lost(hiding, unlucky) == ["DISK_EXHAUSTED", ""]
