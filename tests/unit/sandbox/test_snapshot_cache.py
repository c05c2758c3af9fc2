"""Snapshots beyond the cache's size go, the least recently used first, and never one that anybody needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.waiting import eventually
from tests.unit.sandbox.domain import Domain, opened, pass_turns

from penstock_chassis.errors import NotFound, Unavailable
from penstock_sandbox.forks import Forks
from penstock_sandbox.model import Sandbox, SandboxSpec, Snapshot, SnapshotSpec
from penstock_sandbox.snapshots import Snapshots


class Cache:
    """Room for two snapshots."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.snapshots = Snapshots(domain.sandboxes, 1000.0, 2 * domain.world.layer_size, clock=lambda: domain.now)
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


@asynccontextmanager
async def cache(folder: Path) -> AsyncIterator[Cache]:
    async with opened(folder) as domain:
        made = Cache(domain)
        yield made
        await made.snapshots.aclose()


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
