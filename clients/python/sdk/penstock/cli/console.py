"""How the command line talks: one console, errors in one line, exit codes, text that cannot drive a terminal."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock.client import errors
from penstock.client.stack import StackFailed

OK: Final = 0
FAILED: Final = 1
"""What was asked for was done and did not succeed: a rollout failed, a check found something."""
USAGE: Final = 2
"""The command line, or a file that it names, is wrong: whoever found that, client or service."""
UNREACHABLE: Final = 3
"""A service cannot be reached or started."""
REFUSED: Final = 4
"""A service or the client refused the request."""
INTERRUPTED: Final = 130
TERMINATED: Final = 143
"""Ended by SIGTERM; by another signal 128 and its number."""

EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 done without success (a rollout failed, a check found something, nothing matched);"
    " 2 wrong usage, or a file that does not hold;"
    " 3 a service cannot be reached or started; 4 the request was refused; 130 interrupted;"
    " 143 ended by SIGTERM."
    " PENSTOCK_DEBUG=1 shows the whole of an error."
)


def _console(*, stderr: bool) -> Console:
    """On a terminal as wide as that is; in a pipe or a file there is no width, and nothing is wrapped or cut."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=100_000)


out = _console(stderr=False)
"""What was asked for."""
err = _console(stderr=True)
"""Everything about it."""

T = TypeVar("T")

_UNREACHABLE = (errors.Unavailable, errors.SessionLost, errors.DeadlineExceeded, StackFailed)


def run(work: Coroutine[Any, Any, int]) -> None:
    """Runs a command to its exit code; an error becomes one line that says what to do.

    SIGTERM and SIGHUP cancel it as an interrupt does, so that what it started ends with it.
    """
    caught: list[int] = []
    try:
        code = asyncio.run(_cancelled_by_signals(work, caught))
    except (asyncio.CancelledError, KeyboardInterrupt):
        if caught:
            err.print(f"ended by {signal.Signals(caught[0]).name}")
            sys.exit(128 + caught[0])
        err.print("interrupted")
        sys.exit(INTERRUPTED)
    except errors.PenstockError as error:
        if os.environ.get("PENSTOCK_DEBUG") == "1":
            raise
        err.print(f"[bold red]error[/]: {escape(clean(str(error)))}", soft_wrap=True)
        if isinstance(error, errors.InvalidArgument):
            sys.exit(USAGE)
        sys.exit(UNREACHABLE if isinstance(error, _UNREACHABLE) else REFUSED)
    sys.exit(code)


async def _cancelled_by_signals(work: Coroutine[Any, Any, int], caught: list[int]) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def end(number: int) -> None:
        caught.append(number)
        if task is not None:
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
            loop.add_signal_handler(number, end, number)
    return await work


def read(load: Callable[[Path], T], file: Path) -> T:
    """A file that the command line names; one that cannot be used ends the program as wrong usage."""
    try:
        return load(file)
    except errors.PenstockError as error:
        usage_error(str(error))


def usage_error(message: str) -> NoReturn:
    """Ends the program: the command line does not hold."""
    err.print(f"[bold red]error[/]: {escape(clean(message))}", soft_wrap=True)
    sys.exit(USAGE)


def columns(*headers: str | tuple[str, JustifyMethod]) -> Table:
    """A table without lines whose cells are wrapped where a terminal is narrow, never cut."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in headers:
        if isinstance(header, str):
            table.add_column(header, overflow="fold")
        else:
            table.add_column(header[0], justify=header[1], overflow="fold")
    return table


def counted(number: int, noun: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def clean(text: str) -> str:
    """Text of an agent or a model without what a terminal would take as a command."""
    return "".join(
        letter if letter in "\n\t" or (letter.isprintable() or letter == " ") else "\N{REPLACEMENT CHARACTER}"
        for letter in text.replace("\r\n", "\n")
    )


def quoted(text: str, style: str = "", *, lines: int = 12, width: int = 400) -> Text:
    """Foreign text for the console: cleaned, bounded, never read as markup."""
    kept = clean(text).strip("\n").splitlines()
    shown = [line if len(line) <= width else line[:width] + " ..." for line in kept[:lines]]
    if len(kept) > lines:
        shown.append(f"... {len(kept) - lines} more lines")
    return Text("\n".join(shown), style=style)
