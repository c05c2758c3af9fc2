"""Toolboxes for sandboxes that do not share this machine's files: packed, sent, and unpacked there.

Invariants: what is unpacked belongs to root, at the paths where a local sandbox would see it mounted.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from penstock_sandbox.backends.base import MountedToolbox

_COMPRESSION: Final = 1  # most of it is already dense, and a fast line wants a fast compressor


def folders(toolboxes: Sequence[MountedToolbox]) -> dict[str, Path]:
    """Where what is to be there: paths inside, and the host's directories, toolboxes and their runtimes."""
    found = {toolbox.mount_path: toolbox.source for toolbox in toolboxes}
    for toolbox in toolboxes:
        found |= toolbox.runtimes
    return found


def pack(toolboxes: Sequence[MountedToolbox], archive: IO[bytes]) -> None:
    """Write them as a compressed tar whose names are relative to the root, and rewind it."""

    def as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        member.mtime = int(member.mtime)  # a fraction would take another header for each file
        return member

    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=_COMPRESSION) as tar:
        for target, source in folders(toolboxes).items():
            tar.add(source, target.lstrip("/"), filter=as_root)
    archive.seek(0)
