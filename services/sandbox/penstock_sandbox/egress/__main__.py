"""The process of the proxy: its settings come as one line on standard input, and it lives until that is closed.

So it ends with its service, however that ends, and credentials appear in no command line and no environment.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import sys
from pathlib import Path
from typing import Any

from penstock_chassis import sockets
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.telemetry import logging
from penstock_sandbox.egress.addresses import Addresses
from penstock_sandbox.egress.authority import Authority
from penstock_sandbox.egress.credentials import Credentials
from penstock_sandbox.egress.fetching import Fetcher
from penstock_sandbox.egress.open_shared_recordings import Unusable, opened_recordings
from penstock_sandbox.egress.proxy import Bodies, Conversation
from penstock_sandbox.egress.store import Store

_BACKLOG = 1024
_MOST_CONVERSATIONS = 8192
"""Of all sandboxes; one has at most 256 (host.relay)."""


async def serve(settings: dict[str, Any], stop: asyncio.Event, listens: asyncio.Event) -> None:
    """Serves on a unix socket until ``stop``.

    Once it listens, writes one line with the CA's certificate and sets ``listens``. If it cannot use the shared
    recordings, writes one that says why, and returns.
    """
    folder = Path(settings["folder"])
    authority = Authority.open(folder)
    try:
        shared = await opened_recordings(settings["recordings"], folder, settings["timeout_s"])
    except Unusable as error:
        sys.stdout.write(json.dumps({"unusable": str(error)}) + "\n")
        sys.stdout.flush()
        return
    fetcher = Fetcher(
        Store(folder, settings["store_bytes"]),
        Addresses([ipaddress.ip_network(block) for block in settings["private"]]),
        Credentials(Path(settings["netrc"]) if settings["netrc"] else None, settings["tokens"]),
        max_object_bytes=settings["max_object_bytes"],
        timeout_s=settings["timeout_s"],
        ca=Path(settings["ca"]) if settings["ca"] else None,
        shared=shared,
    )
    conversations = TaskOwner()

    bodies = Bodies()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(conversations) >= _MOST_CONVERSATIONS:
            writer.transport.abort()
            return
        conversations.start(Conversation(reader, writer, authority, fetcher, bodies).run())

    path = Path(settings["socket"])
    path.unlink(missing_ok=True)
    with sockets.short_path(path) as short:
        server = await asyncio.start_unix_server(accept, short, backlog=_BACKLOG)
    try:
        sys.stdout.write(json.dumps({"ca": authority.pem.decode()}) + "\n")
        sys.stdout.flush()
        listens.set()
        await stop.wait()
    finally:
        server.close()
        await conversations.aclose()
        await fetcher.aclose()
        path.unlink(missing_ok=True)


async def main() -> None:
    logging.configure()
    settings = json.loads(sys.stdin.buffer.readline())
    # Before a library reads it. The kernel shows a process's first environment alone, and that has none of it.
    os.environ.update(settings["environment"])
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def until_closed() -> None:
        await reader.read()
        stop.set()

    tasks = TaskOwner()
    tasks.start(until_closed())
    try:
        await serve(settings, stop, asyncio.Event())
    finally:
        await tasks.aclose()


if __name__ == "__main__":
    asyncio.run(main())
