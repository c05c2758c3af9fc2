"""Which services of one kind there are: names and addresses, from a list, a DNS name or a file.

A text describes the source:

    static:n0=host-a:7701,n1=host-b:7701    a fixed list
    dns:sandboxes.example:7701              every address that the name has; its members are named by their addresses
    file:/run/penstock/sandboxes.json       a JSON object of addresses by name, which may change at any time

A launcher that writes the file replaces it by a rename, so nobody reads half of it. A source that cannot be read keeps
the members that it had.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import structlog
from pydantic import TypeAdapter, ValidationError

READ_AGAIN_S: Final = 1.0
"""How often a file and a DNS name are read again."""
MAX_MEMBERS: Final = 10_000
_MAX_FILE_BYTES: Final = 4 << 20
_NAME: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._:\[\]-]{0,252}")
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s/:@\[\]]+):([0-9]{1,5})")
_FILE: Final = TypeAdapter(dict[str, str])

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """One service.

    Attributes:
        name: unique in the source.
        address: host:port.
        certified: the name that its certificate has, where that is not the host of `address`; else empty.
    """

    name: str
    address: str
    certified: str = ""


class Source(Protocol):
    """Where members come from."""

    def read(self) -> AsyncIterator[Mapping[str, Member]]:
        """Yields the members by name, and again after each change. Never ends."""


@dataclass(frozen=True, slots=True)
class Static:
    """A fixed list."""

    members: tuple[Member, ...]

    async def read(self) -> AsyncIterator[Mapping[str, Member]]:
        """See Source."""
        yield {member.name: member for member in self.members}
        await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class Dns:
    """Every address of a host name."""

    host: str
    port: int
    every_s: float = READ_AGAIN_S

    async def read(self) -> AsyncIterator[Mapping[str, Member]]:
        """See Source. A name that is unknown at first has no members."""
        known: Mapping[str, Member] | None = None
        while True:
            try:
                found: Mapping[str, Member] | None = await self._resolved()
            except (OSError, ValueError) as error:  # ValueError, and UnicodeError: it can be no name
                _log.warning("a name of services cannot be resolved", host=self.host, error=str(error))
                found = {} if known is None else None
            if found is not None and found != known:
                yield found
                known = found
            await asyncio.sleep(self.every_s)

    async def _resolved(self) -> Mapping[str, Member]:
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        hosts = sorted({str(info[4][0]) for info in infos})
        addresses = [f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}" for host in hosts]
        return {address: Member(address, address, self.host) for address in addresses[:MAX_MEMBERS]}


@dataclass(frozen=True, slots=True)
class File:
    """A JSON object of addresses by name."""

    path: Path
    every_s: float = READ_AGAIN_S

    async def read(self) -> AsyncIterator[Mapping[str, Member]]:
        """See Source. A file that is absent at first has no members."""
        known: Mapping[str, Member] | None = None
        stamp: tuple[int, int, int] | None = None
        while True:
            found: Mapping[str, Member] | None = None
            try:
                status = await asyncio.to_thread(self.path.stat)
                now = (status.st_mtime_ns, status.st_ino, status.st_size)
                if now != stamp:
                    found = await asyncio.to_thread(self._members)
                    stamp = now
            except (OSError, ValueError) as error:
                _log.warning("the list of services cannot be read", path=str(self.path), error=str(error))
                found = {} if known is None else None
            if found is not None and found != known:
                yield found
                known = found
            await asyncio.sleep(self.every_s)

    def _members(self) -> Mapping[str, Member]:
        with self.path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        try:
            listed = _FILE.validate_json(content)
        except ValidationError:
            raise ValueError('it is not a JSON object of addresses by name: {"n0": "host:7701"}') from None
        return {member.name: member for member in _checked(listed.items())}


def parse(text: str) -> Source:
    """Returns the source that a setting describes.

    Raises:
        ValueError: states what is wrong.
    """
    kind, _, rest = text.partition(":")
    parser: Callable[[str], Source] | None = {"static": _static, "dns": _dns, "file": _file}.get(kind)
    if parser is None:
        raise ValueError("must be static:NAME=HOST:PORT,..., dns:HOST:PORT or file:/PATH")
    return parser(rest)


def _static(text: str) -> Source:
    pairs = [item.strip().partition("=") for item in text.split(",")]
    if wrong := [f"{name}{equals}{address}" for name, equals, address in pairs if not equals]:
        raise ValueError(f"{wrong[0]!r} is not NAME=HOST:PORT")
    members = _checked((name, address) for name, _, address in pairs)
    if len({member.name for member in members}) != len(members):
        raise ValueError("two members have the same name")
    return Static(members)


def _dns(text: str) -> Source:
    member = _checked([("dns", text)])[0]
    host, _, port = member.address.rpartition(":")
    return Dns(host, int(port))


def _file(text: str) -> Source:
    path = Path(text)
    if not path.is_absolute():
        raise ValueError("the path of a file must be absolute")
    return File(path)


def _checked(items: Iterable[tuple[str, str]]) -> tuple[Member, ...]:
    members = []
    for name, address in items:
        match = _ADDRESS.fullmatch(address)
        if not _NAME.fullmatch(name) or match is None or not 0 < int(match[2]) < 65_536:
            raise ValueError(f"{name!r}: {address!r} is not a name with an address HOST:PORT")
        members.append(Member(name, address))
        if len(members) > MAX_MEMBERS:
            raise ValueError(f"more than {MAX_MEMBERS} members")
    return tuple(members)
