"""Rows and files of trajectories."""

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.client import ConfigurationError, InvalidArgument, Trajectory
from penstock.client.export import sequences, tool_calls, turns, write
from penstock.client.wire_results import trajectory as from_proto
from penstock.trajectory.v1 import trajectory_pb2 as pb


def ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


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
    """Two turns: 1 2 | 3 4, then 5 | 6."""
    message = pb.Trajectory(rollout_id="r", task_id="t", grade=pb.GRADE_EXACT, reward=pb.Reward(value=0.5, range_max=1))
    message.calls.append(call("a", 0, ids(1, 2), ids(3, 4)))
    message.calls.append(call("b", 4, ids(5), ids(6), parent="a", index=1))
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
    return from_proto(message)


def test_a_call_of_a_host_tool_is_a_row_of_its_own_table() -> None:
    """R87: what the host did for the agent leaves with the trajectory."""
    (row,) = tool_calls(trajectory())
    assert (row["rollout_id"], row["tool_call_index"], row["name"], row["state"]) == ("r", 0, "lookup", "delivered")
    assert (row["arguments_json"], row["result_json"], row["result_bytes"]) == ('{"word":"x"}', "[]", 2)
    assert (row["is_error"], row["end_reason"], row["result_sha256"]) == (False, None, None)


async def several(count: int) -> AsyncIterator[Trajectory]:
    for _ in range(count):
        yield trajectory()


def test_a_turn_carries_its_whole_prompt_put_together_from_its_parents() -> None:
    """R82: the tokens of path and prompt are those of the engine."""
    first, second = turns(trajectory())
    assert (first["prompt_token_ids"], first["completion_token_ids"]) == ([1, 2], [3, 4])
    assert (second["prompt_token_ids"], second["completion_token_ids"]) == ([1, 2, 3, 4, 5], [6])
    assert second["policy_spans"] == [{"policy_version": 3, "start": 0, "end": 1}]
    assert (second["finish_reason"], second["parent_call_id"]) == ("stop", "a")


def test_a_sequence_has_arrays_of_one_length_and_its_reward() -> None:
    """R84: mask 1 exactly where it was sampled; logprob 0.0 elsewhere."""
    (row,) = sequences(trajectory())
    assert row["input_ids"] == [1, 2, 3, 4, 5, 6] and row["loss_mask"] == [0, 0, 1, 1, 0, 1]
    assert row["logprobs"] == [0, 0, -0.5, -0.5, 0, -0.5]
    assert (row["reward"], row["prompt_len"], row["policy_version_min"]) == (0.5, 2, 3)


@pytest.mark.parametrize("bad", [np.nan, 0.25, -np.inf])
def test_a_sample_with_a_logprob_that_is_none_is_refused(bad: float) -> None:
    """R83: finite and <= 0 where the mask is 1, or it does not leave."""
    good = trajectory()
    logprobs = np.array([0, 0, bad, -0.5, 0, -0.5], np.float32)
    broken = replace(good, samples=(replace(good.samples[0], logprobs=logprobs),))
    with pytest.raises(InvalidArgument, match="s has logprobs"):
        list(sequences(broken))


async def test_a_file_appears_when_it_is_complete_and_not_before(tmp_path: Path) -> None:
    """A reader sees all rows or no file."""

    async def breaks() -> AsyncIterator[Trajectory]:
        yield trajectory()
        raise RuntimeError("cut")

    with pytest.raises(RuntimeError):
        await write(breaks(), tmp_path / "x.jsonl")
    assert list(tmp_path.iterdir()) == []
    assert await write(several(3), tmp_path / "x.jsonl", table="turns") == 6
    rows = [orjson.loads(line) for line in (tmp_path / "x.jsonl").read_bytes().splitlines()]
    assert len(rows) == 6 and [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize("table", ["turns", "sequences", "tool_calls"])
async def test_parquet_has_the_rows_of_json_lines(tmp_path: Path, table: str) -> None:
    """R84: arrays as arrays, nested values as JSON text."""
    await write(several(600), tmp_path / "x.parquet", table=table)
    await write(several(600), tmp_path / "x.jsonl", table=table)
    rows = pq.read_table(tmp_path / "x.parquet").to_pylist()
    expected = [orjson.loads(line) for line in (tmp_path / "x.jsonl").read_bytes().splitlines()]
    assert len(rows) == len(expected) == (1200 if table == "turns" else 600)
    nested = [name for name, value in expected[0].items() if isinstance(value, dict | list) and value != rows[0][name]]
    for row, right in zip(rows, expected, strict=True):
        assert {**row, **{name: orjson.loads(row[name]) for name in nested}} == right


async def test_parquet_without_its_package_is_a_named_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R48: a missing optional package is an error that says what to install."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'penstock\[parquet\]'"):
        await write(several(1), tmp_path / "x.parquet")
