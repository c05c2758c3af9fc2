"""The account files of a container, and whom a USER[:GROUP] of an image names in them.

Purpose: the daemon opens /etc/passwd and /etc/group of each container that it starts, and waits for as long as nobody
writes if one is a pipe: the container can then neither be started nor removed. And it takes for 0 what is no number. So
the files are checked before a start, and the daemon gets numbers that are found here.

Invariants
- A file counts only where it is a plain one, or a link that leads to one.
- A number given to the daemon is nobody's name in these files: some engines look for a name first.
"""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from typing import Final

from penstock_sandbox.backends.docker.engine.daemon import GO_LINK, GO_TYPES, Daemon
from penstock_sandbox.backends.docker.engine.errors import Missing, Refused
from penstock_sandbox.backends.images.additions import RESERVED, File, id_of, packed

FOLDER: Final = "/etc"
PATHS: Final = (f"{FOLDER}/passwd", f"{FOLDER}/group")
_MOST_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Ids:
    """The numbers of a process: user, group, and further groups."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    @property
    def reserved(self) -> bool:
        """Whether one of them is that of a process which holds or serves a sandbox."""
        return not RESERVED.isdisjoint((self.uid, self.gid, *self.groups))


async def check(daemon: Daemon, container: str) -> None:
    """Raises Refused (409) unless both files are plain, or not there. The container must not run."""
    for path in PATHS:
        await _plain(daemon, container, path)


async def check_in_place(daemon: Daemon, container: str) -> None:
    """As ``check``, and raises Refused where a link leads from these paths to another place."""
    for path in (FOLDER, *PATHS):
        found = await daemon.stat(container, path)
        if found is not None and int(found["mode"]) & GO_LINK:
            raise Refused(409, f"{path} is a link")
    await check(daemon, container)


async def complete(daemon: Daemon, container: str) -> None:
    """Adds an empty file for each that a new container lacks, so that it can be made read-only."""
    missing = [File(path, b"", mode=0o644) for path in PATHS if await daemon.stat(container, path) is None]
    if missing:
        await daemon.put(container, "/", packed(missing))


async def read(daemon: Daemon, container: str) -> tuple[str, str]:
    """Returns both files; empty where there is none. Raises Refused as ``check``, and (413) beyond 4 MiB."""
    passwd, group = [await _text(daemon, container, path) for path in PATHS]
    return passwd, group


async def _plain(daemon: Daemon, container: str, path: str) -> str:
    """Returns where a file is, links followed; empty if there is none."""
    found, at = await daemon.stat(container, path), path
    if found is not None and int(found["mode"]) & GO_LINK:
        # The daemon has resolved it to its end.
        at = str(found["linkTarget"])
        found = await daemon.stat(container, at)
    if found is None:
        return ""
    if int(found["mode"]) & GO_TYPES:
        raise Refused(409, f"{path} is not a plain file")
    return at


async def _text(daemon: Daemon, container: str, path: str) -> str:
    at = await _plain(daemon, container, path)
    if not at:
        return ""
    try:
        whole = await daemon.fetch(container, at, _MOST_BYTES)
    except Missing:
        return ""
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        for member in archive:
            if (file := archive.extractfile(member) if member.isreg() else None) is not None:
                return file.read().decode(errors="surrogateescape")
    return ""


def ids_of(user: str, passwd: str, group: str) -> Ids | None:
    """Returns the ids that USER[:GROUP] stands for, each a name or a number; an empty user is root. None: unknown.

    As the daemon finds them, where it reads the files as they are meant: a number without an account has the group 0,
    and further groups are those that list the account, unless a group is named.
    """
    name, _, group_name = (user or "0").partition(":")
    accounts, groups = _rows(passwd, 4), _rows(group, 3)
    number = id_of(name)
    account = next(
        (row for row in accounts if (id_of(row[2]) == number if number is not None else row[0] == name)), None
    )
    gid, further = 0, tuple[int, ...]()
    if account is None and name == "root":
        number = 0  # of an image without accounts, as for sandboxes
    if account is not None:
        found, own = id_of(account[2]), id_of(account[3])
        if found is None or own is None:
            return None
        number, gid = found, own
        members = [row for row in groups if account[0] in ",".join(row[3:4]).split(",")]
        listed = [id_of(row[2]) for row in members]
        if not group_name:
            further = tuple(sorted({one for one in listed if one is not None} - {gid}))
    if number is None:
        return None
    if group_name:
        named = id_of(group_name)
        if named is None:
            named = next((id_of(row[2]) for row in groups if row[0] == group_name), None)
        if named is None:
            return None
        gid = named
    ids = Ids(number, gid, further)
    return ids if _unambiguous(accounts, {number}) and _unambiguous(groups, {gid, *further}) else None


def _unambiguous(rows: list[list[str]], numbers: set[int]) -> bool:
    return not any(id_of(row[0].strip()) in numbers and id_of(row[2]) != id_of(row[0].strip()) for row in rows)


def _rows(text: str, least: int) -> list[list[str]]:
    # Lines end where they do for the C library: other signs are part of a field.
    rows = [line.split(":") for line in text.split("\n")]
    return [row for row in rows if len(row) >= least]
