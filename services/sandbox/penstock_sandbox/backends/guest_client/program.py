"""The guest agent as one text: a Python program (3.8 or newer, standard library only) to be put into a sandbox.

Purpose: the program is written as modules, one reason to change each, and shipped as one file: a small loader with the
modules' sources. ``python3 FILE serve|attach|deliver ...`` runs it; ``guest.main`` and ``guest.delivery`` define its
options.

Invariants: the text depends on these sources alone; a module in it is compiled at its first import, so that ``attach``
and ``deliver``, which run for every connection, do not pay for what only ``serve`` needs.

`pack` makes the archive of toolboxes that goes the same way.
"""

from __future__ import annotations

import functools
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import penstock_sandbox
from penstock_sandbox.domain.backend import MountedToolbox

_COMPRESSION: Final = 1  # most content is dense already, and a fast line wants a fast compressor

PARTS = (
    "penstock_sandbox.guest.handshake",
    "penstock_sandbox.guest.delivery",
    "penstock_sandbox.guest.frames",
    "penstock_sandbox.guest.confinement",
    "penstock_sandbox.guest.system",
    "penstock_sandbox.guest.supervisor",
    "penstock_sandbox.guest.loop",
    "penstock_sandbox.guest.connections",
    "penstock_sandbox.guest.replies",
    "penstock_sandbox.guest.processes",
    "penstock_sandbox.guest.transfers",
    "penstock_sandbox.guest.endpoint",
    "penstock_sandbox.guest.server",
    "penstock_sandbox.guest.forkserver",
    "penstock_sandbox.guest.main",
    "penstock_sandbox.guest.common.filters",
    "penstock_sandbox.guest.common.syscalls",
    "penstock_sandbox.guest.common.children",
    "penstock_sandbox.guest.common.loopback",
    "penstock_sandbox.guest.common.pdeathsig",
    "penstock_sandbox.guest.common.files",
    "penstock_sandbox.guest.common.walk",
    "penstock_sandbox.guest.common.trees",
)
"""The modules of the program."""

_PACKAGES = ("penstock_sandbox", "penstock_sandbox.guest", "penstock_sandbox.guest.common")

_LOADER = '''\
"""Serves one sandbox for Penstock's sandbox service; made from penstock_sandbox.guest."""
import importlib.machinery
import sys

SOURCES = {sources}


class Loader:
    def find_spec(self, name, path=None, target=None):
        if name in SOURCES:
            return importlib.machinery.ModuleSpec(name, self, is_package=SOURCES[name] is None)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        source = SOURCES[module.__name__]
        if source is not None:
            exec(compile(source, module.__name__, "exec", dont_inherit=True), module.__dict__)


sys.meta_path.insert(0, Loader())
if sys.argv[1:2] == ["deliver"]:
    from penstock_sandbox.guest.delivery import main
else:
    from penstock_sandbox.guest.main import main

sys.exit(main())
'''


def source(name: str) -> str:
    root = Path(penstock_sandbox.__file__).parent.parent
    return root.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8")


@functools.cache
def text() -> str:
    """Returns the whole program."""
    sources: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    sources.update((name, source(name)) for name in PARTS)
    listed = "".join(f"    {name!r}: {content!r},\n" for name, content in sources.items())
    return _LOADER.replace("{sources}", "{\n" + listed + "}")


def folders(toolboxes: Sequence[MountedToolbox]) -> dict[str, Path]:
    """Maps paths inside to the host's directories of toolboxes and their runtimes."""
    found = {toolbox.mount_path: toolbox.source for toolbox in toolboxes}
    for toolbox in toolboxes:
        found |= toolbox.runtimes
    return found


def pack(toolboxes: Sequence[MountedToolbox], archive: IO[bytes]) -> None:
    """Writes them as a compressed tar whose names are relative to the root, and rewinds it.

    For sandboxes that do not share this machine's files. Unpacked files belong to root, at the paths where a local
    sandbox has them mounted.
    """

    def as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        member.mtime = int(member.mtime)  # a fraction would need an extra header per file
        return member

    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=_COMPRESSION) as tar:
        for target, source in folders(toolboxes).items():
            tar.add(source, target.lstrip("/"), filter=as_root)
    archive.seek(0)
