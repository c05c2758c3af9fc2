"""The working directory of an image, handed over to the sandbox's user when the image is made ready.

Purpose: images for tasks hold their repository as root's, in the directory that they declare as their working directory
(``/testbed``, ``/app``); there the agent must be able to write, and it is not root. So everything below that directory
becomes the user's, in a layer of the prepared image: once for each image, and no sandbox waits for it again.

Invariants
- Nothing of the image is run; files are read from one container that never starts and written to another.
- No directory of the system is ever handed over; such an image, like one that names none, gets ``WORKDIR``.
- Content, times and modes stay; a set-user-id or set-group-id bit of a file does not. What is the user's already is
  left as it is, and so are devices and sockets.
"""

from __future__ import annotations

import posixpath
import stat
import tarfile
from collections.abc import Iterable, Iterator

from penstock_sandbox.backends.docker.additions import Account
from penstock_sandbox.backends.docker.changes import Source
from penstock_sandbox.backends.docker.places import OURS, WORKDIR
from penstock_sandbox.backends.local.layers import Collector

_CHUNK = 256 * 1024
# Themselves not, but directories below them.
_SHARED = frozenset(
    ("/", "/home", "/media", "/mnt", "/opt", "/srv", "/usr", "/usr/local", "/usr/src", "/var", "/var/lib", "/var/opt")
)
# With all that is below them.
_SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", OURS, "/proc", "/run", "/sbin"),
    *("/sys", "/tmp", "/usr/bin", "/usr/include", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/sbin"),  # noqa: S108
    *("/usr/local/bin", "/usr/local/lib", "/usr/local/sbin", "/usr/share", "/var/cache", "/var/lib/apt"),
    *("/var/lib/dpkg", "/var/log", "/var/run", "/var/tmp"),  # noqa: S108 - paths in the sandbox
)


def workdir_of(declared: str) -> str:
    """The working directory of sandboxes of an image that declares this one (empty: none)."""
    if not declared.startswith("/"):
        return WORKDIR
    # Two slashes at the start are one here, whatever POSIX allows.
    path = posixpath.normpath(f"/{declared.lstrip('/')}")
    if path in _SHARED or any(path == folder or path.startswith(f"{folder}/") for folder in _SYSTEM):
        return WORKDIR
    return path


def handed_over(chunks: Iterable[bytes], folder: str, account: Account) -> Iterator[bytes]:
    """From the tar of ``folder`` as the daemon gives it, the tar, from the root, of what changes owner; in pieces."""
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
    # What the archive says of it beside is said anew from the member; attributes of the kernel's are root's to give.
    kept = ("mtime", "SCHILY.xattr.user.")
    member.pax_headers = {key: value for key, value in member.pax_headers.items() if key.startswith(kept)}
