"""Limits a sandbox's share of resources that the kernel counts per user, since others of its user need the rest.

Purpose: sandboxes from one snapshot share one host user, and those of a service that is not root share the service's.
The kernel counts per user, so one sandbox could starve its siblings, or the service itself.

Invariants: a limit is only ever lowered, and a lower one stays. Called by a sandbox's helper before the agent's
processes run.
"""

from __future__ import annotations

import errno
import os
import resource

_SIGNALS = 4096
"""Maximum queued signals and timers. A user namespace counts its own, so each sandbox has as many."""
_DIVIDED = ("inotify_instances", "inotify_watches", "fanotify_groups", "fanotify_marks")
_SHARE = 4
_LEAST = 16


def lower_limits(open_files: int) -> None:
    """Lowers the caller's limits for good: fewer open files than the service may have, and no core dumps.

    Descriptors in flight in sockets are counted per user, and sending is refused to processes with a lower limit than
    that: if the service had the sandbox's limit, an agent with as many in flight would stop it from starting anything.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = min(most - most // 8, open_files)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    signals = resource.getrlimit(resource.RLIMIT_SIGPENDING)[1]
    signals = _SIGNALS if signals == resource.RLIM_INFINITY else min(signals, _SIGNALS)
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (signals, signals))


def limit_watches(proc: int) -> None:
    """Limits what the caller's user namespace, in which it has all rights, may watch to a part of its user's limit.

    ``proc`` is a descriptor of the machine's /proc. Nothing is changed where a kernel does not count one of these, or
    where this machine is itself a container, whose /proc/sys is read-only.
    """
    for name in _DIVIDED:
        try:
            whole = _number(proc, f"sys/fs/{name.replace('_', '/max_user_', 1)}")
            file = os.open(f"sys/user/max_{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EROFS, errno.EACCES):
                continue
            raise
        try:
            os.write(file, str(max(_LEAST, whole // _SHARE)).encode())
        finally:
            os.close(file)


def _number(proc: int, path: str) -> int:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        return int(os.read(file, 64))
    finally:
        os.close(file)
