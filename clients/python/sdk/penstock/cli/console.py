"""How the command line talks: one console, errors in one line, exit codes, text that cannot drive a terminal."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from penstock.client import errors
from penstock.client.stack import StackFailed

OK: Final = 0
FAILED: Final = 1
"""What was asked for was done and did not succeed: a rollout failed, a check found something."""
USAGE: Final = 2
"""The command line itself is wrong."""
UNREACHABLE: Final = 3
"""A service cannot be reached or started."""
REFUSED: Final = 4
"""A service or the client refused the request."""
INTERRUPTED: Final = 130

EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 done without success (a rollout failed, a check found something); 2 wrong usage;"
    " 3 a service cannot be reached or started; 4 the request was refused; 130 interrupted."
    " PENSTOCK_DEBUG=1 shows the whole of an error."
)

out = Console(highlight=False)
"""What was asked for."""
err = Console(stderr=True, highlight=False)
"""Everything about it."""

_UNREACHABLE = (errors.Unavailable, errors.SessionLost, errors.DeadlineExceeded, StackFailed)


def run(work: Coroutine[Any, Any, int]) -> None:
    """Runs a command to its exit code; an error becomes one line that says what to do."""
    try:
        code = asyncio.run(work)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(INTERRUPTED)
    except errors.PenstockError as error:
        if os.environ.get("PENSTOCK_DEBUG") == "1":
            raise
        err.print(f"[bold red]error[/]: {escape(clean(str(error)))}", soft_wrap=True)
        sys.exit(UNREACHABLE if isinstance(error, _UNREACHABLE) else REFUSED)
    sys.exit(code)


def usage_error(message: str) -> None:
    """Ends the program: the command line does not hold."""
    err.print(f"[bold red]error[/]: {escape(message)}", soft_wrap=True)
    sys.exit(USAGE)


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
