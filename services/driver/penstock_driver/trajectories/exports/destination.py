"""Where exported files go: a directory of any filesystem that fsspec knows.

Invariants: a file appears under its name whole, with its last content if it is sent again. Credentials come from the
environment and fsspec's own configuration: a URL has none, so it can be logged and stored. All calls block, and run in
the threads of one small pool.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson

from penstock.tables.rows import ROWS
from penstock.values import directory_urls
from penstock_chassis.aio.retry import Delays, retry
from penstock_chassis.errors import FailedPrecondition

CALL_S: Final = 600.0
"""Limit of one call of the filesystem; its thread goes on."""
CHECK_S: Final = 15.0
"""How long a start repeats its check while errors look transient."""
_DELAYS: Final = Delays(0.5, 4.0, jitter=(0.75, 1.25))
_MARK: Final = "_penstock"
_OBJECT_STORES: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "ocilake", "tos", "obs", "memory"}
)
"""Filesystems in which a file appears whole when its upload ends."""
_PERMANENT: Final = (PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, TypeError)

T = TypeVar("T")


class Destination:
    """One directory. Open with `opened`."""

    def __init__(self, url: str, filesystem: Any, root: str, pool: Executor) -> None:
        self.url = url
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._pool = pool
        protocol = filesystem.protocol
        names = {protocol} if isinstance(protocol, str) else set(protocol)
        self._is_object_store = bool(names & _OBJECT_STORES)
        self._send = (
            self._put_local
            if names & directory_urls.LOCAL
            else self._put
            if self._is_object_store
            else self._put_and_move
        )

    @classmethod
    async def opened(cls, url: str, pool: Executor) -> Destination:
        """Load what the URL needs. FailedPrecondition (EXPORT_PACKAGE_MISSING): a package is not installed."""
        filesystem, root = await asyncio.get_running_loop().run_in_executor(pool, _filesystem_of, url)
        return cls(url, filesystem, root, pool)

    async def check(self, driver: str, *, is_known: bool) -> Exception | None:
        """Write a small file that says which driver writes here.

        `is_known`: this driver has written there before; then an error that looks transient is returned.
        FailedPrecondition (EXPORT_NOT_WRITABLE) otherwise.
        """
        content = orjson.dumps({"driver": driver, "tables": sorted(ROWS)})
        name = f"{_MARK}/{driver}.json"

        def write() -> None:
            if not self._is_object_store:  # a bucket that is missing is a mistake, which this would make
                self._filesystem.makedirs(f"{self._root}/{_MARK}", exist_ok=True)
            self._filesystem.pipe_file(f"{self._root}/{name}", content)

        try:
            # A filesystem repeats by itself, for a minute or so. A driver that has rollouts must not be away so long.
            async with asyncio.timeout(CHECK_S if is_known else None):
                await retry(
                    lambda: self.run(write), _DELAYS, patience_s=lambda error: 0.0 if _is_permanent(error) else CHECK_S
                )
        except Exception as error:
            if is_known and not _is_permanent(error):
                return error
            raise FailedPrecondition(
                f"export_url {self.url} cannot be written: {described(error)}. Check that the place exists, and the "
                "credentials and the endpoint in the driver's environment.",
                reason="EXPORT_NOT_WRITABLE",
            ) from error
        return None

    async def put(self, local: Path, name: str) -> None:
        """Send a file; raises whatever the filesystem raises. What has this name is replaced."""
        await self.run(lambda: self._send(local, f"{self._root}/{name}"))

    async def has(self, name: str) -> bool:
        """Whether a file is there. False, too, where this driver may write but not look."""

        def look() -> bool:
            self._filesystem.invalidate_cache()
            return bool(self._filesystem.exists(f"{self._root}/{name}"))

        try:
            return await self.run(look)
        except PermissionError:
            return False

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of blocking work, done in the pool. TimeoutError after CALL_S."""
        async with asyncio.timeout(CALL_S):
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _put(self, local: Path, target: str) -> None:
        self._filesystem.put_file(str(local), target)

    def _put_and_move(self, local: Path, target: str) -> None:
        """For filesystems where a file grows under the eyes of readers, and a move may not replace."""
        directory, _, name = target.rpartition("/")
        part = f"{directory}/.{name}.{secrets.token_hex(4)}.part"
        self._filesystem.makedirs(directory, exist_ok=True)
        self._filesystem.put_file(str(local), part)
        if self._filesystem.exists(target):
            self._filesystem.rm_file(target)
        self._filesystem.mv(part, target)

    def _put_local(self, local: Path, target: str) -> None:
        path = Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            with local.open("rb") as source, part.open("xb") as sink:
                while piece := source.read(1 << 20):
                    sink.write(piece)
                sink.flush()
                os.fsync(sink.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def described(error: BaseException) -> str:
    """An error of a filesystem in one line for people."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _is_permanent(error: BaseException) -> bool:
    return isinstance(error, _PERMANENT)


def _filesystem_of(url: str) -> tuple[Any, str]:
    try:
        import fsspec
        import pyarrow.parquet  # noqa: F401 - needed at the first batch, missed at the start
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            f"export_url needs the package {error.name}: pip install 'penstock-driver[export]'",
            reason="EXPORT_PACKAGE_MISSING",
        ) from error
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise FailedPrecondition(
            f"export_url {url} needs a package that is not installed: {described(error)} (for s3://: "
            "pip install 'penstock-driver[s3]')",
            reason="EXPORT_PACKAGE_MISSING",
        ) from error
    except Exception as error:
        # An unknown scheme, or a configuration of the filesystem that it refuses.
        raise FailedPrecondition(
            f"export_url {url} cannot be opened: {described(error)}", reason="EXPORT_NOT_WRITABLE"
        ) from error
    return filesystem, str(root)
