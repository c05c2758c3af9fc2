"""Where sandbox services keep recordings together: a folder of a shared file system, or a part of an S3 bucket (R141).

Invariants
- A file appears whole or not at all. Of several that create one name at once, one succeeds, and its content stays.
- The folder or bucket itself is never made: one that is absent is a mistake, or not mounted.
- Calls block, and raise whatever the file system raises.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

_LOCAL: Final = "file://"
_CHECKED: Final = "_penstock"
_CONFLICTS: Final = 5
"""How often S3 is asked again that answered 409: another creation of the name was under way."""
_PART_BYTES: Final = 8 * 1024 * 1024
_PARTS_AT_ONCE: Final = 2
_COPY: Final = 1024 * 1024


class Unfit(Exception):
    """A place that does not do what recordings need."""


class Place(Protocol):
    """Files by name; a name has parts with "/" between them."""

    def create(self, name: str, data: bytes) -> bool:
        """Stores a file if none has the name. Returns whether it did."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Stores a file, in place of what has the name."""
        ...

    def send(self, name: str, file: Path) -> None:
        """Stores a copy of a file, in place of what has the name."""
        ...

    def read(self, name: str, start: int, end: int) -> bytes | None:
        """Returns the bytes from ``start`` to before ``end``, fewer at the file's end; None if there is no file."""
        ...

    def age_s(self, name: str) -> float | None:
        """Returns the seconds since a file was stored, by both machines' clocks; None if there is none."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        ...


def opened(url: str) -> Place:
    """Returns the place of a URL with file:// or s3://. Raises ImportError and whatever its file system raises."""
    if url.startswith(_LOCAL):
        return Folder(Path(url.removeprefix(_LOCAL)))
    import fsspec

    files, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    return Bucket(files, str(root).rstrip("/"))


def check(place: Place) -> None:
    """Raises Unfit if a name can be created twice there, and whatever the place raises."""
    name = f"{_CHECKED}/{secrets.token_hex(16)}"
    try:
        # What it returns does not count: a creation whose answer is lost is repeated, and then finds itself.
        place.create(name, b"first")
        replaced = place.create(name, b"second")
        found = place.read(name, 0, _COPY)
    finally:
        place.remove(name)
    if replaced or found != b"first":
        raise Unfit("it stores a file although its name is taken")


class Folder:
    """A folder of a POSIX file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, name: str, data: bytes) -> bool:
        """See Place."""
        with self._part(name, lambda file: file.write(data)) as part:
            try:
                os.link(part, self._root / name)
            except FileExistsError:
                return False
        self._sync(name)
        return True

    def replace(self, name: str, data: bytes) -> None:
        """See Place."""
        with self._part(name, lambda file: file.write(data)) as part:
            part.replace(self._root / name)

    def send(self, name: str, file: Path) -> None:
        """See Place."""

        def copy(target: BinaryIO) -> None:
            with file.open("rb") as source:
                while data := source.read(_COPY):
                    target.write(data)

        with self._part(name, copy) as part:
            part.replace(self._root / name)
        self._sync(name)

    def read(self, name: str, start: int, end: int) -> bytes | None:
        """See Place."""
        try:
            with (self._root / name).open("rb") as file:
                file.seek(start)
                return file.read(end - start)
        except FileNotFoundError:
            self._root.stat()  # an absent root is no absent file
            return None

    def age_s(self, name: str) -> float | None:
        """See Place."""
        try:
            return time.time() - (self._root / name).stat().st_mtime
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        """See Place."""
        (self._root / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _part(self, name: str, write: Callable[[BinaryIO], object]) -> Iterator[Path]:
        """Yields a written file beside the named one: some file systems link only within a folder."""
        folder = self._root
        for step in name.split("/")[:-1]:
            folder /= step
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        part = folder / f".{secrets.token_hex(8)}.part"
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            yield part
        finally:
            part.unlink(missing_ok=True)

    def _sync(self, name: str) -> None:
        descriptor = os.open((self._root / name).parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Bucket:
    """A part of an S3 bucket, by s3fs, which repeats what failed on the way."""

    def __init__(self, files: Any, root: str) -> None:
        self._files = files
        self._root = root

    def create(self, name: str, data: bytes) -> bool:
        """See Place."""
        for last in (*[False] * (_CONFLICTS - 1), True):
            try:
                self._files.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                # s3fs maps both to errors that others have too.
                status = _status(error)
                if status == 412:
                    return False
                if status != 409 or last:
                    raise
            else:
                return True
        raise AssertionError("the last attempt returns or raises")

    def replace(self, name: str, data: bytes) -> None:
        """See Place."""
        self._files.pipe_file(self._path(name), data)

    def send(self, name: str, file: Path) -> None:
        """See Place."""
        self._files.put_file(str(file), self._path(name), chunksize=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    def read(self, name: str, start: int, end: int) -> bytes | None:
        """See Place."""
        try:
            return bytes(self._files.cat_file(self._path(name), start=start, end=end))
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":
                raise
            return None
        except OSError as error:
            if _status(error) == 416:  # the file ends before `start`
                return b""
            raise

    def age_s(self, name: str) -> float | None:
        """See Place."""
        try:
            modified = self._files.info(self._path(name)).get("LastModified")
        except FileNotFoundError:
            return None
        return None if modified is None else time.time() - modified.timestamp()

    def remove(self, name: str) -> None:
        """See Place."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _response(error: BaseException) -> dict[str, Any]:
    """What S3 answered, as botocore has it in the cause of the error that s3fs raises."""
    found = getattr(error.__cause__, "response", None)
    return found if isinstance(found, dict) else {}


def _status(error: BaseException) -> int | None:
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def _code(error: BaseException) -> str | None:
    code = _response(error).get("Error", {}).get("Code")
    return code if isinstance(code, str) else None
