"""Snapshots beyond the cache's size go, the least recently used first, and never one that anybody needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.waiting import eventually
from tests.unit.sandbox.domain import Domain, opened, pass_turns
from tests.unit.sandbox.scripted_backend import World

from penstock_chassis.errors import NotFound, Unavailable
from penstock_sandbox.forks import Forks
from penstock_sandbox.model import Command, Sandbox, SandboxSpec, Snapshot, SnapshotSpec
from penstock_sandbox.records import SnapshotRecords
from penstock_sandbox.snapshot_key import key_of
from penstock_sandbox.snapshots import Snapshots


class Cache:
    """Room for two snapshots."""

    def __init__(self, domain: Domain, *, keep: bool = False) -> None:
        self.domain = domain
        self.snapshots = Snapshots(
            domain.sandboxes,
            SnapshotRecords(domain.journal),
            1000.0,
            2 * domain.world.layer_size,
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
    folder: Path, world: World | None = None, *, keep: bool = False, killed: bool = False
) -> AsyncIterator[Cache]:
    async with opened(folder, world) as domain:
        made = Cache(domain, keep=keep)
        await made.snapshots.open()
        yield made
        if not killed:
            await made.snapshots.aclose()
            await pass_turns()


async def test_the_least_recently_used_goes_first_and_is_unknown_then(tmp_path: Path) -> None:
    """R23: what is prepared is bounded; who needs a forgotten one prepares it again."""
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


async def test_one_that_a_sandbox_or_a_snapshot_stands_on_stays_until_that_is_gone(tmp_path: Path) -> None:
    """R52"""
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


async def test_one_that_was_just_made_can_be_forked_however_large_it_is(tmp_path: Path) -> None:
    """R26"""
    async with cache(tmp_path) as it:
        it.domain.world.layer_size = 1000
        made = await it.prepare("large")
        it.domain.now -= 60.0
        assert it.known == {made}
        assert (await it.fork(made)).spec.snapshot_id == made


async def test_a_deleted_snapshots_layer_goes_with_the_last_who_stands_on_it_and_is_asked_for_until_it_does(
    tmp_path: Path,
) -> None:
    """R50"""
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


async def test_a_child_that_is_made_keeps_its_snapshot_while_it_waits(tmp_path: Path) -> None:
    """R26, R51: neither the queue nor the backend lets it go in between."""
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


async def test_a_copy_of_a_live_sandbox_that_has_no_child_goes_with_the_call(tmp_path: Path) -> None:
    """R49"""
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


async def test_what_a_killed_service_prepared_is_found_by_the_next_and_nothing_else_stays(tmp_path: Path) -> None:
    """R50, R57: setup runs once, also across a kill -9; a layer that nobody remembers goes."""
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


async def test_a_stopped_service_leaves_snapshots_only_where_that_is_wished(tmp_path: Path) -> None:
    """R50, R70"""
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


async def test_a_snapshot_whose_layer_is_gone_is_prepared_again(tmp_path: Path) -> None:
    """R26: whether it went while the service ran or while it did not."""
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


async def test_one_that_was_evicted_is_not_back_after_a_restart(tmp_path: Path) -> None:
    """R50"""
    world = World()
    async with cache(tmp_path, world, killed=True) as it:
        names = [await it.prepare(name) for name in ("first", "second", "third")]
        assert await it.rows() == it.known == set(names[1:])
    async with cache(tmp_path, world) as it:
        assert it.known == world.layers == set(names[1:])


async def test_what_a_provider_has_is_asked_for_until_it_answers_and_nothing_is_removed_before(tmp_path: Path) -> None:
    """R50, R27"""
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


async def test_a_setup_with_a_secret_is_not_recognised_after_a_restart_and_the_secret_is_nowhere(
    tmp_path: Path,
) -> None:
    """R1, R2: what could recognise it could be used to guess it."""
    world = World()
    secret = "sk-test '$(leak)"
    spec = SnapshotSpec(SandboxSpec(), setup=(Command(("true",), secret_env={"KEY": secret}),))
    assert key_of(spec) == key_of(spec)
    async with cache(tmp_path, world, killed=True) as it:
        kept = await it.prepare("plain")
    text = b"".join(file.read_bytes() for file in tmp_path.iterdir() if file.is_file())
    assert kept.encode() in text and secret.encode() not in text
    program = "from penstock_sandbox.model import *; from penstock_sandbox.snapshot_key import key_of;"
    program += "print(key_of(SnapshotSpec(SandboxSpec(), setup=(Command(('true',), secret_env={KEYS}),))))"
    keys = {run_python(program.replace("{KEYS}", repr({"KEY": secret}))) for _ in range(2)}
    plain = {run_python(program.replace("{KEYS}", "{}")) for _ in range(2)}
    assert len(keys) == 2 and len(plain) == 1


def run_python(text: str) -> str:
    """What a program prints in an interpreter of its own."""
    return subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True).stdout
