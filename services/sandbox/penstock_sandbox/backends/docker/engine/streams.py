"""The Docker daemon's streams, by aiohttp: events, the progress of a pull, waits, and the pipes of a command.

Purpose: the SDK needs a waiting thread for each of these, and a service has one such wait for every sandbox.

Invariants: one connection for each stream, closed when its reader stops; a reader that does not read stops the daemon
(64 KiB to 2 MiB are held); lines have limits; an absent daemon raises Unavailable (DOCKER_UNREACHABLE).
"""

from __future__ import annotations

import asyncio
import json
import ssl
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager

import aiohttp
from aiohttp.http import HttpProcessingError, StreamWriter

from penstock_sandbox.backends.docker.engine.errors import Json, Missing, Refused, unreachable

# A line of the daemon's is at most twice as long.
_READ_BYTES = 1024 * 1024
_PIPE_BYTES = 64 * 1024
_CONNECT_S = 10.0
_ERROR_BYTES = 16 * 1024
_FRAME = struct.Struct(">BxxxI")
_STDERR = 2
_STDERR_KEPT = 4096
_BROKEN = (OSError, EOFError, ValueError, TimeoutError, aiohttp.ClientError, HttpProcessingError)


class Streams:
    """Connections to one daemon: at a Unix socket's ``path``, else at ``url`` (http or https). Needs a running loop."""

    def __init__(self, version: str, *, path: str = "", url: str = "", tls: ssl.SSLContext | None = None) -> None:
        # Without limit and reuse: a connection lasts as long as its stream, and there is one for each sandbox.
        connector = (
            aiohttp.UnixConnector(path, force_close=True, limit=0)
            if path
            else aiohttp.TCPConnector(force_close=True, limit=0, ssl=tls if tls is not None else True)
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        jar = aiohttp.DummyCookieJar()
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar)
        self._base = f"{url or 'http://docker'}/v{version}"

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._session.close()

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        headers: Mapping[str, str] | None = None,
        body: Json | None = None,
        read_bytes: int = _READ_BYTES,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            answer = await self._session.request(
                method, self._base + path, params=query, headers=headers, json=body, read_bufsize=read_bytes
            )
        except _BROKEN as error:
            raise unreachable(error) from error
        try:
            if answer.status >= 300:
                raise (Missing if answer.status == 404 else Refused)(answer.status, await _reason(answer))
            yield answer
        finally:
            if answer.connection is not None and answer.connection.transport is not None:
                # What the daemon has not read is dropped: closing would wait for it.
                answer.connection.transport.abort()
            answer.close()

    async def answer(self, method: str, path: str, query: Mapping[str, str]) -> Json:
        """Returns the object that the daemon answers with, however late. Raises as ``objects`` does."""
        async with aclosing(self.objects(method, path, query)) as objects:
            async for one in objects:
                return one
        raise unreachable("an empty answer")

    async def objects(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Json, None]:
        """Yields a stream of JSON objects, to its end. Raises Refused, Missing and Unavailable."""
        async with self._request(method, path, query, headers=headers) as answer:
            try:
                async for line in answer.content:
                    if line.strip():
                        yield json.loads(line)
            except _BROKEN as error:
                raise unreachable(error) from error

    @asynccontextmanager
    async def command(self, execution: str) -> AsyncIterator[CommandPipes]:
        """Starts a prepared command and yields its pipes; they are cut at the end of the context."""
        body = {"Detach": False, "Tty": False}
        async with self._request("POST", f"/exec/{execution}/start", {}, body=body, read_bytes=_PIPE_BYTES) as answer:
            yield CommandPipes(answer)

    @asynccontextmanager
    async def attached(self, container: str, last: bytes) -> AsyncIterator[CommandPipes]:
        """Yields the pipes of a container's first process, which need not have been started.

        They end when it writes ``last`` to standard error.
        """
        query = dict.fromkeys(("stream", "stdin", "stdout", "stderr"), "1")
        path = f"/containers/{container}/attach"
        async with self._request("POST", path, query, read_bytes=_PIPE_BYTES) as answer:
            yield CommandPipes(answer, last)


class CommandPipes:
    """The three pipes of a command in a container, on one connection; ``last`` on standard error ends them.

    The connection was not upgraded, so that its output is a plain body of no stated length; the daemon reads what
    comes after the request as input all the same.
    """

    def __init__(self, answer: aiohttp.ClientResponse, last: bytes = b"") -> None:
        connection = answer.connection
        self._input = (
            StreamWriter(connection.protocol, asyncio.get_running_loop())
            if connection is not None and connection.protocol is not None
            else None  # the command has ended already
        )
        self._output = answer.content
        self._last = last
        self._reading = asyncio.Lock()
        # Of the frame being read; kept here so that the next reader can continue inside it.
        self.head = b""
        """The part of a frame's head that has come."""
        self._stream = self._left = 0
        self.errors = b""
        """The end of its standard error."""

    async def write(self, data: bytes) -> None:
        """Writes to its standard input; waits while the daemon does not read. Raises OSError when it is gone."""
        if self._input is None:
            raise ConnectionResetError("the command has ended")
        await self._input.write(data, LIMIT=0)

    async def output(self) -> AsyncIterator[bytes]:
        """Yields its standard output, as it arrives; ends when the command or the connection does.

        One reader at a time: the next one continues where the last stopped.
        """
        async with self._reading:
            while True:
                try:
                    while not self._left and len(self.head) < _FRAME.size:
                        # By parts: a reader that is cancelled must leave the next one what it has read.
                        data = await self._output.read(_FRAME.size - len(self.head))
                        if not data:
                            return
                        self.head += data
                    if not self._left:
                        (self._stream, self._left), self.head = _FRAME.unpack(self.head), b""
                    while self._left:
                        data = await self._output.read(min(self._left, 256 * 1024))
                        if not data:
                            return
                        self._left -= len(data)
                        if self._stream == _STDERR:
                            self.errors = (self.errors + data)[-_STDERR_KEPT:]
                            if self._last and self._last in self.errors:
                                return
                        else:
                            yield data
                except _BROKEN:
                    return


async def _reason(answer: aiohttp.ClientResponse) -> str:
    """Returns the daemon's explanation of a refusal, as far as it came."""
    whole = b""
    try:
        while len(whole) < _ERROR_BYTES and (more := await answer.content.read(_ERROR_BYTES)):
            whole += more
    except _BROKEN as error:
        raise unreachable(error) from error
    try:
        return str(json.loads(whole)["message"])
    except (ValueError, KeyError, TypeError):
        return whole.decode(errors="replace").strip()
