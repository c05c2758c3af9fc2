"""Forks guest agents on this machine from one process started once (``penstock_sandbox.guest.forkserver``).

Invariants: requests are answered once each, in any order; when the forkserver ends the waiting requests fail, and the
next one starts another. It is started without forking this process (gRPC's threads do not survive a fork), with an
empty environment and none of the service's descriptors.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock_chassis.errors import Internal

_DEADLINE_S = 30.0


class Forkserver:
    """Starts guest agents. ``program`` is the program's file."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[tuple[int, str]]] = {}
        self._last = 0
        self._starting = asyncio.Lock()

    async def serve(self, arguments: Sequence[str]) -> None:
        """Starts a guest agent with the arguments of its ``serve``. Raises Internal (CREATE_FAILED)."""
        async with self._starting:
            if self._writer is None:
                await self._start()
        assert self._writer is not None
        self._last += 1
        order = self._last
        answer = self._waiting[order] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(json.dumps({"order": order, "serve": list(arguments)}).encode() + b"\n")
            async with asyncio.timeout(_DEADLINE_S):
                code, errors = await answer
        except TimeoutError as error:
            raise Internal("the guest did not start in time", reason="CREATE_FAILED") from error
        finally:
            self._waiting.pop(order, None)
        if code != 0:
            raise Internal(f"the sandbox could not be entered: {errors.strip()}", reason="CREATE_FAILED")

    async def aclose(self) -> None:
        """Ends it; the guest agents live on as long as their sandboxes."""
        if self._writer is not None:
            self._writer.close()
        if self._reader is not None:
            await self._reader

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - 2 ms, see the module
                [sys.executable, "-I", "-S", str(self._program), "forkserver"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env={},
                cwd="/",
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reader = asyncio.create_task(self._read(reader, self._writer, process), name="docker-forkserver")

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: subprocess.Popen[bytes]
    ) -> None:
        try:
            while line := await reader.readline():
                answer = json.loads(line)
                waiter = self._waiting.get(answer["order"])
                if waiter is not None and not waiter.done():
                    waiter.set_result((answer["code"], answer["errors"]))
        finally:
            writer.close()
            self._writer = None
            for waiter in self._waiting.values():
                if not waiter.done():
                    waiter.set_result((1, "the forkserver ended"))
            await asyncio.to_thread(process.wait)
