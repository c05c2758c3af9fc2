"""Ends vLLM with its service, also after a kill -9, which notifies no process.

vLLM's workers notice when their engine core dies, but nothing in vLLM notices the death of the core's parent: the
accelerator's memory would stay allocated. So a worker watches for it.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from pathlib import Path


def follow(service: int) -> bool:
    """Kill the engine core of this process (perhaps itself) when the process `service` ends.

    Returns False, and does nothing, if the core is not a child of the service: on other machines, or when started by
    others.
    """
    core = os.getpid() if os.getppid() == service else os.getppid()
    if core != os.getpid() and _parent_of(core) != service:
        return False
    try:
        watched = os.pidfd_open(service)
    except OSError:
        return False
    threading.Thread(target=_wait, args=(watched, core), name="penstock-follow", daemon=True).start()
    return True


def _wait(watched: int, core: int) -> None:
    select.select([watched], [], [])
    os.kill(core, signal.SIGKILL)


def _parent_of(pid: int) -> int:
    try:
        # The second field is a name in parentheses, with any characters.
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return -1
