"""The directory of a stack over many machines, which one stack has at a time."""

import errno
import logging
from pathlib import Path
from typing import Final

from penstock.client.transport.private_files import private_directory
from penstock.local.processes import hold

_log = logging.getLogger("penstock.stack")
_NO_LOCKS: Final = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""How a file system says that it has none, as some shared ones do."""


def hold_directory(path: Path) -> int | None:
    """Takes a directory, made where it is absent, for one stack: another one would replace its authority and orders.

    Returns:
        A descriptor: the directory is held until it is closed; None = its file system has no locks, which is logged.

    Raises:
        ConfigurationError: another stack has it (`STATE_DIR_IN_USE`), or others than this user can write to it.
    """
    private_directory(path)
    try:
        return hold(
            path, "Choose another directory: --state-dir DIR on the command line, Stack(state_dir=DIR) in Python."
        )
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning("%s cannot be locked (%s): no other stack may use it", path, error.strerror)
        return None
