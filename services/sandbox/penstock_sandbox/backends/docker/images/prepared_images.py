"""Prepares images to be sandboxes, and limits how many of them the daemon keeps.

Purpose: any image can be a sandbox's base. An additional layer, made once for each image and user, adds what a sandbox
needs and an image may lack: the first process (``hold``), an ordinary user with a home, the working directory, and
mount points; and the image's own working directory becomes the user's (``handover``). Nothing of the image is run for
this, and it needs neither a shell nor an interpreter.

Invariants
- A prepared image is named by the hash of its sources and outlives the service: it is a cache, without an instance's
  label, which all services of the daemon share.
- Prepared images not in use together add at most ``limit_bytes`` to their sources: the least recently used, as far as
  this service knows, are removed first. The daemon refuses to remove the image of a container, and keeps, without a
  name, the base of a snapshot until that is removed.
"""

from __future__ import annotations

import asyncio
import hashlib
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

import structlog

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, PenstockError, Violation
from penstock_sandbox.backends.docker.cleanup.reaper import KIND, Owner, Reaper
from penstock_sandbox.backends.docker.engine.daemon import GO_DIRECTORY, Daemon
from penstock_sandbox.backends.docker.engine.errors import Json, Missing, Refused
from penstock_sandbox.backends.docker.images import account_files, workdir_owner
from penstock_sandbox.backends.docker.images.account_files import Ids
from penstock_sandbox.backends.images import pause_program
from penstock_sandbox.backends.images.additions import (
    OURS,
    RESERVED,
    TOOLBOXES,
    USER,
    WORKDIR,
    Account,
    File,
    account_in,
    account_named,
    packed,
    with_holder,
    workdir_of,
)

_REPOSITORY = "penstock-prepared"
_EQUIPPED = "penstock-equipped"
# Increase when the added content changes: prepared images are found by it.
_VERSION = 8
_ACCOUNT_LABEL = "penstock.account"
_WORKDIR_LABEL = "penstock.workdir"
_BYTES_LABEL = "penstock.added_bytes"
_PREPARED = "prepared"
_LONGEST_LABEL = 20
_PLAIN = "/:"
# Podman adds it to images that it commits.
_PODMANS_OWN = "container=podman"
# A container of a prepared image is made sooner than this.
_GRACE_S = 60.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyImage:
    """An image ready for sandboxes. ``size`` is in bytes, with all layers below."""

    name: str
    account: Account
    workdir: str
    env: Mapping[str, str]
    checks_health: bool
    """Whether it declares a health check, which a container of it must switch off."""
    architecture: str
    size: int


class Prepared:
    """The prepared images of one daemon. ``keep_workdir``: sandboxes work in ``WORKDIR``, whatever images declare."""

    def __init__(
        self,
        daemon: Daemon,
        owner: Owner,
        reaper: Reaper,
        limit_bytes: int,
        *,
        keep_workdir: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._daemon = daemon
        self._owner = owner
        self._reaper = reaper
        self._limit_bytes = limit_bytes
        self._keep_workdir = keep_workdir
        self._clock = clock
        self._used_at: dict[str, float] = {}
        self._trimming = asyncio.Lock()
        self._later: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        """Stops removing."""
        if self._later is not None:
            self._later.cancel()
            await asyncio.gather(self._later, return_exceptions=True)

    async def of(self, image: str, base: Json, user: str) -> ReadyImage:
        """Returns ``base``, which callers know as ``image``, prepared for ``user`` (empty: ``USER``).

        Raises FailedPrecondition (IMAGE_UNUSABLE) and InvalidArgument (USER_UNKNOWN, USER_RESERVED).
        """
        program = _first_program(image, base)
        user = user or USER
        content = f"{_VERSION} {base['Id']} {hashlib.sha256(program).hexdigest()} {self._keep_workdir} {user}"
        name = f"{_REPOSITORY}:{hashlib.sha256(content.encode()).hexdigest()[:32]}"
        self._used_at[name] = self._clock()
        try:
            return described(await self._daemon.image(name))
        except Missing:
            pass
        try:
            await self._make(image, base, name, program, user)
        except BaseException:
            self._used_at.pop(name, None)
            raise
        if self._later is None or self._later.done():
            # In the background: removing a large one takes seconds.
            self._later = asyncio.create_task(self._trim_now(), name="docker-trim")
        return described(await self._daemon.image(name))

    async def equipped(self, image: str, base: Json, files: Callable[[str], Mapping[str, bytes]]) -> str:
        """Returns the name of ``base`` with further root files, mode 0755, at absolute paths, for its architecture.

        One of them is the first process, with a mode of its own. Raises FailedPrecondition (IMAGE_UNUSABLE).
        """
        wanted = {pause_program.PATH: _first_program(image, base), **files(str(base["Architecture"]))}
        digest = hashlib.sha256(f"{_VERSION} {base['Id']}".encode())
        for path, content in sorted(wanted.items()):
            digest.update(hashlib.sha256(path.encode()).digest() + hashlib.sha256(content).digest())
        name = f"{_EQUIPPED}:{digest.hexdigest()[:32]}"
        try:
            await self._daemon.image(name)
        except Missing:
            container = await self._unstarted(base["Id"])
            try:
                made = [
                    File(path, file, pause_program.MODE if path == pause_program.PATH else 0o755)
                    for path, file in wanted.items()
                ]
                await self._daemon.put(container, "/", packed(made))
                await self._commit(container, name, {KIND: "equipped"})
            finally:
                await self._reaper.container(container)
        return name

    async def ids(self, base: Json, user: str) -> Ids | None:
        """Returns whom a USER[:GROUP] names in an image; None: nobody. Raises Refused for account files of no use."""
        container = await self._unstarted(base["Id"])
        try:
            await account_files.check_in_place(self._daemon, container)
            return account_files.ids_of(user, *await account_files.read(self._daemon, container))
        finally:
            await self._reaper.container(container)

    async def trim(self) -> None:
        """Removes the least recently used until the rest fits. Images of existing containers stay."""
        async with self._trimming:
            kept = [one for one in await self._daemon.images(f"{KIND}={_PREPARED}") if _names(one)]
            total = sum(map(_added, kept))
            before = self._clock() - _GRACE_S
            for one in sorted(kept, key=self._last_used):
                if total <= self._limit_bytes or self._last_used(one) > before:
                    return
                try:
                    for name in _names(one):
                        await self._daemon.remove_image(name)
                        self._used_at.pop(name, None)
                except Refused as error:
                    _log.debug("a prepared image is in use", image=one["Id"], reason=error.what)
                    continue
                total -= _added(one)
                _log.info("a prepared image is evicted", image=one["Id"], bytes=_added(one))

    async def _trim_now(self) -> None:
        try:
            await self.trim()
        except (Refused, PenstockError) as error:
            _log.warning("the prepared images could not be listed; the next preparation retries", error=str(error))

    def _last_used(self, image: Json) -> float:
        return max(self._used_at.get(name, float(image.get("Created") or 0)) for name in _names(image))

    # Making ------------------------------------------------------------------------------------------------------

    async def _make(self, image: str, base: Json, name: str, program: bytes, user: str) -> None:
        container = await self._unstarted(base["Id"])
        try:
            passwd, group = await account_files.read(self._daemon, container)
            shell = "/bin/bash" if await self._daemon.has(container, "/bin/bash") else "/bin/sh"
            files = [
                # A tmpfs over a directory gets its mode.
                File("/tmp", None, mode=0o1777),  # noqa: S108 - a path in the sandbox
                File("/opt", None),
                File(OURS, None),
                File(TOOLBOXES, None),
                File(pause_program.PATH, program, mode=pause_program.MODE),
            ]
            if user == USER:
                account, passwd, group = account_in(passwd, group, shell)
                files += [
                    File("/etc", None),
                    *_accounts_files(*with_holder(passwd, group)),
                    File("/home", None),
                    File(account.home, None, owner=account),
                ]
            else:
                account = _known(image, user, account_named(user, passwd, shell))
                passwd, group = with_holder(passwd, group)
                if passwd and group:
                    files += [File("/etc", None), *_accounts_files(passwd, group)]
                if not await self._daemon.has(container, account.home):
                    files.append(File(account.home, None, owner=account))
            _refuse_reserved(image, user, account)
            workdir = WORKDIR
            if not self._keep_workdir:
                workdir = workdir_of(str((base.get("Config") or {}).get("WorkingDir") or ""))
            added = 0
            there = await self._daemon.stat(container, workdir)
            if there is None:
                files.append(File(workdir, None, owner=account))
            elif workdir == WORKDIR and self._keep_workdir:
                pass  # a size-limited mount will be there
            elif not int(there["mode"]) & GO_DIRECTORY:
                raise Refused(409, f"its working directory {workdir} is not a directory")
            else:
                added = await self._hand_over(base["Id"], container, workdir, account)
            archive = packed(files)
            await self._daemon.put(container, "/", archive)
            labels = {
                KIND: _PREPARED,
                _ACCOUNT_LABEL: quote(
                    f"{account.name}:{account.uid}:{account.gid}:{account.home}:{account.shell}", _PLAIN
                ),
                _WORKDIR_LABEL: quote(workdir, _PLAIN),
                _BYTES_LABEL: str(added + len(archive)),
            }
            await self._commit(container, name, labels)
        except (Refused, tarfile.TarError) as error:
            raise FailedPrecondition(
                f"the image {image!r} cannot be prepared for sandboxes: {error}",
                reason="IMAGE_UNUSABLE",
                metadata={"image": image},
            ) from error
        finally:
            await self._reaper.container(container)

    async def _hand_over(self, base: str, container: str, workdir: str, account: Account) -> int:
        """Makes a directory its user's; returns how many bytes that takes."""
        # The daemon reads or writes a container's files, not both at once: so a second container is read.
        source = await self._unstarted(base)
        written = 0

        def pieces() -> Iterator[bytes]:
            nonlocal written
            found = self._daemon.fetch_stream(source, workdir)
            if found is None:
                return
            _, chunks = found
            try:
                for piece in workdir_owner.handed_over(chunks, workdir, account):
                    written += len(piece)
                    yield piece
            finally:
                chunks.close()

        try:
            await self._daemon.put(container, "/", pieces())
        finally:
            await self._reaper.container(source)
        return written

    async def _unstarted(self, image: str) -> str:
        """Returns a container of an image that is never started."""
        settings: Json = {"image": image, "command": ["-"], "entrypoint": ["-"], "labels": self._owner.labels("making")}
        return await self._daemon.create("", settings, {"network_mode": "none"})

    async def _commit(self, container: str, name: str, labels: Mapping[str, str]) -> None:
        repository, _, tag = name.partition(":")
        # The labels of the container are inherited; these mark it as no instance's.
        blank = dict.fromkeys(self._owner.labels(""), "")
        await self._daemon.commit(container, repository, tag, {**blank, **labels})


def _accounts_files(passwd: str, group: str) -> list[File]:
    return [
        File("/etc/passwd", passwd.encode(errors="surrogateescape"), mode=0o644),
        File("/etc/group", group.encode(errors="surrogateescape"), mode=0o644),
    ]


def _known(image: str, user: str, account: Account | None) -> Account:
    if account is None:
        problem = f"the image {image!r} has no user {user!r}"
        raise InvalidArgument(problem, reason="USER_UNKNOWN", violations=[Violation("spec.user", problem)])
    return account


def _refuse_reserved(image: str, user: str, account: Account) -> None:
    if not account.reserved:
        return
    ids = " and ".join(map(str, sorted(RESERVED)))
    problem = f"the user {user!r} of the image {image!r} is {account.uid}:{account.gid}; {ids} are Penstock's own"
    if user == USER:
        raise FailedPrecondition(
            f"{problem}: change the ids of the image's user", reason="IMAGE_UNUSABLE", metadata={"image": image}
        )
    raise InvalidArgument(
        f"{problem}: name another user", reason="USER_RESERVED", violations=[Violation("spec.user", problem)]
    )


def _first_program(image: str, base: Json) -> bytes:
    program = pause_program.program(str(base["Architecture"]))
    if program is None or base.get("Os") != "linux":
        raise FailedPrecondition(
            f"the image {image!r} is for {base.get('Os')}/{base['Architecture']}; sandboxes need linux/amd64 or "
            "linux/arm64",
            reason="IMAGE_UNUSABLE",
            metadata={"image": image},
        )
    return program


def described(image: Json) -> ReadyImage:
    """Returns the description of one of our images, prepared or committed, from its labels."""
    config = image.get("Config") or {}
    labels = config.get("Labels") or {}
    name, uid, gid, home, shell = unquote(labels[_ACCOUNT_LABEL]).split(":")
    return ReadyImage(
        name=image["Id"],
        account=Account(name, int(uid), int(gid), home, shell),
        workdir=unquote(labels[_WORKDIR_LABEL]),
        env=dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry and entry != _PODMANS_OWN),
        checks_health=bool(config.get("Healthcheck")),
        architecture=image["Architecture"],
        size=int(image.get("Size") or 0),
    )


def _names(image: Json) -> Iterable[str]:
    return [name for name in image.get("RepoTags") or () if name.startswith(f"{_REPOSITORY}:")]


def _added(image: Json) -> int:
    label = str((image.get("Labels") or {}).get(_BYTES_LABEL, ""))
    return int(label) if label.isascii() and label.isdigit() and len(label) < _LONGEST_LABEL else 0
