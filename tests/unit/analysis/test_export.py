"""Rows and files of trajectories."""

import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.analysis.trajectory_cases import sample
from tests.unit.analysis.trajectory_cases import trajectory as case

from penstock.analysis.export import (
    ROWS,
    annotations,
    format_of,
    read_exports,
    read_rows,
    rollouts,
    sequences,
    tool_calls,
    turns,
    write,
)
from penstock.analysis.export_files import Format, new_file
from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.client import ConfigurationError, InvalidArgument, Trajectory
from penstock.client.wire.results import trajectory as from_proto
from penstock.tables.columns import COLUMNS, SCHEMA_VERSION, Kind, Row, Table
from penstock.trajectory.v1 import trajectory_pb2 as pb


def ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def call(
    call_id: str, shared: int, suffix: bytes, sampled: bytes, *, parent: str | None = None, index: int = 0
) -> pb.Call:
    count = len(sampled) // 4
    span = completion_pb2.TokenSpan(
        token_ids=sampled,
        count=count,
        logprobs=np.full(count, -0.5, "<f4").tobytes(),
        versions=[completion_pb2.PolicyVersionSpan(policy_version=3, start=0, end=count)],
    )
    return pb.Call(
        call_id=call_id,
        rollout_id="r",
        index=index,
        state=pb.CALL_STATE_DELIVERED,
        parent_call_id=parent,
        prompt_shared_count=shared,
        prompt_suffix_token_ids=suffix,
        prompt_count=shared + len(suffix) // 4,
        capture_level=pb.CAPTURE_LEVEL_TOKENS_AND_LOGPROBS,
        completion=completion_pb2.Completion(span=span, finish_reason=chat_pb2.FINISH_REASON_STOP),
    )


def trajectory() -> Trajectory:
    """Two turns: 1 2 | 3 4, then 5 | 6, which have one conversation."""
    message = pb.Trajectory(rollout_id="r", task_id="t", grade=pb.GRADE_EXACT, reward=pb.Reward(value=0.5, range_max=1))
    message.calls.append(call("a", 0, ids(1, 2), ids(3, 4)))
    message.calls.append(call("b", 4, ids(5), ids(6), parent="a", index=1))
    message.calls[1].request_body = b'{"messages": [{"role": "user", "content": "Hello"}]}'
    message.calls[1].completion.message.parts.add().text.text = "Good day"
    message.branches.append(pb.Branch(branch_id="m", branch_class=pb.CALL_CLASS_MAIN, call_ids=["a", "b"]))
    message.samples.append(
        pb.Sample(
            sample_id="s", count=6, input_ids=ids(1, 2, 3, 4, 5, 6), loss_mask=bytes([0, 0, 1, 1, 0, 1]),
            logprobs=np.array([0, 0, -0.5, -0.5, 0, -0.5], "<f4").tobytes(), prompt_count=2, weight=1,
            turns=[pb.TurnSpan(call_id="a", start=2, end=4), pb.TurnSpan(call_id="b", start=5, end=6)],
            versions=[completion_pb2.PolicyVersionSpan(policy_version=3, start=2, end=6)],
        )
    )  # fmt: skip
    tool = pb.HostToolCall(tool_call_id="t", name="lookup", arguments_json='{"word":"x"}', result_json="[]")
    tool.state, tool.result_bytes = pb.CALL_STATE_DELIVERED, 2
    message.host_tool_calls.append(tool)
    message.reward.turns.add(call_id="a", value=0.0, components={"style": 0.25}, token_values=floats(0.1, -1))
    message.samples[0].turns[0].reward = 0.0
    message.samples[0].token_rewards = floats(0, 0, 0.1, -1, 0, 0)
    judged = message.annotations.add(name="step", author="judge", call_id="b", value=0.5, token_values=floats(0.3))
    judged.details.update({"why": {"words": 2}})
    return from_proto(message)


@pytest.mark.requirement("R87")
def test_host_tool_call_is_a_row_of_its_own_table() -> None:
    """What the host did for the agent leaves with the trajectory."""
    (row,) = tool_calls(trajectory())
    assert (row["rollout_id"], row["tool_call_index"], row["name"], row["state"]) == ("r", 0, "lookup", "delivered")
    assert (row["arguments_json"], row["result_json"], row["result_bytes"]) == ('{"word":"x"}', "[]", 2)
    assert (row["is_error"], row["end_reason"], row["result_sha256"]) == (False, None, None)


@pytest.mark.requirement("R135")
def test_rewards_of_turns_and_tokens_are_columns_and_annotations_a_table() -> None:
    """A turn without a reward has null, which is not zero."""
    (row,) = sequences(trajectory())
    tenth = float(np.float32(0.1))
    assert row["turn_rewards"] == [0.0, None] and row["token_rewards"] == [0, 0, tenth, -1, 0, 0]
    first, second = turns(trajectory())
    assert (first["turn_reward"], first["turn_reward_components"]) == (0.0, {"style": 0.25})
    assert first["token_rewards"] == [tenth, -1.0]
    assert (second["turn_reward"], second["turn_reward_components"], second["token_rewards"]) == (None, {}, None)
    (judged,) = annotations(trajectory())
    assert (judged["name"], judged["author"], judged["call_id"], judged["value"]) == ("step", "judge", "b", 0.5)
    assert judged["token_values"] == [float(np.float32(0.3))] and judged["details"] == {"why": {"words": 2}}


async def several(count: int) -> AsyncIterator[Trajectory]:
    for _ in range(count):
        yield trajectory()


@pytest.mark.requirement("R82")
def test_a_turn_carries_its_whole_prompt_put_together_from_its_parents() -> None:
    """The tokens of path and prompt are those of the engine."""
    first, second = turns(trajectory())
    assert (first["prompt_token_ids"], first["completion_token_ids"]) == ([1, 2], [3, 4])
    assert (second["prompt_token_ids"], second["completion_token_ids"]) == ([1, 2, 3, 4, 5], [6])
    assert second["policy_spans"] == [{"policy_version": 3, "start": 0, "end": 1}]
    assert (second["finish_reason"], second["parent_call_id"]) == ("stop", "a")


@pytest.mark.requirement("R84")
def test_a_sequence_has_arrays_of_one_length_and_its_reward() -> None:
    """Mask 1 exactly where it was sampled; logprob 0.0 elsewhere."""
    (row,) = sequences(trajectory())
    assert row["input_ids"] == [1, 2, 3, 4, 5, 6] and row["loss_mask"] == [0, 0, 1, 1, 0, 1]
    assert row["logprobs"] == [0, 0, -0.5, -0.5, 0, -0.5]
    assert (row["reward"], row["prompt_len"], row["policy_version_min"]) == (0.5, 2, 3)


@pytest.mark.requirement("R83")
@pytest.mark.parametrize("bad", [np.nan, 0.25, -np.inf])
def test_a_sample_with_a_logprob_that_is_none_is_refused(bad: float) -> None:
    """Finite and <= 0 where the mask is 1, or it does not leave."""
    good = trajectory()
    logprobs = np.array([0, 0, bad, -0.5, 0, -0.5], np.float32)
    broken = replace(good, samples=(replace(good.samples[0], logprobs=logprobs),))
    with pytest.raises(InvalidArgument, match="s has invalid logprobs"):
        list(sequences(broken))


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
async def test_a_file_appears_when_it_is_complete_and_not_before(tmp_path: Path, name: str) -> None:
    """A reader sees all rows or no file."""

    async def breaks() -> AsyncIterator[Trajectory]:
        yield trajectory()
        raise RuntimeError("cut")

    with pytest.raises(RuntimeError):
        await write(breaks(), tmp_path / name)
    with pytest.raises(InvalidArgument, match="nothing to export"):
        await write(several(0), tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    assert await write(several(3), tmp_path / name, table="turns") == 6
    assert len(list(read_rows(tmp_path / name))) == 6 and [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.requirement("R82", "R87")
@pytest.mark.parametrize("table", Table)
async def test_both_formats_give_back_the_rows_of_trajectories(tmp_path: Path, table: Table) -> None:
    """Several batches of them, whose columns are those that the documentation lists."""
    rows = list(ROWS[table](trajectory()))
    assert [list(row) for row in rows] == [list(COLUMNS[table])] * len(rows)
    for name in ("x.jsonl", "x.parquet"):
        assert await write(several(600), tmp_path / name, table=table) == 600 * len(rows)
        for i, row in enumerate(read_rows(tmp_path / name)):
            assert row == rows[i % len(rows)]
    assert pq.ParquetFile(tmp_path / "x.parquet").num_row_groups == 1 + 600 * len(rows) // 512
    assert pq.read_schema(tmp_path / "x.parquet").metadata == {
        b"penstock.table": table.encode(),
        b"penstock.schema_version": str(SCHEMA_VERSION).encode(),
    }


async def test_long_sequences_are_written_in_smaller_batches(tmp_path: Path) -> None:
    """Memory holds a million elements of lists, not 512 rows of any length."""
    long = case("r", [sample("s", [(1, 200_000, True)])])

    async def some() -> AsyncIterator[Trajectory]:
        for _ in range(5):
            yield long

    await write(some(), tmp_path / "x.parquet")
    file = pq.ParquetFile(tmp_path / "x.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [2, 2, 1]


def record(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Row]:
    """Dicts whose keys keep their order."""
    return st.tuples(*fields.values()).map(lambda values: dict(zip(fields, values, strict=True)))


INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)
DOUBLE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | INT64 | DOUBLE | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
NULLABLE_TEXT = st.none() | st.text(max_size=5)
SPAN = {"start": INT32, "end": INT32}
TURN = {"call_id": NULLABLE_TEXT, **SPAN, "untrained_reason": NULLABLE_TEXT}
FINDING = dict.fromkeys(("severity", "reason", "message", "call_id"), NULLABLE_TEXT)
VALUES: dict[Kind, st.SearchStrategy[Any]] = {
    Kind.TEXT: st.text(max_size=9),
    Kind.BOOL: st.booleans(),
    Kind.INT32: INT32,
    Kind.INT64: INT64,
    Kind.DOUBLE: DOUBLE,
    Kind.JSON: st.lists(JSON, max_size=2) | st.dictionaries(st.text(max_size=3), JSON, max_size=2),
    Kind.TEXTS: st.lists(st.text(max_size=5), max_size=3),
    Kind.IDS: st.lists(INT32, max_size=5),
    Kind.FLOATS: st.lists(FLOAT, max_size=5),
    Kind.ID_ROWS: st.lists(st.lists(INT32, max_size=2), max_size=2),
    Kind.FLOAT_ROWS: st.lists(st.lists(st.none() | FLOAT, max_size=2), max_size=2),
    Kind.DOUBLES: st.lists(st.none() | DOUBLE, max_size=5),
    Kind.MASK: st.lists(st.integers(0, 1), max_size=5),
    Kind.VERSIONS: st.lists(record({"policy_version": INT64} | SPAN), max_size=2),
    Kind.TURN_SPANS: st.lists(record(TURN), max_size=2),
    Kind.FINDINGS: st.lists(record(FINDING), max_size=2),
}


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("table", Table)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_written_export_is_read_back_unchanged(table: Table, data: st.DataObject) -> None:
    """Whatever is in the columns, bit for bit, in both formats."""
    fields = {name: st.none() | VALUES[kind] for name, kind in COLUMNS[table].items()}
    row = record(fields | {"schema_version": st.just(SCHEMA_VERSION)})
    rows = data.draw(st.lists(row, min_size=1, max_size=2))
    with tempfile.TemporaryDirectory() as folder:
        for format_ in Format:
            path = Path(folder, f"x.{format_}")
            with new_file(path, table, format_) as sink:
                sink.write(rows)
            # repr tells 0.0 from -0.0.
            assert repr(list(read_rows(path))) == repr(rows)


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
async def test_rows_of_a_newer_version_are_refused(tmp_path: Path, name: str) -> None:
    """A column may mean something else there."""
    (row,) = sequences(trajectory())
    with new_file(tmp_path / name, Table.SEQUENCES, format_of(tmp_path / name)) as sink:
        sink.write([row | {"schema_version": SCHEMA_VERSION + 1}])
    with pytest.raises(InvalidArgument, match=f"schema version {SCHEMA_VERSION + 1}"):
        list(read_rows(tmp_path / name))


async def test_rows_of_the_first_version_are_read(tmp_path: Path) -> None:
    """Its Parquet files have spans and turns as JSON text."""
    (row,) = sequences(trajectory())
    nested = ("policy_spans", "turn_spans", "findings", "samplings", "labels", "reward_components")
    old = row | {name: orjson.dumps(row[name]).decode() for name in nested} | {"schema_version": 1}
    pq.write_table(pa.Table.from_pylist([old]), tmp_path / "x.parquet")
    (read,) = read_rows(tmp_path / "x.parquet")
    assert read == row | {"schema_version": 1}


@pytest.mark.requirement("R48")
async def test_parquet_without_its_package_is_a_named_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing optional package is an error that says what to install."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'penstock\[parquet\]'"):
        await write(several(1), tmp_path / "x.parquet")


def stored(place: Path, name: str, table: Table, rows: list[Row]) -> None:
    """One file as a driver stores it."""
    with new_file(place / f"{name}.{table}.parquet", table, Format.PARQUET) as sink:
        sink.write(rows)


@pytest.mark.requirement("R124")
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_rollout_that_was_stored_twice_is_read_once(tmp_path: Path, scheme: str) -> None:
    """A driver stores at least once; a key is of one file for a reader, with all its rows."""
    first, second = replace(trajectory(), attempt=1), replace(trajectory(), attempt=2)
    for table in Table:
        stored(tmp_path / "default/run/d0", "1", table, [*ROWS[table](first)])
        stored(tmp_path / "default/run/d1", "1", table, [*ROWS[table](first), *ROWS[table](second)])
        found = [row["attempt"] for row in read_exports(f"{scheme}{tmp_path}", table)]
        assert found == [1] * len(list(ROWS[table](first))) + [2] * len(list(ROWS[table](second)))
    assert list(read_exports(tmp_path / "default/run/d0", "turns")) == list(turns(first))


def test_a_place_without_exports_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="no directory") as refused:
        list(read_exports(tmp_path / "absent", "turns"))
    assert refused.value.reason == "EXPORT_UNREADABLE"
    with pytest.raises(InvalidArgument) as refused:
        list(read_exports("nosuch://place", "turns"))
    assert refused.value.reason == "EXPORT_UNREADABLE"
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigurationError, match=r"penstock\[export\]"):
        list(read_exports("file:///x", "turns"))


@pytest.mark.requirement("R82")
def test_a_parquet_file_on_disk_is_read_a_batch_at_a_time(tmp_path: Path) -> None:
    """Its compressed bytes too, which Arrow would read ahead: an export is larger than memory."""
    file, rng = tmp_path / "x.parquet", np.random.default_rng(7)
    with new_file(file, Table.TURNS, Format.PARQUET) as sink:
        for _ in range(20):
            ids = rng.integers(0, 1 << 31, (64, 1000)).tolist()
            sink.write([dict.fromkeys(COLUMNS[Table.TURNS]) | {"prompt_token_ids": line} for line in ids])
    before, most = pa.total_allocated_bytes(), 0
    for _ in read_rows(file):
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < file.stat().st_size / 2


@pytest.mark.requirement("R124")
def test_the_row_of_a_rollout_says_how_it_ended() -> None:
    (row,) = rollouts(replace(trajectory(), attempt=3))
    assert (row["rollout_id"], row["attempt"], row["reward"], row["calls"], row["samples"]) == ("r", 3, 0.5, 2, 1)
    assert row["rollout_rows"] == 1 and row["grade"] == "exact"
