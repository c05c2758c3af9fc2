"""A fleet that grows while rollouts run: sandbox services appear in the drivers' list, or under its DNS name.

One is as it should be. One says that it has the name of another, and one has a certificate of a stranger: those two get
no work, whatever the list says.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from tests.hosts import dns
from tests.hosts.fleet import PORTS, STRANGERS, Fleet
from tests.hosts.following import Follower

from penstock.client import Penstock, connect

NEWCOMER: Final = "n7"
LIAR: Final = "n8"
STRANGER: Final = "n9"
LATER: Final = (NEWCOMER, LIAR, STRANGER)
_ENVIRONMENTS: Final = 16
"""Enough that some of them belong to the newcomer."""
_LOOK_S: Final = 0.05
_LIMIT_S: Final = 120.0


def listing(folder: Path) -> Path:
    """The list of sandbox services, from which the name server answers too."""
    return folder / "sandboxes.json"


def settings(folder: Path, members: str) -> Mapping[str, Mapping[str, Any]]:
    """What the three newcomers say of themselves, and where drivers find the `members`: in a `file`, or by `dns`."""
    certificate = {
        "tls_cert": str(folder / STRANGERS / "sandbox.pem"),
        "tls_key": str(folder / STRANGERS / "sandbox.key"),
    }
    sources = {"file": f"file:{listing(folder)}", "dns": f"dns:{dns.NAME}:{PORTS['sandbox']}"}
    return {
        "driver": {"sandbox_members": sources[members]},
        LIAR: {"name": "n0"},
        STRANGER: certificate,
    }


def write_list(fleet: Fleet, more: Sequence[str] = ()) -> None:
    """Replace the drivers' list, as a launcher does."""
    listed = {name: fleet.address(name) for name in (*fleet.size.names("sandbox"), *more)}
    partial = fleet.folder / "sandboxes.new"
    partial.write_text(json.dumps(listed))
    partial.replace(listing(fleet.folder))


class Growth:
    """One run: rollouts all the time, and the list grows in the middle."""

    def __init__(self, fleet: Fleet, count: int, work_s: float) -> None:
        self.fleet = fleet
        self.first_s: float | None = None
        """From the new list to the first sandbox at the newcomer."""
        self.failures: list[str] = []
        self.at: Counter[str] = Counter()
        """Rollouts that ended at each sandbox service, by the name that it gave."""
        self._count = count
        self._work_s = work_s
        self._awaits = True
        """Whether rollouts beyond `count` start, since the newcomer has no sandbox yet."""

    async def go(self, at_once: int) -> None:
        """Run it."""
        fleet = self.fleet
        for name in LATER:
            fleet.spawn(name)
        for name in (NEWCOMER, LIAR):
            await fleet.serving(name)
        numbers, listed = itertools.count(), asyncio.Event()
        async with AsyncExitStack() as stack:
            drivers = [
                await stack.enter_async_context(connect(fleet.endpoints(driver=name)))
                for name in fleet.size.names("driver")
            ]

            async def work() -> None:
                while (number := next(numbers)) < self._count or self._awaits:
                    await self._one(drivers, number)
                    if sum(self.at.values()) >= self._count // 3:
                        listed.set()

            async with asyncio.TaskGroup() as tasks:
                for _ in range(at_once):
                    tasks.create_task(work())
                await listed.wait()
                write_list(fleet, LATER)
                await self._first(time.monotonic())

    async def _one(self, drivers: Sequence[Penstock], number: int) -> None:
        index = number % len(drivers)
        follower = Follower(drivers[index], f"d{index}", self._work_s, 1, environments=_ENVIRONMENTS)
        story = follower.begin(number, 0)
        await follower.follow(story)
        if story.reward != 1.0:
            self.failures.append(f"{story.rollout_id}: {story.reason}, reward {story.reward}")
        self.at[story.attempts[-1].node] += 1

    async def _first(self, since: float) -> None:
        """Look for the newcomer's first sandbox. New rollouts start until it is there, or is late."""
        try:
            while time.monotonic() < since + _LIMIT_S:
                if served(self.fleet, NEWCOMER):
                    self.first_s = time.monotonic() - since
                    return
                await asyncio.sleep(_LOOK_S)
        finally:
            self._awaits = False

    def faults(self, within_s: float) -> list[str]:
        """Everything that is not as it must be."""
        found = list(self.failures)
        if self.first_s is None or self.first_s > within_s:
            found.append(f"the first sandbox at {NEWCOMER} came after {self.first_s} s, at most {within_s:g} s")
        if not self.at[NEWCOMER]:
            found.append(f"no rollout ended at {NEWCOMER}")
        for name in (LIAR, STRANGER):
            if served(self.fleet, name):
                found.append(f"{name} was given work")
            if not refused(self.fleet, name):
                found.append(f"no driver says why {name} is not used")
        return found

    def lines(self) -> list[str]:
        """The report, for people."""
        first = "never" if self.first_s is None else f"after {self.first_s:.1f} s"
        return [
            f"first sandbox       at {NEWCOMER} {first}",
            f"rollouts            {sum(self.at.values())}, by sandbox service {dict(sorted(self.at.items()))}",
            f"failures            {len(self.failures)}",
            f"given no work       {[name for name in (LIAR, STRANGER) if not served(self.fleet, name)]}",
        ]


def served(fleet: Fleet, node: str) -> bool:
    """Whether a node has made a sandbox."""
    return "sandbox ready" in fleet.log(node)


def refused(fleet: Fleet, node: str) -> bool:
    """Whether a driver has logged that this member is not used, or cannot be reached."""
    logs = [fleet.log(name) for name in fleet.size.names("driver")]
    names = (f'"{node}"', f'"{fleet.address(node)}"')  # a member of a DNS name is called by its address
    lines = [line for log in logs for line in log.splitlines() if any(name in line for name in names)]
    return any("a member is not used" in line or "a service is lost" in line for line in lines)
