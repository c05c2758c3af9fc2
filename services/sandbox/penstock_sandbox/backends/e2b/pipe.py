"""A pipe to the guest agent over a background command of E2B: its standard input and output.

Purpose: E2B's data plane returns a command's output as text and drops unread output; so the bytes are armoured, and a
lost pipe loses nothing, since the link above keeps unacknowledged frames.

Invariants
- The pipe ends when its command or its stream ends; if that is because the sandbox is gone, it raises that.
- Both directions are bounded: output is read no faster than it is consumed, and each input is a request that envd
  acknowledges. (The SDK's streamed input reports nothing when its connection is cut, and its data would be waited for
  in vain.)
- It has no timeout: an idle pipe is healthy, and the link watches for silence.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.e2b.errors import Denied, Gone, asked
from penstock_sandbox.backends.guest_client.pipe import Armoured, Pipe, SandboxGone

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

_MOST_WAITING = 64
_DISCONNECT_S = 5.0
# The exit code of ``attach`` where no guest agent listens.
_NOBODY_LISTENS = 69
GONE = "SANDBOX_VANISHED"


async def open_pipe(sandbox: AsyncSandbox, command: str) -> Pipe:
    """Starts the command that connects its standard input and output with the guest agent, armoured.

    Raises SandboxGone, PenstockError or Denied.
    """
    inbox = _Inbox()
    try:
        starting = sandbox.commands.run(
            command, background=True, user="root", stdin=True, timeout=0, on_stdout=inbox.put, retain_output=False
        )
        handle = await asked("attach", starting, undo=lambda late: late.disconnect())
    except Gone:
        raise SandboxGone(GONE) from None
    return Armoured(_CommandPipe(sandbox, handle, inbox))


class _Inbox:
    """Received and unread pieces. Its end needs no room: the one that ends it may be the only one left."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._ended = False

    async def put(self, text: str) -> None:
        """Adds a piece; waits while there is much, so that the SDK reads no further. Raises once it has ended."""
        while len(self._waiting) >= _MOST_WAITING and not self._ended:
            await self._change()
        if self._ended:
            raise ConnectionResetError("nobody reads any more")
        self._waiting.append(text.encode("ascii", errors="replace"))
        self._changed.set()

    def end(self) -> None:
        """Marks the end; harmless if repeated."""
        self._ended = True
        self._changed.set()

    async def take(self) -> bytes:
        """Returns the next piece; empty at the end."""
        while not self._waiting and not self._ended:
            await self._change()
        self._changed.set()
        return self._waiting.popleft() if self._waiting else b""

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class _CommandPipe:
    def __init__(self, sandbox: AsyncSandbox, command: AsyncCommandHandle[None], inbox: _Inbox) -> None:
        self._sandbox = sandbox
        self._command = command
        self._inbox = inbox
        self._gone = ""
        self._watching = asyncio.create_task(self._watch(), name="e2b-pipe")

    async def _watch(self) -> None:
        from e2b import CommandExitException

        try:
            await asked("attached", self._command.wait())
        except CommandExitException as ended:
            if ended.exit_code == _NOBODY_LISTENS:
                self._gone = "ATTENDANT_ENDED"
        except Gone:
            self._gone = GONE
        except (PenstockError, Denied):
            pass  # a cut pipe; its opener opens another
        finally:
            self._inbox.end()

    async def send(self, data: bytes) -> None:
        try:
            await asked("send", self._sandbox.commands.send_stdin(self._command.pid, data))
        except Gone:
            raise SandboxGone(GONE) from None

    async def received(self) -> AsyncIterator[bytes]:
        while chunk := await self._inbox.take():
            yield chunk
        if self._gone:
            raise SandboxGone(self._gone)

    async def aclose(self) -> None:
        self._inbox.end()
        while True:
            try:
                async with asyncio.timeout(_DISCONNECT_S):
                    await self._command.disconnect()
            except TimeoutError:
                continue  # the SDK lost the cancellation: cancel again
            break
        self._watching.cancel()
        await asyncio.wait({self._watching})
