"""A local socket that leads to a daemon on another machine, over ``ssh HOST docker system dial-stdio``.

Purpose: the SDK and the streams both speak to a Unix socket; the SDK's own ssh needs another library, and blocks. Each
connection to the socket becomes the input and output of one ``ssh``, so no byte passes through this process, and
half-closed and broken connections reach the other side as they are.

Invariants: the socket is in a directory of this user's alone; every ``ssh`` ends with its connection or
with ``aclose``.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
from urllib.parse import urlsplit

import structlog

from penstock_chassis.errors import FailedPrecondition

_WAITING = 128
_PAUSE_S = 1.0

_log = structlog.get_logger(__name__)


class SshRelay:
    """Relays to the daemon of an ``ssh://[USER@]HOST[:PORT]``, from now on. Needs a running event loop.

    Raises FailedPrecondition (BACKEND_UNAVAILABLE) without an ``ssh`` program.
    """

    def __init__(self, host: str) -> None:
        parts = urlsplit(host)
        if shutil.which("ssh") is None or not parts.hostname:
            problem = f"{host} needs the ssh program, and a host"
            raise FailedPrecondition(problem, reason="BACKEND_UNAVAILABLE")
        self._argv = ["ssh", "-o", "BatchMode=yes", *(["-p", str(parts.port)] if parts.port else [])]
        self._argv += ["-l", parts.username] if parts.username else []
        self._argv += ["--", parts.hostname, "docker", "system", "dial-stdio"]
        self._children: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.mkdtemp(prefix="penstock-ssh-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self.address = f"unix://{self._folder}/docker.sock"
        try:
            self._listener.bind(f"{self._folder}/docker.sock")
            self._listener.listen(_WAITING)
        except OSError:  # such as a folder for temporary files whose name is too long for a socket's
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._task = asyncio.create_task(self._relay(), name="docker-ssh")

    async def aclose(self) -> None:
        """Ends all connections."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._listener.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, True)
        for child in self._children:
            child.terminate()
        await asyncio.to_thread(lambda: [child.wait() for child in self._children])

    async def _relay(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
                with connection:
                    # For the child, which shares this setting.
                    connection.setblocking(True)
                    self._children = [child for child in self._children if child.poll() is None]
                    # Not asyncio's subprocess: uvloop forks, which gRPC's threads do not survive; this one uses vfork.
                    pipe = connection.fileno()
                    child = subprocess.Popen(self._argv, stdin=pipe, stdout=pipe)  # noqa: ASYNC220 - milliseconds
                    self._children.append(child)
            except OSError as error:
                # Out of descriptors or processes: the caller's connection is closed, and the next one may do.
                _log.warning("ssh could not be started", error=str(error))
                await asyncio.sleep(_PAUSE_S)
