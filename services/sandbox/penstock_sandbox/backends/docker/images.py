"""Images: pulled once with a deadline of their own, and made ready to be a sandbox.

Purpose: any image can be a sandbox's base. A thin layer on top, made once for each image, adds what a sandbox needs
and an image may lack: the first process (``hold``), an ordinary user with a home, the working directory, and mount
points. Nothing of the image is run to make it, and neither a shell nor an interpreter is needed in it.

Invariants
- One pull and one preparation of an image at a time, whoever asks; who gives up stops nobody else.
- A prepared image is named by the hash of what it was made from and outlives the service: it is a cache of a few
  kilobytes each, without the label of an instance, so that no instance removes another's.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from penstock_chassis.errors import DeadlineExceeded, FailedPrecondition, NotFound, PenstockError, Unavailable
from penstock_sandbox.backends.docker import hold
from penstock_sandbox.backends.docker.additions import Account, File, account_in, packed
from penstock_sandbox.backends.docker.daemon import Daemon, Json, Missing, Refused
from penstock_sandbox.backends.docker.reaper import KIND, Owner, Reaper
from penstock_sandbox.backends.docker.wire import Wire

WORKDIR = "/workspace"
OURS = "/opt/penstock"
TOOLBOXES = f"{OURS}/toolboxes"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_REPOSITORY = "penstock-prepared"
# To be raised when what is added to an image changes: prepared images are found by it.
_VERSION = 4
_ACCOUNT_LABEL = "penstock.account"
_ACCOUNTS_LIMIT = 4 * 1024 * 1024

_log = structlog.get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadyImage:
    """An image that a sandbox can be made from. ``size`` is in bytes, with all that it stands on."""

    name: str
    account: Account
    env: Mapping[str, str]
    architecture: str
    size: int


class Images:
    """The images of one daemon."""

    def __init__(self, daemon: Daemon, wire: Wire, owner: Owner, reaper: Reaper, pull_timeout_s: float) -> None:
        self._daemon = daemon
        self._wire = wire
        self._owner = owner
        self._reaper = reaper
        self._timeout_s = pull_timeout_s
        self._working: dict[str, asyncio.Task[Any]] = {}

    async def aclose(self) -> None:
        """Stop what is being pulled or made ready."""
        for task in list(self._working.values()):
            task.cancel()
        await asyncio.gather(*self._working.values(), return_exceptions=True)

    async def there(self, image: str) -> bool:
        """Whether the daemon has an image, without pulling it."""
        try:
            await self._daemon.image(image)
        except Missing:
            return False
        return True

    async def ready(self, image: str) -> ReadyImage:
        """The image with what a sandbox needs; pulled and made where it is not there.

        Raises NotFound (IMAGE_UNKNOWN), Unavailable (IMAGE_PULL_FAILED), DeadlineExceeded (IMAGE_PULL_TIMEOUT) and
        FailedPrecondition (IMAGE_UNUSABLE).
        """
        found = await self._pulled(image)
        program = hold.program(str(found["Architecture"]))
        if program is None or found.get("Os") != "linux":
            raise FailedPrecondition(
                f"the image {image!r} is for {found.get('Os')}/{found['Architecture']}; sandboxes need linux/amd64 or "
                "linux/arm64",
                reason="IMAGE_UNUSABLE",
                metadata={"image": image},
            )
        content = f"{_VERSION} {found['Id']} {hashlib.sha256(program).hexdigest()}"
        tag = hashlib.sha256(content.encode()).hexdigest()[:32]
        return await self._once(f"prepare {tag}", lambda: self._prepared(found, f"{_REPOSITORY}:{tag}", program))

    async def with_files(self, image: str, files: Mapping[str, bytes]) -> str:
        """An image with further files of root's, mode 0755, at absolute paths; answers its name."""
        found = await self._pulled(image)
        digest = hashlib.sha256(found["Id"].encode())
        for path, content in sorted(files.items()):
            digest.update(hashlib.sha256(path.encode()).digest() + hashlib.sha256(content).digest())
        name = f"{_REPOSITORY}:{digest.hexdigest()[:32]}"

        async def make() -> str:
            if not await self.there(name):
                await self._derive(found["Id"], name, packed([File(path, file) for path, file in files.items()]))
            return name

        return await self._once(f"prepare {name}", make)

    def described(self, image: Json) -> ReadyImage:
        """What an image of ours, prepared or committed, says of itself."""
        config = image.get("Config") or {}
        uid, gid, home, shell = (config.get("Labels") or {})[_ACCOUNT_LABEL].split(":")
        return ReadyImage(
            name=image["Id"],
            account=Account(int(uid), int(gid), home, shell),
            env=dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry),
            architecture=image["Architecture"],
            size=int(image.get("Size") or 0),
        )

    # Pulling -----------------------------------------------------------------------------------------------------

    async def _pulled(self, image: str) -> Json:
        try:
            return await self._daemon.image(image)
        except Missing:
            pass
        except Refused as error:
            raise _unknown(image, error.what) from error
        await self._once(f"pull {image}", lambda: self._pull(image))
        try:
            return await self._daemon.image(image)
        except Missing as error:
            raise _unknown(image, error.what) from error

    async def _pull(self, image: str) -> None:
        name, digest = image.partition("@")[::2]
        if not digest:
            last = name.rpartition("/")[2]
            name, digest = (name, "latest") if ":" not in last else name.rsplit(":", 1)
        _log.info("pulling an image", image=image)
        try:
            async with asyncio.timeout(self._timeout_s):
                query = {"fromImage": name, "tag": digest}
                header = await self._daemon.in_thread(lambda: self._daemon.registry_header(image))
                async for event in self._wire.objects("POST", "/images/create", query, header):
                    if "error" in event:
                        raise _pull_failed(image, str(event["error"]))
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the image {image!r} was not there after {self._timeout_s:g} s; pull it beforehand, or raise "
                "image_pull_timeout_s",
                reason="IMAGE_PULL_TIMEOUT",
                metadata={"image": image},
            ) from error
        except Refused as error:
            raise _pull_failed(image, error.what, unknown=error.status in (400, 404)) from error

    # Making ready ------------------------------------------------------------------------------------------------

    async def _prepared(self, base: Json, name: str, program: bytes) -> ReadyImage:
        try:
            return self.described(await self._daemon.image(name))
        except Missing:
            pass
        container = await self._unstarted(base["Id"])
        try:
            passwd, group = [await self._text(container, path) for path in ("/etc/passwd", "/etc/group")]
            shell = "/bin/bash" if await self._has(container, "/bin/bash") else "/bin/sh"
            account, passwd, group = account_in(passwd, group, shell)
            files = [
                # A tmpfs over a directory gets its mode.
                File("/tmp", None, mode=0o1777),  # noqa: S108 - a path in the sandbox
                File("/etc", None),
                File("/etc/passwd", passwd.encode(errors="surrogateescape"), mode=0o644),
                File("/etc/group", group.encode(errors="surrogateescape"), mode=0o644),
                File("/home", None),
                File(account.home, None, owner=account),
                File(WORKDIR, None, owner=account),
                File("/opt", None),
                File(OURS, None),
                File(TOOLBOXES, None),
                File(hold.PATH, program),
            ]
            label = f"{account.uid}:{account.gid}:{account.home}:{account.shell}"
            await self._daemon.put(container, "/", packed(files))
            await self._commit(container, name, {_ACCOUNT_LABEL: label})
        except Refused as error:
            raise FailedPrecondition(
                f"the image cannot be made a sandbox's: {error.what}", reason="IMAGE_UNUSABLE"
            ) from error
        finally:
            await asyncio.shield(asyncio.ensure_future(self._reaper.container(container)))
        return self.described(await self._daemon.image(name))

    async def _derive(self, base: str, name: str, archive: bytes) -> None:
        container = await self._unstarted(base)
        try:
            await self._daemon.put(container, "/", archive)
            await self._commit(container, name, {})
        finally:
            await asyncio.shield(asyncio.ensure_future(self._reaper.container(container)))

    async def _unstarted(self, image: str) -> str:
        """A container of an image that is never started."""
        settings: Json = {"image": image, "command": ["-"], "entrypoint": ["-"], "labels": self._owner.labels("making")}
        return await self._daemon.create("", settings, {"network_mode": "none"})

    async def _commit(self, container: str, name: str, labels: Mapping[str, str]) -> None:
        repository, _, tag = name.partition(":")
        # The labels of the container are inherited; these say that it is no instance's.
        blank = dict.fromkeys(self._owner.labels(""), "")
        await self._daemon.commit(container, repository, tag, {**blank, KIND: "prepared", **labels})

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

    async def _has(self, container: str, path: str) -> bool:
        try:
            await self._daemon.fetch(container, path, 64 * 1024 * 1024)
        except Missing:
            return False
        return True

    async def _once(self, key: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``work`` once for all who ask for ``key`` while it runs; a caller that leaves does not stop it."""
        task = self._working.get(key)
        if task is None:
            task = asyncio.create_task(work(), name=key)
            self._working[key] = task
            task.add_done_callback(lambda done: self._done(key, done))
        result: T = await asyncio.shield(task)
        return result

    def _done(self, key: str, task: asyncio.Task[Any]) -> None:
        self._working.pop(key, None)
        if not task.cancelled():
            task.exception()  # told to whoever waited; nobody may be left


def _unknown(image: str, what: str) -> NotFound:
    return NotFound(f"there is no image {image!r}: {what}", reason="IMAGE_UNKNOWN", metadata={"image": image})


def _pull_failed(image: str, what: str, *, unknown: bool = False) -> PenstockError:
    if unknown or "not found" in what or "manifest unknown" in what or "does not exist" in what:
        return _unknown(image, what)
    return Unavailable(
        f"the image {image!r} could not be pulled: {what}",
        reason="IMAGE_PULL_FAILED",
        metadata={"image": image},
        retry_after_s=5.0,
    )
