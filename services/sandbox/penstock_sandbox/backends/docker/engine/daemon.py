"""One Docker daemon: its calls by the official SDK in a few threads, its streams by aiohttp.

Purpose: the SDK is synchronous, so each call runs in one of ``_WORKERS`` threads of its own pool, and holds it only
while the daemon works. What waits (events, pulls, the pipes of commands, the end of a container) is in ``streams``.
The SDK decides where the daemon is and by which certificates; ``ssh`` makes it a local socket for both.

Invariants
- A cancelled caller still waits for its call: the daemon executes it in any case, and clean-up must come after it.
- Errors are ``Refused`` (the daemon refused), ``Missing`` (there is no such object) or Unavailable
  (DOCKER_UNREACHABLE); no exception of the SDK leaves this module.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import contextlib
import json
import os
import ssl
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.backends.docker.engine.errors import Json, Missing, Refused, unreachable
from penstock_sandbox.backends.docker.engine.ssh import SshRelay

if TYPE_CHECKING:
    from penstock_sandbox.backends.docker.engine.streams import CommandPipes, Streams

_WORKERS = 16
_TIMEOUT_S = 120
_ARCHIVE_CHUNK = 256 * 1024
_REFUSAL_BYTES = 64 << 10
_REFUSAL_ENDS = 600
_MOST_OF_AN_ITEM = 1024 * 1024
# Oldest API version with all calls used here: Docker 20.10.
_API_VERSION = "1.41"
_DEFAULT_HOST = "unix:///var/run/docker.sock"

GO_DIRECTORY = 1 << 31
"""Go's os.ModeDir, in the daemon's file modes."""
GO_SOCKET = 1 << 24
"""Go's os.ModeSocket."""
GO_LINK = 1 << 27
"""Go's os.ModeSymlink."""
GO_TYPES = GO_DIRECTORY | GO_LINK | GO_SOCKET | 1 << 26 | 1 << 25 | 1 << 21 | 1 << 19
"""Go's os.ModeType: the bits that no plain file has, those of devices and pipes included."""

T = TypeVar("T")


def items(chunks: Iterable[bytes]) -> Iterator[Json]:
    """Yields the objects of a JSON array (or null) from chunks, each as it arrives. Raises Refused (502)."""
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
            raise Refused(502, "the daemon's list has an entry that is too long")
    if text.strip() not in ("]", "null", "[]"):
        raise Refused(502, "the daemon's list ended early")


class Daemon:
    """One daemon; see ``connect``."""

    def __init__(self, api: Any, sdk: Any, streams: Streams, relay: SshRelay | None) -> None:
        self._api = api
        self._errors = sdk.errors
        self._transport_errors: tuple[type[Exception], ...] = (OSError, sdk.errors.DockerException)
        self._auth = sdk.auth
        self._types = sdk.types
        self._streams = streams
        self._relay = relay
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="docker")

    @classmethod
    async def connect(cls, host: str) -> Daemon:
        """Returns the daemon at ``host`` (empty: DOCKER_HOST and related variables). Sends nothing yet.

        Raises FailedPrecondition (BACKEND_UNAVAILABLE) without the SDK, or for an invalid address; Unavailable
        (DOCKER_UNREACHABLE) without a socket at a local address.
        """
        local = host or os.environ.get("DOCKER_HOST", "") or _DEFAULT_HOST
        # Before the SDK is imported: that takes a quarter of a service's start.
        if local.startswith("unix://") and not Path(local.removeprefix("unix://")).exists():
            raise unreachable(f"there is no {local}")
        try:
            import docker
            import docker.tls
            import docker.utils
        except ImportError as error:
            raise FailedPrecondition(
                "the docker package is not installed: pip install 'penstock-sandbox[docker]'",
                reason="BACKEND_UNAVAILABLE",
            ) from error
        relay: SshRelay | None = None
        try:
            found: Json = docker.utils.kwargs_from_env()
            at = docker.utils.parse_host(host or found.get("base_url"), tls="tls" in found)
            if at.startswith("ssh://"):
                # As it was given: the SDK's has a port, which may be another one in ssh's configuration.
                relay = SshRelay(host or found["base_url"])
                at = relay.address
            found["base_url"] = at
            api = docker.APIClient(version=_API_VERSION, timeout=_TIMEOUT_S, max_pool_size=_WORKERS, **found)
            streams = _streams(at, api)
        except BaseException as error:
            if relay is not None:
                await relay.aclose()
            if isinstance(error, (docker.errors.DockerException, ValueError, OSError)):
                raise FailedPrecondition(f"no Docker daemon: {error}", reason="BACKEND_UNAVAILABLE") from error
            raise
        return cls(api, docker, streams, relay)

    async def aclose(self) -> None:
        """Ends the threads after the calls in flight, and the streams."""
        await asyncio.to_thread(self._pool.shutdown)
        self._api.close()
        await self._streams.aclose()
        if self._relay is not None:
            await self._relay.aclose()

    async def _call(self, work: Callable[[], T]) -> T:
        running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with contextlib.suppress(asyncio.CancelledError):  # repeated cancellation waits as well
                    await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # the caller has left; its clean-up will see the state
            raise
        except self._errors.NotFound as error:
            raise Missing(404, str(error.explanation or error)) from error
        except self._errors.APIError as error:
            raise Refused(error.status_code or 0, str(error.explanation or error)) from error
        except self._transport_errors as error:
            # requests' errors are OSErrors.
            raise unreachable(error) from error

    # The daemon itself -------------------------------------------------------------------------------------------

    async def info(self) -> Json:
        """Returns the daemon's description of itself."""
        return await self._call(self._api.info)

    async def is_podman(self) -> bool:
        """Whether it is Podman, which differs in what it takes."""
        found = await self._call(self._api.version)
        return any(str(one.get("Name")).startswith("Podman") for one in found.get("Components") or ())

    def events(self, query: Mapping[str, str]) -> AsyncGenerator[Json, None]:
        """Yields the daemon's events, with a query as in its API, until the connection ends."""
        return self._streams.objects("GET", "/events", query)

    async def pull(self, image: str, name: str, tag: str) -> AsyncGenerator[Json, None]:
        """Yields the progress of a pull of ``name`` with a tag or digest; ``image`` is how callers call it.

        Raises Refused, also for a name that no image can have.
        """
        header = await self._call(lambda: self._registry_header(image))
        query = {"fromImage": name, "tag": tag}
        async with aclosing(self._streams.objects("POST", "/images/create", query, header)) as progress:
            async for event in progress:
                yield event

    def _registry_header(self, image: str) -> dict[str, str]:
        """Returns the header that authorises a pull of ``image``, from Docker's own configuration."""
        repository, _, _ = image.partition("@")
        try:
            registry, _ = self._auth.resolve_repository_name(repository)
        except self._errors.InvalidRepository as error:
            raise Refused(400, str(error)) from error
        header = self._auth.get_config_header(self._api, registry)
        return {"X-Registry-Auth": header.decode() if isinstance(header, bytes) else header} if header else {}

    # Containers --------------------------------------------------------------------------------------------------

    async def create(self, name: str, settings: Mapping[str, Any], host: Mapping[str, Any]) -> str:
        """Creates a container (both parts: see ``container``); returns its id. Refused (409) if the name is in use."""

        def work() -> str:
            limits = dict(host)
            limits["ulimits"] = [self._types.Ulimit(**limit) for limit in limits.get("ulimits", ())]
            limits["mounts"] = [self._types.Mount(**mount) for mount in limits.get("mounts", ())]
            if (log := limits.pop("log_driver", None)) is not None:
                limits["log_config"] = self._types.LogConfig(type=log, config=limits.pop("log_options", {}))
            read_only = limits.pop("readonly_paths", None)
            config = self._api.create_host_config(**limits)
            if read_only is not None:
                config["ReadonlyPaths"] = read_only  # the SDK has no parameter for it
            made: Json = self._api.create_container(name=name, host_config=config, **settings)
            return str(made["Id"])

        return await self._call(work)

    async def start(self, container: str) -> None:
        await self._call(lambda: self._api.start(container))

    async def inspect(self, container: str) -> Json:
        """Returns the full description of a container. Raises Missing."""
        return await self._call(lambda: self._api.inspect_container(container))

    async def kill(self, container: str) -> None:
        """Kills a container and waits until it is dead; succeeds if it is dead already."""

        try:
            await self._call(lambda: self._api.kill(container))
        except Refused as error:
            if error.status != 409:
                raise
        await self._ended(container, "not-running")

    async def _ended(self, container: str, condition: str) -> Json:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._streams.answer("POST", f"/containers/{container}/wait", {"condition": condition})
        except TimeoutError as error:
            raise unreachable(f"the container {container} does not end") from error

    async def remove(self, container: str) -> None:
        """Kills and removes a container with its anonymous volumes; succeeds if it is gone.

        If another removal is in progress, waits for its end: it may fail.
        """

        try:
            await self._call(lambda: self._api.remove_container(container, force=True, v=True))
        except Missing:
            return
        except Refused as error:
            # "removal of container ... is already in progress"
            if error.status != 409 or "in progress" not in error.what:
                raise
            try:
                failure = (await self._ended(container, "removed")).get("Error")
            except Missing:
                return
            if failure:
                raise Refused(500, str(failure.get("Message"))) from error

    async def containers(self, label: str, *, running: bool = False) -> list[Json]:
        """Returns containers with a label, stopped ones included unless ``running``."""
        return await self._call(lambda: self._api.containers(all=not running, filters={"label": [label]}))

    async def last_output(self, container: str, lines: int, most_bytes: int) -> str:
        """Returns the last lines of both outputs of a container with a log. Raises Missing."""
        whole = await self._call(lambda: self._api.logs(container, stdout=True, stderr=True, tail=lines))
        return bytes(whole[-most_bytes:]).decode(errors="replace").strip()

    async def stats(self, container: str) -> Json:
        """Returns one sample of a container's statistics."""
        return await self._call(lambda: self._api.stats(container, decode=None, stream=False, one_shot=True))

    async def execute(self, container: str, argv: Sequence[str]) -> str:
        """Prepares a command with three pipes; returns the id with which ``command`` starts it."""

        def work() -> str:
            made: Json = self._api.exec_create(container, list(argv), stdin=True, stdout=True, stderr=True)
            return str(made["Id"])

        return await self._call(work)

    def command(self, execution: str) -> AbstractAsyncContextManager[CommandPipes]:
        """Starts a prepared command; its pipes are cut at the end of the context."""
        return self._streams.command(execution)

    def attached(self, container: str, last: bytes) -> AbstractAsyncContextManager[CommandPipes]:
        """Opens the pipes of a container's first process, as ``Streams.attached`` does."""
        return self._streams.attached(container, last)

    async def exit_code(self, execution: str) -> int | None:
        """Returns the exit code of a command; None while it runs."""
        code = (await self._call(lambda: self._api.exec_inspect(execution))).get("ExitCode")
        return code if isinstance(code, int) else None

    # Files of containers -----------------------------------------------------------------------------------------

    async def put(self, container: str, folder: str, archive: bytes | Iterable[bytes]) -> None:
        """Unpacks a tar at ``folder``, which must not lie under a tmpfs: the daemon would write beneath it."""
        await self._call(lambda: self._api.put_archive(container, folder, archive))

    async def fetch(self, container: str, path: str, limit: int) -> bytes:
        """Returns the tar of a path. Raises Missing, and Refused (413) if it is larger than ``limit`` bytes."""

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
        """Returns a path's metadata and its tar in chunks (a generator to close), for ``in_thread``; None if missing.

        Raises Refused also if the daemon fails at a link, which it follows.
        """
        try:
            chunks, described = self._api.get_archive(container, path, chunk_size=_ARCHIVE_CHUNK)
        except self._errors.NotFound:
            return None
        except self._errors.APIError as error:
            raise Refused(error.status_code or 0, str(error.explanation or error)) from error
        return described, chunks

    async def has(self, container: str, path: str) -> bool:
        """Whether a path exists."""
        return await self.stat(container, path) is not None

    async def stat(self, container: str, path: str) -> Json | None:
        """Returns a path's metadata, of a link itself, with Go's ``mode`` and the ``linkTarget``; None if missing.

        The path is not opened: a daemon that makes a tar of a pipe waits for a writer.
        """

        def work() -> Json | None:
            url = f"{self._api.base_url}/v{_API_VERSION}/containers/{quote(container)}/archive"
            answer = self._api.head(url, params={"path": path}, timeout=_TIMEOUT_S)
            if answer.status_code == 404:
                return None
            if answer.status_code != 200:
                raise Refused(answer.status_code, f"the daemon does not describe {path}")
            found: Json = json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))
            return found

        return await self._call(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs a caller's own work with the SDK in a thread of the pool, with the same errors."""
        return await self._call(work)

    def changes(self, container: str) -> Generator[tuple[str, int], None, None]:
        """Yields paths that differ from the image, each with 0 changed, 1 added or 2 deleted, for use in ``in_thread``.

        Streamed: the sandbox controls their number.
        """
        url = f"{self._api.base_url}/v{_API_VERSION}/containers/{container}/changes"
        with self._api.get(url, stream=True, timeout=_TIMEOUT_S) as answer:
            if answer.status_code != 200:
                what = answer.raw.read(_REFUSAL_BYTES, decode_content=True).decode(errors="replace")
                if len(what) > 2 * _REFUSAL_ENDS:  # a path is in the middle, the error at the end
                    what = f"{what[:_REFUSAL_ENDS]} ... {what[-_REFUSAL_ENDS:]}"
                raise (Missing if answer.status_code == 404 else Refused)(answer.status_code, what)
            for one in items(answer.iter_content(_ARCHIVE_CHUNK)):
                yield str(one["Path"]), int(one["Kind"])

    # Images ------------------------------------------------------------------------------------------------------

    async def image(self, name: str) -> Json:
        """Returns the full description of an image. Raises Missing."""
        return await self._call(lambda: self._api.inspect_image(name))

    async def commit(self, container: str, repository: str, tag: str, labels: Mapping[str, str]) -> str:
        """Makes an image of a container's files; returns its id.

        The values of ``labels`` have no spaces, quotes, backslashes and dollars: they are instructions of a Dockerfile,
        since Podman takes no other form.
        """

        def work() -> str:
            changes = [f"LABEL {name}={value}" for name, value in labels.items()]
            made: Json = self._api.commit(container, repository, tag, pause=False, changes=changes)
            return str(made["Id"])

        return await self._call(work)

    async def images(self, label: str) -> list[Json]:
        """Returns images with a label, with the names that they were given."""
        found = await self._call(lambda: self._api.images(filters={"label": [label]}))
        return [{**one, "RepoTags": [_as_given(name) for name in one.get("RepoTags") or ()]} for one in found]

    async def remove_image(self, name: str) -> None:
        """Removes an image; succeeds if it is gone. Raises Refused (409) while something is based on it."""

        def work() -> None:
            try:
                self._api.remove_image(name)
            except self._errors.NotFound:
                return

        await self._call(work)

    # Volumes -----------------------------------------------------------------------------------------------------

    async def create_volume(self, name: str, labels: Mapping[str, str]) -> None:
        await self._call(lambda: self._api.create_volume(name, labels=dict(labels)))

    async def volumes(self, label: str) -> list[Json]:
        return (await self._call(lambda: self._api.volumes(filters={"label": [label]}))).get("Volumes") or []

    async def remove_volume(self, name: str) -> None:
        """Removes a volume; succeeds if it is gone."""

        def work() -> None:
            try:
                self._api.remove_volume(name, force=True)
            except self._errors.NotFound:
                return

        await self._call(work)


def _as_given(name: str) -> str:
    """Returns an image's name without the registry that Podman adds to names that have none."""
    for added in ("docker.io/library/", "localhost/"):
        name = name.removeprefix(added)
    return name


def _streams(at: str, api: Any) -> Streams:
    """Returns the streams of a daemon at the SDK's address, with the SDK's certificates."""
    from penstock_sandbox.backends.docker.engine.streams import Streams  # and aiohttp, once there is a daemon

    scheme, _, place = at.partition("://")
    if scheme.endswith("unix"):
        return Streams(_API_VERSION, path=place)
    if scheme == "http":
        return Streams(_API_VERSION, url=at)
    context = ssl.create_default_context(cafile=api.verify if isinstance(api.verify, str) else None)
    if not api.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if api.cert:
        context.load_cert_chain(*api.cert)
    return Streams(_API_VERSION, url=at, tls=context)
