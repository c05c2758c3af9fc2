"""What several of the processes that share the tests use, and one of them builds."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

_RUN: Final = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
"""This run's name, which the processes that share it have in common."""


def once_a_run(build: Callable[[], None], stamp: Path) -> None:
    """Builds, unless another process of this run has; waits while one does.

    A second build would write the files anew while others read or execute them. `stamp` is a file beside what is
    built, which no tool removes or packs.
    """
    with stamp.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if file.read() == _RUN:
            return
        build()
        file.truncate(0)
        file.write(_RUN)
