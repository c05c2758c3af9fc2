"""Images made ready to be the base of sandboxes: their layers, and one of ours on top.

Purpose: that layer, made once for each image and user, has what a sandbox needs and an image may lack: accounts with
the user, names of hosts, mount points. Where the service is root it also has a copy of the user's home and of the
working directory that the image declares, as far as they exist, which belongs to the base's own host user: sandboxes
of one base then share that user, as the forks of a snapshot do. Elsewhere everything belongs to the service's user
already, and each place but those two is a read-only mount.

Invariants
- Nothing of the image is run or mounted to make it.
- A base stays while a sandbox or a snapshot is based on it, and so does its image. Those not in use are kept, up to
  ``_KEPT``, until their image is evicted; the service's start removes all.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import posixpath
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock_chassis.aio.single_flight import SingleFlight
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, PenstockError, Violation
from penstock_sandbox.backends.images import errors
from penstock_sandbox.backends.images.additions import USER, Account, account_in, account_named, unwanted, workdir_of
from penstock_sandbox.backends.images.store import Image, ImageStore, machine
from penstock_sandbox.backends.images.unpack import OPAQUE
from penstock_sandbox.backends.local import rootfs
from penstock_sandbox.backends.local.host_users import UserPool
from penstock_sandbox.backends.local.images import first_process, merged
from penstock_sandbox.backends.local.images.merged import Merged
from penstock_sandbox.domain import paths

_KEPT: Final = 8
_ACCOUNTS_LIMIT = 4 * 1024 * 1024
# As `rootfs` does for sandboxes without an image.
_OURS = ("etc/hosts", "etc/hostname", "etc/resolv.conf", "etc/machine-id")
_IF_ABSENT = ("etc/nsswitch.conf", "etc/services", "etc/protocols")
_POINTS = ("proc", "dev", "tmp", "home", "opt/penstock", "var")
# One page of options, of which this is for the upper and the work directory, and the layers of snapshots.
_MOST_OPTIONS = 4096 - 1024
_BESIDE_A_PATH = len(":/oldroot")


@dataclass(slots=True, eq=False)
class Base:
    """An image for one user. ``layers`` are listed from the lowest up, and end with ours.

    ``uid``: the host user that owns the user's directories in it; None: nobody in particular. ``made``: the directories
    that each sandbox gets, as the image has none there; ``writable``: all that its user may write to.
    """

    key: tuple[str, str]
    image: Image
    layers: tuple[Path, ...]
    account: Account
    workdir: str
    env: Mapping[str, str]
    made: tuple[str, ...]
    uid: int | None
    writable: tuple[str, ...]
    held: int = 0


class Bases:
    """The bases of one backend; ours are under ``root``. ``mapped`` returns the path of a host path for bubblewrap."""

    def __init__(
        self,
        root: Path,
        store: ImageStore,
        users: UserPool,
        mapped: Callable[[Path], str],
        remove_later: Callable[[Path], None],
        *,
        as_root: bool,
    ) -> None:
        self._root = root
        self._store = store
        self._users = users
        self._mapped = mapped
        self._remove_later = remove_later
        self._as_root = as_root
        self._bases: dict[tuple[str, str], Base] = {}
        self._makings: SingleFlight[tuple[str, str], Base] = SingleFlight(keep=0, finish=True)
        self._numbers = itertools.count()

    def open(self) -> None:
        """Makes the directory."""
        self._root.mkdir(exist_ok=True)
        self._root.chmod(0o711)

    async def aclose(self) -> None:
        """Stops making bases."""
        await self._makings.aclose()

    async def get(self, name: str, user: str) -> Base:
        """Returns an image's base for a user (empty: ``USER``), held until ``release``.

        Raises what ``ImageStore.get`` does, FailedPrecondition (IMAGE_UNUSABLE, CAPABILITY_MISSING), InvalidArgument
        (USER_UNKNOWN) and ResourceExhausted (SANDBOX_LIMIT).
        """
        image = await self._store.get(name)
        try:
            key = (image.id, user or USER)
            base = self._bases.get(key)
            if base is None:
                base = await self._makings.get(key, lambda: self._make(name, image, key))
        except BaseException:
            self._store.release(image)
            raise
        # The reference to the image is the base's now.
        base.held += 1
        return base

    def hold(self, base: Base) -> None:
        """Adds a reference to a base that has one."""
        self._store.hold(base.image)
        base.held += 1

    def release(self, base: Base) -> None:
        """Drops a reference to a base."""
        base.held -= 1
        # The most recently used last.
        self._bases[base.key] = self._bases.pop(base.key)
        for other in [one for one in self._bases.values() if not one.held][:-_KEPT]:
            self._drop(other)
        self._store.release(base.image)

    def evicted(self, image: Image) -> None:
        """Drops the bases of an image that is evicted, which nothing holds."""
        for base in [one for one in self._bases.values() if one.image.id == image.id]:
            self._drop(base)

    def _drop(self, base: Base) -> None:
        del self._bases[base.key]
        self._users.release(base.uid)
        self._remove_later(base.layers[-1])

    # Making ------------------------------------------------------------------------------------------------------

    async def _make(self, name: str, image: Image, key: tuple[str, str]) -> Base:
        self._store.hold(image)
        folder = self._root / str(next(self._numbers))
        uid: int | None = None
        try:
            layers = tuple(self._store.folder(layer) for layer in image.layers)
            view = Merged(layers)
            if first_process.program(machine()) is None:
                raise errors.unusable(name, f"sandboxes cannot be made for {image.architecture}")
            self._check_count(name, (*layers, folder))
            account, passwd, group = await asyncio.to_thread(_account, name, view, key[1])
            workdir = _place(view, image.workdir) or paths.WORKDIR
            writable = tuple(dict.fromkeys(filter(None, (_place(view, account.home), workdir))))
            there = {path: found for path in writable if (found := view.find(path)) is not None and found.folders}
            uid = self._users.acquire() if self._as_root and there else None
            await asyncio.to_thread(_furnish, folder, view, passwd, group)
            if not self._as_root:
                await asyncio.to_thread(_close, folder, view)
            # The outer one first: it holds the other.
            for path in sorted(there, key=len):
                if uid is not None:
                    await asyncio.to_thread(_hand_over, folder, path, there[path], uid)
        except BaseException as error:
            self._users.release(uid)
            if folder.exists():
                self._remove_later(folder)
            if isinstance(error, OSError):
                raise errors.unusable(name, f"its files cannot be taken: {error}") from error
            raise
        finally:
            self._store.release(image)
        env = {name_: value for name_, value in image.env.items() if not unwanted(name_)}
        made = tuple(path for path in writable if path not in there)
        base = Base(key, image, (*layers, folder), account, workdir, env, made, uid, writable)
        self._bases[key] = base
        return base

    def _check_count(self, name: str, layers: tuple[Path, ...]) -> None:
        """Refuses what the kernel would: the paths of all layers must fit into one page."""
        taken = sum(len(os.fsencode(self._mapped(layer))) + _BESIDE_A_PATH for layer in layers)
        if taken > _MOST_OPTIONS:
            raise errors.unusable(
                name,
                f"it has {len(layers) - 1} layers, whose paths need {taken} bytes of the kernel's {_MOST_OPTIONS}: use "
                "a shorter state_dir, or squash the image",
            )


def root_refused(user: str) -> PenstockError:
    """The user is root, or of root's group, which local sandboxes do not have."""
    return FailedPrecondition(
        f"the local backend has no sandboxes whose user is root or of its group ({user!r})",
        reason="CAPABILITY_MISSING",
        metadata={"backend": "local", "capabilities": "root"},
    )


def environment(base: Base | None, path: Sequence[str]) -> dict[str, str]:
    """Returns the environment of every process of a sandbox: the image's own, and the user's."""
    home, user, shell, system = paths.HOME, paths.USER, "/bin/bash", ":".join(paths.SYSTEM_PATH)
    image: Mapping[str, str] = {}
    if base is not None:
        home, user, shell, image = base.account.home, base.account.name, base.account.shell, base.env
        system = image.get("PATH") or system
    return {
        "LANG": "C.UTF-8",
        **image,
        "PATH": ":".join([*path, system]),
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": shell,
        "TERM": "dumb",
        "TMPDIR": "/tmp",
    }


def _account(name: str, view: Merged, user: str) -> tuple[Account, str, str]:
    passwd, group = [view.text(path, _ACCOUNTS_LIMIT) for path in ("/etc/passwd", "/etc/group")]
    shell = "/bin/bash" if view.find("/bin/bash") is not None else "/bin/sh"
    if user == USER:
        account, passwd, group = account_in(passwd, group, shell)
    else:
        found = account_named(user, passwd, shell)
        if found is None:
            problem = f"the image {name} has no user {user!r}"
            raise InvalidArgument(problem, reason="USER_UNKNOWN", violations=[Violation("spec.user", problem)])
        account = found
    if account.uid == 0 or account.gid == 0:
        raise root_refused(user)
    return account, passwd, group


def _place(view: Merged, path: str) -> str:
    """Returns where a directory is that the user may have, links followed; empty for one of the system's."""
    for _ in range(2):
        if workdir_of(path) != posixpath.normpath(path):
            return ""
        path = posixpath.normpath(path)
        found = view.find(path)
        if found is None or found.path == path:
            return path
        path = found.path
    return ""


def _furnish(folder: Path, view: Merged, passwd: str, group: str) -> None:
    folder.mkdir()
    for name in _POINTS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    files = {"etc/passwd": passwd, "etc/group": group}
    files |= {name: rootfs.WRITTEN[name] for name in _OURS}
    files |= {name: rootfs.WRITTEN[name] for name in _IF_ABSENT if view.find(f"/{name}") is None}
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content.encode(errors="surrogateescape"))
        file.chmod(0o644)
    (folder / "var/tmp").symlink_to("../tmp")
    for parent, _, _ in os.walk(folder):
        os.chmod(parent, 0o755)


def _close(folder: Path, view: Merged) -> None:
    """Hides root's home where it is closed: all files belong to the sandbox's user, if the service is not root."""
    found = view.find("/root")
    if found is None or not found.folders or Path(found.folders[0]).stat().st_mode & stat.S_IXOTH:
        return
    home = folder / "root"
    home.mkdir()
    os.setxattr(home, OPAQUE, b"y")
    home.chmod(0)


def _hand_over(folder: Path, path: str, found: merged.Found, uid: int) -> None:
    target = folder / path.lstrip("/")
    if target.exists():
        return  # within another that was handed over
    target.parent.mkdir(parents=True, exist_ok=True)
    for parent in target.relative_to(folder).parents:
        os.chmod(folder / parent, 0o755)
    merged.copy(found, target, uid, uid)
