"""A batch of rollouts as Parquet files on this machine, before they are sent: one for each table that has rows."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

from penstock.tables.columns import Row, Table
from penstock.tables.parquet import ParquetSink
from penstock.tables.rows import ROWS, BrokenSample
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import DataLoss

_ROWS_AT_ONCE: Final = 256
_ELEMENTS_AT_ONCE: Final = 1 << 20
"""List items: some 40 MB as Python objects."""


def clean(spool: Path) -> None:
    """Remove what a killed driver left."""
    if spool.exists():
        shutil.rmtree(spool)


class Batch:
    """The files of one batch, in a directory of their own below `spool`. All methods work on the disk: call them in a
    thread. Memory holds one trajectory and the rows that are written next."""

    def __init__(self, spool: Path) -> None:
        spool.mkdir(parents=True, exist_ok=True)
        self._directory = Path(tempfile.mkdtemp(dir=spool))
        self._files: dict[Table, tuple[Path, BinaryIO, ParquetSink]] = {}

    def discard(self) -> None:
        """Remove the files."""
        try:
            self.close()
        finally:
            shutil.rmtree(self._directory)

    def add(self, trajectory: trajectory_pb2.Trajectory) -> int:
        """Write a rollout's rows; return the bytes of all files so far.

        Raises DataLoss (SAMPLE_BROKEN), and what the disk raises. The batch may then have a part of the rollout, and
        must not be sent.
        """
        try:
            for table in ROWS:
                self._write(table, trajectory)
        except BrokenSample as error:
            raise DataLoss(str(error), reason="SAMPLE_BROKEN") from error
        return sum(stream.tell() for _, stream, _ in self._files.values())

    def close(self) -> Mapping[Table, Path]:
        """Complete the files; return them in the order in which they are to be sent."""
        for _, stream, sink in self._files.values():
            sink.close()
            stream.close()
        return {table: self._files[table][0] for table in ROWS if table in self._files}

    def _write(self, table: Table, trajectory: trajectory_pb2.Trajectory) -> None:
        rows: list[Row] = []
        elements = 0
        for row in ROWS[table](trajectory):
            rows.append(row)
            elements += sum(_size(value) for value in row.values() if isinstance(value, list))
            if len(rows) >= _ROWS_AT_ONCE or elements >= _ELEMENTS_AT_ONCE:
                self._sink(table).write(rows)
                rows, elements = [], 0
        if rows:
            self._sink(table).write(rows)

    def _sink(self, table: Table) -> ParquetSink:
        if table not in self._files:
            path = self._directory / f"{table}.parquet"
            stream = path.open("wb")
            self._files[table] = path, stream, ParquetSink(stream, table)
        return self._files[table][2]


def _size(items: list[object]) -> int:
    first = items[0] if items else None
    return len(items) * (len(first) if isinstance(first, list) else 1)
