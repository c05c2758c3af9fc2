"""A port that several servers of one process share, and nobody else's."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.support.endpoints.loopback import unused_port

from penstock_chassis.connections.port import SharedPort

PATIENCE_S = 20.0


def listening(host: str, port: int, *, shares: bool = True) -> socket.socket:
    """As gRPC does: with SO_REUSEADDR, and by default SO_REUSEPORT. Raises OSError."""
    one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
        one.bind((host, port))
        one.listen()
    except BaseException:
        one.close()
        raise
    return one


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def shared(stack: ExitStack, host: str, servers: int, number: int = 0) -> tuple[SharedPort, list[socket.socket]]:
    """A port on which so many servers listen."""
    port = SharedPort(host, number)
    stack.callback(port.close)
    with port.joined():
        found = [stack.enter_context(listening(LISTENS.get(host, host), port.number)) for _ in range(servers)]
    return port, found


LISTENS = {"localhost": "127.0.0.1", "0.0.0.0": "::"}
"""What gRPC makes of a host."""
REACHED = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}
HOSTS = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::")


@pytest.mark.parametrize("host", HOSTS)
def test_servers_of_the_process_join_and_get_all_connections(stack: ExitStack, host: str) -> None:
    port, servers = shared(stack, host, 3)
    reached = set()
    for _ in range(30):
        with socket.create_connection((REACHED.get(host, host), port.number), timeout=PATIENCE_S):
            ready, _, _ = select.select(servers, [], [], PATIENCE_S)
            assert len(ready) == 1
            reached.add(ready[0])
            ready[0].accept()[0].close()
    assert len(reached) > 1


@pytest.mark.parametrize("host", HOSTS)
def test_a_second_owner_is_refused_before_and_after_servers_join(stack: ExitStack, host: str) -> None:
    port = SharedPort(host, 0)
    stack.callback(port.close)
    with pytest.raises(OSError, match="in use"):
        SharedPort(host, port.number)
    with port.joined():
        with pytest.raises(OSError, match="in use"):
            SharedPort(host, port.number)
        stack.enter_context(listening(LISTENS.get(host, host), port.number))
        with pytest.raises(OSError, match="in use"):
            SharedPort(host, port.number)
    with pytest.raises(OSError, match="in use"):
        SharedPort(host, port.number)


@pytest.mark.parametrize("host", HOSTS)
def test_a_stranger_that_does_not_share_is_refused(stack: ExitStack, host: str) -> None:
    port, _ = shared(stack, host, 2)
    for address in (REACHED.get(host, host), "::"):
        with pytest.raises(OSError, match="in use"):
            listening(address, port.number, shares=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_stranger_that_shares_is_refused(stack: ExitStack, host: str) -> None:
    """As a gRPC server of another program, which asks for SO_REUSEPORT by default."""
    port, _ = shared(stack, host, 2)
    for address in (LISTENS.get(host, host), "::"):
        with pytest.raises(OSError, match="in use"):
            listening(address, port.number)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("shares", [False, True])
def test_a_port_that_another_listens_at_is_refused(stack: ExitStack, host: str, shares: bool) -> None:
    other = stack.enter_context(listening(REACHED.get(host, host), 0, shares=shares))
    with pytest.raises(OSError, match="in use"):
        SharedPort(host, other.getsockname()[1])


def test_closed_connections_of_a_previous_process_do_not_hold_the_port(stack: ExitStack) -> None:
    port, servers = shared(stack, "127.0.0.1", 1, unused_port())
    client = stack.enter_context(socket.create_connection(("127.0.0.1", port.number), timeout=PATIENCE_S))
    accepted = servers[0].accept()[0]
    accepted.close()  # the first to close waits for stray packets for a minute
    assert client.recv(1) == b""
    client.close()
    servers[0].close()
    port.close()
    SharedPort("127.0.0.1", port.number).close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign"):
        SharedPort("192.0.2.1", 0)
