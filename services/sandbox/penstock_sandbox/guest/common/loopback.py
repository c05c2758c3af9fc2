"""The one port that a sandbox's programs may connect to. This module is part of a program for Python 3.8."""

from __future__ import annotations

import socket

_BACKLOG = 128


def listen(port: int) -> socket.socket:
    """Listens on a port of the loopback of the caller's network namespace. Raises OSError when it is in use."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
