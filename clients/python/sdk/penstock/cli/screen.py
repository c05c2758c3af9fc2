"""The whole terminal for a while: a frame at a time, keys as words, and the terminal as it was afterwards.

Invariants: nothing here polls; a key, a change of the terminal's size or a call of `wake` is what `key` waits for; the
terminal's modes are put back however the block is left.
"""

import asyncio
import os
import re
import signal
import sys
import termios
import tty
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console, RenderableType
from rich.live import Live

_SEQUENCE: Final = re.compile(rb"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|\x1b|[\xc0-\xff][\x80-\xbf]*|.", re.DOTALL)
_NAMES: Final = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down",
    b"\x1b[C": "right", b"\x1bOC": "right", b"\x1b[D": "left", b"\x1bOD": "left",
    b"\x1b[H": "home", b"\x1bOH": "home", b"\x1b[1~": "home", b"\x1b[F": "end", b"\x1bOF": "end", b"\x1b[4~": "end",
    b"\x1b[5~": "pageup", b"\x1b[6~": "pagedown", b"\x1b": "escape", b"\t": "tab", b"\r": "enter", b"\n": "enter",
    b" ": "space", b"\x7f": "backspace",
}  # fmt: skip

WAKE: Final = "wake"
"""What `key` gives when something is to be drawn anew and no key was pressed."""


def interactive(console: Console) -> bool:
    """Whether somebody sits there: a terminal that can be drawn on, and keys."""
    return console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty()


class Screen:
    """The terminal's other screen, inside an `async with`."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, screen=True, auto_refresh=False, transient=True)
        self._keys: asyncio.Queue[str] = asyncio.Queue()
        self._fd = sys.stdin.fileno()
        self._modes: list[Any] = []
        self._woken = False

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._modes = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)  # Ctrl-C stays what it is
        loop.add_reader(self._fd, self._read)
        loop.add_signal_handler(signal.SIGWINCH, self.wake)
        self._live.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._fd)
        loop.remove_signal_handler(signal.SIGWINCH)
        self._live.stop()
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._modes)

    def show(self, frame: RenderableType) -> None:
        """Draws; what does not fit is cut."""
        self._live.update(frame, refresh=True)

    def wake(self) -> None:
        """Something changed: `key` gives WAKE. Many calls before it is awaited are one."""
        if not self._woken:
            self._woken = True
            self._keys.put_nowait(WAKE)

    async def key(self) -> str:
        """The next key: a character, or up, down, left, right, home, end, pageup, pagedown, tab, enter, space, escape.

        `closed` when the terminal is gone.
        """
        name = await self._keys.get()
        if name == WAKE:
            self._woken = False
        return name

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 1024)
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._keys.put_nowait("closed")
        for part in _SEQUENCE.findall(data):
            name = _NAMES.get(part)
            if name is None and not part.startswith(b"\x1b"):
                name = part.decode("utf-8", "replace")
            if name is not None:
                self._keys.put_nowait(name)
