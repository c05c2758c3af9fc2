"""What one machine is to run: a service with its settings, certificate and token.

An order has secrets: it is sent to the machine's own process, or stands in a file that only this user can read.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import orjson

from penstock.client.transport.endpoints import ServiceName

WIDE: Final = "0.0.0.0"  # noqa: S104 - other machines call; the chassis wants TLS and a token for it
"""Services of a cluster listen on all addresses: which one others use is known to its manager only."""

GATE_NAME: Final = "gate"
"""A name in the certificate of each gate, by which sandbox services know them wherever they are."""

Members = Mapping[ServiceName, Mapping[str, str]]
"""Addresses of services by kind and name."""

MEMBER_FILES: Final[Mapping[ServiceName, str]] = MappingProxyType(
    {
        "sandbox": "sandboxes.json",
        "driver": "drivers.json",
        "interception": "gates.json",
        "inference": "engines.json",
    }
)
"""Names of the files that have the members of each kind, on each machine whose services read them."""

_READ_BY: Final[Mapping[ServiceName, Mapping[str, ServiceName]]] = MappingProxyType(
    {
        "driver": {"sandbox_members": "sandbox", "interception_members": "interception", "driver_members": "driver"},
        "interception": {"inference_members": "inference"},
        "inference": {"pool_members": "inference"},
        "sandbox": {},
    }
)


def member_settings(service: ServiceName, directory: Path, present: Members) -> dict[str, str]:
    """Returns the settings by which a service finds the others: files in `directory`, of the kinds in `present`."""
    read = _READ_BY[service]
    return {name: f"file:{directory / MEMBER_FILES[kind]}" for name, kind in read.items() if kind in present}


def bracketed(host: str) -> str:
    """Returns a host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def dump_members(members: Members) -> bytes:
    """Returns JSON, one line without its end."""
    return orjson.dumps(members)


def load_members(data: bytes) -> Members:
    """Reads what `dump_members` returned."""
    return cast(Members, orjson.loads(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One service on one machine.

    Attributes:
        name: the service's own, such as n0.
        service: its kind.
        settings: as in its settings file, but for those that only the machine knows.
        hosts: addresses of machines, by the names that the cluster manager gives them.
        members: the kinds of services in the stack, with those that are ready.
        authority, certificate, key: PEM.
        scratch: directory on a local disk of the machine, for state; removed at the end.
        log_dir: None = in `scratch`.
        start_timeout: seconds for the service to become ready.
        stop_timeout: seconds after which a service that does not stop is killed.
        max_restarts: how often a service that died is restarted within ten minutes.
    """

    name: str
    service: ServiceName
    settings: Mapping[str, Any] = field(repr=False)
    hosts: Mapping[str, str]
    members: Members
    authority: str
    certificate: str
    key: str = field(repr=False)
    scratch: str
    log_dir: str | None
    start_timeout: float
    stop_timeout: float
    max_restarts: int

    def dumps(self) -> bytes:
        """Returns JSON."""
        return orjson.dumps(asdict(self))

    @classmethod
    def loads(cls, data: bytes) -> "Order":
        """Reads what `dumps` returned."""
        return cls(**orjson.loads(data))


def scratch_root(given: Path | str | None) -> Path:
    """Returns the directory for state: the given one, or the machine's temporary directory.

    It must be on a local disk: journals are SQLite databases.
    """
    return Path(given or tempfile.gettempdir()).absolute()
