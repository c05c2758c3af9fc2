"""The Docker daemon as this backend uses it: calls that begin and end, by the official SDK in a few threads.

Purpose: the SDK is synchronous, so each of its calls runs in one of ``_WORKERS`` threads of its own pool; nothing here
waits for something to happen (that is ``wire``'s business), so a thread is held for as long as the daemon works.

Invariants
- A cancelled call is waited for all the same: the daemon carries it out whether its caller waits or not, and whoever
  cleans up must do so after it.
- Errors come out as ``Refused`` (the daemon said no), ``Missing`` (it has no such thing) or Unavailable
  (DOCKER_UNREACHABLE); nothing of the SDK leaves this module.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from penstock_chassis.errors import FailedPrecondition, Unavailable

_WORKERS = 16
_TIMEOUT_S = 120
_ARCHIVE_CHUNK = 256 * 1024
_REFUSAL_BYTES = 64 << 10
_REFUSAL_ENDS = 600
_MOST_OF_AN_ITEM = 1024 * 1024
# Oldest API with all that is used here: Docker 20.10.
_API_VERSION = "1.41"

GO_DIRECTORY = 1 << 31
"""Go's os.ModeDir, in what the daemon says of a path."""

Json = dict[str, Any]
T = TypeVar("T")


class Refused(Exception):
    """The daemon refused; ``status`` is HTTP's, ``what`` its explanation."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(what)
        self.status = status
        self.what = what


class Missing(Refused):
    """There is no such container, image or volume."""


def items(chunks: Iterable[bytes]) -> Iterator[Json]:
    """The objects of a JSON array (or of null) that comes in chunks, each as it comes. Raises Refused (502)."""
    decoder, more = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    for chunk in chunks:
        text += more.decode(chunk)
        at = 0
        while (begin := text.find("{", at)) >= 0:
            try:
                found, at = decoder.raw_decode(text, begin)
            except ValueError:
                at = begin  # the rest of it is still to come
                break
            yield found
        text = text[at:]
        if len(text) > _MOST_OF_AN_ITEM:
            raise Refused(502, "the daemon's list holds something that is too long for an entry")
    if text.strip() not in ("]", "null", "[]"):
        raise Refused(502, "the daemon's list ended early")


def _unreachable(error: object) -> Unavailable:
    return Unavailable(f"the Docker daemon does not answer: {error}", reason="DOCKER_UNREACHABLE", retry_after_s=1.0)


class Daemon:
    """One daemon. ``connect`` makes it."""

    def __init__(self, api: Any, sdk: Any) -> None:
        self._api = api
        self._errors = sdk.errors
        self._transport_errors: tuple[type[Exception], ...] = (OSError, sdk.errors.DockerException)
        self._auth = sdk.auth
        self._types = sdk.types
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="docker")

    @classmethod
    def connect(cls, host: str) -> Daemon:
        """The daemon at ``host`` (empty: as DOCKER_HOST and its kin say). Nothing is sent yet.

        Raises FailedPrecondition (BACKEND_UNAVAILABLE) without the SDK, or for an address that is none.
        """
        try:
            import docker
            import docker.tls
            import docker.utils
        except ImportError as error:
            raise FailedPrecondition(
                "the docker package is not installed: pip install 'penstock-sandbox[docker]'",
                reason="BACKEND_UNAVAILABLE",
            ) from error
        try:
            found: Json = docker.utils.kwargs_from_env()
            if host:
                found["base_url"] = host
            api = docker.APIClient(version=_API_VERSION, timeout=_TIMEOUT_S, max_pool_size=_WORKERS, **found)
        except docker.errors.DockerException as error:
            raise FailedPrecondition(f"no Docker daemon: {error}", reason="BACKEND_UNAVAILABLE") from error
        return cls(api, docker)

    async def aclose(self) -> None:
        """End the threads; calls in flight are finished first."""
        await asyncio.to_thread(self._pool.shutdown)
        self._api.close()

    async def _call(self, work: Callable[[], T]) -> T:
        running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with contextlib.suppress(asyncio.CancelledError):  # who cancels twice waits as well
                    await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # the caller has left; its clean-up finds out
            raise
        except self._errors.NotFound as error:
            raise Missing(404, str(error.explanation or error)) from error
        except self._errors.APIError as error:
            raise Refused(error.status_code or 0, str(error.explanation or error)) from error
        except self._transport_errors as error:
            # requests' errors are OSErrors.
            raise _unreachable(error) from error

    # The daemon itself -------------------------------------------------------------------------------------------

    async def info(self) -> Json:
        """What the daemon says of itself."""
        return await self._call(self._api.info)

    def registry_header(self, image: str) -> dict[str, str]:
        """The header with which a pull of ``image`` is authorised, from Docker's own configuration."""
        repository, _, _ = image.partition("@")
        registry, _ = self._auth.resolve_repository_name(repository)
        header = self._auth.get_config_header(self._api, registry)
        return {"X-Registry-Auth": header.decode() if isinstance(header, bytes) else header} if header else {}

    # Containers --------------------------------------------------------------------------------------------------

    async def create(self, name: str, settings: Mapping[str, Any], host: Mapping[str, Any]) -> str:
        """Make a container (see ``settings`` for both parts); answers its id. The name is taken once: 409 after."""

        def work() -> str:
            limits = dict(host)
            limits["ulimits"] = [self._types.Ulimit(**limit) for limit in limits.get("ulimits", ())]
            limits["mounts"] = [self._types.Mount(**mount) for mount in limits.get("mounts", ())]
            if (log := limits.pop("log_driver", None)) is not None:
                limits["log_config"] = self._types.LogConfig(type=log)
            config = self._api.create_host_config(**limits)
            made: Json = self._api.create_container(name=name, host_config=config, **settings)
            return str(made["Id"])

        return await self._call(work)

    async def start(self, container: str) -> None:
        """Start a container that was made."""
        await self._call(lambda: self._api.start(container))

    async def inspect(self, container: str) -> Json:
        """Everything about a container. Raises Missing."""
        return await self._call(lambda: self._api.inspect_container(container))

    async def kill(self, container: str) -> None:
        """Kill a container and wait until it is dead; one that is dead already is fine."""

        def work() -> None:
            try:
                self._api.kill(container)
            except self._errors.APIError as error:
                if error.status_code != 409:
                    raise
            self._api.wait(container)

        await self._call(work)

    async def remove(self, container: str) -> None:
        """Kill and remove a container with its anonymous volumes; one that is gone is fine.

        Where somebody else is removing it, waits for how that ends: it may fail.
        """

        def work() -> None:
            try:
                self._api.remove_container(container, force=True, v=True)
            except self._errors.NotFound:
                return
            except self._errors.APIError as error:
                # "removal of container ... is already in progress"
                if error.status_code != 409 or "in progress" not in str(error.explanation):
                    raise
                self._wait_for_removal(container)

        await self._call(work)

    def _wait_for_removal(self, container: str) -> None:
        try:
            failure = self._api.wait(container, condition="removed").get("Error")
        except self._errors.NotFound:
            return
        if failure:
            raise Refused(500, str(failure.get("Message")))

    async def containers(self, label: str, *, running: bool = False) -> list[Json]:
        """Containers with a label, the stopped ones included unless ``running``."""
        return await self._call(lambda: self._api.containers(all=not running, filters={"label": [label]}))

    async def stats(self, container: str) -> Json:
        """One sample of a container's figures."""
        return await self._call(lambda: self._api.stats(container, decode=None, stream=False, one_shot=True))

    async def execute(self, container: str, argv: Sequence[str]) -> str:
        """Prepare a command with its three pipes; answers the id with which ``wire`` starts it."""

        def work() -> str:
            made: Json = self._api.exec_create(container, list(argv), stdin=True, stdout=True, stderr=True)
            return str(made["Id"])

        return await self._call(work)

    async def exit_code(self, execution: str) -> int | None:
        """The exit code of a command; None while it runs."""
        code = (await self._call(lambda: self._api.exec_inspect(execution))).get("ExitCode")
        return code if isinstance(code, int) else None

    # Files of containers -----------------------------------------------------------------------------------------

    async def put(self, container: str, folder: str, archive: bytes | Iterable[bytes]) -> None:
        """Unpack a tar at ``folder``, which must not lie under a tmpfs: the daemon would write beneath it."""
        await self._call(lambda: self._api.put_archive(container, folder, archive))

    async def fetch(self, container: str, path: str, limit: int) -> bytes:
        """The tar of a path. Raises Missing, and Refused (413) when it is larger than ``limit`` bytes."""

        def work() -> bytes:
            chunks, _ = self._api.get_archive(container, path, chunk_size=_ARCHIVE_CHUNK)
            whole = bytearray()
            for chunk in chunks:
                whole += chunk
                if len(whole) > limit:
                    chunks.close()
                    raise Refused(413, f"{path} is larger than {limit} bytes")
            return bytes(whole)

        return await self._call(work)

    def fetch_stream(self, container: str, path: str) -> tuple[Json, Any] | None:
        """What is at a path and its tar in chunks (a generator to close), for use in ``in_thread``; None if missing.

        Raises Refused also where the daemon fails at a link, which it follows.
        """
        try:
            chunks, described = self._api.get_archive(container, path, chunk_size=_ARCHIVE_CHUNK)
        except self._errors.NotFound:
            return None
        except self._errors.APIError as error:
            raise Refused(error.status_code or 0, str(error.explanation or error)) from error
        return described, chunks

    async def has(self, container: str, path: str) -> bool:
        """Whether there is something at a path."""

        def work() -> bool:
            found = self.fetch_stream(container, path)
            if found is not None:
                found[1].close()
            return found is not None

        return await self._call(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run a caller's own work with the SDK in a thread of the pool, with the same errors."""
        return await self._call(work)

    def changes(self, container: str) -> Generator[tuple[str, int], None, None]:
        """Paths that differ from the image, each with 0 changed, 1 added or 2 deleted, for use in ``in_thread``.

        Read as they come: their number is the sandbox's choice.
        """
        url = f"{self._api.base_url}/v{_API_VERSION}/containers/{container}/changes"
        with self._api.get(url, stream=True, timeout=_TIMEOUT_S) as answer:
            if answer.status_code != 200:
                what = answer.raw.read(_REFUSAL_BYTES, decode_content=True).decode(errors="replace")
                if len(what) > 2 * _REFUSAL_ENDS:  # a path is in the middle, what was wrong with it at the end
                    what = f"{what[:_REFUSAL_ENDS]} ... {what[-_REFUSAL_ENDS:]}"
                raise (Missing if answer.status_code == 404 else Refused)(answer.status_code, what)
            for one in items(answer.iter_content(_ARCHIVE_CHUNK)):
                yield str(one["Path"]), int(one["Kind"])

    # Images ------------------------------------------------------------------------------------------------------

    async def image(self, name: str) -> Json:
        """Everything about an image. Raises Missing."""
        return await self._call(lambda: self._api.inspect_image(name))

    async def commit(self, container: str, repository: str, tag: str, labels: Mapping[str, str]) -> str:
        """Make an image of a container's files; answers its id."""

        def work() -> str:
            made: Json = self._api.commit(container, repository, tag, pause=False, conf={"Labels": dict(labels)})
            return str(made["Id"])

        return await self._call(work)

    async def images(self, label: str) -> list[Json]:
        """Images with a label."""
        return await self._call(lambda: self._api.images(filters={"label": [label]}))

    async def remove_image(self, name: str) -> None:
        """Remove an image; one that is gone is fine. Raises Refused (409) while something stands on it."""

        def work() -> None:
            try:
                self._api.remove_image(name)
            except self._errors.NotFound:
                return

        await self._call(work)

    # Volumes -----------------------------------------------------------------------------------------------------

    async def create_volume(self, name: str, labels: Mapping[str, str]) -> None:
        """Make a volume."""
        await self._call(lambda: self._api.create_volume(name, labels=dict(labels)))

    async def volumes(self, label: str) -> list[Json]:
        """Volumes with a label."""
        return (await self._call(lambda: self._api.volumes(filters={"label": [label]}))).get("Volumes") or []

    async def remove_volume(self, name: str) -> None:
        """Remove a volume; one that is gone is fine."""

        def work() -> None:
            try:
                self._api.remove_volume(name, force=True)
            except self._errors.NotFound:
                return

        await self._call(work)
