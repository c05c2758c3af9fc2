"""A command at a terminal of its own, as a person has it: what the screen shows, and keys.

The screen is an emulator's, so that what is asserted is what one would see; `raw` is what was sent to it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import select
import struct
import sys
import termios
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pyte
from tests.support.waiting import GUARD_S

_OURS: Final = re.compile(r"\x1b\[[0-9;]*[mHJKABCD]|\x1b\[\?(1049|25)[hl]")
"""What rich itself sends: styles, positions, the other screen, the cursor."""


def foreign(text: str) -> str:
    """What of a program's output is neither its own drawing nor printable."""
    rest = _OURS.sub("", text)
    return "".join(letter for letter in rest if letter not in "\r\n\t" and not letter.isprintable())


class Terminal:
    """A terminal with a program in it."""

    def __init__(self, master: int, process: Process, columns: int, lines: int) -> None:
        self._master = master
        self.process = process
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._news = asyncio.Event()
        self.raw = bytearray()
        self.closed = False

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux says so when the last program has closed its side
            data = b""
        if data:
            self.raw += data
            self._stream.feed(data)
        else:
            self.closed = True
            asyncio.get_running_loop().remove_reader(self._master)
        self._news.set()

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    @property
    def title(self) -> str:
        """Of the window: a program that prints foreign text must not let it be set."""
        return str(self._screen.title)

    @property
    def foreign(self) -> str:
        """What was sent and is neither ours nor printable."""
        return foreign(self.raw.decode("utf-8", "replace"))

    async def until(self, check: Callable[[str], bool], what: str) -> str:
        """The screen's text once `check` holds of it."""
        try:
            async with asyncio.timeout(GUARD_S):
                while not check(self.text):
                    assert not self.closed, f"{what}: the program ended\n{self.text}"
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"{what}: not within {GUARD_S:g} s\n{self.text}") from None
        return self.text

    async def shows(self, *words: str) -> str:
        """The screen's text once it has all of these."""
        return await self.until(lambda text: all(word in text for word in words), f"shows {words}")

    def press(self, keys: bytes) -> None:
        """As if they were typed."""
        os.write(self._master, keys)

    def resize(self, columns: int, lines: int) -> None:
        """As if the window were dragged."""
        self._screen.resize(lines, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    async def ends(self) -> int:
        """The exit code, when the program has ended and all that it wrote is read."""
        async with asyncio.timeout(GUARD_S):
            code = await self.process.wait()
        while not self.closed and select.select([self._master], [], [], 0)[0]:
            self._read()
        return code


_PROGRAM: Final = """
import fcntl, runpy, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
runpy.run_module("penstock.cli.main", run_name="__main__", alter_sys=True)
"""
"""Makes the terminal its session's, so that keys and size are told by signals, and is `penstock` from then on. Not
between fork and exec: the tests' process may have threads (JAX refuses a fork beside its own)."""


@asynccontextmanager
async def penstock(
    *argv: str, environment: Mapping[str, str], cwd: Path, columns: int = 100, lines: int = 30
) -> AsyncIterator[Terminal]:
    """`penstock` at a terminal; it is ended with the block."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    before = termios.tcgetattr(slave)
    surroundings = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _PROGRAM,
        *argv,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**surroundings, "TERM": "xterm-256color", **environment},
        cwd=cwd,
        start_new_session=True,
    )
    terminal = Terminal(master, process, columns, lines)
    loop = asyncio.get_running_loop()
    loop.add_reader(master, terminal._read)
    try:
        yield terminal
        assert termios.tcgetattr(slave) == before, "the terminal's modes are not what they were"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        loop.remove_reader(master)
        os.close(slave)
        os.close(master)
