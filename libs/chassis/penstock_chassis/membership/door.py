"""One port in front of all replicas of a service: `python -m penstock_chassis.membership.door 7701=sandbox:7701 ...`

For an engine on which only one replica can have a port of the host. Each connection goes to one of the addresses that
the name has then, and nothing in it is read: TLS is between the client and the service.
"""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Final

from penstock_chassis.sockets import end_if_cut

MAX_CONNECTIONS: Final = 4096
CONNECT_S: Final = 5.0
"""Limit of an attempt to connect to one replica."""
_CHUNK: Final = 64 * 1024


@dataclass
class Door:
    """Forwards the connections of one port to a service by name."""

    host: str
    port: int
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    async def enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until both sides have ended. It is closed at once if no replica can be reached."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            if len(self._open) > MAX_CONNECTIONS or (inner := await self._connected()) is None:
                return
            try:
                for each in (writer, inner[1]):
                    end_if_cut(each.transport)
                async with asyncio.TaskGroup() as both:
                    both.create_task(_copy(reader, inner[1]))
                    both.create_task(_copy(inner[0], writer))
            except* OSError:  # one side has gone: both are closed
                pass
            finally:
                inner[1].transport.abort()
        finally:
            self._open.discard(task)
            writer.close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connects to one replica by chance, or to the next."""
        loop = asyncio.get_running_loop()
        try:
            infos = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError:
            return None
        addresses = sorted({str(info[4][0]) for info in infos})
        for address in random.sample(addresses, len(addresses)):
            with suppress(OSError):  # TimeoutError too
                async with asyncio.timeout(CONNECT_S):
                    return await asyncio.open_connection(address, self.port, limit=_CHUNK)
        return None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    writer.write_eof()


async def serve(doors: Sequence[tuple[int, str]], host: str = "0.0.0.0") -> None:  # noqa: S104 - its container's
    """Forwards each port to its HOST:PORT until SIGTERM or SIGINT. Raises OSError: a port is in use."""
    stop = asyncio.Event()
    for wanted in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(wanted, stop.set)
    async with AsyncExitStack() as stack:
        for port, target in doors:
            name, _, number = target.rpartition(":")
            door = Door(name, int(number))
            await stack.enter_async_context(await asyncio.start_server(door.enter, host, port, limit=_CHUNK))
        print("ready", flush=True)  # noqa: T201 - for the program that started it
        await stop.wait()


def main(argv: Sequence[str]) -> None:
    """Run the command. SystemExit (2): an argument is not PORT=HOST:PORT."""
    doors = []
    for given in argv:
        port, _, target = given.partition("=")
        if not (port.isdigit() and target.rpartition(":")[0] and target.rpartition(":")[2].isdigit()):
            sys.stderr.write(f"{given!r} is not PORT=HOST:PORT, such as 7701=sandbox:7701\n")
            raise SystemExit(2)
        doors.append((int(port), target))
    asyncio.run(serve(doors))


if __name__ == "__main__":
    main(sys.argv[1:])
