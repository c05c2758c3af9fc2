"""Reads and writes rows of exported tables: JSON Lines, and Parquet compressed with zstd.

Invariants: a file appears under its name only once complete; values are read back bit for bit in both formats; memory
holds one batch of rows, however many there are.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import orjson

from penstock.client import Outcome, Trajectory
from penstock.client.errors import ConfigurationError, InvalidArgument
from penstock.client.transport.atomic_files import replacing, write_whole
from penstock.tables.columns import COLUMNS, SCHEMA_VERSION, Kind, Row, Table
from penstock.tables.parquet import ParquetSink

_NESTED: Final = frozenset({Kind.JSON, Kind.TEXTS, Kind.VERSIONS, Kind.TURN_SPANS, Kind.FINDINGS})
"""Kinds of columns stored as JSON text in Parquet, in version 1 or still in this one."""

_KINDS: Final = {name: kind for columns in COLUMNS.values() for name, kind in columns.items()}
_READ_ROWS: Final = 64
_SUFFIXES: Final = {"image/png": ".png", "image/jpeg": ".jpg", "image/gif": ".gif", "image/webp": ".webp"}


async def with_images(
    trajectories: AsyncIterable[tuple[Trajectory, Outcome]], directory: Path
) -> AsyncIterator[tuple[Trajectory, Outcome]]:
    """Yields trajectories that were read with images, each after the files of its images are in `directory`.

    A file is named by the digest that rows have, in hexadecimal, with the suffix of its media type.

    Raises:
        ConfigurationError: `FILE_NOT_WRITTEN`.
    """
    written: set[bytes] = set()
    async for trajectory, outcome in trajectories:
        of_calls = (image for call in trajectory.calls for image in call.images)
        of_samples = (image for sample in trajectory.samples for image in sample.images)
        for image in (*of_calls, *of_samples):
            if image.sha256 not in written:
                name = image.sha256.hex() + _SUFFIXES.get(image.media_type, "")
                await asyncio.to_thread(write_whole, directory / name, image.data)
                written.add(image.sha256)
        yield trajectory, outcome


class Format(StrEnum):
    JSONL = "jsonl"
    PARQUET = "parquet"


class Sink(Protocol):
    """A destination of rows."""

    def write(self, rows: list[Row]) -> None:
        """Adds rows."""

    def close(self) -> None:
        """Completes the file's contents."""


def format_of(path: Path, format: Format | str | None = None) -> Format:  # noqa: A002 - the word that everybody uses
    """Returns the format for a file: the requested one, or the one of its name.

    Raises:
        ConfigurationError: `PYARROW_MISSING`, Parquet needs a package that is not installed.
    """
    chosen = Format(format) if format is not None else _format_by_name(path)
    if chosen is Format.PARQUET:
        _parquet()
    return chosen


@contextlib.contextmanager
def new_file(path: Path, table: Table, format: Format) -> Iterator[Sink]:  # noqa: A002 - as in `format_of`
    """Yields a sink for rows; after the block, unless it raised, the file is at `path`, complete and on disk.

    Raises:
        ConfigurationError: `FILE_NOT_WRITTEN`; an existing file at `path` stays unchanged.
    """
    with replacing(path) as stream:
        sink: Sink = ParquetSink(stream, table) if format is Format.PARQUET else _JsonSink(stream)
        try:
            yield sink
        finally:
            sink.close()


def read_rows(path: Path) -> Iterator[Row]:
    """Yields the rows of an exported file; a name that ends in .parquet is Parquet, anything else JSON Lines.

    Raises:
        ConfigurationError: `PYARROW_MISSING`.
        InvalidArgument: `ROW_INVALID`, with the line; `SCHEMA_NEWER`, a newer version wrote it.
    """
    rows = _read_parquet(path, path.name) if _format_by_name(path) is Format.PARQUET else _read_jsonl(path)
    yield from _readable(rows, path.name)


def read_exports(place: str | Path, table: Table | str) -> Iterator[Row]:
    """Yields the rows of a table that drivers exported to a place (`export_url`), a rollout's attempt once.

    Memory holds a batch of rows, and the keys of the rollouts read so far: some 150 bytes each.

    Args:
        place: a directory, or any fsspec URL, of all exports or a part of them such as one run's directory.
        table: the kind of rows.

    Raises:
        ConfigurationError: `PYARROW_MISSING`, `FSSPEC_MISSING`.
        InvalidArgument: `EXPORT_UNREADABLE`, the place cannot be read; `ROW_INVALID`, `SCHEMA_NEWER`.
    """
    known: dict[tuple[str, int | None], str] = {}
    for name, opened in _exported_files(str(place), f".{Table(table)}.parquet"):
        with opened as source:
            for row in _readable(_read_parquet(source, name), name):
                key = (row["rollout_id"], row.get("attempt"))
                # A killed driver, or one without its journal, may have stored a rollout twice; each file has it whole.
                if known.setdefault(key, name) == name:
                    yield row


def _readable(rows: Iterator[Row], name: str) -> Iterator[Row]:
    for row in rows:
        version = row.get("schema_version", SCHEMA_VERSION)
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise InvalidArgument(
                f"{name} has schema version {version}; this release reads up to {SCHEMA_VERSION}",
                reason="SCHEMA_NEWER",
            )
        yield row


def _exported_files(place: str, ending: str) -> Iterator[tuple[str, contextlib.AbstractContextManager[Any]]]:
    if "://" not in place:
        if not Path(place).is_dir():
            raise InvalidArgument(f"{place} is no directory", reason="EXPORT_UNREADABLE")
        for path in sorted(Path(place).rglob(f"*{ending}")):
            yield str(path), path.open("rb")
        return
    try:
        import fsspec
    except ModuleNotFoundError:
        raise ConfigurationError(
            "A URL needs fsspec: pip install 'penstock[export]', and for s3:// s3fs", reason="FSSPEC_MISSING"
        ) from None
    try:
        filesystem, root = fsspec.core.url_to_fs(place)
        names = sorted(name for name in filesystem.find(root) if name.endswith(ending))
    except ImportError as error:
        raise ConfigurationError(f"{place} needs another package: {error}", reason="FSSPEC_MISSING") from None
    except Exception as error:
        raise InvalidArgument(f"{place} cannot be read: {error}", reason="EXPORT_UNREADABLE") from error
    for name in names:
        yield name, filesystem.open(name, "rb")


class _JsonSink:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, rows: list[Row]) -> None:
        self._stream.writelines(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)

    def close(self) -> None:
        """Does nothing: no text follows the last line."""


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                row = orjson.loads(line)
            except ValueError as error:
                raise InvalidArgument(f"{path.name}, line {number}: {error}", reason="ROW_INVALID") from None
            if not isinstance(row, dict):
                raise InvalidArgument(f"{path.name}, line {number}: not an object", reason="ROW_INVALID")
            yield row


def _read_parquet(source: Path | BinaryIO, name: str) -> Iterator[Row]:
    arrow, parquet = _parquet()
    try:
        # Reading ahead keeps a file's compressed bytes in memory until it is closed. It saves time where a stream is
        # far away, and a driver's file is small.
        opened = parquet.ParquetFile(source, pre_buffer=not isinstance(source, Path))
        for batch in opened.iter_batches(_READ_ROWS):
            for row in batch.to_pylist():
                for column, value in row.items():
                    if isinstance(value, str) and _KINDS.get(column) in _NESTED:
                        row[column] = orjson.loads(value)
                yield row
    except (arrow.ArrowInvalid, orjson.JSONDecodeError) as error:
        raise InvalidArgument(f"{name}: {error}", reason="ROW_INVALID") from None


def _format_by_name(path: Path) -> Format:
    return Format.PARQUET if path.suffix == ".parquet" else Format.JSONL


def _parquet() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise ConfigurationError(
            "Parquet needs pyarrow: pip install 'penstock[parquet]', or choose jsonl", reason="PYARROW_MISSING"
        ) from None
    return pa, pq
