"""The stand-in's envd: processes, files and health of the sandbox that a request's headers name.

Invariants: a request is routed by its `E2b-Sandbox-Id`, never by its connection; without that sandbox's access token
nothing is answered; what a command writes while nobody is attached is gone.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from aiohttp import BodyPartReader, web
from tests.support.e2b_cloud.connect import ConnectError, end, failed, frame, frames
from tests.support.e2b_cloud.machine import USERS, Machine, Refused, command_of

_CHUNK = 32 * 1024
_QUEUED = 64
_HELPER = Path(__file__).with_name("inside.py").read_text()
_FILE_STATUS = {"not_found": 404, "permission_denied": 403, "already_exists": 409}


class Sandbox(Protocol):
    """What envd needs of a sandbox."""

    machine: Machine
    access_token: str
    commands: dict[int, Command]
    streams: set[asyncio.Transport]


class Cloud(Protocol):
    """Where sandboxes are found."""

    def running(self, sandbox_id: str) -> Sandbox | None:
        """A running sandbox."""


class Command:
    """A command that runs, and those who are attached to it."""

    def __init__(self, pid: int, config: dict[str, Any], process: Process) -> None:
        self.pid = pid
        self.config = config
        self.process = process
        self.input = process.stdin
        self._attached: set[asyncio.Queue[dict[str, Any] | None]] = set()
        self.ended: dict[str, Any] | None = None

    async def follow(self) -> AsyncIterator[dict[str, Any]]:
        """Events from now on, to the end."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(_QUEUED)
        self._attached.add(queue)
        try:
            yield {"start": {"pid": self.pid}}
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._attached.discard(queue)
            # Whoever waits to put something for us goes on.
            while not queue.empty():
                queue.get_nowait()

    async def serve(self) -> None:
        """Read what it writes, to its end and the end of all who hold its pipes."""
        assert self.process.stdout is not None and self.process.stderr is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(self.process.stdout, "stdout"))
            group.create_task(self._read(self.process.stderr, "stderr"))
        code = await self.process.wait()
        status = f"exit status {code}" if code >= 0 else f"signal: {signal.Signals(-code).name}"
        end = {"exitCode": code if code >= 0 else -1, "exited": code >= 0, "status": status}
        if code != 0:
            end["error"] = status
        self.ended = {"end": end}
        await self._tell(self.ended)
        await self._tell(None)

    async def _read(self, stream: asyncio.StreamReader, name: str) -> None:
        while data := await stream.read(_CHUNK):
            await self._tell({"data": {name: base64.b64encode(data).decode()}})

    async def _tell(self, event: dict[str, Any] | None) -> None:
        for queue in list(self._attached):
            await queue.put(event)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal the command itself: what it started lives on."""
        command = command_of(self.process)
        if command is not None:
            try:
                os.kill(command, number)
            except ProcessLookupError:
                return


class Envd:
    """The routes of the data plane."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._tasks: set[asyncio.Task[None]] = set()

    def routes(self) -> list[web.RouteDef]:
        """Everything that it answers."""
        process, filesystem = "/process.Process/", "/filesystem.Filesystem/"
        return [
            web.get("/health", self._health),
            web.get("/files", self._read_file),
            web.post("/files", self._write_file),
            web.post(process + "Start", self._start),
            web.post(process + "Connect", self._connect),
            web.post(process + "List", self._list),
            web.post(process + "SendInput", self._send_input),
            web.post(process + "StreamInput", self._stream_input),
            web.post(process + "CloseStdin", self._close_stdin),
            web.post(process + "SendSignal", self._send_signal),
            web.post(filesystem + "{what}", self._filesystem),
        ]

    def _sandbox(self, request: web.Request) -> Sandbox:
        sandbox_id = request.headers.get("E2b-Sandbox-Id", "")
        sandbox = self._cloud.running(sandbox_id)
        if sandbox is None:
            text = f'{{"sandboxId":"{sandbox_id}","message":"The sandbox was not found","code":502}}'
            raise web.HTTPBadGateway(text=text, content_type="application/json")
        if request.headers.get("X-Access-Token") != sandbox.access_token:
            raise web.HTTPUnauthorized(text='{"message":"unauthorized access"}', content_type="application/json")
        return sandbox

    @staticmethod
    def _user(request: web.Request) -> str:
        given = request.headers.get("Authorization", "")
        name = base64.b64decode(given.removeprefix("Basic ")).decode().rstrip(":") if given else ""
        user = name or request.query.get("username") or "user"
        if user not in USERS:
            raise ConnectError("unauthenticated", f"invalid user: '{user}'")
        return user

    async def _health(self, request: web.Request) -> web.Response:
        self._sandbox(request)
        return web.Response(status=204)

    # Files -------------------------------------------------------------------------------------------------------

    async def _file(self, request: web.Request, path: str, what: str, data: bytes | None) -> web.Response:
        sandbox = self._sandbox(request)
        try:
            asked = {"what": what, "path": path}
            out = await sandbox.machine.ask(_HELPER, asked, self._user(request), data)
        except Refused as refused:
            code, _, why = str(refused).partition(" ")
            return web.json_response({"message": why, "code": code}, status=_FILE_STATUS.get(code, 400))
        kind = "application/octet-stream" if what == "read" else "application/json"
        return web.Response(body=out, content_type=kind)

    async def _read_file(self, request: web.Request) -> web.Response:
        return await self._file(request, request.query["path"], "read", None)

    async def _write_file(self, request: web.Request) -> web.Response:
        path = request.query.get("path", "")
        if request.content_type == "application/octet-stream":
            return await self._file(request, path, "write", await request.read())
        answer = web.json_response([])
        async for part in await request.multipart():
            assert isinstance(part, BodyPartReader)
            content = bytes(await part.read(decode=False))
            answer = await self._file(request, path or part.filename or "", "write", content)
        return answer

    async def _filesystem(self, request: web.Request) -> web.Response:
        names = {"Stat": "stat", "ListDir": "list", "MakeDir": "make", "Move": "move", "Remove": "remove"}
        body = await request.json()
        try:
            if (what := names.get(request.match_info["what"])) is None:
                raise ConnectError("unimplemented", "the stand-in does not do this")
            asked = {"what": what, "path": body.get("path") or body.get("source", "")}
            asked |= {"depth": body.get("depth", 1), "target": body.get("destination", "")}
            out = await self._sandbox(request).machine.ask(_HELPER, asked, self._user(request))
        except Refused as refused:
            code, _, why = str(refused).partition(" ")
            return failed(ConnectError(code, why))
        except ConnectError as error:
            return failed(error)
        return web.Response(body=out, content_type="application/json")

    # Processes ---------------------------------------------------------------------------------------------------

    async def _start(self, request: web.Request) -> web.StreamResponse:
        sandbox = self._sandbox(request)
        asked = await anext(frames(request.content))
        config = asked["process"]
        try:
            if "pty" in asked:
                raise ConnectError("unimplemented", "the stand-in has no PTYs")
            process = await sandbox.machine.run(
                [config["cmd"], *config.get("args", [])],
                self._user(request),
                cwd=config.get("cwd", ""),
                env=config.get("envs", {}),
                stdin=asked.get("stdin", True),
            )
        except ConnectError as error:
            return await self._stream(request, sandbox, _nothing(), error)
        command = Command(max(sandbox.commands, default=100) + 1, config, process)
        sandbox.commands[command.pid] = command
        events = command.follow()
        first = await anext(events)
        serving = asyncio.create_task(self._serve(sandbox, command))
        self._tasks.add(serving)
        serving.add_done_callback(self._tasks.discard)
        limit = request.headers.get("connect-timeout-ms")
        return await self._stream(
            request, sandbox, _prepend(first, events), None, command, int(limit) / 1e3 if limit else None
        )

    @staticmethod
    async def _serve(sandbox: Sandbox, command: Command) -> None:
        try:
            await command.serve()
        finally:
            sandbox.commands.pop(command.pid, None)

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        sandbox = self._sandbox(request)
        asked = await anext(frames(request.content))
        try:
            command = self._command(sandbox, asked)
        except ConnectError as error:
            return await self._stream(request, sandbox, _nothing(), error)
        return await self._stream(request, sandbox, command.follow(), None)

    async def _stream(
        self,
        request: web.Request,
        sandbox: Sandbox,
        events: AsyncIterator[dict[str, Any]],
        error: ConnectError | None,
        limited: Command | None = None,
        limit_s: float | None = None,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(request)
        transport = request.transport
        assert transport is not None
        sandbox.streams.add(transport)
        try:
            async with asyncio.timeout(limit_s):
                async for event in events:
                    await response.write(frame({"event": event}))
        except ConnectionResetError:
            return response  # whoever asked has gone; the command has not
        except TimeoutError:
            assert limited is not None
            limited.kill()
            sandbox.commands.pop(limited.pid, None)
            error = ConnectError("deadline_exceeded", "context deadline exceeded")
        finally:
            sandbox.streams.discard(transport)
            await events.aclose()  # type: ignore[attr-defined]
        await response.write(end(error))
        return response

    @staticmethod
    def _command(sandbox: Sandbox, asked: Mapping[str, Any]) -> Command:
        pid = asked["process"].get("pid", 0)
        if pid not in sandbox.commands:
            raise ConnectError("not_found", f"process with pid {pid} not found")
        return sandbox.commands[pid]

    async def _list(self, request: web.Request) -> web.Response:
        running = self._sandbox(request).commands.values()
        return web.json_response({"processes": [{"pid": one.pid, "config": one.config} for one in running]})

    async def _send_input(self, request: web.Request) -> web.Response:
        asked = await request.json()
        try:
            await self._feed(self._command(self._sandbox(request), asked), asked["input"])
        except ConnectError as error:
            return failed(error)
        return web.json_response({})

    async def _stream_input(self, request: web.Request) -> web.StreamResponse:
        sandbox = self._sandbox(request)
        transport = request.transport
        assert transport is not None
        sandbox.streams.add(transport)
        command: Command | None = None
        error: ConnectError | None = None
        try:
            async for message in frames(request.content):
                if "start" in message:
                    command = self._command(sandbox, message["start"])
                elif "data" in message:
                    assert command is not None
                    await self._feed(command, message["data"]["input"])
        except ConnectError as raised:
            error = raised
        finally:
            sandbox.streams.discard(transport)
        body = (frame({}) if error is None else b"") + end(error)
        return web.Response(body=body, content_type="application/connect+json")

    @staticmethod
    async def _feed(command: Command, given: Mapping[str, str]) -> None:
        if command.input is None or command.input.is_closing():
            raise ConnectError("invalid_argument", "stdin is not open")
        try:
            command.input.write(base64.b64decode(given.get("stdin", "")))
            await command.input.drain()
        except (BrokenPipeError, ConnectionResetError) as broken:
            raise ConnectError("unavailable", "the process does not read its input any more") from broken

    async def _close_stdin(self, request: web.Request) -> web.Response:
        asked = await request.json()
        try:
            command = self._command(self._sandbox(request), asked)
        except ConnectError as error:
            return failed(error)
        if command.input is not None:
            command.input.close()
        return web.json_response({})

    async def _send_signal(self, request: web.Request) -> web.Response:
        asked = await request.json()
        try:
            command = self._command(self._sandbox(request), asked)
        except ConnectError as error:
            return failed(error)
        command.kill({"SIGNAL_SIGTERM": signal.SIGTERM}.get(asked.get("signal", ""), signal.SIGKILL))
        return web.json_response({})


async def _nothing() -> AsyncIterator[dict[str, Any]]:
    none: tuple[dict[str, Any], ...] = ()
    for event in none:
        yield event


async def _prepend(first: dict[str, Any], rest: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    try:
        yield first
        async for event in rest:
            yield event
    finally:
        await rest.aclose()  # type: ignore[attr-defined]
