"""Puts the driver together: journal, clients of the other services, domain, servicers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import structlog
from pydantic import SecretStr

from penstock_chassis.auth import Role
from penstock_chassis.channel import connect
from penstock_chassis.journal import Journal
from penstock_chassis.server import Service
from penstock_driver import records, registry, rows
from penstock_driver.allowance import Most
from penstock_driver.fleet import Fleet
from penstock_driver.history import History
from penstock_driver.oversight import Oversight
from penstock_driver.preflight import Preflight
from penstock_driver.records import new_id
from penstock_driver.rpc.gate import GrpcGate
from penstock_driver.rpc.sandboxes import GrpcSandboxes
from penstock_driver.rpc.shown import encode_event, encode_outcome
from penstock_driver.rpc.terminal_forms import TerminalForms
from penstock_driver.service import registrations
from penstock_driver.settings import DriverSettings
from penstock_driver.terminals import records as terminal_records
from penstock_driver.terminals.fleet import Terminals

MIGRATIONS: Final = (
    *(registry.MIGRATION, records.MIGRATION, records.MIGRATION_ATTEMPTS, terminal_records.MIGRATION),
    rows.MIGRATION,
)
_EVERYBODY: Final = (Role.TRAINER, Role.OBSERVER)
_READING: Final = {
    "penstock.driver.v1.AgentService": ("ListAgents", "GetAgent"),
    "penstock.driver.v1.RolloutService": (
        *("GetRollout", "ListRollouts", "WatchRollout", "WatchRollouts", "WaitRollout"),
        *("GetGroup", "ListGroups", "WatchGroup", "WaitGroup"),
        *("GetTrajectory", "ExportTrajectories"),
    ),
    "penstock.driver.v1.TerminalService": ("GetTerminal",),
}
ROLES: Final = dict.fromkeys(_READING, (Role.TRAINER,)) | {
    f"{service}/{method}": _EVERYBODY for service, methods in _READING.items() for method in methods
}
"""A trainer may do everything here, an observer may read."""

_log = structlog.get_logger("penstock.driver")


@asynccontextmanager
async def build(settings: DriverSettings) -> AsyncIterator[Service]:
    """Open the driver's resources; what ran when it last died is ended and released."""
    async with AsyncExitStack() as stack:
        tls = settings.client_tls()
        sandbox_channel = await stack.enter_async_context(
            connect(settings.sandbox_address, _text(settings.sandbox_token), tls)
        )
        gate_channel = await stack.enter_async_context(
            connect(settings.interception_address, _text(settings.interception_token), tls)
        )
        journal = await stack.enter_async_context(
            await Journal.open(settings.state_dir / "driver.db", MIGRATIONS, sync=settings.journal_sync)
        )
        sandboxes, gate = GrpcSandboxes(sandbox_channel), GrpcGate(gate_channel)
        agents = await registry.AgentRegistry.open(journal)
        memory, history = records.Records(journal), History(journal, encode_event)
        stack.push_async_callback(history.aclose)
        preflight, instance_id = Preflight(sandboxes, gate), await memory.instance_id(new_id("d"))
        fleet = Fleet(
            memory,
            history,
            sandboxes,
            gate,
            instance_id=instance_id,
            encode_outcome=encode_outcome,
            max_running=settings.max_running,
            max_queued=settings.max_queued,
            agent_port=settings.agent_port,
            spool=settings.spool_dir or settings.state_dir,
            max_changes_bytes=settings.max_changes_bytes,
            most=Most(settings.max_events, settings.max_event_bytes),
        )
        terminals = Terminals(
            memory,
            terminal_records.TerminalRecords(journal),
            sandboxes,
            preflight,
            TerminalForms(),
            instance_id=instance_id,
            max_open=settings.max_terminals,
        )
        oversight = Oversight(fleet, terminals)
        stack.enter_context(oversight.told())

        async def stop() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(terminals.aclose())
                tasks.create_task(fleet.aclose())

        async def drain(_seconds: float) -> None:
            await stop()

        try:
            lost = await fleet.recover()
            if taken_up := await terminals.recover():
                _log.info("terminals of the last driver go on", count=taken_up)
            fleet.watch_calls()
            if lost:
                _log.warning("rollouts were running when the last driver died", count=lost)
            # A driver that can write nothing more ends, and the next start ends what ran: nobody waits for it in vain.
            async with asyncio.TaskGroup() as whole:
                watching = whole.create_task(history.until_broken())
                yield Service(
                    registrations=registrations(
                        fleet, rows.Rows(journal), terminals, agents, preflight, sandboxes, gate
                    ),
                    roles=ROLES,
                    drain=drain,
                    troubles=oversight.troubles,
                )
                watching.cancel()
        finally:
            await stop()


def _text(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
