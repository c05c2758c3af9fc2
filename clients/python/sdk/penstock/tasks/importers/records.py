"""Records of data sets: JSON Lines, JSON or Parquet (with pyarrow), a file or a directory of shards.

A file is a stranger's: it is a regular one, is read a record at a time where its form allows, and has bounds.
"""

import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.client.errors import ConfigurationError, InvalidArgument
from penstock.tasks.importers.common import Refused

Record = Mapping[str, Any]

MAX_RECORDS: Final = 100_000
MAX_LINE_BYTES: Final = 64 << 20
MAX_JSON_BYTES: Final = 512 << 20
"""Of a file that is one JSON value, which is read whole."""
MAX_ROW_GROUP_BYTES: Final = 4 << 30
"""Of a row group of Parquet, unpacked, by the file's own statement."""
_SUFFIXES: Final = (".jsonl", ".json", ".parquet")
_BATCH: Final = 16


def records_of(source: Path) -> Iterator[Record]:
    """Yields the records of a file, or of the files of a directory in the order of their names.

    Raises:
        InvalidArgument: `TASK_IMPORT`; the source has no records, or exceeds a bound.
        ConfigurationError: `PYARROW_MISSING`.
    """
    files = [source]
    if source.is_dir():
        files = sorted(path for path in source.iterdir() if path.suffix in _SUFFIXES)
        if not files:
            raise _unusable(source, f"has no file that ends in {', '.join(_SUFFIXES)}")
    count = 0
    for file in files:
        for record in _records(file):
            count += 1
            if count > MAX_RECORDS:
                raise _unusable(source, f"has more than {MAX_RECORDS} records: split it")
            if not isinstance(record, dict):
                raise _unusable(file, f"a record must be an object, not {type(record).__name__}")
            yield record


def _records(file: Path) -> Iterator[Any]:
    try:
        size = _size(file)
        if file.suffix == ".parquet":
            yield from _rows(file)
        elif file.suffix == ".json" and not _is_lines(file):
            if size > MAX_JSON_BYTES:
                raise _unusable(file, f"has {size} bytes; a JSON file may have {MAX_JSON_BYTES}: use JSON Lines")
            found = json.loads(file.read_bytes())
            yield from found if isinstance(found, list) else [found]
        else:
            yield from map(json.loads, _lines(file))
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(file, f"has no records: {error}") from None


def _size(file: Path) -> int:
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):  # a pipe would block
        raise _unusable(file, "is not a regular file")
    return found.st_size


def _is_lines(file: Path) -> bool:
    """Returns whether the first line is an object of its own, as in JSON Lines of another name."""
    with file.open("rb") as opened:
        first = opened.readline(MAX_LINE_BYTES + 1)
    try:
        return first.lstrip().startswith(b"{") and isinstance(json.loads(first), dict)
    except ValueError:
        return False


def _lines(file: Path) -> Iterator[bytes]:
    """Yields the lines that have something; other line ends than the line feed may stand in a text."""
    with file.open("rb") as opened:
        while line := opened.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise _unusable(file, f"has a line of more than {MAX_LINE_BYTES} bytes")
            if line.strip():
                yield line


def _rows(file: Path) -> Iterator[Any]:
    try:
        import pyarrow.parquet as parquet  # 60 MB that few need
    except ModuleNotFoundError:
        raise ConfigurationError(
            "Parquet needs pyarrow: pip install 'penstock[parquet]', or use JSON Lines", reason="PYARROW_MISSING"
        ) from None
    with parquet.ParquetFile(file) as opened:
        groups = (opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups))
        if (largest := max((group.total_byte_size for group in groups), default=0)) > MAX_ROW_GROUP_BYTES:
            raise _unusable(file, f"has a row group of {largest} bytes; at most {MAX_ROW_GROUP_BYTES} are read")
        for batch in opened.iter_batches(batch_size=_BATCH):
            yield from batch.to_pylist()


def _unusable(source: Path, why: str) -> InvalidArgument:
    return InvalidArgument(f"{source} {why}" if not why.startswith("a ") else f"{source}: {why}", reason="TASK_IMPORT")


def required(record: Record, name: str) -> str:
    """Returns a text that has something in it."""
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise Refused(f"it has no {name}")
    return value


def parsed(record: Record, name: str, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    """Returns a value that is there as it is or as JSON text, which is how Parquet often has it; None = it is not."""
    value = record.get(name)
    words = "a list" if kind is list else "an object"
    try:
        value = json.loads(value) if isinstance(value, str) and value.strip() else value or None
    except (ValueError, RecursionError):
        raise Refused(f"{name} is neither {words} nor one as JSON") from None
    if value is not None and not isinstance(value, kind):
        raise Refused(f"{name} is neither {words} nor one as JSON")
    return value
