"""A pipe to the attendant over a background command of E2B's: its standard input and output.

Purpose: E2B's data plane gives a command's output as text and forgets what nobody reads; what goes through is armoured,
and losing a pipe loses nothing, since the link above keeps what was not acknowledged.

Invariants
- The pipe ends when its command or its stream ends; where that is because the sandbox is gone it says so.
- Both directions are bounded: output is read no faster than it is taken, and each input is a request that envd
  acknowledges. (The SDK's streamed input says nothing when its connection is cut, and what was handed to it would be
  waited for in vain.)
- No timeout bounds it: an idle pipe is a healthy one, and the link watches for silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.attended.pipe import Armoured, Pipe, SandboxGone
from penstock_sandbox.backends.e2b.errors import Denied, Gone, translated

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

_QUEUED_CHUNKS = 64
# What ``attach`` ends with where no attendant is.
_NOBODY_LISTENS = 69
GONE = "SANDBOX_VANISHED"


async def open_pipe(sandbox: AsyncSandbox, command: str) -> Pipe:
    """Start the command that joins its standard input and output with the attendant, armoured.

    Raises SandboxGone, PenstockError or Denied.
    """
    chunks: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUED_CHUNKS)

    async def take(text: str) -> None:
        # The SDK reads no further while we wait.
        await chunks.put(text.encode("ascii", errors="replace"))

    try:
        async with translated("attach"):
            handle = await sandbox.commands.run(
                command, background=True, user="root", stdin=True, timeout=0, on_stdout=take, retain_output=False
            )
    except Gone:
        raise SandboxGone(GONE) from None
    return Armoured(_CommandPipe(sandbox, handle, chunks))


class _CommandPipe:
    def __init__(
        self, sandbox: AsyncSandbox, command: AsyncCommandHandle[None], chunks: asyncio.Queue[bytes | None]
    ) -> None:
        self._sandbox = sandbox
        self._command = command
        self._chunks = chunks
        self._gone = ""
        self._watching = asyncio.create_task(self._watch(), name="e2b-pipe")

    async def _watch(self) -> None:
        from e2b import CommandExitException

        try:
            async with translated("attached"):
                try:
                    await self._command.wait()
                except CommandExitException as ended:
                    if ended.exit_code == _NOBODY_LISTENS:
                        self._gone = "ATTENDANT_ENDED"
        except Gone:
            self._gone = GONE
        except (PenstockError, Denied):
            pass  # a cut pipe; whoever opened this one opens another
        await self._chunks.put(None)

    async def send(self, data: bytes) -> None:
        try:
            async with translated("send"):
                await self._sandbox.commands.send_stdin(self._command.pid, data)
        except Gone:
            raise SandboxGone(GONE) from None

    async def received(self) -> AsyncIterator[bytes]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
        if self._gone:
            raise SandboxGone(self._gone)

    async def aclose(self) -> None:
        self._watching.cancel()
        await asyncio.wait({self._watching})
        # The command inside ends by itself, as soon as it writes to nobody or its attendant takes another.
        await self._command.disconnect()
