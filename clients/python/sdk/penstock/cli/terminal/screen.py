"""Full-screen terminal mode: draws frames, reads keys, and restores the terminal afterwards.

Invariants: nothing here polls; `key` waits for a key, a change of the terminal's size or a call of `wake`; the
terminal's modes are restored however the block is left.
"""

import asyncio
import os
import signal
import sys
import termios
import tty
from typing import Any, Final, Self

from rich.console import Console, RenderableType
from rich.live import Live

from penstock.cli.terminal.keys import ESCAPE_S, Keys

WAKE: Final = "wake"
"""Returned by `key` when a redraw is due and no key was pressed."""


def interactive(console: Console) -> bool:
    """Whether a person uses it: a terminal that can be drawn on, and keys."""
    return console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty()


class Screen:
    """The terminal's alternate screen, inside an `async with`.

    Args:
        console: the terminal.
        escape_s: seconds that an escape byte waits for the rest of its key.
    """

    def __init__(self, console: Console, *, escape_s: float = ESCAPE_S) -> None:
        self._live = Live(console=console, screen=True, auto_refresh=False, transient=True)
        self._keys: asyncio.Queue[str] = asyncio.Queue()
        self._bytes = Keys()
        self._escape_s = escape_s
        self._escape: asyncio.TimerHandle | None = None
        self._fd = sys.stdin.fileno()
        self._modes: list[Any] = []
        self._woken = False

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._modes = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)  # Ctrl-C keeps its effect
        loop.add_reader(self._fd, self._read)
        loop.add_signal_handler(signal.SIGWINCH, self.wake)
        self._live.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._fd)
        self._let_go()
        loop.remove_signal_handler(signal.SIGWINCH)
        self._live.stop()
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._modes)

    def show(self, frame: RenderableType) -> None:
        """Draws a frame; whatever does not fit is cut."""
        self._live.update(frame, refresh=True)

    def wake(self) -> None:
        """Signals a change: `key` returns WAKE. Several calls before it is awaited count as one."""
        if not self._woken:
            self._woken = True
            self._keys.put_nowait(WAKE)

    async def key(self) -> str:
        """Returns the next key: a character, or up, down, left, right, home, end, pageup, pagedown, tab, enter, space,
        escape.

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
        self._let_go()
        self._press(self._bytes.read(data))
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._keys.put_nowait("closed")
        elif self._bytes.may_be_escape:
            self._escape = asyncio.get_running_loop().call_later(self._escape_s, self._nothing_followed)

    def _nothing_followed(self) -> None:
        self._press(self._bytes.nothing_followed())

    def _let_go(self) -> None:
        if self._escape is not None:
            self._escape.cancel()
            self._escape = None

    def _press(self, names: list[str]) -> None:
        for name in names:
            self._keys.put_nowait(name)
