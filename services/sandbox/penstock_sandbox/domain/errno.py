"""Maps errno values from a sandbox helper or guest agent to the service's errors."""

from __future__ import annotations

import errno

from penstock_chassis.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
)
from penstock_sandbox.domain.model import ENDED_INSIDE


class Refused(Exception):
    """A sandbox's helper or guest agent refused: the kernel's ``errno`` and what it was doing."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(what)
        self.errno = number
        self.what = what


_TABLE: dict[int, tuple[type[PenstockError], str]] = {
    errno.ENOENT: (NotFound, "FILE_NOT_FOUND"),
    errno.ENOTDIR: (FailedPrecondition, "NOT_A_DIRECTORY"),
    errno.EISDIR: (FailedPrecondition, "NOT_A_FILE"),
    errno.ENXIO: (FailedPrecondition, "NOT_A_FILE"),
    errno.EINVAL: (FailedPrecondition, "NOT_A_FILE"),
    errno.ELOOP: (FailedPrecondition, "SYMLINK_IN_PATH"),
    errno.EEXIST: (FailedPrecondition, "NOT_A_DIRECTORY"),
    errno.ENOTEMPTY: (FailedPrecondition, "DIRECTORY_NOT_EMPTY"),
    errno.ESTALE: (FailedPrecondition, "FILE_REPLACED"),
    errno.EACCES: (PermissionDenied, "FILE_PERMISSION"),
    errno.EROFS: (PermissionDenied, "FILE_PERMISSION"),
    errno.EBUSY: (PermissionDenied, "FILE_PERMISSION"),
    errno.EPERM: (PermissionDenied, "FILE_PERMISSION"),
    errno.EILSEQ: (InvalidArgument, "TAR_MEMBER_REFUSED"),
    errno.EBADMSG: (InvalidArgument, "TAR_UNREADABLE"),
    errno.ENAMETOOLONG: (InvalidArgument, "PATH_TOO_LONG"),
    errno.EIO: (FailedPrecondition, "FILE_UNREADABLE"),
    errno.EFBIG: (ResourceExhausted, "TREE_TOO_LARGE"),
    errno.ENOSPC: (ResourceExhausted, "DISK_FULL"),
    errno.EDQUOT: (ResourceExhausted, "DISK_FULL"),
    errno.EMFILE: (ResourceExhausted, "DESCRIPTORS"),
    errno.EAGAIN: (ResourceExhausted, "PROCESS_LIMIT"),
}


def sandbox_lost(reason: str, sandbox_id: str = "") -> PenstockError:
    """Returns the error for callers of a sandbox lost for ``reason`` (docs/errors.md); "" = not yet known.

    Its metadata has `ended_inside` = "true" if the sandbox's own workload ended it.
    """
    metadata = {"sandbox_id": sandbox_id, "lost_reason": reason}
    if reason in ENDED_INSIDE:
        metadata["ended_inside"] = "true"
    return FailedPrecondition(
        f"the sandbox is lost: {reason}" if reason else "the sandbox is gone",
        reason="SANDBOX_LOST",
        metadata={name: value for name, value in metadata.items() if value},
    )


def file_error(refusal: Refused, path: str) -> PenstockError:
    kind, reason = _TABLE.get(refusal.errno, (Internal, "FILE_OPERATION_FAILED"))
    return kind(f"{path}: {refusal.what}", reason=reason, metadata={"path": path})
