"""Ties to the process that started this one."""

import ctypes
import os
import signal
import sys

from penstock_chassis.errors import Unsupported

_PR_SET_PDEATHSIG = 1  # prctl(2)


def set_parent_death_signal(parent: int | None = None, signum: signal.Signals = signal.SIGTERM) -> None:
    """Asks the kernel to send `signum` to this process when its parent ends, however it ends.

    The kernel watches the thread of the parent that started this process. A parent that ended before this call is
    noticed, and the signal is sent at once.

    Args:
        parent: pid that the caller expects as its parent; None takes whoever is the parent now, which cannot notice
            one that ended before this process came this far.
        signum: what to send.

    Raises:
        Unsupported: `PARENT_DEATH_UNSUPPORTED` on anything but Linux.
        OSError: the kernel refused.
    """
    if sys.platform != "linux":
        raise Unsupported("Following the parent's death needs Linux.", reason="PARENT_DEATH_UNSUPPORTED")
    expected = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != expected:
        os.kill(os.getpid(), signum)
