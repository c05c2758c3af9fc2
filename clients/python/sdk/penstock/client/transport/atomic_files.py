"""Writes files on the user's disk atomically: complete or absent. Errors name the file."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from penstock.client.errors import ConfigurationError

NOT_WRITTEN: Final = "FILE_NOT_WRITTEN"
_OF_FILES: Final = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM),
        *(errno.ENOTDIR, errno.EISDIR, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP, errno.EEXIST),
    }
)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises ConfigurationError `FILE_NOT_WRITTEN`, which names `path`, for OS errors inside."""
    try:
        yield
    except OSError as error:
        if error.errno not in _OF_FILES:
            raise
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}. Free space on its disk, repair it, or choose another path.",
            reason="FILE_NOT_WRITTEN",
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Replaces a file atomically by what is written inside; at the end it is on the disk, and any failure changes
    nothing. Its directory is created.

    Raises:
        ConfigurationError: `FILE_NOT_WRITTEN`.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.partial")
        try:
            with temporary.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_whole(path: Path, content: bytes) -> None:
    """As `replacing`, for a content that is known."""
    with replacing(path) as stream:
        stream.write(content)
