"""Writes rows of a table as Parquet, compressed with zstd."""

from collections.abc import Sequence
from typing import Any, BinaryIO

import orjson

from penstock.tables.columns import COLUMNS, Kind, Row, Table, arrow_schema


class ParquetSink:
    """A Parquet file of one table. Memory holds one batch of rows.

    Raises ModuleNotFoundError when it is made without pyarrow.
    """

    def __init__(self, stream: BinaryIO, table: Table) -> None:
        import pyarrow  # 60 MB that few need
        import pyarrow.parquet

        self._table_of = pyarrow.Table.from_pylist
        self._schema = arrow_schema(table)
        self._json = [name for name, kind in COLUMNS[table].items() if kind is Kind.JSON]
        self._writer = pyarrow.parquet.ParquetWriter(stream, self._schema, compression="zstd")

    def write(self, rows: Sequence[Row]) -> None:
        """Adds rows."""
        flat = [row | {name: _text(row[name]) for name in self._json} for row in rows]
        self._writer.write_table(self._table_of(flat, schema=self._schema))

    def close(self) -> None:
        """Completes the file's contents."""
        self._writer.close()


def _text(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value).decode()
