"""Services of a cluster that are lost with their machine, until they serve again: under their names, elsewhere."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.clusters.report import Report, members_in
from tests.hosts.network import Host

_KINDS: Final = ("sandboxes", "drivers", "gates", "engines")
"""Files of members."""


def services_on(folder: Path, host: Host, kinds: Collection[str] = _KINDS) -> dict[str, tuple[str, str]]:
    """Files of members and addresses of the services on a machine, by their names."""
    return {
        service: (kind, address)
        for kind in kinds
        for service, address in members_in(folder, kind).items()
        if address.startswith(f"{host.address}:")
    }


@dataclass
class Away:
    """Which services have not come back, and where they were."""

    folder: Path
    report: Report
    _old: dict[str, tuple[str, str]] = field(default_factory=dict)

    def lose(self, services: dict[str, tuple[str, str]]) -> None:
        """Record that services are lost now. They may serve again before the next look at the members."""
        self.report.lost(services)
        self.report.ended(services)
        self._old |= services

    def all_back(self) -> bool:
        """Look at the members: whether each lost service has another address than before. Reports each that has."""
        for name, (kind, old) in list(self._old.items()):
            address = members_in(self.folder, kind).get(name)
            if address not in (None, old):
                del self._old[name]
                self.report.served(name)
                self.report.say(f"{name} is back at {address} after {self.report.away_s(name):.1f} s, before at {old}")
        return not self._old
