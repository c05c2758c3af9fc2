"""A sandbox service is drained by `penstock drain NAME --wait` while rollouts run: it gets no new one, and none fails.

What the service logs is judged: when the drain began, and when each rollout had its first sandbox there. A rollout that
has one may have more, which it is graded in.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tests.hosts.fleet import ROOT, Fleet
from tests.hosts.records import CREATIONS, calls, reports
from tests.hosts.rolling import Rolling

LATEST_S: Final = 2.0
"""How long after the drain began a rollout's first sandbox may be ready, which was being made."""
NAME: Final = "n0"


@dataclass(frozen=True)
class First:
    """A rollout's first sandbox at a service, by times of Unix: of the call that made it, and of the sandbox."""

    rollout_id: str
    asked: float
    ready: float


def drained(log: str) -> tuple[float, float]:
    """When the first request to drain this service came, and when it was answered."""
    first = next(calls(log, "/Drain"))
    return first.began, first.ended


def firsts(log: str) -> Sequence[First]:
    """The first sandbox of each rollout at the service with this log."""
    creations = list(calls(log, CREATIONS))
    found: dict[str, First] = {}
    for one in reports(log, "sandbox ready"):
        if one.rollout_id not in found:
            made = (call for call in creations if call.rollout_id == one.rollout_id)
            asked = max((call.began for call in made if call.began <= one.ended), default=one.ended)
            found[one.rollout_id] = First(one.rollout_id, asked, one.ended)
    return list(found.values())


class Draining(Rolling):
    """One run."""

    def __init__(self, fleet: Fleet, count: int, work_s: float) -> None:
        super().__init__(fleet, count, work_s)
        self._output = ""

    async def _upkeep(self, began: float) -> None:
        fleet, first = self._fleet, time.monotonic()
        kept = fleet.folder / "credentials"
        env = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")} | {
            "PENSTOCK_DRIVER_ADDRESS": fleet.address("d0"),
            "PENSTOCK_TOKEN_FILE": str(kept / "operator.token"),
            "PENSTOCK_CA_FILE": str(kept / "ca.pem"),
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli.main", "drain", NAME, "--wait"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=env,
            cwd=ROOT,
        )
        output, _ = await process.communicate()
        self._output = output.decode()
        self.exits[NAME] = await process.wait()
        self.upkeep_s = time.monotonic() - first
        print(f"{time.monotonic() - began:6.1f} s  {NAME} is drained; {self._ended} ended", flush=True)

    def faults(self) -> list[str]:
        """Everything that is not as it must be."""
        found = super().faults()
        if self.exits[NAME]:
            return [*found, self._output]
        began, _ = drained(log := self._fleet.log(NAME))
        if all(one.ready > began for one in firsts(log)):
            found.append(f"{NAME} had no sandbox before the drain, so that this shows nothing")
        if all(story.created < began + LATEST_S for story in self.stories):
            found.append("no rollout began after the drain, so that this shows nothing")
        return found + [
            f"{one.rollout_id} had its first sandbox at {NAME} {one.ready - began:.1f} s after the drain began"
            for one in firsts(log)
            if one.ready > began + LATEST_S
        ]

    def lines(self) -> list[str]:
        """The report, for people."""
        report = super().lines()
        if self.exits[NAME]:
            return report
        began, _ = drained(log := self._fleet.log(NAME))
        last = max(one.ready for one in firsts(log)) - began
        when = f"{last:.2f} s after the drain began" if last > 0 else "before the drain began"
        later = [story for story in self.stories if story.created > began]
        return [
            *report,
            f"last new sandbox    at {NAME} {when}, at most {LATEST_S:g} s; {len(later)} rollouts began after it",
        ]
