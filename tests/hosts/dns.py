"""A name server on the hub: one name, which has the addresses that a list of members has at that moment."""

from __future__ import annotations

import json
import socket
import socketserver
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.hosts.network import CLONE_NEWNS, HUB_ADDRESS, unshare

NAME: Final = "sandboxes.hosts.test"
"""The name that it knows."""
_PORT: Final = 53
_ADDRESS, _INTERNET = 1, 1
_ANSWER: Final = 0x8580
"""An authoritative answer of a server that resolves names."""
_UNKNOWN: Final = 3
_THE_NAME: Final = 0xC00C
"""The name of the question, which begins at byte 12."""
_HEADER: Final = "!6H"


@contextmanager
def served(members: Path, folder: Path) -> Iterator[None]:
    """While the context is open, this process and its children ask the hub for names.

    The caller is in a hub, and has no other thread. `members` is a JSON object of addresses by name, read at each
    question.
    """
    unshare(CLONE_NEWNS, "a mount namespace")
    settings = folder / "resolv.conf"
    settings.write_text(f"nameserver {HUB_ADDRESS}\n")
    for command in (["--make-rprivate", "/"], ["--bind", str(settings), "/etc/resolv.conf"]):
        subprocess.run(["mount", *command], check=True)

    class Questions(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            query, connection = self.request
            listed: dict[str, str] = json.loads(members.read_text())
            hosts = [address.rpartition(":")[0] for address in listed.values()]
            connection.sendto(answer(query, hosts), self.client_address)

    with socketserver.UDPServer((HUB_ADDRESS, _PORT), Questions) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def answer(query: bytes, hosts: Sequence[str]) -> bytes:
    """The answer to a query of one question (RFC 1035): these IPv4 addresses of NAME, and no other name or record."""
    number: Any = struct.unpack_from(_HEADER, query)[0]
    end = query.index(0, 12) + 5
    labels = b"".join(bytes([len(label)]) + label.encode() for label in NAME.split("."))
    is_known = query[12 : end - 5].lower() == labels
    kind = struct.unpack_from("!H", query, end - 4)[0]
    records = [
        struct.pack("!HHHIH", _THE_NAME, _ADDRESS, _INTERNET, 0, 4) + socket.inet_aton(host)
        for host in hosts
        if is_known and kind == _ADDRESS
    ]
    flags = _ANSWER | (0 if is_known else _UNKNOWN)
    return struct.pack(_HEADER, number, flags, 1, len(records), 0, 0) + query[12:end] + b"".join(records)
