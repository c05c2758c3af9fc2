"""The columns of exported tables, and their types in Parquet. docs/exports.md documents each one.

Invariants: a row of a table has exactly its columns, in this order; a column name has one type in all tables.
"""

import hashlib
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

import orjson

SCHEMA_VERSION: Final = 3
"""Schema version of the rows; it grows when a column changes its meaning or type. Version 1: spans and turns were JSON
text in Parquet. Version 2: rows had no digest."""

Row = dict[str, Any]


class Table(StrEnum):
    TURNS = "turns"
    SEQUENCES = "sequences"
    TOOL_CALLS = "tool_calls"
    ANNOTATIONS = "annotations"
    ROLLOUTS = "rollouts"
    CHAT = "chat"


class Kind(StrEnum):
    """Types of columns. JSON is text in Parquet, since its shape differs from row to row. Any value may be null."""

    TEXT = "text"
    BOOL = "bool"
    INT32 = "int32"
    INT64 = "int64"
    DOUBLE = "double"
    JSON = "json"
    TEXTS = "text[]"
    IDS = "int32[]"
    FLOATS = "float32[]"
    ID_ROWS = "int32[][]"
    FLOAT_ROWS = "float32[][]"
    DOUBLES = "double[]"
    MASK = "uint8[]"
    VERSIONS = "(policy_version int64, start int32, end int32)[]"
    TURN_SPANS = "(call_id text, start int32, end int32, untrained_reason text)[]"
    FINDINGS = "(severity text, reason text, message text, call_id text)[]"


_COMMON: Final = {
    "schema_version": Kind.INT32,
    "run_id": Kind.TEXT,
    "group_id": Kind.TEXT,
    "group_index": Kind.INT32,
    "rollout_id": Kind.TEXT,
    "attempt": Kind.INT32,
    "task_id": Kind.TEXT,
    "agent": Kind.TEXT,
    "labels": Kind.JSON,
    "tokenizer_sha256": Kind.TEXT,
    "error": Kind.TEXT,
    "error_cause": Kind.TEXT,
    "error_caused_by": Kind.TEXT,
}
_SEAL: Final = {"rollout_rows": Kind.INT32, "row_sha256": Kind.TEXT}

COLUMNS: Final = MappingProxyType(
    {
        Table.TURNS: {
            **_COMMON,
            "turn_index": Kind.INT32,
            "call_id": Kind.TEXT,
            "parent_call_id": Kind.TEXT,
            "branch_id": Kind.TEXT,
            "role": Kind.TEXT,
            "state": Kind.TEXT,
            "dialect": Kind.TEXT,
            "capture_level": Kind.TEXT,
            "answerer": Kind.TEXT,
            "injected": Kind.BOOL,
            "prompt_token_ids": Kind.IDS,
            "prompt_shared_count": Kind.INT32,
            "completion_token_ids": Kind.IDS,
            "completion_logprobs": Kind.FLOATS,
            "completion_top_token_ids": Kind.ID_ROWS,
            "completion_top_logprobs": Kind.FLOAT_ROWS,
            "completion_top_count": Kind.INT32,
            "completion_top_sha256": Kind.TEXT,
            "completion_tensors": Kind.JSON,
            "prompt_images": Kind.JSON,
            "logprobs_mode": Kind.TEXT,
            "policy_spans": Kind.VERSIONS,
            "finish_reason": Kind.TEXT,
            "stop_token_id": Kind.INT32,
            "stop_text": Kind.TEXT,
            "sampling_requested": Kind.JSON,
            "sampling_used": Kind.JSON,
            "engine": Kind.TEXT,
            "engine_version": Kind.TEXT,
            "model": Kind.TEXT,
            "model_requested": Kind.TEXT,
            "cached_tokens": Kind.INT64,
            "normalisations": Kind.TEXTS,
            "tools": Kind.JSON,
            "tools_sha256": Kind.TEXT,
            "response_message": Kind.JSON,
            "request_body": Kind.TEXT,
            "request_body_sha256": Kind.TEXT,
            "http_attempts": Kind.INT32,
            "end_reason": Kind.TEXT,
            "receive_time": Kind.TEXT,
            "lease_time": Kind.TEXT,
            "end_time": Kind.TEXT,
            "chain_index": Kind.INT32,
            "chain_sha256": Kind.TEXT,
            "rollout_chain_sha256": Kind.TEXT,
            "replayed_from": Kind.JSON,
            "branch_point": Kind.BOOL,
            "turn_reward": Kind.DOUBLE,
            "turn_reward_components": Kind.JSON,
            "token_rewards": Kind.FLOATS,
            "policy_id": Kind.TEXT,
            "model_name": Kind.TEXT,
            "trained": Kind.BOOL,
            "policies": Kind.JSON,
            **_SEAL,
        },
        Table.SEQUENCES: {
            **_COMMON,
            "sequence_index": Kind.INT32,
            "sample_id": Kind.TEXT,
            "branch_id": Kind.TEXT,
            "role": Kind.TEXT,
            "input_ids": Kind.IDS,
            "loss_mask": Kind.MASK,
            "logprobs": Kind.FLOATS,
            "top_token_ids": Kind.ID_ROWS,
            "top_logprobs": Kind.FLOAT_ROWS,
            "logprobs_mode": Kind.TEXT,
            "prompt_len": Kind.INT32,
            "turn_spans": Kind.TURN_SPANS,
            "policy_version_min": Kind.INT64,
            "policy_version_max": Kind.INT64,
            "policy_spans": Kind.VERSIONS,
            "weight": Kind.DOUBLE,
            "reward": Kind.DOUBLE,
            "reward_components": Kind.JSON,
            "truncated": Kind.BOOL,
            "grade": Kind.TEXT,
            "findings": Kind.FINDINGS,
            "temperatures": Kind.DOUBLES,
            "samplings": Kind.JSON,
            "parent_rollout_id": Kind.TEXT,
            "branch_call_id": Kind.TEXT,
            "advantages": Kind.FLOATS,
            "turn_rewards": Kind.DOUBLES,
            "token_rewards": Kind.FLOATS,
            "tensors": Kind.JSON,
            "images": Kind.JSON,
            "policy_id": Kind.TEXT,
            "turn_policies": Kind.TEXTS,
            **_SEAL,
        },
        Table.TOOL_CALLS: {
            **_COMMON,
            "tool_call_index": Kind.INT32,
            "tool_call_id": Kind.TEXT,
            "name": Kind.TEXT,
            "state": Kind.TEXT,
            "arguments_json": Kind.TEXT,
            "is_error": Kind.BOOL,
            "result_json": Kind.TEXT,
            "result_sha256": Kind.TEXT,
            "result_bytes": Kind.INT64,
            "end_reason": Kind.TEXT,
            "receive_time": Kind.TEXT,
            "end_time": Kind.TEXT,
            **_SEAL,
        },
        Table.ANNOTATIONS: {
            **_COMMON,
            "annotation_index": Kind.INT32,
            "name": Kind.TEXT,
            "author": Kind.TEXT,
            "call_id": Kind.TEXT,
            "value": Kind.DOUBLE,
            "token_values": Kind.FLOATS,
            "details": Kind.JSON,
            "create_time": Kind.TEXT,
            "judged_chain_sha256": Kind.TEXT,
            "rollout_chain_sha256": Kind.TEXT,
            **_SEAL,
        },
        Table.ROLLOUTS: {
            **_COMMON,
            "namespace": Kind.TEXT,
            "agent_spec_sha256": Kind.TEXT,
            "task_metadata": Kind.JSON,
            "reward": Kind.DOUBLE,
            "reward_components": Kind.JSON,
            "grade": Kind.TEXT,
            "findings": Kind.FINDINGS,
            "capture_level": Kind.TEXT,
            "calls": Kind.INT32,
            "samples": Kind.INT32,
            "host_tool_calls": Kind.INT32,
            "chat_template_sha256": Kind.TEXT,
            "rollout_chain_sha256": Kind.TEXT,
            "create_time": Kind.TEXT,
            "end_time": Kind.TEXT,
            "seconds": Kind.DOUBLE,
            "branched_from": Kind.JSON,
            "policies": Kind.JSON,
            "cost": Kind.JSON,
            **_SEAL,
        },
        Table.CHAT: {
            **_COMMON,
            "conversation_index": Kind.INT32,
            "branch_id": Kind.TEXT,
            "role": Kind.TEXT,
            "call_id": Kind.TEXT,
            "call_ids": Kind.TEXTS,
            "messages": Kind.JSON,
            "tools": Kind.JSON,
            "shared_messages": Kind.INT32,
            "left_out": Kind.TEXTS,
            "model": Kind.TEXT,
            "finish_reason": Kind.TEXT,
            "injected": Kind.BOOL,
            "reward": Kind.DOUBLE,
            "reward_components": Kind.JSON,
            "grade": Kind.TEXT,
            "parent_rollout_id": Kind.TEXT,
            "branch_call_id": Kind.TEXT,
            **_SEAL,
        },
    }
)
"""The columns of each table, by name."""


def row_digest(row: Row) -> str:
    """Returns the SHA-256, hexadecimal, of a row without `row_sha256`, as JSON: UTF-8 without spaces, keys sorted at
    each level, numbers in their shortest form. Rows of JSON Lines and of Parquet have the same digest."""
    rest = {name: value for name, value in row.items() if name != "row_sha256"}
    return hashlib.sha256(orjson.dumps(rest, option=orjson.OPT_SORT_KEYS)).hexdigest()


def sealed(row: Row, rows: int) -> Row:
    """Adds the row's digest and its rollout's row count, which reveal a changed or missing row."""
    row["rollout_rows"] = rows
    row["row_sha256"] = row_digest(row)
    return row


def arrow_schema(table: Table) -> Any:
    """Returns a table's columns as a `pyarrow.Schema`, with the table and the version in its metadata."""
    import pyarrow as pa  # 60 MB that few need

    def struct(**fields: Any) -> Any:
        return pa.list_(pa.struct(list(fields.items())))

    text, int32 = pa.string(), pa.int32()
    types = {
        Kind.TEXT: text,
        Kind.BOOL: pa.bool_(),
        Kind.INT32: int32,
        Kind.INT64: pa.int64(),
        Kind.DOUBLE: pa.float64(),
        Kind.JSON: text,
        Kind.TEXTS: pa.list_(text),
        Kind.IDS: pa.list_(int32),
        Kind.FLOATS: pa.list_(pa.float32()),
        Kind.ID_ROWS: pa.list_(pa.list_(int32)),
        Kind.FLOAT_ROWS: pa.list_(pa.list_(pa.float32())),
        Kind.DOUBLES: pa.list_(pa.float64()),
        Kind.MASK: pa.list_(pa.uint8()),
        Kind.VERSIONS: struct(policy_version=pa.int64(), start=int32, end=int32),
        Kind.TURN_SPANS: struct(call_id=text, start=int32, end=int32, untrained_reason=text),
        Kind.FINDINGS: struct(severity=text, reason=text, message=text, call_id=text),
    }
    columns = [(name, types[kind]) for name, kind in COLUMNS[table].items()]
    return pa.schema(columns, {"penstock.table": str(table), "penstock.schema_version": str(SCHEMA_VERSION)})
