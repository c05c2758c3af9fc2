"""Which addresses the proxy connects to."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from penstock_sandbox.egress.addresses import Addresses, AddressRefused, CheckedResolver


@pytest.mark.requirement("R141")
@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.8.8.8",
            "0.0.0.0",
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "169.254.169.254",
        ),
        *("224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1"),
        *("168.63.129.16", "192.0.0.192", "198.18.0.1", "fec0::1", "3fff::1"),
        # Those that carry another address.
        *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001::1"),
    ],
)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert not Addresses(()).allows(ipaddress.ip_address(address))


@pytest.mark.requirement("R141")
def test_public_addresses_and_the_operators_blocks_are_allowed() -> None:
    addresses = Addresses([ipaddress.ip_network("10.1.0.0/16")])
    assert all(addresses.allows(ipaddress.ip_address(one)) for one in ("8.8.8.8", "2606:4700::1111", "10.1.2.3"))
    assert not addresses.allows(ipaddress.ip_address("10.2.2.3"))


@pytest.mark.requirement("R141")
async def test_a_name_resolves_to_allowed_addresses_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that answers with both a public and a private address (rebinding)."""
    given = ["8.8.8.8", "127.0.0.1"]

    def answer(host: str, port: int, **_: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in given]

    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *_, **__: answer(host, port))
    resolver = CheckedResolver(Addresses(()))
    assert [found["host"] for found in await resolver.resolve("a.test", 443)] == ["8.8.8.8"]
    given.pop(0)
    with pytest.raises(AddressRefused):
        await resolver.resolve("a.test", 443)
