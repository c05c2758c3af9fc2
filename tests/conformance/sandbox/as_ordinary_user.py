"""Runs the sandbox service as an ordinary user (the first argument), for tests that run as root.

The interpreter and its packages may lie under a directory that is closed to others, such as root's home. In a mount
namespace of this process such a directory is covered by an empty one in which only they are shown, at their own paths.
"""

import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWNS, MS_BIND, MS_REC, MS_SLAVE = 0x20000, 0x1000, 0x4000, 0x80000

libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    if libc.mount(source.encode(), target.encode(), kind, flags, data) < 0:
        raise OSError(ctypes.get_errno(), f"mount {target}")


def closed_parent(path: Path) -> Path | None:
    """The uppermost directory on the way to `path` that other users may not enter."""
    return next((parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001), None)


def main() -> None:
    uid = int(sys.argv[1])
    needed = {Path(path) for path in (sys.base_prefix, sys.prefix, *sys.path) if path and Path(path).is_dir()}
    if libc.unshare(CLONE_NEWNS) < 0:
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", "/", None, MS_REC | MS_SLAVE)
    closed: dict[Path, list[tuple[Path, int]]] = {}
    for path in sorted(needed):
        parent = closed_parent(path)
        if parent is not None:
            closed.setdefault(parent, []).append((path, os.open(path, os.O_PATH)))
    for parent, shown in closed.items():
        mount("cover", str(parent), b"tmpfs", 0, b"mode=755")
        for path, descriptor in shown:
            if not path.exists():
                path.mkdir(parents=True)
                mount(f"/proc/self/fd/{descriptor}", str(path), None, MS_BIND | MS_REC)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.execv(sys.executable, [sys.executable, "-m", "penstock_sandbox"])


main()
