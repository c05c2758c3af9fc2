"""What is added to an image so that it can be a sandbox: files as tars, and the account of its user.

Invariants: the ordinary user is never root, has an id that nobody else in the image has, and keeps the home that the
image gave it where the image has it already. Another user is one that the image has, by name or by id, or an id alone.
Whoever makes a sandbox refuses an account that is ``reserved``.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock_sandbox.attendant.system import ASIDE
from penstock_sandbox.backends.docker.hold import USER_ID

USER = "agent"

RESERVED: Final = frozenset({USER_ID, ASIDE})
"""Ids of what holds and serves a sandbox: whoever had one of them could end it, or become it."""

_FIRST_UID, _LAST_UID = 1000, 60_000
# Beyond it are ids that mean "none" to the kernel.
_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Account:
    """The user that a sandbox's processes run as."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str

    @property
    def reserved(self) -> bool:
        """Whether it is, or shares a group with, what holds or serves a sandbox."""
        return not RESERVED.isdisjoint((self.uid, self.gid))


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
    accounts = _accounts(passwd)
    for fields in accounts:
        if fields[0] == USER and _sound(fields) and int(fields[2]) > 0:
            home = fields[5] if fields[5].startswith("/") else f"/home/{USER}"
            return Account(USER, int(fields[2]), int(fields[3]), home, shell), passwd, group
    taken = {fields[2] for fields in accounts} | {fields[3] for fields in accounts}
    taken |= {line.split(":")[2] for line in group.splitlines() if line.count(":") >= 2}
    uid = next(number for number in range(_FIRST_UID, _LAST_UID) if str(number) not in taken)
    account = Account(USER, uid, uid, f"/home/{USER}", shell)
    root = "" if accounts else "root:x:0:0:root:/root:/sbin/nologin\n"
    return (
        account,
        f"{_ended(passwd)}{root}{USER}:x:{uid}:{uid}:{USER}:{account.home}:{shell}\n",
        f"{_ended(group)}{USER}:x:{uid}:\n",
    )


def account_named(user: str, passwd: str, shell: str) -> Account | None:
    """The account of an image's user by its name or id; an id that no user has is one without a name. None: unknown."""
    by_id = user.isascii() and user.isdigit()
    if user in ("root", "0"):
        return Account("root", 0, 0, "/root", shell)
    for fields in _accounts(passwd):
        if _sound(fields) and (int(fields[2]) == int(user) if by_id else fields[0] == user):
            home = fields[5] if fields[5].startswith("/") else "/"
            return Account(fields[0] or user, int(fields[2]), int(fields[3]), home, shell)
    if by_id and int(user) <= _LARGEST_ID:
        return Account(str(int(user)), int(user), int(user), "/tmp", shell)  # noqa: S108 - a path in the sandbox
    return None


def _accounts(passwd: str) -> list[list[str]]:
    return [line.split(":") for line in passwd.splitlines() if line.count(":") >= 6]


def _sound(fields: list[str]) -> bool:
    """Whether an account can be used: its ids are numbers, and its name and home are text."""
    try:
        f"{fields[0]}{fields[5]}".encode()
    except UnicodeEncodeError:
        return False
    return all(field.isascii() and field.isdigit() and int(field) <= _LARGEST_ID for field in fields[2:4])


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"
