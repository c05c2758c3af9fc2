"""Reads and writes rows of exported tables: JSON Lines, and Parquet compressed with zstd.

Invariants: a file appears under its name only once complete; values are read back bit for bit in both formats; memory
holds one batch of rows, however many there are.
"""

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import orjson

from penstock.analysis.export_columns import COLUMNS, SCHEMA_VERSION, Kind, Row, Table, arrow_schema
from penstock.client.errors import ConfigurationError, InvalidArgument
from penstock.client.transport.atomic_files import replacing

_NESTED: Final = frozenset({Kind.JSON, Kind.TEXTS, Kind.VERSIONS, Kind.TURN_SPANS, Kind.FINDINGS})
"""Kinds of columns stored as JSON text in Parquet, in version 1 or still in this one."""

_KINDS: Final = {name: kind for columns in COLUMNS.values() for name, kind in columns.items()}
_READ_ROWS: Final = 64


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
        sink: Sink = _ParquetSink(stream, table) if format is Format.PARQUET else _JsonSink(stream)
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
    for row in _read_parquet(path) if _format_by_name(path) is Format.PARQUET else _read_jsonl(path):
        version = row.get("schema_version", SCHEMA_VERSION)
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise InvalidArgument(
                f"{path.name} has schema version {version}; this release reads up to {SCHEMA_VERSION}",
                reason="SCHEMA_NEWER",
            )
        yield row


class _JsonSink:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, rows: list[Row]) -> None:
        self._stream.writelines(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)

    def close(self) -> None:
        """Nothing follows the last line."""


class _ParquetSink:
    def __init__(self, stream: BinaryIO, table: Table) -> None:
        self._arrow, parquet = _parquet()
        self._schema = arrow_schema(table)
        self._json = [name for name, kind in COLUMNS[table].items() if kind is Kind.JSON]
        self._writer = parquet.ParquetWriter(stream, self._schema, compression="zstd")

    def write(self, rows: list[Row]) -> None:
        flat = [row | {name: _text(row[name]) for name in self._json} for row in rows]
        self._writer.write_table(self._arrow.Table.from_pylist(flat, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _text(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value).decode()


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


def _read_parquet(path: Path) -> Iterator[Row]:
    arrow, parquet = _parquet()
    try:
        for batch in parquet.ParquetFile(path).iter_batches(_READ_ROWS):
            for row in batch.to_pylist():
                for name, value in row.items():
                    if isinstance(value, str) and _KINDS.get(name) in _NESTED:
                        row[name] = orjson.loads(value)
                yield row
    except (arrow.ArrowInvalid, orjson.JSONDecodeError) as error:
        raise InvalidArgument(f"{path.name}: {error}", reason="ROW_INVALID") from None


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
