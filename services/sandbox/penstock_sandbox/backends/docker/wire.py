"""What the daemon streams: events, the progress of a pull, and the pipes of a command, on asyncio's own streams.

Purpose: the SDK can only wait for these in a thread each, and a service has one such wait for every sandbox. The part
of HTTP/1.1 that they need is small: a request, a head, then JSON in chunks or a bare connection. No HTTP library is
added for it, since those that speak asyncio hide the half-close that a command's input needs.

Invariants: one connection for each stream, closed when its reader stops; lines and frames have limits; a daemon that
is not there raises Unavailable (DOCKER_UNREACHABLE).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_sandbox.backends.docker.daemon import Json, Missing, Refused

_API = "/v1.41"
_LIMIT = 1024 * 1024
_CONNECT_S = 10.0
_ERROR_BYTES = 16 * 1024
_FRAME = struct.Struct(">BxxxI")
_STDERR = 2
_UPGRADE = {"Connection": "Upgrade", "Upgrade": "tcp"}
_STDERR_KEPT = 4096
_LOCAL = "unix:///var/run/docker.sock"

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Wire:
    """Connections to one daemon; ``host`` as the SDK takes it (unix, tcp, http, https, ssh), empty = DOCKER_HOST's."""

    def __init__(self, host: str) -> None:
        self._host = host or os.environ.get("DOCKER_HOST", "") or _LOCAL
        parts = urlsplit(self._host)
        if parts.scheme not in ("unix", "tcp", "http", "https", "ssh"):
            raise FailedPrecondition(
                f"{self._host}: the daemon must be reached by unix://, tcp:// or ssh://", reason="BACKEND_UNAVAILABLE"
            )
        self._parts = parts
        self._tls = _tls(parts.scheme)

    async def _dial(self) -> _Streams:
        parts = self._parts
        try:
            async with asyncio.timeout(_CONNECT_S):
                if parts.scheme == "unix":
                    return await asyncio.open_unix_connection(parts.path, limit=_LIMIT)
                if parts.scheme == "ssh":
                    return await _dial_ssh(self._host)
                port = parts.port or (2376 if self._tls else 2375)
                return await asyncio.open_connection(parts.hostname, port, ssl=self._tls, limit=_LIMIT)
        except (OSError, TimeoutError) as error:
            raise _unreachable(error) from error

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, Mapping[str, str]]]:
        reader, writer = await self._dial()
        try:
            target = f"{_API}{path}" + (f"?{urlencode(query)}" if query else "")
            fields = {"Host": "docker", "Content-Length": str(len(body)), "Content-Type": "application/json", **headers}
            head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            try:
                writer.write(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + body)
                await writer.drain()
                status, answered = await _head(reader)
                if status >= 300:
                    what = await _body(reader, answered)
                    raise (Missing if status == 404 else Refused)(status, what)
            except (OSError, EOFError, ValueError) as error:
                raise _unreachable(error) from error
            yield reader, writer, answered
        finally:
            writer.transport.abort()

    async def objects(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Json]:
        """A stream of JSON objects, to its end. Raises Refused, Missing and Unavailable."""
        async with self._request(method, path, query, headers or {}) as (reader, _, answered):
            pending = bytearray()
            try:
                async for chunk in _chunks(reader, answered):
                    pending += chunk
                    *lines, rest = pending.split(b"\n")
                    pending = bytearray(rest)
                    for line in lines:
                        if line.strip():
                            yield json.loads(line)
                    if len(pending) > _LIMIT:
                        raise ValueError("a line of the daemon's is too long")
                if pending.strip():
                    yield json.loads(pending)
            except (OSError, EOFError, ValueError) as error:
                raise _unreachable(error) from error

    @asynccontextmanager
    async def command(self, execution: str) -> AsyncIterator[CommandPipes]:
        """Start a prepared command and hold its pipes; they are cut when the context is left."""
        body = json.dumps({"Detach": False, "Tty": False}).encode()
        async with self._request("POST", f"/exec/{execution}/start", {}, _UPGRADE, body) as (reader, writer, _):
            yield CommandPipes(reader, writer)

    @asynccontextmanager
    async def attached(self, container: str, last: bytes) -> AsyncIterator[CommandPipes]:
        """Hold the pipes of a container's first process, which need not have been started.

        They are over when it writes ``last`` to standard error.
        """
        query = dict.fromkeys(("stream", "stdin", "stdout", "stderr"), "1")
        async with self._request("POST", f"/containers/{container}/attach", query, _UPGRADE) as (reader, writer, _):
            yield CommandPipes(reader, writer, last)


class CommandPipes:
    """The three pipes of a command in a container, on one connection; ``last`` on standard error ends them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, last: bytes = b"") -> None:
        self._reader = reader
        self._writer = writer
        self._last = last
        self._reading = asyncio.Lock()
        # Of the frame that is being read: kept here, so that who goes on after another knows where it stands.
        self._stream = self._left = 0
        self.errors = b""
        """The last of what it wrote to standard error."""

    async def write(self, data: bytes) -> None:
        """Write to its standard input. Raises OSError when the connection is gone."""
        self._writer.write(data)
        await self._writer.drain()

    async def output(self) -> AsyncIterator[bytes]:
        """Its standard output, as it comes; ends when the command or the connection does.

        One hears it at a time: who comes second goes on where the first left off.
        """
        async with self._reading:
            while True:
                try:
                    if not self._left:
                        self._stream, self._left = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
                    while self._left:
                        data = await self._reader.read(min(self._left, 256 * 1024))
                        if not data:
                            return
                        self._left -= len(data)
                        if self._stream == _STDERR:
                            self.errors = (self.errors + data)[-_STDERR_KEPT:]
                            if self._last and self._last in self.errors:
                                return
                        else:
                            yield data
                except (OSError, EOFError):
                    return


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    status_line = await reader.readline()
    parts = status_line.split(None, 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1."):
        raise EOFError("no HTTP answer")
    fields: dict[str, str] = {}
    while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        fields[name.strip().lower()] = value.strip()
    return int(parts[1]), fields


async def _chunks(reader: asyncio.StreamReader, fields: Mapping[str, str]) -> AsyncIterator[bytes]:
    if fields.get("transfer-encoding", "").lower() != "chunked":
        left = int(fields["content-length"]) if "content-length" in fields else None
        while left is None or left > 0:
            data = await reader.read(64 * 1024 if left is None else min(left, 64 * 1024))
            if not data:
                return
            left = None if left is None else left - len(data)
            yield data
        return
    while True:
        size = int((await reader.readline()).partition(b";")[0], 16)
        if size == 0:
            return
        yield await reader.readexactly(size)
        await reader.readline()


async def _body(reader: asyncio.StreamReader, fields: Mapping[str, str]) -> str:
    whole = b""
    async for chunk in _chunks(reader, fields):
        whole += chunk
        if len(whole) > _ERROR_BYTES:
            break
    try:
        return str(json.loads(whole)["message"])
    except (ValueError, KeyError, TypeError):
        return whole.decode(errors="replace").strip()


def _tls(scheme: str) -> ssl.SSLContext | None:
    folder = os.environ.get("DOCKER_CERT_PATH", "")
    verify = bool(os.environ.get("DOCKER_TLS_VERIFY", ""))
    if scheme != "https" and not (scheme == "tcp" and (folder or verify)):
        return None
    certificates = Path(folder) if folder else Path.home() / ".docker"
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem") if verify else None)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if (certificates / "cert.pem").exists():
        context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    return context


async def _dial_ssh(host: str) -> _Streams:
    """A connection through ``ssh HOST docker system dial-stdio``, as the command line makes it."""
    parts = urlsplit(host)
    argv = ["ssh", "-o", "BatchMode=yes", *(["-p", str(parts.port)] if parts.port else [])]
    argv += ["-l", parts.username] if parts.username else []
    argv += ["--", parts.hostname or "", "docker", "system", "dial-stdio"]
    ours, theirs = socket.socketpair()
    try:
        # Not asyncio's own: uvloop forks, which gRPC's threads do not survive; this one is a vfork.
        subprocess.Popen(argv, stdin=theirs.fileno(), stdout=theirs.fileno())  # noqa: ASYNC220 - milliseconds; it ends with its socket
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return await asyncio.open_connection(sock=ours, limit=_LIMIT)


def _unreachable(error: object) -> Unavailable:
    return Unavailable(f"the Docker daemon does not answer: {error}", reason="DOCKER_UNREACHABLE", retry_after_s=1.0)
