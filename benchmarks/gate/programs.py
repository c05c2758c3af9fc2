"""Programs that run beside what is measured: started here, told what to do by lines of JSON, ended with the block."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

_LINE: Final = 1 << 24


class Program:
    """A running program."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self.pid = process.pid
        self.ready: dict[str, Any] = {}
        """What it said when it was ready."""
        self._process = process
        self._name = name
        self._turn = asyncio.Lock()

    async def tell(self, do: str, **given: object) -> dict[str, Any]:
        """Has it do something and returns what it says. Raises RuntimeError when it is gone."""
        async with self._turn:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"do": do, **given}).encode() + b"\n")
            return await self.hear()

    async def hear(self) -> dict[str, Any]:
        """The next line that it says."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} ended")
        said: dict[str, Any] = json.loads(line)
        return said


@asynccontextmanager
async def running(name: str, argv: Sequence[object], **given: object) -> AsyncIterator[Program]:
    """A program that is ready; `given` is what it reads first."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*map(str, argv), stdin=pipe, stdout=pipe, limit=_LINE)
    program = Program(process, name)
    try:
        program.ready = await program.tell("start", **given)
        yield program
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
