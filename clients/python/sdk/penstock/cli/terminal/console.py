"""Output of the command line: one console, one-line errors, exit codes, and text without terminal control sequences."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import orjson
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from penstock.analysis.readable_calls import counted as counted
from penstock.client import errors
from penstock.local.stack import StackFailed

OK: Final = 0
FAILED: Final = 1
"""The command ran without success: a rollout failed, a check found something."""
USAGE: Final = 2
"""The command line, or a file that it names, is invalid, whether client or service found that."""
UNREACHABLE: Final = 3
"""A service cannot be reached or started."""
REFUSED: Final = 4
"""A service or the client refused the request."""
INTERRUPTED: Final = 130
CLOSED: Final = 141
"""The reader of the output has closed it."""
TERMINATED: Final = 143
"""Ended by SIGTERM; another signal gives 128 plus its number."""

EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 done without success (a rollout failed, a check found something, nothing matched, two"
    " things differ);"
    " 2 wrong usage, or an invalid file;"
    " 3 a service cannot be reached or started; 4 the request was refused; 130 interrupted;"
    " 141 the reader of the output has closed it; 143 ended by SIGTERM."
    " PENSTOCK_DEBUG=1 shows the full error."
)


_PADDING: Final = re.compile(r" +\n")


def _end_unread() -> NoReturn:
    """Ends the program: the output has no reader any more."""
    # Buffered output has nowhere to go, and the interpreter would report that at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(CLOSED)


class _Unpadded(Console):
    """For output that is no terminal: strips the blanks with which a table fills its last column."""

    def print(self, *objects: Any, **options: Any) -> None:
        with self.capture() as captured:
            super().print(*objects, **options)
        try:
            self.file.write(_PADDING.sub("\n", captured.get()))
            self.file.flush()
        except BrokenPipeError:
            _end_unread()


def _console(*, stderr: bool) -> Console:
    """As wide as the terminal; in a pipe or a file nothing is wrapped, cut or padded."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else _Unpadded(stderr=stderr, highlight=False, width=100_000)


out = _console(stderr=False)
"""The command's result."""
err = _console(stderr=True)
"""Everything about it: errors, progress."""

_UNUSUAL: Final = re.compile(r"[^ -~]+")

T = TypeVar("T")

_UNREACHABLE = (errors.Unavailable, errors.SessionLost, errors.DeadlineExceeded, StackFailed)


_MISSING_HERE = ("PYARROW_MISSING", "MATPLOTLIB_MISSING")
"""Reasons for missing software on this side, which no service refused."""


def run(work: Coroutine[Any, Any, int]) -> None:
    """Runs a command and exits with its code; an error becomes one line with advice.

    SIGTERM and SIGHUP cancel it as an interrupt does, so that whatever it started ends with it.
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
    except BrokenPipeError:
        _end_unread()
    except errors.PenstockError as error:
        if os.environ.get("PENSTOCK_DEBUG") == "1":
            raise
        err.print(f"[bold red]error[/]: {escape(clean(_lines(error)))}", soft_wrap=True)
        if isinstance(error, errors.InvalidArgument) or error.reason in _MISSING_HERE:
            sys.exit(USAGE)
        sys.exit(UNREACHABLE if isinstance(error, _UNREACHABLE) else REFUSED)
    except OSError as error:
        if os.environ.get("PENSTOCK_DEBUG") == "1" or not isinstance(error.filename, str):
            raise
        err.print(f"[bold red]error[/]: {escape(clean(f'{error.filename}: {error.strerror}'))}", soft_wrap=True)
        sys.exit(REFUSED)
    sys.exit(code)


async def _cancelled_by_signals(work: Coroutine[Any, Any, int], caught: list[int]) -> int:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def end(number: int) -> None:
        caught.append(number)
        if task is not None:
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup SIGHUP stays ignored
            loop.add_signal_handler(number, end, number)
    return await work


def emit(body: object) -> None:
    """Prints a line of JSON on standard output and flushes: the output of `--json`. docs/cli.md has each command's
    shape.

    Characters that a terminal might interpret are escaped: it is the same JSON.
    """
    text = orjson.dumps(body, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
    sys.stdout.buffer.write(_UNUSUAL.sub(_escaped, text).encode() + b"\n")
    sys.stdout.buffer.flush()


def _escaped(match: re.Match[str]) -> str:
    """Escapes what JSON leaves unescaped and a screen might interpret: controls, directions, invisible characters."""
    return match[0] if match[0].isprintable() else "".join(map(_escape, match[0]))


def _escape(letter: str) -> str:
    if letter.isprintable():
        return letter
    units = letter.encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def read(load: Callable[[Path], T], file: Path) -> T:
    """Loads a file that the command line names; an invalid one ends the program as wrong usage."""
    try:
        return load(file)
    except errors.PenstockError as error:
        usage_error(_lines(error))


def _lines(error: errors.PenstockError) -> str:
    """Returns an error in one line, or with several violations, one line for each."""
    details = [f"{item.field}: {item.description}" for item in error.violations]
    if len(details) < 2 or "; ".join(details[:2]) in error.message:
        return str(error)
    return "\n  ".join((error.message, *details))


def usage_error(message: str) -> NoReturn:
    """Ends the program: the command line is invalid."""
    err.print(f"[bold red]error[/]: {escape(clean(message))}", soft_wrap=True)
    sys.exit(USAGE)


def columns(*headers: str | tuple[str, JustifyMethod]) -> Table:
    """Returns a table without borders whose cells wrap on a narrow terminal and are never cut."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in headers:
        if isinstance(header, str):
            table.add_column(header, overflow="fold")
        else:
            table.add_column(header[0], justify=header[1], overflow="fold")
    return table


def clean(text: str) -> str:
    """Returns an agent's or a model's text without characters that a terminal would interpret."""
    return "".join(
        letter if letter in "\n\t" or (letter.isprintable() or letter == " ") else "\N{REPLACEMENT CHARACTER}"
        for letter in text.replace("\r\n", "\n")
    )


def quoted(text: str, style: str = "", *, lines: int = 12, width: int = 400) -> Text:
    """Returns foreign text for the console: cleaned, bounded, never parsed as markup."""
    kept = text.replace("\r\n", "\n").strip("\n").split("\n", lines)  # cut first: it may be megabytes
    shown = [clean(line[:width]) + (" ..." if len(line) > width else "") for line in kept[:lines]]
    if len(kept) > lines:
        shown.append(f"... {kept[lines].count(chr(10)) + 1} more lines")
    return Text("\n".join(shown), style=style)


@dataclass(frozen=True, slots=True)
class Indented:
    """Indents a renderable: wrapped lines, too, and without trailing blanks."""

    content: RenderableType
    by: int = 2

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        inner = options.update(width=max(1, options.max_width - self.by))
        for line in console.render_lines(self.content, inner, pad=False):
            yield Segment(" " * self.by)
            yield from line
            yield Segment.line()
