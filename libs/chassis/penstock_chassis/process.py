"""Binds this process's lifetime to its parent's."""

import ctypes
import os
import signal
import sys

from penstock_chassis.errors import Unsupported

_PR_SET_PDEATHSIG = 1  # prctl(2)


def set_parent_death_signal(parent: int | None) -> None:
    """Asks the kernel to send SIGTERM to this process when its parent ends, however it ends.

    The kernel watches the parent's thread that started this process. If the parent ended before this call, the signal
    is sent at once.

    Args:
        parent: pid that the caller expects as its parent; None takes the current parent, and then a parent that ended
            before this call goes unnoticed.

    Raises:
        Unsupported: `PARENT_DEATH_UNSUPPORTED` on anything but Linux.
        OSError: the kernel refused.
    """
    if sys.platform != "linux":
        raise Unsupported(
            "The setting that stops a service with its parent needs Linux.", reason="PARENT_DEATH_UNSUPPORTED"
        )
    expected = os.getppid() if parent is None else parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGTERM)
