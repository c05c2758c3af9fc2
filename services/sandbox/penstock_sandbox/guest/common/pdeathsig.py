"""Checks from outside whether the process whose end ends the sandbox is dying.

Used by sandbox helpers and guest agents: this module is part of a program for Python 3.8.
"""

from __future__ import annotations

import os

_PF_EXITING = 0x4


def is_dying(proc: int, pid: int) -> bool:
    """Whether it is gone, or dying, which kills all others: the kernel sets a flag before that.

    ``proc`` is an open /proc in which its number is ``pid``.
    """
    try:
        stat = os.open(f"{pid}/stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    except FileNotFoundError:
        return True
    try:
        fields = os.read(stat, 4096).rpartition(b")")[2].split()
    except ProcessLookupError:
        return True
    finally:
        os.close(stat)
    return bool(int(fields[6]) & _PF_EXITING)
