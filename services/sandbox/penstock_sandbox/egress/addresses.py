"""Which addresses the proxy connects to: those that are public, and those that the operator names (R141).

Invariants: a name is resolved once for a connection, and the connection goes to an address of that answer that was
checked; an address that carries another one (mapped, translated, tunnelled) is never public.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

from aiohttp.abc import AbstractResolver, ResolveResult

from penstock.values.hosts import Address, Block
from penstock_sandbox.egress.errors import Refusal

_CARRIERS = tuple(
    map(ipaddress.ip_network, ("::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16"))
)

# Whatever the version of Python takes for public: special addresses of RFC 6890 and later, and clouds' own services.
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            *("0.0.0.0/8", "100.64.0.0/10", "168.63.129.16/32", "192.0.0.0/24", "198.18.0.0/15"),
            *("3fff::/20", "5f00::/16", "fec0::/10"),
        ),
    )
)


class AddressRefused(OSError):
    """No address of a host may be connected to."""


class Addresses:
    """Decides on addresses. ``private`` are the operator's blocks of addresses that are not public."""

    def __init__(self, private: Sequence[Block]) -> None:
        self._private = tuple(private)

    def allows(self, address: Address) -> bool:
        """Whether the proxy may connect to an address."""
        if any(address.version == block.version and address in block for block in self._private):
            return True
        if any(address.version == block.version and address in block for block in (*_CARRIERS, *_SPECIAL)):
            return False
        return address.is_global and not address.is_multicast and not address.is_reserved

    def check(self, address: Address) -> None:
        """Raises Refusal (ADDRESS_NOT_ALLOWED)."""
        if not self.allows(address):
            raise refused(str(address))


def refused(host: str) -> Refusal:
    """Returns the refusal of a host none of whose addresses may be connected to."""
    return Refusal(
        "ADDRESS_NOT_ALLOWED",
        f"{host} has no public address",
    )


class CheckedResolver(AbstractResolver):
    """Resolves names for the HTTP client, which connects to what this returns."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Returns the allowed addresses of a name. Raises AddressRefused if there is none."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        allowed = [
            ResolveResult(
                hostname=host,
                host=str(place[0]),
                port=port,
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, protocol, _, place in found
            # A scope (fe80::1%eth0) is of a link, which is not public.
            if "%" not in str(place[0]) and self._addresses.allows(ipaddress.ip_address(place[0]))
        ]
        if not allowed:
            raise AddressRefused(host)
        return allowed

    async def close(self) -> None:
        """Nothing is kept."""
