"""The end of the service is the end of its vLLM, also after a kill -9, which tells nobody.

vLLM's workers notice when their engine core dies; nothing of vLLM notices when the core's parent does, and the
accelerator's memory would stay taken. So a worker watches for it.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from pathlib import Path


def follow(service: int) -> bool:
    """Kill the engine core that this process belongs to, or is, when the process `service` ends.

    False, and nothing happens, where the core is no child of the service: on other machines, or started by others.
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
        # The second field is a name in parentheses, and may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return -1
