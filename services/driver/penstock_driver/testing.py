"""Opens a driver inside a test, over given stand-ins for the other services: wired as `app.build` wires it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import SecretStr

from penstock_chassis import times
from penstock_chassis.journal import Journal
from penstock_driver.app import MIGRATIONS, Driver, one_place, wired
from penstock_driver.domain.ports import GateClient, Sandboxes
from penstock_driver.rollouts.event_limits import DEFAULT_LIMITS, EventLimits
from penstock_driver.rollouts.manager import Capacity, RolloutManager
from penstock_driver.rollouts.preflight import Preflight
from penstock_driver.settings import DriverSettings
from penstock_driver.store.seal import Seal
from penstock_driver.terminals.manager import OpenLimits, TerminalManager
from penstock_driver.terminals.records import TerminalRecords

CATALOG: Final = Path(__file__).parent / "agents/catalog"
"""The agents that the driver brings, and their programs."""


@dataclass(frozen=True, slots=True)
class OpenDriver:
    """A driver that runs in this process. Its caller recovers and stops it."""

    parts: Driver
    journal: Journal
    sandboxes: Sandboxes
    gate: GateClient
    settings: DriverSettings

    def next_manager(self, events: EventLimits = DEFAULT_LIMITS) -> RolloutManager:
        """A manager as the next driver has it, over the same journal; `events` limits what a rollout records."""
        return RolloutManager(
            self.parts.records,
            self.parts.event_log,
            one_place(self.sandboxes, self.gate, self.settings),
            self.parts.specs,
            instance_id=self.parts.instance_id,
            capacity=Capacity(self.settings.max_running, self.settings.max_queued, events),
        )

    def next_terminals(self, clock: Callable[[], float] = times.even_time) -> TerminalManager:
        """The terminal episodes as the next driver has them, over the same journal."""
        return TerminalManager(
            self.parts.records,
            TerminalRecords(self.journal, Seal.of(self.settings.state_dir)),
            self.sandboxes,
            Preflight(self.sandboxes, self.gate),
            instance_id=self.parts.instance_id,
            home=self.parts.home,
            limits=OpenLimits(self.settings.max_terminals, self.settings.quotas()),
            clock=clock,
        )


@asynccontextmanager
async def open_driver(
    directory: Path,
    sandboxes: Sandboxes,
    gate: GateClient,
    *,
    clock: Callable[[], float] = times.even_time,
    **settings: Any,
) -> AsyncIterator[OpenDriver]:
    """Open a driver on the journal in `directory`; `settings` are those of `DriverSettings`."""
    chosen = DriverSettings(state_dir=directory, operator_token=SecretStr("t" * 32), **settings)
    async with (
        await Journal.open(directory / "driver.db", MIGRATIONS, reads_apart=True) as journal,
        wired(journal, sandboxes, gate, one_place(sandboxes, gate, chosen), chosen, clock) as parts,
    ):
        yield OpenDriver(parts, journal, sandboxes, gate, chosen)
