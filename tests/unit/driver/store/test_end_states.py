"""Kept end states: equal ones once, within their bounds, through restarts, and never a damaged one."""

from __future__ import annotations

import asyncio
import io
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.journal import Journal
from penstock_driver.app import MIGRATIONS
from penstock_driver.domain.rollout import Changes
from penstock_driver.store.end_states import BLOCK_BYTES, ROW_BYTES, Bounds, EndStates
from penstock_driver.wire.to_proto import changes_to_proto

CHANGES = Changes(3, 120, 1, 2, ("/a", "/b"))
LISTED = len(changes_to_proto(CHANGES).SerializeToString())
EACH = BLOCK_BYTES + ROW_BYTES + LISTED
"""What a small end state counts."""


@dataclass
class World:
    journal: Journal
    directory: Path
    now: float = 1000.0
    layers: dict[str, bytes] = field(default_factory=dict)

    async def open(
        self, total: int = 100 * EACH, each: int | None = None, kept_s: float = 1e6, spool: Path | None = None
    ) -> EndStates:
        """The end states as the next process finds them."""
        bounds = Bounds(total, each, kept_s)
        return await EndStates.open(self.journal, self.directory, bounds, lambda: self.now, spool)

    async def keep(
        self, states: EndStates, name: str, layer: bytes | None = None, namespace: str = "default", attempt: int = 1
    ) -> None:
        """Keep one of a recorded rollout; without a layer, one of its own."""
        self.layers[name] = secrets.token_bytes(100) if layer is None else layer
        self.now += 1
        await self.journal.execute(
            "INSERT OR IGNORE INTO rollouts (rollout_id, idx, task_id, agent, agent_sha256, labels, spec, create_time,"
            " phase, phase_times) VALUES (?, 0, '', '', '', '{}', x'', 0, 0, '{}')",
            (name,),
        )
        await states.keep(name, namespace, attempt, CHANGES, io.BytesIO(self.layers[name]))

    async def there(self, states: EndStates) -> list[str]:
        """The rollouts whose end state is read as it was written."""
        found = []
        for name, layer in self.layers.items():
            try:
                state = await states.open_state(name, 1)
            except FailedPrecondition as error:
                assert error.reason == "END_STATE_GONE" and "kept_end_state_bytes" in error.message
                continue
            with state.layer:
                assert (state.changes, state.layer.read()) == (CHANGES, layer)
            found.append(name)
        return found

    def files(self) -> int:
        """How many files there are."""
        return len(list(self.directory.iterdir()))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with await Journal.open(tmp_path / "journal.db", MIGRATIONS) as journal:
        yield World(journal, tmp_path / "end-states")


@pytest.mark.requirement("R140")
@pytest.mark.parametrize("size", [0, 100, 1 << 20])
async def test_an_end_state_is_read_as_it_was_written(world: World, size: int) -> None:
    """Also by the next process."""
    states = await world.open(total=1 << 30)
    await world.keep(states, "r1", secrets.token_bytes(size), attempt=1)
    assert await world.there(states) == ["r1"]
    again = await world.open(total=1 << 30)
    assert await world.there(again) == ["r1"] and again.kept_bytes == states.kept_bytes


@pytest.mark.requirement("R140")
async def test_equal_changes_are_one_file(world: World) -> None:
    """Until the last rollout that has them goes."""
    states = await world.open()
    for name in ("r1", "r2", "r3"):
        await world.keep(states, name, b"the same")
    assert world.files() == 1 and states.kept_bytes == EACH + 2 * (ROW_BYTES + LISTED)
    await states.forget("r1")
    await states.forget("r1")
    await states.forget("r3")
    assert await world.there(states) == ["r2"]
    await states.forget("r2")
    assert world.files() == 0 and states.kept_bytes == 0


@pytest.mark.requirement("R140")
async def test_the_least_recently_used_go_first(world: World) -> None:
    """What was read counts as used, also for the next process."""
    states = await world.open(3 * EACH)
    for name in ("r1", "r2", "r3"):
        await world.keep(states, name)
    world.now += 1
    (await states.open_state("r1", 1)).layer.close()
    again = await world.open(3 * EACH)
    await world.keep(again, "r4")
    assert await world.there(again) == ["r1", "r3", "r4"]
    assert world.files() == 3
    assert await world.there(await world.open(2 * EACH)) == ["r3", "r4"]


@pytest.mark.requirement("R140")
async def test_a_namespace_makes_room_for_itself_alone(world: World) -> None:
    states = await world.open(each=2 * EACH)
    await world.keep(states, "other", namespace="b")
    for name in ("r1", "r2", "r3"):
        await world.keep(states, name, namespace="a")
    assert await world.there(states) == ["other", "r2", "r3"]


@pytest.mark.requirement("R140")
async def test_what_nobody_used_for_its_time_is_gone(world: World) -> None:
    states = await world.open(kept_s=100.0)
    await world.keep(states, "r1")
    world.now += 90
    await world.keep(states, "r2")
    world.now += 20
    assert await world.there(states) == ["r2"] and world.files() == 1


def _damage(world: World) -> None:
    for path in world.directory.iterdir():
        path.write_bytes(path.read_bytes()[:-9])


def _exchange(world: World) -> None:
    one, other = sorted(world.directory.iterdir())
    one.write_bytes(other.read_bytes())
    other.write_bytes(b"")


def _remove(world: World) -> None:
    for path in world.directory.iterdir():
        path.unlink()


@pytest.mark.requirement("R140")
@pytest.mark.parametrize("harm", [_damage, _exchange, _remove])
async def test_no_damaged_end_state_is_ever_read(world: World, harm: Callable[[World], None]) -> None:
    states = await world.open()
    await world.keep(states, "r1")
    await world.keep(states, "r2")
    harm(world)
    assert await world.there(states) == []
    assert states.kept_bytes == 0


@pytest.mark.requirement("R140")
async def test_leftovers_of_a_killed_driver_are_removed(world: World) -> None:
    """Files without a row, rows without a file or without a rollout."""
    states = await world.open()
    for name in ("r1", "r2", "r3"):
        await world.keep(states, name)
    (world.directory / "half.new").write_bytes(b"")
    await world.journal.execute("DELETE FROM rollouts WHERE rollout_id = 'r1'")
    await world.journal.execute("DELETE FROM end_states WHERE rollout_id = 'r2'")
    again = await world.open()
    assert await world.there(again) == ["r3"] and world.files() == 1


@pytest.mark.requirement("R140")
async def test_an_attempt_replaces_what_the_one_before_left(world: World) -> None:
    """What an earlier attempt left is never graded as the last one's work."""
    states = await world.open()
    await world.keep(states, "r1", b"first")
    with pytest.raises(FailedPrecondition, match="r1"):
        await states.open_state("r1", 2)
    await world.keep(states, "r1", b"second", attempt=2)
    with (await states.open_state("r1", 2)).layer as layer:
        assert layer.read() == b"second"
    assert world.files() == 1


@pytest.mark.requirement("R140")
@pytest.mark.parametrize("total", [0, EACH - 1])
async def test_one_that_exceeds_the_bound_is_not_kept(world: World, total: int) -> None:
    states = await world.open(total)
    await world.keep(states, "r1")
    assert await world.there(states) == [] and states.kept_bytes == 0


class Endless(io.RawIOBase):
    """A layer that no packing makes smaller, and that counts how much of it was read."""

    def __init__(self, size: int) -> None:
        self.size, self.at, self.read_bytes, self.began = size, 0, 0, threading.Event()

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = self.size if whence == 2 else offset
        return self.at

    def read(self, size: int = -1) -> bytes:
        self.began.set()
        piece = secrets.token_bytes(min(size, self.size - self.at))
        self.at += len(piece)
        self.read_bytes += len(piece)
        return piece


@pytest.mark.requirement("R140")
async def test_packing_stops_where_the_bound_is_exceeded(world: World) -> None:
    """An agent may leave a gigabyte of noise: the rest is neither packed nor written."""
    states = await world.open(total=1 << 20)
    await world.keep(states, "r1", b"an earlier attempt's")
    layer = Endless(1 << 30)
    assert not await states.keep("r1", "default", 2, CHANGES, cast("BinaryIO", layer))
    assert layer.read_bytes <= 4 << 20
    assert world.files() == 0 and states.kept_bytes == 0


@pytest.mark.requirement("R140")
async def test_packing_that_is_given_up_leaves_nothing(world: World) -> None:
    """Nothing reads the layer any more when the caller closes it."""
    states = await world.open(total=1 << 40)
    layer = Endless(1 << 40)
    keeping = asyncio.ensure_future(states.keep("r1", "default", 1, CHANGES, cast("BinaryIO", layer)))
    await asyncio.to_thread(layer.began.wait, 60)
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    read = layer.read_bytes
    await world.keep(states, "r2")
    assert await world.there(states) == ["r2"] and world.files() == 1 and layer.read_bytes == read


@pytest.mark.requirement("R140")
async def test_no_room_to_unpack_loses_no_end_state(world: World, tmp_path: Path) -> None:
    """A small file may unpack to a large layer, for which the disk has no room."""
    spool = tmp_path / "later"
    states = await world.open(total=1 << 30, spool=spool)
    await world.keep(states, "r1", bytes(1 << 20))
    with pytest.raises(OSError, match="later"):
        await states.open_state("r1", 1)
    spool.mkdir()
    assert await world.there(states) == ["r1"] and list(spool.iterdir()) == []


@pytest.mark.requirement("R140")
async def test_a_file_is_removed_and_written_again_at_once(world: World) -> None:
    """Equal changes come and go while others of the same content are being kept."""
    states = await world.open()
    names = [f"r{number}" for number in range(24)]
    for name in names:
        await world.keep(states, name, b"the same")

    async def again(name: str) -> None:
        await states.forget(name)
        await states.keep(name, "default", 1, CHANGES, io.BytesIO(b"the same"))
        await states.forget(name)

    await asyncio.gather(*(again(name) for name in names[1:]), states.forget(names[0]))
    assert world.files() == 0 and states.kept_bytes == 0
    await asyncio.gather(*(world.keep(states, name, b"the same") for name in names))
    assert await world.there(states) == names and world.files() == 1


@pytest.mark.requirement("R140")
async def test_what_a_row_lists_counts(world: World) -> None:
    """An agent chooses the names that are listed: files without content would count almost nothing."""
    names = tuple("n" * 4000 for _ in range(32))
    states = await world.open(total=1 << 20)
    for number in range(12):
        await world.keep(states, f"r{number}", b"the same")
        await states.keep(f"r{number}", "default", 1, Changes(0, 0, 0, 32, names), io.BytesIO(b"the same"))
    (used,) = (await world.journal.query("SELECT SUM(length(changes)) FROM end_states"))[0]
    assert 500_000 < used < states.kept_bytes <= 1 << 20
    assert (await world.open(total=1 << 20)).kept_bytes == states.kept_bytes
