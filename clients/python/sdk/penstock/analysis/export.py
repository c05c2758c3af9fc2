"""Exports trajectories to files: the tables `turns` (a row per model call, lossless), `sequences` (a row per training
sample), `tool_calls` (a row per call of a host tool), `annotations`, `rollouts`, and `chat` (a conversation per branch,
for supervised fine-tuning), as JSON Lines or Parquet. docs/exports.md documents each column; `penstock.tables.rows`
makes the rows of all tables but `chat`, for drivers too.

Each row has its own digest and its rollout's number of rows in the table; `verify_chain.verify` checks both.
"""

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock.analysis.export_files import Format, Sink, format_of, new_file, read_exports, read_rows
from penstock.analysis.interchange import chat_rows
from penstock.analysis.prices import Prices, used
from penstock.client.errors import InvalidArgument
from penstock.client.types.results import Outcome
from penstock.client.types.trajectories import Trajectory
from penstock.client.wire.results import trajectory_to
from penstock.tables import rows
from penstock.tables.columns import SCHEMA_VERSION, Row, Table

__all__ = [
    "ROWS",
    "SCHEMA_VERSION",
    "Format",
    "Row",
    "Table",
    "annotations",
    "chat",
    "format_of",
    "read_exports",
    "read_rows",
    "rollouts",
    "sequences",
    "tool_calls",
    "turns",
    "write",
    "write_jsonl",
]

_BATCH_ROWS: Final = 512
_BATCH_ELEMENTS: Final = 1 << 20
"""List items per batch: some 40 MB as Python objects."""


def turns(trajectory: Trajectory) -> Iterator[Row]:
    """Yields a row per model call, in order of arrival."""
    return _rows(Table.TURNS, trajectory)


def sequences(trajectory: Trajectory) -> Iterator[Row]:
    """Yields a row per sample.

    Raises:
        InvalidArgument: `SAMPLE_BROKEN`, a sample breaks an invariant of `penstock.tables.rows`.
    """
    return _rows(Table.SEQUENCES, trajectory)


def tool_calls(trajectory: Trajectory) -> Iterator[Row]:
    """Yields a row per call of a host tool, in order of arrival."""
    return _rows(Table.TOOL_CALLS, trajectory)


def annotations(trajectory: Trajectory) -> Iterator[Row]:
    """Yields a row per annotation, in the order of their creation."""
    return _rows(Table.ANNOTATIONS, trajectory)


def rollouts(trajectory: Trajectory, prices: Prices | None = None) -> Iterator[Row]:
    """Yields the one row of the rollout, which exists also for one without a call; with `prices`, with its cost."""
    return _rows(Table.ROLLOUTS, trajectory, prices)


def chat(trajectory: Trajectory) -> Iterator[Row]:
    """Yields a row per branch: its conversation as messages.

    Raises:
        InvalidArgument: `BODIES_MISSING`, the trajectory was read without request bodies (`bodies=True`).
    """
    return _rows(Table.CHAT, trajectory)


ROWS: Final[dict[Table, Callable[[Trajectory], Iterator[Row]]]] = {
    Table.TURNS: turns,
    Table.SEQUENCES: sequences,
    Table.TOOL_CALLS: tool_calls,
    Table.ANNOTATIONS: annotations,
    Table.ROLLOUTS: rollouts,
    Table.CHAT: chat,
}
"""The function that makes each table's rows from a trajectory."""


def _rows(table: Table, trajectory: Trajectory, prices: Prices | None = None) -> Iterator[Row]:
    # A message's maps have no order; those of the trajectory keep theirs.
    reward = trajectory.reward
    maps = {
        "labels": dict(trajectory.labels),
        "task_metadata": dict(trajectory.task_metadata),
        "reward_components": {} if reward is None else dict(reward.components),
    }
    make = chat_rows.chat if table is Table.CHAT else rows.ROWS[table]
    if table is Table.SEQUENCES:
        samples = trajectory.samples
        advantages = {one.sample_id: one.advantages.tolist() for one in samples if one.advantages is not None}
        make = partial(rows.sequences, advantages=advantages)
    if prices is not None:
        make = partial(rows.rollouts, cost=prices.cost(used(trajectory.calls)).as_dict())
    try:
        for row in make(trajectory_to(trajectory)):
            yield row | {name: value for name, value in maps.items() if name in row}
    except rows.BrokenSample as error:
        raise InvalidArgument(str(error), reason="SAMPLE_BROKEN") from None
    except chat_rows.BodiesMissing as error:
        message = f"The table chat needs request bodies, and {error}: read trajectories with bodies=True"
        raise InvalidArgument(message, reason="BODIES_MISSING") from None


async def write(
    trajectories: AsyncIterable[Trajectory | tuple[Trajectory, Outcome]],
    path: Path,
    *,
    table: Table | str = Table.SEQUENCES,
    format: Format | str | None = None,  # noqa: A002 - the word that everybody uses
    prices: Prices | None = None,
) -> int:
    """Writes trajectories to one file, which appears under its name once complete.

    Args:
        trajectories: for example `ps.rollouts.export(run_id=...)`.
        path: the file; its directory is created.
        table: the kind of rows.
        format: None = Parquet for a name that ends in .parquet, else JSON Lines.
        prices: for the costs of `rollouts`; other tables have none.

    Returns:
        The number of rows.

    Raises:
        ConfigurationError: `PYARROW_MISSING`, Parquet needs a package that is not installed.
        InvalidArgument: `EMPTY`, there is no row. No file is made then, and an existing one stays unchanged.
    """
    table = Table(table)
    make = partial(rollouts, prices=prices) if table is Table.ROLLOUTS else ROWS[table]
    with new_file(path, table, format_of(path, format)) as sink:
        batch = _Batch(sink)
        async for item in trajectories:
            for row in make(item if isinstance(item, Trajectory) else item[0]):
                if batch.add(row):
                    await asyncio.to_thread(batch.flush)
        await asyncio.to_thread(batch.flush)
        if not batch.written:
            raise InvalidArgument("There is nothing to export", reason="EMPTY")
    return batch.written


def write_jsonl(trajectories: Iterable[Trajectory], path: Path, table: Table | str = Table.TURNS) -> int:
    """As `write`, for trajectories in memory; without a row the file is empty."""
    table = Table(table)
    with new_file(path, table, Format.JSONL) as sink:
        batch = _Batch(sink)
        for trajectory in trajectories:
            for row in ROWS[table](trajectory):
                if batch.add(row):
                    batch.flush()
        batch.flush()
    return batch.written


class _Batch:
    """Rows to be written together."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._rows: list[Row] = []
        self._elements = 0
        self.written = 0

    def add(self, row: Row) -> bool:
        """Adds a row; returns whether it is time to flush."""
        self._rows.append(row)
        self._elements += sum(_size(value) for value in row.values() if isinstance(value, list))
        return len(self._rows) >= _BATCH_ROWS or self._elements >= _BATCH_ELEMENTS

    def flush(self) -> None:
        if self._rows:
            self._sink.write(self._rows)
            self.written += len(self._rows)
            self._rows, self._elements = [], 0


def _size(items: list[Any]) -> int:
    return len(items) * (len(items[0]) if items and isinstance(items[0], list) else 1)
