"""Turns a disk's refusals of files into errors with advice. A journal's errors are `journal.refusal`'s."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog

from penstock_chassis.errors import FailedPrecondition, PenstockError, Unavailable

_log = structlog.get_logger(__name__)

REFUSED: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG})
"""The disk is full or broken: the operation did not happen and may succeed once that is fixed."""

MEND: Final = "Free space on its disk or repair it, or set state_dir to another directory, then restart the service."

_NOT_OURS: Final = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP})
"""The path is not usable for this service's files."""


@contextmanager
def on_disk(what: str) -> Iterator[None]:
    """Raises Unavailable (`DISK_REFUSED`) naming `what` if an OSError inside shows that the disk refused.

    The path goes to the log only: callers must not see it.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        _log.warning("the disk refused a write", what=what, error=repr(error), path=str(error.filename or ""))
        raise Unavailable(
            f"The service's disk refused {what} ({error.strerror}), so it has no effect. Free space on the disk or "
            "repair it, then try again.",
            reason="DISK_REFUSED",
            retry_after_s=2.0,
        ) from error


def refused_start(error: BaseException, state_dir: Path) -> PenstockError | None:
    """The error for a service that cannot start because its files cannot be created; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in REFUSED | _NOT_OURS:
        return None
    place = error.filename if isinstance(error.filename, str) else str(state_dir)
    if not Path(place).is_relative_to(state_dir) and not state_dir.is_relative_to(place):
        return FailedPrecondition(
            f"{place} cannot be used: {error.strerror}. Check the path and its permissions.", reason="FILE_UNUSABLE"
        )
    if error.errno in REFUSED:
        return Unavailable(
            f"{place} cannot be written: {error.strerror}. {MEND}",
            reason="DISK_REFUSED",
        )
    return FailedPrecondition(
        f"{place} cannot be used: {error.strerror}. Check its owner, or set state_dir to a directory that this "
        "service may write to.",
        reason="STATE_DIR_UNUSABLE",
    )
