"""Private directories and files of this user: a state directory holds tokens, and files planted there by others would
be followed, appended to or trusted."""

import os
import stat
from pathlib import Path
from typing import Final

from penstock.client.errors import ConfigurationError

_OTHERS_WRITE: Final = 0o022


def private_directory(path: Path) -> None:
    """Creates a directory for its owner only; an existing one must be this user's, and writable by nobody else.

    Raises:
        ConfigurationError: `STATE_DIR_NOT_PRIVATE`, it is not; or it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.stat()
    except OSError as error:
        raise _refused(path, f"cannot be used: {error.strerror}") from None
    if found.st_uid != os.geteuid():
        raise _refused(path, f"belongs to another user (uid {found.st_uid})")
    if found.st_mode & _OTHERS_WRITE:
        raise _refused(path, f"can be written to by others (mode {stat.S_IMODE(found.st_mode):04o})")


def open_private(path: Path, flags: int) -> int:
    """Opens or creates a file of this user in such a directory, readable by its owner only. Links are not followed.

    Raises:
        ConfigurationError: `STATE_DIR_NOT_PRIVATE`, it is a link, no regular file, or another user's.
    """
    try:
        # Non-blocking: a pipe that somebody planted there would block the open.
        descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        what = "is a link" if path.is_symlink() else f"cannot be opened: {error.strerror}"
        raise _refused(path, what) from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise _refused(path, "is not a regular file that you own")
    return descriptor


def _refused(path: Path, what: str) -> ConfigurationError:
    advice = "choose a directory that only you can write to (chmod go-w DIR), or a new one: --state-dir DIR"
    return ConfigurationError(f"{path} {what}: {advice}", reason="STATE_DIR_NOT_PRIVATE")
