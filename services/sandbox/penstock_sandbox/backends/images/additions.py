"""Additions to an image for sandboxes: files as tars, their paths, its user's account, and the working directory.

Invariants: the ordinary user is never root, has an id that nobody else in the image has, and keeps its home if the
image has that user already. Another user is one of the image's, by name or by id, or an id alone. Callers refuse
an account that is ``reserved``.
"""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock_sandbox.backends.images.pause_program import USER_ID
from penstock_sandbox.guest.system import ASIDE

USER = "agent"

WORKDIR: Final = "/workspace"
"""The working directory for images whose declared one cannot become the sandbox's user's, or that declare none."""
OURS: Final = "/opt/penstock"
TOOLBOXES: Final = f"{OURS}/toolboxes"
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

RESERVED: Final = frozenset({USER_ID, ASIDE})
"""Ids of the processes that hold and serve a sandbox: a workload with such an id could end or become them."""

# Not these themselves, but directories below them may be.
_SHARED = frozenset(
    ("/", "/home", "/media", "/mnt", "/opt", "/srv", "/usr", "/usr/local", "/usr/src", "/var", "/var/lib", "/var/opt")
)
# Neither these nor anything below them.
_SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", OURS, "/proc", "/run", "/sbin"),
    *("/sys", "/tmp", "/usr/bin", "/usr/include", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/sbin"),
    *("/usr/local/bin", "/usr/local/lib", "/usr/local/sbin", "/usr/share", "/var/cache", "/var/lib/apt"),
    *("/var/lib/dpkg", "/var/log", "/var/run", "/var/tmp"),
)
_HOLDER = "penstock-hold"
_FIRST_UID, _LAST_UID = 1000, 60_000
# Higher ids mean "none" to the kernel.
_LARGEST_ID = 2**31 - 1
_LONGEST_ID = 20


def workdir_of(declared: str) -> str:
    """Returns the working directory of sandboxes of an image that declares this one (empty: none)."""
    if not declared.startswith("/"):
        return WORKDIR
    # A leading double slash means one here, whatever POSIX allows.
    path = posixpath.normpath(f"/{declared.lstrip('/')}")
    if path in _SHARED or any(path == folder or path.startswith(f"{folder}/") for folder in _SYSTEM):
        return WORKDIR
    return path


@dataclass(frozen=True, slots=True)
class Account:
    """The user of a sandbox's processes."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str

    @property
    def reserved(self) -> bool:
        """Whether it is, or shares a group with, a process that holds or serves a sandbox."""
        return not RESERVED.isdisjoint((self.uid, self.gid))


@dataclass(frozen=True, slots=True)
class File:
    """A file, or (``content`` None) a directory, at an absolute path; root's unless it has an ``owner``."""

    path: str
    content: bytes | None
    mode: int = 0o755
    owner: Account | None = None


def unwanted(name: str) -> bool:
    """Whether an image's variable is dropped: Penstock's own names, and libraries loaded into every program."""
    return name.startswith("PENSTOCK_") or name in ("LD_PRELOAD", "LD_AUDIT")


def packed(files: Iterable[File]) -> bytes:
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
    """Returns the account of the sandbox's user, and both files with it; keeps the image's account of that name."""
    accounts = _accounts(passwd)
    for fields in accounts:
        if fields[0] == USER and _sound(fields) and id_of(fields[2]):
            home = fields[5] if fields[5].startswith("/") else f"/home/{USER}"
            return Account(USER, int(fields[2]), int(fields[3]), home, shell), passwd, group
    taken = {fields[2] for fields in accounts} | {fields[3] for fields in accounts}
    taken |= {line.split(":")[2] for line in group.split("\n") if line.count(":") >= 2}
    uid = next(number for number in range(_FIRST_UID, _LAST_UID) if str(number) not in taken)
    account = Account(USER, uid, uid, f"/home/{USER}", shell)
    root = "" if accounts else "root:x:0:0:root:/root:/sbin/nologin\n"
    return (
        account,
        f"{_ended(passwd)}{root}{USER}:x:{uid}:{uid}:{USER}:{account.home}:{shell}\n",
        f"{_ended(group)}{USER}:x:{uid}:\n",
    )


def account_named(user: str, passwd: str, shell: str) -> Account | None:
    """Returns an image's account by name or id; for an id without a user, a nameless account. None: unknown."""
    number = id_of(user)
    if user in ("root", "0"):
        return Account("root", 0, 0, "/root", shell)
    for fields in _accounts(passwd):
        if _sound(fields) and (id_of(fields[2]) == number if number is not None else fields[0] == user):
            home = fields[5] if fields[5].startswith("/") else "/"
            return Account(fields[0] or user, int(fields[2]), int(fields[3]), home, shell)
    if number is not None:
        return Account(str(number), number, number, "/tmp", shell)
    return None


def id_of(text: str) -> int | None:
    """Returns the id of a user or group that is written as a number; None if it is none, or too large."""
    if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_ID):
        return None
    return number if (number := int(text)) <= _LARGEST_ID else None


def with_holder(passwd: str, group: str) -> tuple[str, str]:
    """Returns both files with the user of a sandbox's first process; an empty one stays so.

    Podman adds such a line to a container's files where there is none, which a diff would show.
    """
    if passwd and str(USER_ID) not in {fields[2] for fields in _accounts(passwd)}:
        passwd = f"{_ended(passwd)}{_HOLDER}:x:{USER_ID}:{USER_ID}::/:/sbin/nologin\n"
    if group and str(USER_ID) not in {line.split(":")[2] for line in group.split("\n") if line.count(":") >= 2}:
        group = f"{_ended(group)}{_HOLDER}:x:{USER_ID}:\n"
    return passwd, group


def _accounts(passwd: str) -> list[list[str]]:
    # Lines end where they do for the C library: other signs are part of a field.
    return [line.split(":") for line in passwd.split("\n") if line.count(":") >= 6]


def _sound(fields: list[str]) -> bool:
    """Whether an account is usable: its ids are numbers, and its name and home are text."""
    try:
        f"{fields[0]}{fields[5]}".encode()
    except UnicodeEncodeError:
        return False
    return id_of(fields[2]) is not None and id_of(fields[3]) is not None


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"
