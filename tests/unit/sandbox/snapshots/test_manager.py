"""Snapshots beyond the cache's size go, the least recently used first, and never one that anybody needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.waiting import eventually
from tests.unit.sandbox.scripted_backend import World
from tests.unit.sandbox.scripted_domain import Domain, opened, pass_turns

from penstock_chassis.errors import NotFound, Unavailable
from penstock_sandbox.domain.model import Command, Sandbox, SandboxSpec, Snapshot, SnapshotSpec, State
from penstock_sandbox.snapshots.forks import Forks
from penstock_sandbox.snapshots.manager import Snapshots, key_of
from penstock_sandbox.store.records import SnapshotRecords


class Cache:
    """Room for two snapshots, or for `count`."""

    def __init__(self, domain: Domain, *, keep: bool = False, count: int | None = None) -> None:
        self.domain = domain
        self.snapshots = Snapshots(
            domain.sandboxes,
            SnapshotRecords(domain.journal),
            1000.0,
            2 * domain.world.layer_size if count is None else 1 << 40,
            count or 1000,
            keep=keep,
            clock=lambda: domain.now,
            pause=domain.pause,
        )
        self.forks = Forks(domain.sandboxes)

    async def prepare(self, name: str, below: str = "") -> str:
        """The id of the snapshot of this name; a minute later."""
        made = None
        spec = SnapshotSpec(SandboxSpec(env={"NAME": name}, snapshot_id=below))
        async for event in self.snapshots.prepare(spec):
            made = event
        assert isinstance(made, Snapshot)
        await pass_turns()
        self.domain.now += 61.0
        return made.id

    async def fork(self, snapshot_id: str) -> Sandbox:
        origin = self.snapshots.sandbox_spec(snapshot_id)
        async for _, child in self.forks.of_snapshot("", snapshot_id, origin, 1, SandboxSpec(lease_s=1000.0)):
            assert isinstance(child, Sandbox)
            return child
        raise AssertionError("no child")

    @property
    def known(self) -> set[str]:
        return {snapshot.id for snapshot in self.snapshots.all()}

    async def rows(self) -> set[str]:
        return {row["id"] for row in await self.domain.journal.query("SELECT id FROM snapshot")}


@asynccontextmanager
async def cache(
    folder: Path, world: World | None = None, *, keep: bool = False, killed: bool = False, count: int | None = None
) -> AsyncIterator[Cache]:
    async with opened(folder, world) as domain:
        made = Cache(domain, keep=keep, count=count)
        await made.snapshots.open()
        yield made
        if not killed:
            await made.snapshots.aclose()
            await pass_turns()


@pytest.mark.requirement("R23")
async def test_the_least_recently_used_goes_first_and_is_unknown_then(tmp_path: Path) -> None:
    """What is prepared is bounded; who needs a forgotten one prepares it again."""
    async with cache(tmp_path) as it:
        first, second = await it.prepare("first"), await it.prepare("second")
        assert await it.prepare("first") == first, "found made, and so used"
        third = await it.prepare("third")
        assert it.known == {first, third} == it.domain.world.layers
        for use in (it.snapshots.get, it.snapshots.sandbox_spec):
            with pytest.raises(NotFound) as unknown:
                use(second)
            assert unknown.value.reason == "SNAPSHOT_UNKNOWN"
        with pytest.raises(NotFound):
            await it.domain.create(snapshot=second)
        assert await it.prepare("second") not in (first, second, third)


@pytest.mark.requirement("R52")
async def test_snapshot_in_use_stays_until_its_user_is_gone(tmp_path: Path) -> None:
    async with cache(tmp_path) as it:
        below = await it.prepare("below")
        above = await it.prepare("above", below)
        # The one below was used longer ago, but the other stands on it.
        used = await it.prepare("used")
        assert it.known == {below, used} and above not in it.domain.world.layers
        child = await it.fork(used)
        # That has set it free; the next that may go is not the one that was used longest ago.
        fresh = await it.prepare("fresh")
        assert it.known == {used, fresh}
        last = await it.prepare("last")
        assert it.known == {used, last}
        await it.domain.sandboxes.delete(child.id)
        await it.prepare("one more")
        assert used not in it.known and len(it.known) == 2 == len(it.domain.world.layers)


@pytest.mark.requirement("R26")
async def test_new_snapshot_can_be_forked_whatever_its_size(tmp_path: Path) -> None:
    async with cache(tmp_path) as it:
        it.domain.world.layer_size = 1000
        made = await it.prepare("large")
        it.domain.now -= 60.0
        assert it.known == {made}
        assert (await it.fork(made)).spec.snapshot_id == made


@pytest.mark.requirement("R50")
async def test_deleted_snapshots_layer_is_removed_with_its_last_user(
    tmp_path: Path,
) -> None:
    async with cache(tmp_path) as it:
        made = await it.prepare("made")
        child = await it.fork(made)
        await it.snapshots.delete(made)
        await pass_turns()
        assert it.domain.world.layers == {made} and not it.known
        await it.domain.sandboxes.delete(child.id)
        await pass_turns()
        assert not it.domain.world.layers
        other = await it.prepare("other")
        it.domain.world.fails = True
        with pytest.raises(Unavailable) as pending:
            await it.snapshots.delete(other)
        assert pending.value.reason == "DELETE_PENDING" and it.domain.world.layers == {other}
        with pytest.raises(NotFound):
            await it.domain.create(snapshot=other)
        it.domain.world.fails = False
        await it.domain.try_again()
        assert not it.domain.world.layers


@pytest.mark.requirement("R26", "R51")
async def test_a_child_that_is_made_keeps_its_snapshot_while_it_waits(tmp_path: Path) -> None:
    """Neither the queue nor the backend lets it go in between."""
    async with cache(tmp_path) as it:
        made = await it.prepare("made")
        it.domain.backend.gate.clear()
        waiting = it.domain.begin(snapshot=made)
        await pass_turns()
        await it.snapshots.delete(made)
        assert it.domain.world.layers == {made}
        it.domain.backend.gate.set()
        child = await waiting
        await it.domain.sandboxes.delete(child.id)
        await pass_turns()
        assert not it.domain.world.layers


@pytest.mark.requirement("R49")
async def test_live_copy_without_a_child_ends_with_the_call(tmp_path: Path) -> None:
    async with cache(tmp_path) as it:
        source = await it.domain.create()
        it.domain.backend.create_fails = True
        with pytest.raises(OSError, match="makes nothing"):
            async for _ in it.forks.of_sandbox("request", source.id, 2, SandboxSpec()):
                pass
        # The other child's create may still be at the journal, which is not this loop's.
        await eventually(lambda: not it.domain.world.layers, "the copy goes")
        it.domain.backend.create_fails = False
        children = [child async for _, child in it.forks.of_sandbox("request", source.id, 2, SandboxSpec())]
        assert len({child.id for child in children if isinstance(child, Sandbox)}) == 2
        assert len(it.domain.world.layers) == 1
        for child in children:
            assert isinstance(child, Sandbox)
            await it.domain.sandboxes.delete(child.id)
        await pass_turns()
        assert not it.domain.world.layers


# After a restart -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R50", "R57")
async def test_snapshots_of_a_killed_service_are_found_and_nothing_else_stays(tmp_path: Path) -> None:
    """Setup runs once, also across a kill -9; a layer that nobody remembers goes."""
    world = World()
    async with cache(tmp_path, world, killed=True) as it:
        below = await it.prepare("below")
        above = await it.prepare("above", below)
        world.layers.add("ss-half-made")
    assert world.layers == {below, above, "ss-half-made"}
    async with cache(tmp_path, world) as it:
        assert it.known == world.layers == {below, above}
        assert await it.prepare("above", below) == above and await it.prepare("below") == below
        child = await it.fork(above)
        assert child.spec.snapshot_id == above and child.spec.env == {"NAME": "above"}
        # What it stands on is known too.
        await it.domain.sandboxes.delete(child.id)
        await it.snapshots.delete(below)
        await pass_turns()
        assert world.layers == {below, above}
        await it.snapshots.delete(above)
        await pass_turns()
        assert not world.layers and not await it.rows()


@pytest.mark.requirement("R50", "R70")
async def test_a_stopped_service_leaves_snapshots_only_where_that_is_wished(tmp_path: Path) -> None:
    world = World()
    async with cache(tmp_path, world, keep=True) as it:
        kept = await it.prepare("kept")
        deleted = await it.prepare("deleted")
        await it.snapshots.delete(deleted)
    assert world.layers == {kept}
    async with cache(tmp_path, world) as it:
        assert it.known == {kept} and await it.prepare("kept") == kept
    assert not world.layers
    async with cache(tmp_path, world) as it:
        assert not it.known and not await it.rows()


@pytest.mark.requirement("R26")
async def test_a_snapshot_whose_layer_is_gone_is_prepared_again(tmp_path: Path) -> None:
    """Whether it went while the service ran or while it did not."""
    world = World()
    async with cache(tmp_path, world, killed=True) as it:
        first = await it.prepare("one")
        world.layers.clear()
        second = await it.prepare("one")
        assert it.known == {second} == await it.rows() and second != first
    world.layers.clear()
    async with cache(tmp_path, world) as it:
        assert not it.known and not await it.rows()
        assert await it.prepare("one") not in (first, second)


@pytest.mark.requirement("R50")
async def test_evicted_snapshot_does_not_return_after_a_restart(tmp_path: Path) -> None:
    world = World()
    async with cache(tmp_path, world, killed=True) as it:
        names = [await it.prepare(name) for name in ("first", "second", "third")]
        assert await it.rows() == it.known == set(names[1:])
    async with cache(tmp_path, world) as it:
        assert it.known == world.layers == set(names[1:])


@pytest.mark.requirement("R27")
async def test_snapshots_are_bounded_in_number_too(tmp_path: Path) -> None:
    """However small they are: each may hold what there is a fixed number of, such as a user."""
    async with cache(tmp_path, count=1) as it:
        names = [await it.prepare(name) for name in ("first", "second", "third")]
        assert await it.rows() == it.known == set(names[2:])


@pytest.mark.requirement("R27", "R50")
async def test_providers_snapshots_are_requested_until_answered_before_any_removal(tmp_path: Path) -> None:
    world = World()
    async with cache(tmp_path, world, killed=True) as it:
        kept = await it.prepare("kept")
    world.fails = True
    async with cache(tmp_path, world) as it:
        assert not it.known and world.layers == {kept} == await it.rows()
        world.fails = False
        # Before it is asked again it is made again, and that one counts.
        again = await it.prepare("kept")
        await it.domain.try_again()
        await pass_turns()
        assert it.known == {again} == world.layers == await it.rows()


@pytest.mark.requirement("R1", "R2")
async def test_setup_with_a_secret_is_not_reused_after_a_restart_nor_stored(
    tmp_path: Path,
) -> None:
    """What could recognise it could be used to guess it."""
    world = World()
    secret = "sk-test '$(leak)"
    spec = SnapshotSpec(SandboxSpec(), setup=(Command(("true",), secret_env={"KEY": secret}),))
    assert key_of(spec) == key_of(spec)
    async with cache(tmp_path, world, killed=True) as it:
        kept = await it.prepare("plain")
    text = b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.is_file())
    assert kept.encode() in text and secret.encode() not in text
    program = "from penstock_sandbox.domain.model import *; from penstock_sandbox.snapshots.manager import key_of;"
    program += "print(key_of(SnapshotSpec(SandboxSpec(), setup=(Command(('true',), secret_env={KEYS}),))))"
    keys = {run_python(program.replace("{KEYS}", repr({"KEY": secret}))) for _ in range(2)}
    plain = {run_python(program.replace("{KEYS}", "{}")) for _ in range(2)}
    assert len(keys) == 2 and len(plain) == 1


def run_python(text: str) -> str:
    """What a program prints in an interpreter of its own."""
    return subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True).stdout


@pytest.mark.requirement("R49", "R50")
async def test_a_snapshot_whose_sandbox_row_stays_leaves_no_layer(tmp_path: Path) -> None:
    """The disk refuses the row's end: the caller gets the error and no snapshot, and nobody else knew of its files."""
    async with cache(tmp_path) as made:
        journal, world = made.domain.journal, made.domain.world
        await journal.execute("CREATE TRIGGER full BEFORE DELETE ON sandbox BEGIN SELECT RAISE(ABORT, 'full'); END")
        with pytest.raises(Unavailable):
            await made.prepare("a")
        await journal.execute("DROP TRIGGER full")
        await made.domain.try_again()
        assert not world.layers and not world.sandboxes
        assert await made.prepare("a") in world.layers


@pytest.mark.requirement("R25", "R50")
@pytest.mark.parametrize("of_snapshot", [True, False], ids=["snapshot", "live sandbox"])
async def test_repeated_fork_replaces_removed_children_and_keeps_the_others(tmp_path: Path, of_snapshot: bool) -> None:
    """A child whose lease has ended is never returned again; without any child a live sandbox is copied anew."""
    async with cache(tmp_path) as it:
        source = await it.prepare("a") if of_snapshot else (await it.domain.create()).id

        async def fork() -> list[str]:
            asked = SandboxSpec(lease_s=50.0)
            if of_snapshot:
                made = it.forks.of_snapshot("request", source, it.snapshots.sandbox_spec(source), 2, asked)
            else:
                made = it.forks.of_sandbox("request", source, 2, asked)
            children: dict[int, str] = {}
            async for index, child in made:
                assert isinstance(child, Sandbox) and child.state is State.READY
                children[index] = child.id
            return [children[index] for index in range(2)]

        first = await fork()
        assert await fork() == first
        if not of_snapshot:
            await it.domain.sandboxes.leases.renew(source, 1000.0)
        await it.domain.sandboxes.leases.renew(first[0], 1000.0)
        it.domain.now += 51.0
        assert it.domain.sandboxes.leases.reap() == [first[1]]
        second = await fork()
        assert second[0] == first[0] and second[1] not in first
        for child in second:
            await it.domain.sandboxes.delete(child)
        await it.domain.settle()
        third = await fork()
        assert not {*third} & {*first, *second}
        await it.domain.settle()
        assert {*third} <= it.domain.world.sandboxes and not {*first, *second} & it.domain.world.sandboxes
