"""A directory for what a service holds while it runs: pushes on their way, weights and adapters in force.

It is gone with the service. After a kill -9 the next service removes it: a lock that its owner held tells that nobody
lives there any more.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "running-"
_LOCK = "lock"


@contextmanager
def workspace(state_dir: Path) -> Iterator[Path]:
    """A new directory under `state_dir`, which is made if it is not there; removed on the way out."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in state_dir.glob(f"{_PREFIX}*"):
        _remove_if_left(left)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=state_dir))
    with (directory / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _remove_if_left(directory: Path) -> None:
    try:
        with (directory / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
    except OSError:
        return  # somebody lives there, or is just moving in or out
