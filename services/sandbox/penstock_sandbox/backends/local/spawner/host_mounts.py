"""What the spawner's mount namespace has of the host: only the mounts that sandboxes need.

Purpose: bubblewrap copies every mount of the namespace that it comes from, and reads the list of them for each mount
that it makes. On a host with a hundred mounts, as of containers, that is more than half of its time.

Invariants
- The namespace is the spawner's own and gets mounts from the host, but gives it none: nothing is unmounted on the host.
- A mount stays if a needed path is at or below its mount point, or if it is below a needed tree.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from penstock_sandbox.guest.common import syscalls

# How the kernel writes what would end a field of its list; the backslash last.
_ESCAPED = ((rb"\040", b" "), (rb"\011", b"\t"), (rb"\012", b"\n"), (rb"\134", b"\\"))


class HostMounts:
    """The mounts of the caller's own namespace. ``trees`` are needed with all that is mounted below them, ``paths``
    without it; neither has a link in it."""

    def __init__(self, trees: Sequence[str], paths: Sequence[str]) -> None:
        self._trees = [os.fsencode(path) for path in trees]
        self._paths = [os.fsencode(path) for path in paths]
        self._list = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)

    def fileno(self) -> int:
        """A descriptor that has an error to poll (POLLERR, POLLPRI) when a mount was made or removed."""
        return self._list

    def keep(self, tree: str) -> None:
        """Adds a tree that is needed from now on."""
        self._trees.append(os.fsencode(tree))

    def detach_others(self) -> None:
        """Detaches what is not needed; what the kernel does not let go stays."""
        for point in self._points():
            if not self._is_needed(point):
                try:
                    syscalls.detach(point)
                except OSError:
                    continue  # hidden by another mount, or locked by the owner of the container that this runs in

    def _points(self) -> Iterable[bytes]:
        os.lseek(self._list, 0, os.SEEK_SET)
        text = b""
        while part := os.read(self._list, 65_536):
            text += part
        for line in text.splitlines():
            point = line.split(b" ", 5)[4]
            for escaped, meant in _ESCAPED:
                point = point.replace(escaped, meant)
            yield point

    def _is_needed(self, point: bytes) -> bool:
        return any(_is_within(path, point) for path in (*self._trees, *self._paths)) or any(
            _is_within(point, tree) for tree in self._trees
        )


def _is_within(path: bytes, folder: bytes) -> bool:
    return path == folder or path.startswith(folder.rstrip(b"/") + b"/")
