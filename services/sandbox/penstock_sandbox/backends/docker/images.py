"""Images: pulled once with a deadline of their own, and made ready (``prepared``) to be a sandbox.

Invariants: one pull and one preparation of an image at a time, whoever asks; who gives up stops nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import structlog

from penstock_chassis.errors import DeadlineExceeded, NotFound, PenstockError, Unavailable
from penstock_sandbox.backends.docker.daemon import Daemon, Json, Missing, Refused
from penstock_sandbox.backends.docker.prepared import Prepared, ReadyImage
from penstock_sandbox.backends.docker.wire import Wire

_log = structlog.get_logger(__name__)
T = TypeVar("T")


class Images:
    """The images of one daemon."""

    def __init__(self, daemon: Daemon, wire: Wire, prepared: Prepared, pull_timeout_s: float) -> None:
        self._daemon = daemon
        self._wire = wire
        self._prepared = prepared
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

    async def ready(self, image: str, user: str = "") -> ReadyImage:
        """The image with what a sandbox needs; pulled and made where it is not there. ``user``: as in ``Prepared``.

        Raises NotFound (IMAGE_UNKNOWN), Unavailable (IMAGE_PULL_FAILED), DeadlineExceeded (IMAGE_PULL_TIMEOUT),
        FailedPrecondition (IMAGE_UNUSABLE) and InvalidArgument (USER_UNKNOWN).
        """
        found = await self._pulled(image)
        return await self._once(f"prepare {found['Id']} {user}", lambda: self._prepared.of(image, found, user))

    async def equipped(self, image: str, files: Callable[[str], Mapping[str, bytes]]) -> str:
        """As ``Prepared.equipped``, of an image by its name; raises what ``ready`` does."""
        found = await self._pulled(image)
        return await self._once(f"equip {image}", lambda: self._prepared.equipped(image, found, files))

    async def known(self, image: str) -> tuple[str, str]:
        """An image's id and architecture, pulled where it is not there; raises what ``ready`` does."""
        found = await self._pulled(image)
        return str(found["Id"]), str(found["Architecture"])

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
