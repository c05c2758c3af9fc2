"""Exports trajectories to files: three tables, `turns` (a row per model call, lossless), `sequences` (a row per
training sample) and `tool_calls` (a row per call of a host tool), as JSON Lines or Parquet. docs/exports.md documents
each column.

Each row has its own digest and its rollout's number of rows in the table; `verify_chain.verify` checks both.

Invariants of a row of `sequences`: input_ids, loss_mask and logprobs have one length; the mask is 1 exactly on sampled
tokens that may be trained; there the logprob is finite and <= 0, elsewhere it is 0.0.
"""

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.analysis.export_columns import SCHEMA_VERSION, Row, Table, row_digest
from penstock.analysis.export_files import Format, Sink, format_of, new_file, read_rows
from penstock.client.errors import InvalidArgument
from penstock.client.types.chat import Message, Sampling
from penstock.client.types.results import Outcome
from penstock.client.types.trajectories import Call, Trajectory

__all__ = [
    "ROWS",
    "SCHEMA_VERSION",
    "Format",
    "Row",
    "Table",
    "format_of",
    "read_rows",
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
    for call in trajectory.calls:
        completion = call.completion
        row = {
            **_common(trajectory),
            "turn_index": call.index,
            "call_id": call.call_id,
            "parent_call_id": call.parent_call_id,
            "branch_id": call.branch_id,
            "role": call.call_class,
            "state": call.state,
            "dialect": call.dialect,
            "capture_level": call.capture_level,
            "answerer": call.answerer,
            "injected": call.injected,
            "prompt_token_ids": _ids(trajectory, call),
            "prompt_shared_count": call.prompt_shared_count,
            "completion_token_ids": _list(None if completion is None else completion.token_ids),
            "completion_logprobs": _list(None if completion is None else completion.logprobs),
            "completion_top_token_ids": _list(None if completion is None else completion.top_token_ids),
            "completion_top_logprobs": _chances(None if completion is None else completion.top_logprobs),
            "completion_top_count": 0 if completion is None else completion.top_count,
            "completion_top_sha256": None if completion is None else completion.top_sha256.hex() or None,
            "logprobs_mode": None if completion is None else str(completion.logprobs_mode),
            "policy_spans": [asdict(span) for span in completion.versions] if completion is not None else [],
            "finish_reason": None if completion is None else str(completion.finish_reason),
            "stop_token_id": None if completion is None else completion.stop_token_id,
            "stop_text": None if completion is None else completion.stop_text,
            "sampling_requested": _sampling(call.sampling_requested),
            "sampling_used": _sampling(completion.sampling_used) if completion and completion.sampling_used else None,
            "engine": None if completion is None else completion.engine,
            "engine_version": None if completion is None else completion.engine_version,
            "model": None if completion is None else completion.model,
            "model_requested": call.model_requested,
            "cached_tokens": completion.usage.cached_tokens if completion and completion.usage else None,
            "normalisations": list(call.normalisations),
            "tools": [asdict(tool) for tool in call.tools],
            "tools_sha256": call.tools_sha256.hex(),
            "response_message": _message(completion.message) if completion and completion.message else None,
            "request_body": call.request_body.decode("utf-8", errors="replace") or None,
            "request_body_sha256": call.request_body_sha256.hex(),
            "http_attempts": call.http_attempts,
            "end_reason": call.end_reason or None,
            "receive_time": _time(call.receive_time),
            "lease_time": _time(call.lease_time),
            "end_time": _time(call.end_time),
            "chain_index": call.chain_index,
            "chain_sha256": call.chain_sha256.hex() or None,
            "rollout_chain_sha256": trajectory.chain_sha256.hex() or None,
        }
        yield _sealed(row, len(trajectory.calls))


def sequences(trajectory: Trajectory) -> Iterator[Row]:
    """Yields a row per sample.

    Raises:
        InvalidArgument: `SAMPLE_BROKEN`, a sample breaks an invariant of this module's docstring.
    """
    reward = trajectory.reward
    samplings = {
        call.call_id: _sampling(call.completion.sampling_used)
        for call in trajectory.calls
        if call.completion is not None and call.completion.sampling_used is not None
    }
    for index, sample in enumerate(trajectory.samples):
        count = len(sample.input_ids)
        logprobs = sample.logprobs
        if len(sample.loss_mask) != count or (logprobs is not None and len(logprobs) != count):
            raise InvalidArgument(f"Sample {sample.sample_id} has arrays of several lengths", reason="SAMPLE_BROKEN")
        if logprobs is not None and not (np.isfinite(logprobs) & (logprobs <= 0))[sample.loss_mask].all():
            raise InvalidArgument(f"Sample {sample.sample_id} has invalid logprobs", reason="SAMPLE_BROKEN")
        top, trained = (sample.top_token_ids, sample.top_logprobs), int(sample.loss_mask.sum())
        if any(array is not None and len(array) != trained for array in top) or (top[0] is None) != (top[1] is None):
            raise InvalidArgument(f"Sample {sample.sample_id} has alternatives of other tokens", reason="SAMPLE_BROKEN")
        versions = [span.policy_version for span in sample.versions]
        row = {
            **_common(trajectory),
            "sequence_index": index,
            "sample_id": sample.sample_id,
            "branch_id": sample.branch_id,
            "role": sample.branch_class,
            "input_ids": sample.input_ids.tolist(),
            "loss_mask": sample.loss_mask.astype("u1").tolist(),
            "logprobs": _list(logprobs),
            "top_token_ids": _list(sample.top_token_ids),
            "top_logprobs": _chances(sample.top_logprobs),
            "logprobs_mode": str(sample.logprobs_mode),
            "prompt_len": sample.prompt_count,
            "turn_spans": [asdict(turn) for turn in sample.turns],
            "policy_version_min": min(versions, default=None),
            "policy_version_max": max(versions, default=None),
            "policy_spans": [asdict(span) for span in sample.versions],
            "weight": sample.weight,
            "reward": None if reward is None else reward.value,
            "reward_components": {} if reward is None else dict(reward.components),
            "truncated": sample.truncated,
            "grade": trajectory.grade,
            "findings": [asdict(finding) for finding in trajectory.findings],
            "temperatures": [(samplings.get(turn.call_id) or {}).get("temperature") for turn in sample.turns],
            "samplings": [samplings.get(turn.call_id) for turn in sample.turns],
        }
        yield _sealed(row, len(trajectory.samples))


def tool_calls(trajectory: Trajectory) -> Iterator[Row]:
    """Yields a row per call of a host tool, in order of arrival."""
    for call in trajectory.host_tool_calls:
        row = {
            **_common(trajectory),
            "tool_call_index": call.index,
            "tool_call_id": call.tool_call_id,
            "name": call.name,
            "state": call.state,
            "arguments_json": call.arguments_json,
            "is_error": call.is_error,
            "result_json": call.result_json or None,
            "result_sha256": call.result_sha256.hex() or None,
            "result_bytes": call.result_bytes,
            "end_reason": call.end_reason or None,
            "receive_time": _time(call.receive_time),
            "end_time": _time(call.end_time),
        }
        yield _sealed(row, len(trajectory.host_tool_calls))


ROWS: Final[dict[Table, Callable[[Trajectory], Iterator[Row]]]] = {
    Table.TURNS: turns,
    Table.SEQUENCES: sequences,
    Table.TOOL_CALLS: tool_calls,
}
"""The function that makes each table's rows from a trajectory."""


async def write(
    trajectories: AsyncIterable[Trajectory | tuple[Trajectory, Outcome]],
    path: Path,
    *,
    table: Table | str = Table.SEQUENCES,
    format: Format | str | None = None,  # noqa: A002 - the word that everybody uses
) -> int:
    """Writes trajectories to one file, which appears under its name once complete.

    Args:
        trajectories: for example `ps.rollouts.export(run_id=...)`.
        path: the file; its directory is created.
        table: the kind of rows.
        format: None = Parquet for a name that ends in .parquet, else JSON Lines.

    Returns:
        The number of rows.

    Raises:
        ConfigurationError: `PYARROW_MISSING`, Parquet needs a package that is not installed.
        InvalidArgument: `EMPTY`, there is no row. No file is made then, and an existing one stays unchanged.
    """
    table = Table(table)
    with new_file(path, table, format_of(path, format)) as sink:
        batch = _Batch(sink)
        async for item in trajectories:
            for row in ROWS[table](item if isinstance(item, Trajectory) else item[0]):
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


def _common(trajectory: Trajectory) -> Row:
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": trajectory.run_id,
        "group_id": trajectory.group_id,
        "group_index": trajectory.group_index,
        "rollout_id": trajectory.rollout_id,
        "task_id": trajectory.task_id,
        "agent": trajectory.agent,
        "labels": dict(trajectory.labels),
        "tokenizer_sha256": trajectory.tokenizer_sha256.hex(),
        "error": trajectory.failure_reason or None,
        "error_cause": trajectory.failure_cause or None,
        "error_caused_by": trajectory.failure_caused_by or None,
    }


def _sealed(row: Row, rows: int) -> Row:
    """Adds the row's digest and its rollout's row count, which reveal a changed or missing row."""
    row["rollout_rows"] = rows
    row["row_sha256"] = row_digest(row)
    return row


def _ids(trajectory: Trajectory, call: Call) -> list[int] | None:
    if call.capture_level not in ("tokens", "tokens_and_logprobs"):
        return None
    ids: list[int] = trajectory.prompt_of(call.call_id).tolist()
    return ids


def _list(array: Any) -> list[Any] | None:
    return None if array is None else list(array.tolist())


def _chances(rows: Any) -> list[list[float | None]] | None:
    """Returns rows of logprobs with null for -infinity, which JSON does not have."""
    return None if rows is None else [[None if value == -np.inf else value for value in row] for row in rows.tolist()]


def _size(items: list[Any]) -> int:
    return len(items) * (len(items[0]) if items and isinstance(items[0], list) else 1)


def _sampling(sampling: Sampling) -> Row:
    return {name: value for name, value in asdict(sampling).items() if value not in (None, ())}


def _message(message: Message) -> Row:
    parts = [{"kind": type(part).__name__.lower(), **_json(asdict(part))} for part in message.parts]
    return {"role": str(message.role), "parts": parts}


def _json(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value


def _time(moment: Any) -> str | None:
    return None if moment is None else moment.isoformat()
