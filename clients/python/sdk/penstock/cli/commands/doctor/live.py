"""`penstock doctor --live`: problems of running services, with advice.

Each service reports its own diagnostics (`penstock.ops.v1`); problems that no service can see by itself are found here:
one that does not answer, clocks and versions that differ, sandboxes of rollouts that are over. Exit code 0 when nothing
is grave, 1 when something is. It changes nothing.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from rich.markup import escape
from rich.table import Table

from penstock.cli.connections.service_selection import running
from penstock.cli.terminal.console import FAILED, OK, clean, emit, out
from penstock.client import Penstock, PenstockError, connect
from penstock.client.errors import Unsupported
from penstock.client.operations import ServiceStatus, Trouble
from penstock.client.transport.endpoints import DEFAULT_PORTS, SERVICES, Endpoints, ServiceName

SKEW_S: Final = 2.0
"""Normal clock difference in seconds; leases and tokens depend on clocks."""
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The services that answered, and the problems, the gravest first."""

    services: Sequence[ServiceStatus]
    troubles: Sequence[Trouble]

    @property
    def healthy(self) -> bool:
        """Whether nothing is grave."""
        return not any(trouble.grave for trouble in self.troubles)


async def live(as_json: bool, patience: float, min_free_bytes: int | None, state_dir: Path | None) -> int:
    """Examines the running services as a client finds them; returns the exit code."""
    diagnosis = await examine(running(state_dir), patience, min_free_bytes)
    if as_json:
        report = {
            "healthy": diagnosis.healthy,
            "services": [asdict(status) for status in diagnosis.services],
            "troubles": [asdict(trouble) for trouble in diagnosis.troubles],
        }
        emit(report)
    else:
        _show(diagnosis)
    return OK if diagnosis.healthy else FAILED


async def examine(endpoints: Endpoints, patience: float = 60.0, min_free_bytes: int | None = None) -> Diagnosis:
    """Examines every service of `endpoints`."""
    async with connect(endpoints) as ps:
        names = [name for name in SERVICES if endpoints.address(name)]
        asked = await asyncio.gather(*(_ask(ps, name, patience, min_free_bytes) for name in names))
        statuses = [status for status in asked if isinstance(status, ServiceStatus)]
        troubles = _without_repeats(endpoints, [trouble for trouble in asked if isinstance(trouble, Trouble)])
        troubles += [trouble for status in statuses for trouble in status.troubles]
        troubles += [*_clocks(statuses), *_versions(statuses)]
        if {"sandbox", "driver"} <= {status.service for status in statuses}:
            troubles += await _left_sandboxes(ps, patience)
    return Diagnosis(statuses, sorted(troubles, key=lambda trouble: not trouble.grave))


async def _ask(
    ps: Penstock, name: ServiceName, patience: float, min_free_bytes: int | None
) -> ServiceStatus | Trouble | None:
    try:
        return await ps.operations.status(name, patience=patience, min_free_bytes=min_free_bytes)
    except Unsupported:
        return Trouble(
            service=name,
            reason="SERVICE_OLD",
            message=f"the {name} service at {ps.endpoints.address(name)} is older than this command and does not "
            "report its status",
            advice=f"upgrade it: pip install --upgrade penstock-{name}, and restart it",
            grave=False,
        )
    except PenstockError as error:
        address = ps.endpoints.address(name)
        absent = error.reason.startswith("TRANSPORT_")
        if absent and name == "inference" and address == f"127.0.0.1:{DEFAULT_PORTS['inference']}":
            return None  # a trainer may have an engine of its own
        return Trouble(
            service=name,
            reason="SERVICE_UNREACHABLE" if absent else error.reason,
            message=f"the {name} service at {address} does not answer: {error}" if absent else str(error),
            advice=f"start it, or correct its address (from {ps.endpoints.origin}); its log has the reason why it ended"
            if absent
            else "a service refuses tokens of earlier starts: the message names the origin of this token",
        )


def _without_repeats(endpoints: Endpoints, troubles: Sequence[Trouble]) -> list[Trouble]:
    """Merges diagnostics: one token that several services refuse is one problem."""
    refused = [trouble for trouble in troubles if trouble.reason.startswith("CREDENTIAL_")]
    if len(refused) < 2:
        return list(troubles)
    names = ", ".join(trouble.service for trouble in refused)
    message = f"refused by the services {names}. {endpoints.token_advice}"
    together = replace(refused[0], service="all", message=message)
    return [together, *(trouble for trouble in troubles if trouble not in refused)]


def _clocks(statuses: Sequence[ServiceStatus]) -> list[Trouble]:
    return [
        Trouble(
            service=status.service,
            reason="CLOCK_SKEW",
            message=f"the clock of the {status.service} service is {abs(status.clock_skew):.1f} s"
            f" {'ahead of' if status.clock_skew > 0 else 'behind'} this machine's",
            advice="synchronise both machines with a time server (chronyc tracking, timedatectl): leases, tokens "
            "and certificates depend on clocks",
            grave=abs(status.clock_skew) > 30 * SKEW_S,
        )
        for status in statuses
        if abs(status.clock_skew) - status.clock_error > SKEW_S
    ]


def _versions(statuses: Sequence[ServiceStatus]) -> list[Trouble]:
    versions = {status.service: status.version for status in statuses if status.version}
    if len(set(versions.values())) < 2:
        return []
    listed = ", ".join(f"{service} {version}" for service, version in sorted(versions.items()))
    return [
        Trouble(
            service="all",
            reason="VERSIONS_DIFFER",
            message=f"the services have different versions: {listed}",
            advice="upgrade all of them together: a newer one may use calls that an older one lacks",
            grave=False,
        )
    ]


async def _left_sandboxes(ps: Penstock, patience: float) -> list[Trouble]:
    try:
        left = await ps.operations.left_sandboxes(patience=patience)
    except PenstockError as error:
        return [
            Trouble(
                service="driver",
                reason=error.reason,
                message=f"the owners of leftover sandboxes could not be determined: {error}",
                advice="see the message",
                grave=False,
            )
        ]
    troubles = []
    for known, reason, whose, advice in (
        (
            True,
            "SANDBOXES_LEFT",
            "of rollouts or terminals that have ended",
            "the driver deletes them as soon as it can",
        ),
        (
            False,
            "SANDBOXES_STRANGE",
            "of rollouts or terminals that are unknown to the drivers of this connection",
            "another driver may have made them",
        ),
    ):
        ids = tuple(item.sandbox_id for item in left if item.known is known)
        if ids:
            troubles.append(
                Trouble(
                    service="sandbox",
                    reason=reason,
                    message=f"{len(ids)} sandbox{'es' * (len(ids) > 1)} {whose} still run",
                    advice=f"{advice}; to do it by hand, call DeleteSandbox, or wait for the end of their lease",
                    grave=known,
                    subjects=ids[:20],
                )
            )
    return troubles


def _show(diagnosis: Diagnosis) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("mark", "service"):
        table.add_column(column, no_wrap=True)
    table.add_column("facts", overflow="fold")
    for status in diagnosis.services:
        facts = (
            f"{status.version or '?'} at {status.address}, up {_span(status.up)},"
            f" loop lag {status.loop_lag * 1e3:.0f} ms, {status.resident_bytes / 1e6:.0f} MB,"
            f" {status.open_files} files open"
        )
        table.add_row("[green]answers[/]", status.service, escape(clean(facts)))
    for trouble in diagnosis.troubles:
        mark = "[red]trouble[/]" if trouble.grave else "[yellow]warning[/]"
        about = ""
        if trouble.subjects:
            more = f" and {len(trouble.subjects) - _SHOWN} more" if len(trouble.subjects) > _SHOWN else ""
            about = f"\n[dim]{escape(clean(', '.join(trouble.subjects[:_SHOWN])))}{more}[/]"
        line = f"{escape(clean(trouble.message))} [dim]({escape(trouble.reason)})[/]{about}"
        table.add_row(mark, escape(trouble.service), f"{line}\n→ {escape(clean(trouble.advice))}")
    out.print(table)
    if not diagnosis.troubles:
        out.print("[green]All services are healthy.[/]")
    elif diagnosis.healthy:
        out.print("[green]No service is stuck.[/]")
    else:
        out.print("[red]Something is stuck or lost.[/]")


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
