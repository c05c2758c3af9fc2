"""The reaper of leases looks at the sandboxes when a lease ends, and not when one begins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

import pytest
from tests.support.waiting import eventually

from penstock_chassis.testing import in_virtual_time
from penstock_sandbox.domain.backend import Backend
from penstock_sandbox.domain.model import Sandbox, SandboxSpec, State
from penstock_sandbox.sandboxes.leases import Leases
from penstock_sandbox.sandboxes.removal import Teardowns
from penstock_sandbox.sandboxes.table import SandboxEntry, Table

COUNT = 500
FAR_S = 3600.0


class CountedTable(Table):
    scans = 0

    def __iter__(self) -> Iterator[SandboxEntry]:
        self.scans += 1
        return super().__iter__()


class NamedBackend:
    name = "local"


class Removed:
    """Teardowns that only note what they are asked to remove; the first attempt fails on request."""

    def __init__(self, *, fails: bool = False) -> None:
        self.ids: list[str] = []
        self.fails = fails

    def begin_removal(self, live: SandboxEntry) -> None:
        if self.fails:
            self.fails = False
            raise RuntimeError("no")
        self.ids.append(live.view.id)
        live.removal = cast("asyncio.Task[None]", object())


def begun(table: Table, leases: Leases, number: int, lease_s: float) -> None:
    view = Sandbox(f"s{number}", State.CREATING, SandboxSpec(), created_at=0.0, expires_at=0.0)
    live = SandboxEntry(view, cast("Backend", NamedBackend()))
    table.add(live)
    live.become(state=State.READY, expires_at=leases.begin(live, lease_s))


def leased(table: Table, removed: Removed) -> Leases:
    return Leases(table, cast("Teardowns", removed), 2 * FAR_S, None, asyncio.get_running_loop().time)


@pytest.mark.requirement("R61", "R126")
async def test_thousands_of_leases_begin_and_are_renewed_without_a_scan() -> None:
    table, removed = CountedTable(), Removed()
    leases = leased(table, removed)
    leases.open()
    for number in range(COUNT):
        begun(table, leases, number, FAR_S)
        await asyncio.sleep(0)
    for number in range(COUNT):
        await leases.renew(f"s{number}", 2 * FAR_S)
    assert table.scans <= 2 and not removed.ids
    await leases.aclose()


@pytest.mark.requirement("R50", "R61")
def test_a_lease_that_ends_before_all_others_ends_in_time() -> None:
    """Neither a later end, a renewal nor an earlier instance hides it."""

    async def reaped() -> None:
        table, removed = CountedTable(), Removed(fails=True)
        leases = leased(table, removed)
        # A sandbox of an earlier instance, which is shown as lost until the lease ends.
        view = Sandbox("left", State.LOST, SandboxSpec(), created_at=0.0, expires_at=asyncio.get_running_loop().time())
        table.add(SandboxEntry(view, cast("Backend", NamedBackend())))
        leases.open()
        for number, lease_s in enumerate((FAR_S, 0.01, FAR_S, 0.02, FAR_S)):
            begun(table, leases, number, lease_s)
            await asyncio.sleep(0)
        await leases.renew("s3", FAR_S)
        await leases.renew("s4", 0.03)
        await eventually(lambda: len(removed.ids) == 3, "all have ended, although one removal could not begin at first")
        assert sorted(removed.ids) == ["left", "s1", "s4"]
        await leases.aclose()

    in_virtual_time(reaped())  # a slow machine must not end a lease before its renewal
