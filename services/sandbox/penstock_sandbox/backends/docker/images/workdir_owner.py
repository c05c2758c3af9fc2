"""Hands over an image's working directory to the sandbox's user when the image is prepared.

Purpose: task images hold their repository as root's, in their declared working directory (``/testbed``, ``/app``); the
agent must be able to write there, and is not root. So everything below that directory becomes the user's, in a layer of
the prepared image: once per image, and no sandbox waits for it again.

Invariants
- Nothing of the image is run; files are read from one container that never starts and written to another.
- No system directory is ever handed over (``additions.workdir_of``).
- Content, times and modes stay; a file's set-user-id or set-group-id bit does not. Files that the user owns already,
  devices and sockets are left unchanged.
"""

from __future__ import annotations

import posixpath
import stat
import tarfile
from collections.abc import Iterable, Iterator

from penstock_sandbox.backends.docker.images.changes import Source
from penstock_sandbox.backends.host.layers import Collector
from penstock_sandbox.backends.images.additions import Account

_CHUNK = 256 * 1024


def handed_over(chunks: Iterable[bytes], folder: str, account: Account) -> Iterator[bytes]:
    """Yields, from the daemon's tar of ``folder``, a tar from the root of all that changes its owner; in pieces."""
    sink = Collector()
    prefix = posixpath.dirname(folder).strip("/")
    with (
        tarfile.open(fileobj=Source(chunks), mode="r|") as source,
        tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in source:
            if not (member.isreg() or member.isdir() or member.issym() or member.islnk() or member.isfifo()):
                continue
            if (member.uid, member.gid) == (account.uid, account.gid):
                continue
            _adopt(member, prefix, account)
            target.addfile(member, source.extractfile(member) if member.isreg() else None)
            while sink.size >= _CHUNK:
                yield sink.take()
    yield sink.take()


def _adopt(member: tarfile.TarInfo, prefix: str, account: Account) -> None:
    member.name = f"{prefix}/{member.name}".strip("/")
    if member.islnk():
        member.linkname = f"{prefix}/{member.linkname}".strip("/")
    member.uid, member.gid, member.uname, member.gname = account.uid, account.gid, "", ""
    if not member.isdir():
        member.mode &= ~(stat.S_ISUID | stat.S_ISGID)
    # The archive's extra headers are made again from the member; kernel attributes are only root's to give.
    kept = ("mtime", "SCHILY.xattr.user.")
    member.pax_headers = {key: value for key, value in member.pax_headers.items() if key.startswith(kept)}
