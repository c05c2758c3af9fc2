"""Programs that a sandbox helper or a guest agent starts: what they inherit, how they end, what they used.

Used by sandbox helpers, their spawner, guest agents and the service: this module is part of a program for Python 3.8.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import struct
import termios
from typing import Any, Dict, Optional, Set, Tuple

RESET_SIGNALS = (
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)
"""What Python or those that serve changed, and a program expects to find as usual."""


def close_others(kept: Set[int]) -> None:
    """Closes every descriptor but ``kept``: a copy in a child would keep another process's pipe open."""
    try:
        highest = max(map(int, os.listdir("/proc/self/fd")))
    except OSError:
        highest = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    low = 0
    for number in (*sorted(kept), highest + 1):
        if low < number:  # an empty range would mean all descriptors
            os.closerange(low, number)
        low = number + 1


def set_window(terminal: int, rows: int, columns: int) -> None:
    """Sets a terminal's dimensions."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def ended(status: int) -> Tuple[Optional[int], Optional[int]]:
    """Returns the exit code, or the signal, of a status from ``wait``; the other one is None."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def was_killed(code: Optional[int], number: Optional[int]) -> bool:
    """Whether SIGKILL ended a program, or, as a shell reports it, that program's last command."""
    return number == signal.SIGKILL or code == 128 + signal.SIGKILL


def used(usage: resource.struct_rusage) -> Dict[str, Any]:
    """Returns a reaped child's ``cpu_s`` and ``peak_bytes``, for its exit.

    Before it executed its program it was a copy of this process, or shared its memory, which counts: at or under this
    process's own peak the figure means nothing, and is None.
    """
    floor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024 if usage.ru_maxrss > floor else None,
    }
