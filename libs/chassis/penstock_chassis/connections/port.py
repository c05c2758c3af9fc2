"""A port on which several servers of this process listen, and no other process.

Servers share a port by SO_REUSEPORT, with which each process of the same user may share it too, by default each gRPC
server: a second instance would silently get half of the connections. So the port is taken without that option first,
by a socket that listens, which the kernel lets only one of all do. Only then may the servers of this process join.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

_NEIGHBOURS: Final = ("127.255.255.254", "127.255.255.253")
"""Addresses of this machine at which nobody listens; at least one is not the server's."""
_WILDCARDS: Final = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared with, not bound


class SharedPort:
    """A port, held until `close`.

    Args:
        host: an address or a name, without brackets.
        port: 0 = any free one.

    Attributes:
        number: the port.

    Raises:
        OSError: the address is not of this machine, or another socket has the port.
    """

    def __init__(self, host: str, port: int) -> None:
        self.number = port
        self._held: list[socket.socket] = []
        self._host = host
        with ExitStack() as undo:
            undo.callback(self.close)
            for family, address in _addresses(host):
                with _chosen(family, address, self.number) as self.number:
                    self._held.append(_bound(family, address, self.number))
                    self._held[-1].listen(1)
            undo.pop_all()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Servers of this process may listen at the port inside the block, with SO_REUSEPORT.

        Afterwards nobody else may, except at a wildcard address: there, another process of the same user still can if
        it asks for SO_REUSEPORT and does not try without it first, as this class does.
        """
        for one in self._held:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield
        for one in self._held:
            # Connections are for the servers from now on; the socket stays bound.
            one.shutdown(socket.SHUT_RDWR)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        if self._host not in _WILDCARDS:
            self._forget_sharing()

    def close(self) -> None:
        """Idempotent. The servers keep the port as long as they listen."""
        for one in self._held:
            one.close()
        self._held.clear()

    def _forget_sharing(self) -> None:
        """Linux admits a socket like the last one that joined without a look at the others, which include ours.

        It does so no longer once a socket without SO_REUSEPORT has the same port of another address.
        """
        own = {one.getsockname()[0] for one in self._held}
        neighbour = next(one for one in _NEIGHBOURS if one not in own)
        # Where there is no such address (a namespace whose loopback is down), it is as at a wildcard address.
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other, suppress(OSError):
            other.bind((neighbour, self.number))


@contextmanager
def _chosen(family: socket.AddressFamily, host: str, port: int) -> Iterator[int]:
    """Yields the port, or a free one that nobody else is given meanwhile."""
    if port:
        yield port
        return
    with _bound(family, host, 0) as chooser:
        number: int = chooser.getsockname()[1]
        yield number


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections that a previous process has closed are no reason to refuse its next one.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host not in _WILDCARDS)
        one.bind((host, port))
    except BaseException:
        one.close()
        raise
    return one


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Where gRPC listens for such a host: any wildcard is both IPv6's and IPv4's where the machine has IPv6."""
    if host in _WILDCARDS:
        try:
            _bound(socket.AF_INET6, "::", 0).close()
        except OSError:
            return [(socket.AF_INET, "0.0.0.0")]  # noqa: S104 - the operator set it
        return [(socket.AF_INET6, "::")]
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))
