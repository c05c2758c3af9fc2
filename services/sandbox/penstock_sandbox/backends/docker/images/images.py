"""Images: pulled once with a timeout of their own, and prepared (``prepared_images``) to be sandboxes.

Invariants: one pull and one preparation of an image at a time, shared by all callers; a cancelled caller stops neither.
"""

from __future__ import annotations

import asyncio
import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing

import structlog

from penstock_chassis.aio.single_flight import SingleFlight
from penstock_chassis.errors import DeadlineExceeded, FailedPrecondition, PenstockError
from penstock_sandbox.backends.docker.engine.daemon import Daemon
from penstock_sandbox.backends.docker.engine.errors import Json, Missing, Refused
from penstock_sandbox.backends.docker.images import names
from penstock_sandbox.backends.docker.images.account_files import Ids
from penstock_sandbox.backends.docker.images.prepared_images import Prepared, ReadyImage
from penstock_sandbox.backends.images import errors
from penstock_sandbox.backends.images.reference import Reference

_KEPT_IDS = 256
# Of a daemon's messages, by what they have in them.
_CAUSES = (
    ("toomanyrequests", "its registry limits pulls"),
    ("unauthorized", "its registry wants a login"),
    ("denied", "its registry wants a login"),
    ("no such host", "its registry has no address"),
    ("connection refused", "its registry cannot be reached"),
    ("timeout", "its registry cannot be reached"),
    ("x509", "its registry's certificate is not trusted"),
    ("no space left", "the daemon's disk is full"),
)

_log = structlog.get_logger(__name__)


class Images:
    """The images of one daemon.

    Args:
        trusted: names that are the operator's, which the daemon is asked for as they are; see ``names``.
        registries: patterns of the registries from which other images are pulled.
    """

    def __init__(
        self,
        daemon: Daemon,
        prepared: Prepared,
        pull_timeout_s: float,
        trusted: Collection[str] = (),
        registries: Sequence[str] = ("*",),
    ) -> None:
        self._registries = tuple(registries)
        self._trusted = frozenset(trusted)
        self._daemon = daemon
        self._prepared = prepared
        self._timeout_s = pull_timeout_s
        # By the image as the caller names it, or by its id.
        self._pulls: SingleFlight[str, None] = SingleFlight(keep=0, finish=True)
        self._preparations: SingleFlight[tuple[str, str], ReadyImage] = SingleFlight(keep=0, finish=True)
        self._additions: SingleFlight[str, str] = SingleFlight(keep=0, finish=True)
        # By an image's id and a user: an image of one id never changes.
        self._ids: SingleFlight[tuple[str, str], Ids | None] = SingleFlight(keep=_KEPT_IDS, finish=True)

    async def aclose(self) -> None:
        """Stops pulls and preparations."""
        await asyncio.gather(
            self._pulls.aclose(), self._preparations.aclose(), self._additions.aclose(), self._ids.aclose()
        )

    async def there(self, image: str) -> bool:
        """Whether the daemon has an image, without pulling it."""
        try:
            await self._daemon.image(image)
        except Missing:
            return False
        return True

    async def ready(self, image: str, user: str = "") -> ReadyImage:
        """Returns the prepared image, pulled and made if necessary. ``user``: as in ``Prepared``.

        Raises NotFound (IMAGE_UNKNOWN), Unavailable (IMAGE_PULL_FAILED), DeadlineExceeded (IMAGE_PULL_TIMEOUT),
        FailedPrecondition (IMAGE_UNUSABLE, IMAGE_NOT_ALLOWED) and InvalidArgument (FIELD_INVALID, USER_UNKNOWN).
        """
        found = await self._pulled(image)
        return await self._preparations.get((found["Id"], user), lambda: self._prepared.of(image, found, user))

    async def equipped(self, image: str, files: Callable[[str], Mapping[str, bytes]]) -> str:
        """As ``Prepared.equipped``, for an image's name; raises as ``ready`` does."""
        found = await self._pulled(image)
        return await self._additions.get(image, lambda: self._prepared.equipped(image, found, files))

    async def known(self, image: str) -> tuple[str, str]:
        """Returns an image's id and architecture, pulled if necessary; raises as ``ready`` does."""
        found = await self._pulled(image)
        return str(found["Id"]), str(found["Architecture"])

    async def inspected(self, image: str, field: str) -> Json:
        """Returns the full description of the image that ``field`` names, pulled if necessary; raises as ``ready``."""
        return await self._pulled(image, field)

    async def ids(self, image: Json, user: str) -> Ids | None:
        """As ``Prepared.ids``, for an image's description."""
        return await self._ids.get((str(image["Id"]), user), lambda: self._prepared.ids(image, user))

    # Pulling -----------------------------------------------------------------------------------------------------

    async def _pulled(self, image: str, field: str = "spec.image") -> Json:
        wanted = None if image in self._trusted else names.asked(image, field)
        asked = image if wanted is None else str(wanted)
        try:
            return await self._found(image, wanted)
        except Missing:
            pass
        except Refused as error:
            raise errors.unknown(image, error.what) from error
        if wanted is not None and not any(fnmatch.fnmatchcase(wanted.registry, one) for one in self._registries):
            raise FailedPrecondition(
                f"the daemon has no image {image!r}, and the operator's docker_registries does not name "
                f"{wanted.registry}, from which it would be pulled",
                reason="IMAGE_NOT_ALLOWED",
                metadata={"image": image},
            )
        await self._pulls.get(asked, lambda: self._pull(asked, shown=wanted is None))
        try:
            return await self._found(image, wanted)
        except Missing as error:
            raise errors.unknown(image, error.what) from error

    async def _found(self, image: str, wanted: Reference | None) -> Json:
        """Returns the daemon's image of a caller's name (``wanted``), or of one of the operator's. Raises Missing."""
        if wanted is None:
            return await self._daemon.image(image)
        for form in names.forms(image, wanted):
            try:
                found = await self._daemon.image(str(form))
            except Missing:
                continue
            if names.is_ours(found):
                raise names.not_allowed(image)
            if names.is_named(found, form):
                return found
        raise Missing(404, "the daemon has none of this name")

    async def _pull(self, image: str, *, shown: bool) -> None:
        """Pulls an image. ``shown``: errors have the daemon's text, which a registry may have written."""
        name, digest = image.partition("@")[::2]
        if not digest:
            last = name.rpartition("/")[2]
            name, digest = (name, "latest") if ":" not in last else name.rsplit(":", 1)
        _log.info("pulling an image", image=image)
        try:
            async with asyncio.timeout(self._timeout_s):
                async with aclosing(self._daemon.pull(image, name, digest)) as progress:
                    async for event in progress:
                        if "error" in event:
                            raise _pull_failed(image, str(event["error"]), shown=shown)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the image {image!r} was not pulled within {self._timeout_s:g} s: pull it beforehand, or raise "
                "image_pull_timeout_s",
                reason="IMAGE_PULL_TIMEOUT",
                metadata={"image": image},
            ) from error
        except Refused as error:
            raise _pull_failed(image, error.what, shown=shown, known=error.status not in (400, 404)) from error


def _pull_failed(image: str, what: str, *, shown: bool, known: bool = True) -> PenstockError:
    # A registry's text, or that of an address to which one sent the daemon: the caller is a stranger to them.
    _log.warning("an image was not pulled", image=image, reason=what)
    if not known or "not found" in what or "manifest unknown" in what or "does not exist" in what:
        return errors.unknown(image, what if shown else "its registry does not give it")
    cause = next((ours for theirs, ours in _CAUSES if theirs in what.lower()), "the service's log has the reason")
    return errors.pull_failed(image, what if shown else cause)
