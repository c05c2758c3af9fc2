"""Images made ready to be a sandbox, and how many of them the daemon keeps.

Purpose: any image can be a sandbox's base. A layer on top, made once for each image and user, adds what a sandbox needs
and an image may lack: the first process (``hold``), an ordinary user with a home, the working directory, and mount
points; and the directory that the image works in becomes the user's (``handover``). Nothing of the image is run to make
it, and neither a shell nor an interpreter is needed in it.

Invariants
- A prepared image is named by the hash of what it was made from and outlives the service: it is a cache, without the
  label of an instance, which all services of the daemon share.
- Together they add at most ``limit_bytes`` to what they were made from, those in use aside: the least recently used
  go first, as far as this service knows; the daemon itself refuses to remove what a container is made of, and keeps,
  without a name, what a snapshot stands on until that goes.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import structlog

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, PenstockError, Violation
from penstock_sandbox.backends.docker import handover, hold
from penstock_sandbox.backends.docker.additions import RESERVED, USER, Account, File, account_in, account_named, packed
from penstock_sandbox.backends.docker.daemon import GO_DIRECTORY, Daemon, Json, Missing, Refused
from penstock_sandbox.backends.docker.places import OURS, TOOLBOXES, WORKDIR
from penstock_sandbox.backends.docker.reaper import KIND, Owner, Reaper

_REPOSITORY = "penstock-prepared"
_EQUIPPED = "penstock-equipped"
# To be raised when what is added to an image changes: prepared images are found by it.
_VERSION = 6
_ACCOUNT_LABEL = "penstock.account"
_WORKDIR_LABEL = "penstock.workdir"
_BYTES_LABEL = "penstock.added_bytes"
_PREPARED = "prepared"
_ACCOUNTS_LIMIT = 4 * 1024 * 1024
# Who had one made ready makes a container of it in less than this.
_GRACE_S = 60.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyImage:
    """An image that a sandbox can be made from. ``size`` is in bytes, with all that it stands on."""

    name: str
    account: Account
    workdir: str
    env: Mapping[str, str]
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
        """Stop removing."""
        if self._later is not None:
            self._later.cancel()
            await asyncio.gather(self._later, return_exceptions=True)

    async def of(self, image: str, base: Json, user: str) -> ReadyImage:
        """What ``base``, which callers know as ``image``, is with what a sandbox needs for ``user`` (empty: ``USER``).

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
            # Nobody waits for it: removing a large one takes seconds.
            self._later = asyncio.create_task(self._trim_now(), name="docker-trim")
        return described(await self._daemon.image(name))

    async def equipped(self, image: str, base: Json, files: Callable[[str], Mapping[str, bytes]]) -> str:
        """The name of ``base`` with further files of root's, mode 0755, at absolute paths, for its architecture.

        The first process is one of them, with a mode of its own. Raises FailedPrecondition (IMAGE_UNUSABLE).
        """
        wanted = {hold.PATH: _first_program(image, base), **files(str(base["Architecture"]))}
        digest = hashlib.sha256(f"{_VERSION} {base['Id']}".encode())
        for path, content in sorted(wanted.items()):
            digest.update(hashlib.sha256(path.encode()).digest() + hashlib.sha256(content).digest())
        name = f"{_EQUIPPED}:{digest.hexdigest()[:32]}"
        try:
            await self._daemon.image(name)
        except Missing:
            container = await self._unstarted(base["Id"])
            try:
                made = [File(path, file, hold.MODE if path == hold.PATH else 0o755) for path, file in wanted.items()]
                await self._daemon.put(container, "/", packed(made))
                await self._commit(container, name, {KIND: "equipped"})
            finally:
                await self._reaper.container(container)
        return name

    async def trim(self) -> None:
        """Remove the least recently used until the rest fits. What cannot go stays: a container is made of it."""
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
                _log.info("a prepared image leaves the cache", image=one["Id"], bytes=_added(one))

    async def _trim_now(self) -> None:
        try:
            await self.trim()
        except (Refused, PenstockError) as error:
            _log.warning("the prepared images are not looked through; the next preparation does", error=str(error))

    def _last_used(self, image: Json) -> float:
        return max(self._used_at.get(name, float(image.get("Created") or 0)) for name in _names(image))

    # Making ------------------------------------------------------------------------------------------------------

    async def _make(self, image: str, base: Json, name: str, program: bytes, user: str) -> None:
        container = await self._unstarted(base["Id"])
        try:
            passwd, group = [await self._text(container, path) for path in ("/etc/passwd", "/etc/group")]
            shell = "/bin/bash" if await self._daemon.has(container, "/bin/bash") else "/bin/sh"
            files = [
                # A tmpfs over a directory gets its mode.
                File("/tmp", None, mode=0o1777),  # noqa: S108 - a path in the sandbox
                File("/opt", None),
                File(OURS, None),
                File(TOOLBOXES, None),
                File(hold.PATH, program, mode=hold.MODE),
            ]
            if user == USER:
                account, passwd, group = account_in(passwd, group, shell)
                files += [
                    File("/etc", None),
                    File("/etc/passwd", passwd.encode(errors="surrogateescape"), mode=0o644),
                    File("/etc/group", group.encode(errors="surrogateescape"), mode=0o644),
                    File("/home", None),
                    File(account.home, None, owner=account),
                ]
            else:
                account = _known(image, user, account_named(user, passwd, shell))
                if not await self._daemon.has(container, account.home):
                    files.append(File(account.home, None, owner=account))
            _refuse_reserved(image, user, account)
            workdir = WORKDIR
            if not self._keep_workdir:
                workdir = handover.workdir_of(str((base.get("Config") or {}).get("WorkingDir") or ""))
            added = 0
            if not await self._daemon.has(container, workdir):
                files.append(File(workdir, None, owner=account))
            elif workdir == WORKDIR and self._keep_workdir:
                pass  # something bounded is mounted there
            else:
                added = await self._hand_over(base["Id"], container, workdir, account)
            archive = packed(files)
            await self._daemon.put(container, "/", archive)
            labels = {
                KIND: _PREPARED,
                _ACCOUNT_LABEL: f"{account.name}:{account.uid}:{account.gid}:{account.home}:{account.shell}",
                _WORKDIR_LABEL: workdir,
                _BYTES_LABEL: str(added + len(archive)),
            }
            await self._commit(container, name, labels)
        except (Refused, tarfile.TarError) as error:
            raise FailedPrecondition(
                f"the image {image!r} cannot be made a sandbox's: {error}",
                reason="IMAGE_UNUSABLE",
                metadata={"image": image},
            ) from error
        finally:
            await self._reaper.container(container)

    async def _hand_over(self, base: str, container: str, workdir: str, account: Account) -> int:
        """Give a directory to its user; answers how many bytes that takes."""
        # The daemon reads or writes a container's files, not both at once: so there is one to read from.
        source = await self._unstarted(base)
        written = 0

        def pieces() -> Iterator[bytes]:
            nonlocal written
            found = self._daemon.fetch_stream(source, workdir)
            if found is None:
                return
            described, chunks = found
            try:
                if not int(described["mode"]) & GO_DIRECTORY:
                    raise Refused(409, f"its working directory {workdir} is none")
                for piece in handover.handed_over(chunks, workdir, account):
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
        """A container of an image that is never started."""
        settings: Json = {"image": image, "command": ["-"], "entrypoint": ["-"], "labels": self._owner.labels("making")}
        return await self._daemon.create("", settings, {"network_mode": "none"})

    async def _commit(self, container: str, name: str, labels: Mapping[str, str]) -> None:
        repository, _, tag = name.partition(":")
        # The labels of the container are inherited; these say that it is no instance's.
        blank = dict.fromkeys(self._owner.labels(""), "")
        await self._daemon.commit(container, repository, tag, {**blank, **labels})

    async def _text(self, container: str, path: str) -> str:
        try:
            whole = await self._daemon.fetch(container, path, _ACCOUNTS_LIMIT)
        except Missing:
            return ""
        with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
            for member in archive:
                if (file := archive.extractfile(member) if member.isreg() else None) is not None:
                    return file.read().decode(errors="surrogateescape")
        return ""


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
            f"{problem}: give the image's user other ids", reason="IMAGE_UNUSABLE", metadata={"image": image}
        )
    raise InvalidArgument(
        f"{problem}: name another user", reason="USER_RESERVED", violations=[Violation("spec.user", problem)]
    )


def _first_program(image: str, base: Json) -> bytes:
    program = hold.program(str(base["Architecture"]))
    if program is None or base.get("Os") != "linux":
        raise FailedPrecondition(
            f"the image {image!r} is for {base.get('Os')}/{base['Architecture']}; sandboxes need linux/amd64 or "
            "linux/arm64",
            reason="IMAGE_UNUSABLE",
            metadata={"image": image},
        )
    return program


def described(image: Json) -> ReadyImage:
    """What an image of ours, prepared or committed, says of itself."""
    config = image.get("Config") or {}
    labels = config.get("Labels") or {}
    name, uid, gid, home, shell = labels[_ACCOUNT_LABEL].split(":")
    return ReadyImage(
        name=image["Id"],
        account=Account(name, int(uid), int(gid), home, shell),
        workdir=labels[_WORKDIR_LABEL],
        env=dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry),
        architecture=image["Architecture"],
        size=int(image.get("Size") or 0),
    )


def _names(image: Json) -> Iterable[str]:
    return [name for name in image.get("RepoTags") or () if name.startswith(f"{_REPOSITORY}:")]


def _added(image: Json) -> int:
    told = str((image.get("Labels") or {}).get(_BYTES_LABEL, ""))
    return int(told) if told.isdigit() else 0
