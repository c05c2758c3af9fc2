"""The tree that Debian packages unpack to: what is refused of it, and where its files go.

Invariants
- A tree that passes ``check`` has no whiteout, no opaque directory, nothing that others may write, and a bounded depth.
- No link is followed.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Final

from penstock_sandbox.backends.images import unpack
from penstock_sandbox.guest.common import walk

MOST_DEPTH: Final = 256
"""Directories above an entry, and it. Debian's own are below 30."""
_KEPT: Final = frozenset({"usr", "etc", "var"})
_MERGED: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_OTHERS_WRITE: Final = 0o022
_HIDES: Final = f"a name begins with {unpack.WHITEOUT}, which would hide a directory"


def check(tree: Path) -> None:
    """Takes the right to write from all but the owner. Raises unpack.Refused, OSError.

    The unpacker is that of images: it makes whiteouts of names that begin with ``.wh.``, which would delete what the
    base has.
    """
    if unpack.OPAQUE in os.listxattr(tree):
        raise unpack.Refused(unpack.UNSAFE, _HIDES)
    for above, name, _, folder in walk.walk(str(tree)):
        if above.count("/") >= MOST_DEPTH:
            raise unpack.Refused(unpack.UNSAFE, f"directories are nested more than {MOST_DEPTH} deep")
        opened = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            _check_entry(opened)
        finally:
            os.close(opened)


def _check_entry(opened: int) -> None:
    status, path = os.fstat(opened), f"/proc/self/fd/{opened}"
    if stat.S_ISCHR(status.st_mode):
        raise unpack.Refused(unpack.UNSAFE, f"a name begins with {unpack.WHITEOUT}, which would delete another")
    if stat.S_ISLNK(status.st_mode):
        return
    mode = stat.S_IMODE(status.st_mode)
    allowed = mode & ~_OTHERS_WRITE
    if stat.S_ISDIR(status.st_mode):
        # Else a service that is not root could not look into its own directory.
        allowed |= stat.S_IRWXU
    if allowed != mode:
        os.chmod(path, allowed)
    if stat.S_ISDIR(status.st_mode) and unpack.OPAQUE in os.listxattr(path):
        raise unpack.Refused(unpack.UNSAFE, _HIDES)


def arrange(tree: Path) -> list[str]:
    """Moves what is beside usr to where Debian has it since 12, and removes what is not taken; returns its names.

    Raises unpack.Refused for a link in the place of usr, or of a directory that is mounted: the mount would follow it.
    """
    # First, as the paths below lead through it.
    if os.path.lexists(tree / "usr") and not _is_folder(tree / "usr"):
        raise unpack.Refused(unpack.UNSAFE, "/usr is no directory")
    for name in _MERGED:
        if _is_folder(tree / name):
            _merge(tree / name, tree / "usr" / name)
    dropped = sorted(child.name for child in tree.iterdir() if child.name not in _KEPT or not _is_folder(child))
    for name in dropped:
        gone = tree / name
        shutil.rmtree(gone) if _is_folder(gone) else gone.unlink()
    for name in _MERGED:
        if os.path.lexists(tree / "usr" / name) and not _is_folder(tree / "usr" / name):
            raise unpack.Refused(unpack.UNSAFE, f"/usr/{name} is no directory")
    return [name for name in dropped if name not in _MERGED]


def _merge(source: Path, target: Path) -> None:
    """Moves a directory's content into another one, and follows no link. What is there already stays."""
    if not os.path.lexists(target):
        target.parent.mkdir(exist_ok=True)
        target.parent.chmod(0o755)
        source.rename(target)
        return
    if not _is_folder(target):
        return
    for child in source.iterdir():
        inside = target / child.name
        if not os.path.lexists(inside):
            child.rename(inside)
        elif _is_folder(child):
            _merge(child, inside)


def _is_folder(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode) if os.path.lexists(path) else False
