"""What is added to an image so that it can be a sandbox: files as tars, and the account of its user.

Invariants: the user is never root, has an id that nobody else in the image has, and keeps the home that the image gave
it where the image has it already.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass

USER = "agent"

_FIRST_UID, _LAST_UID = 1000, 60_000


@dataclass(frozen=True, slots=True)
class Account:
    """The user that a sandbox's processes run as."""

    uid: int
    gid: int
    home: str
    shell: str


@dataclass(frozen=True, slots=True)
class File:
    """A file, or (``content`` None) a directory, of root's unless it has an ``owner``, at an absolute path."""

    path: str
    content: bytes | None
    mode: int = 0o755
    owner: Account | None = None


def packed(files: Iterable[File]) -> bytes:
    """Files as a tar."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for file in files:
            member = tarfile.TarInfo(file.path)
            member.mode = file.mode
            if file.owner is not None:
                member.uid, member.gid = file.owner.uid, file.owner.gid
            if file.content is None:
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
            else:
                member.size = len(file.content)
                archive.addfile(member, io.BytesIO(file.content))
    return sink.getvalue()


def account_in(passwd: str, group: str, shell: str) -> tuple[Account, str, str]:
    """The account of the sandbox's user, and both files with it; one that the image has under that name is kept."""
    accounts = [line.split(":") for line in passwd.splitlines() if line.count(":") >= 6]
    for fields in accounts:
        if fields[0] == USER and fields[2].isdigit() and fields[3].isdigit() and int(fields[2]) > 0:
            home = fields[5] if fields[5].startswith("/") and ":" not in fields[5] else f"/home/{USER}"
            return Account(int(fields[2]), int(fields[3]), home, shell), passwd, group
    taken = {fields[2] for fields in accounts} | {fields[3] for fields in accounts}
    taken |= {line.split(":")[2] for line in group.splitlines() if line.count(":") >= 2}
    uid = next(number for number in range(_FIRST_UID, _LAST_UID) if str(number) not in taken)
    account = Account(uid, uid, f"/home/{USER}", shell)
    root = "" if accounts else "root:x:0:0:root:/root:/sbin/nologin\n"
    return (
        account,
        f"{_ended(passwd)}{root}{USER}:x:{uid}:{uid}:{USER}:{account.home}:{shell}\n",
        f"{_ended(group)}{USER}:x:{uid}:\n",
    )


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"
