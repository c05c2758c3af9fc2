"""The driver's rows against those of the Python client: one format, made twice."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.analysis.export import ROWS as CLIENT_ROWS
from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.client.wire.results import trajectory as read
from penstock.tables.columns import COLUMNS, Table, row_digest
from penstock.tables.rows import ROWS, BrokenSample, sequences
from penstock.trajectory.v1 import trajectory_pb2 as pb

TEXTS = st.text(max_size=4)
DIGESTS = st.sampled_from([b"", b"\x01\xff"])
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=4)
CHANCES = st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32)


def enums(most: int) -> st.SearchStrategy[Any]:
    """Numbers of an enum, one more than it has included."""
    return st.integers(0, most)


def ints(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def floats(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


@st.composite
def versions(draw: st.DrawFn) -> list[completion_pb2.PolicyVersionSpan]:
    return [
        completion_pb2.PolicyVersionSpan(policy_version=draw(st.integers(0, 2**40)), start=index, end=index + 1)
        for index in range(draw(st.integers(0, 2)))
    ]


@st.composite
def messages(draw: st.DrawFn) -> chat_pb2.Message:
    text = chat_pb2.Part(text=chat_pb2.Text(text=draw(TEXTS)))
    result = chat_pb2.ToolResult(tool_call_id="c", parts=[text], is_error=draw(st.booleans()))
    kinds = [
        text,
        chat_pb2.Part(reasoning=chat_pb2.Reasoning(text=draw(TEXTS), signature=draw(DIGESTS))),
        chat_pb2.Part(image=chat_pb2.Image(media_type="image/png", data=draw(DIGESTS))),
        chat_pb2.Part(tool_call=chat_pb2.ToolCall(id="c", name="bash", arguments_json=draw(TEXTS))),
        chat_pb2.Part(tool_result=result),
        chat_pb2.Part(),
    ]
    return chat_pb2.Message(role=draw(enums(6)), parts=draw(st.lists(st.sampled_from(kinds), max_size=3)))


@st.composite
def samplings(draw: st.DrawFn) -> chat_pb2.Sampling:
    optional: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.floats(0, 5),
        "top_k": st.integers(1, 9),
        "max_tokens": st.integers(1, 9),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "top_logprobs": st.integers(0, 20),
        "thinking": st.booleans(),
        "response_format_json": TEXTS,
    }
    chosen: dict[str, Any] = {name: draw(values) for name, values in optional.items() if draw(st.booleans())}
    return chat_pb2.Sampling(**chosen, stop=draw(st.lists(TEXTS, max_size=2)), stop_token_ids=draw(IDS))


@st.composite
def completions(draw: st.DrawFn) -> completion_pb2.Completion:
    done = completion_pb2.Completion(
        finish_reason=draw(enums(6)), engine=draw(TEXTS), engine_version=draw(TEXTS), model=draw(TEXTS)
    )
    if draw(st.booleans()):
        sampled, count = draw(IDS), draw(st.integers(0, 3))
        span = done.span
        span.token_ids, span.count = ints(sampled), len(sampled)
        span.logprobs_mode = draw(enums(4))
        span.versions.extend(draw(versions()))
        if draw(st.booleans()):
            span.logprobs = floats([draw(CHANCES) for _ in sampled])
        if count and sampled:
            span.top_count, span.top_sha256 = count, draw(DIGESTS)
            if draw(st.booleans()):
                span.top_token_ids = ints([draw(st.integers(-1, 99)) for _ in range(count * len(sampled))])
                chances = st.one_of(CHANCES, st.just(float("-inf")))
                span.top_logprobs = floats([draw(chances) for _ in range(count * len(sampled))])
        if draw(st.booleans()):
            span.ClearField("token_ids")  # left out, as in events
    if draw(st.booleans()):
        done.sampling_used.CopyFrom(draw(samplings()))
    if draw(st.booleans()):
        done.message.CopyFrom(draw(messages()))
    if draw(st.booleans()):
        done.usage.CopyFrom(chat_pb2.Usage(prompt_tokens=1, cached_tokens=draw(st.integers(0, 9))))
    if draw(st.booleans()):
        done.stop_token_id = 7
    elif draw(st.booleans()):
        done.stop_text = draw(TEXTS)
    return done


@st.composite
def calls(draw: st.DrawFn, index: int, before: list[str]) -> pb.Call:
    call = pb.Call(
        call_id=f"c{index}",
        index=index,
        state=draw(enums(8)),
        dialect=draw(enums(4)),
        call_class=draw(enums(7)),
        branch_id=draw(TEXTS),
        capture_level=draw(enums(4)),
        prompt_suffix_token_ids=ints(draw(IDS)),
        sampling_requested=draw(samplings()),
        normalisations=draw(st.lists(TEXTS, max_size=2)),
        tools=draw(st.lists(st.just(chat_pb2.Tool(name="bash", strict=True)) | st.just(chat_pb2.Tool(name="x")))),
        tools_sha256=draw(DIGESTS),
        request_body=draw(st.binary(max_size=4)),
        request_body_sha256=draw(DIGESTS),
        model_requested=draw(TEXTS),
        http_attempts=draw(st.integers(0, 3)),
        injected=draw(st.booleans()),
        replayed_from=draw(st.none() | st.builds(pb.ReplayOrigin, call_id=TEXTS, attempt=st.integers(1, 9))),
        answerer=draw(enums(3)),
        end_reason=draw(TEXTS),
        chain_sha256=draw(DIGESTS),
        receive_time=draw(st.none() | st.just(Timestamp(seconds=9, nanos=1234567)) | st.just(Timestamp(seconds=9))),
    )
    if draw(st.booleans()):
        call.completion.CopyFrom(draw(completions()))
    if draw(st.booleans()):
        call.chain_index = index
    has_parent: bool = draw(st.booleans())
    if before and has_parent:
        call.parent_call_id = draw(st.sampled_from(before))
        call.prompt_shared_count = draw(st.integers(0, 5))
    return call


@st.composite
def samples(draw: st.DrawFn) -> pb.Sample:
    ids = draw(IDS)
    mask = [draw(st.booleans()) for _ in ids]
    sample = pb.Sample(
        sample_id=draw(TEXTS),
        branch_id=draw(TEXTS),
        count=len(ids),
        input_ids=ints(ids),
        loss_mask=bytes(mask),
        logprobs_mode=draw(enums(4)),
        versions=draw(versions()),
        turns=[pb.TurnSpan(call_id="c0", start=0, end=len(ids), untrained_reason=draw(TEXTS))],
        prompt_count=draw(st.integers(0, 9)),
        weight=draw(st.floats(0, 1)),
        branch_class=draw(enums(7)),
        truncated=draw(st.booleans()),
    )
    if draw(st.booleans()):
        sample.logprobs = floats([draw(CHANCES) if trained else 0.0 for trained in mask])
    if sum(mask) and draw(st.booleans()):
        sample.top_count = 2
        sample.top_token_ids = ints([5, -1] * sum(mask))
        sample.top_logprobs = floats([-0.25, float("-inf")] * sum(mask))
    return sample


@st.composite
def trajectories(draw: st.DrawFn) -> pb.Trajectory:
    trajectory = pb.Trajectory(
        rollout_id="r",
        labels=draw(st.dictionaries(TEXTS, TEXTS, max_size=2)),
        samples=draw(st.lists(samples(), max_size=2)),
        grade=draw(enums(3)),
        capture_level=draw(enums(4)),
        tokenizer_sha256=draw(DIGESTS),
        chat_template_sha256=draw(DIGESTS),
        chain_sha256=draw(DIGESTS),
        agent=draw(TEXTS),
        agent_spec_sha256=draw(TEXTS),
        task_id=draw(TEXTS),
        failure_cause=draw(TEXTS),
        failure_reason=draw(TEXTS),
        failure_caused_by=draw(TEXTS),
        namespace=draw(TEXTS),
        attempt=draw(st.integers(0, 3)),
        findings=[pb.Finding(severity=draw(enums(3)), reason="R", call_id=draw(st.none() | TEXTS))],
    )
    for index in range(draw(st.integers(0, 3))):
        trajectory.calls.append(draw(calls(index, [call.call_id for call in trajectory.calls])))
    for index in range(draw(st.integers(0, 2))):
        tool = trajectory.host_tool_calls.add(index=index, name=draw(TEXTS), state=draw(enums(7)))
        tool.result_json, tool.result_bytes = draw(TEXTS), draw(st.integers(0, 2**40))
        tool.end_time.CopyFrom(Timestamp(seconds=2, nanos=5000))
    if draw(st.booleans()):
        trajectory.run_id, trajectory.group_id, trajectory.group_index = (
            draw(TEXTS),
            draw(TEXTS),
            draw(st.integers(0, 9)),
        )
    if draw(st.booleans()):
        trajectory.reward.CopyFrom(pb.Reward(value=draw(st.floats(0, 1)), components={"a": draw(st.floats(0, 1))}))
    if draw(st.booleans()):
        trajectory.task_metadata.update({"whole": 3.0, "part": 0.5, "list": [1.0, {"deep": None}], "text": draw(TEXTS)})
    if draw(st.booleans()):
        trajectory.duration.FromNanoseconds(draw(st.integers(0, 2**50)))
        trajectory.create_time.CopyFrom(Timestamp(seconds=1, nanos=999))
    if draw(st.booleans()):
        point = pb.BranchPoint(parent_rollout_id="p", call_id=draw(TEXTS), call_index=draw(st.integers(0, 9)))
        point.train_prefix = draw(st.booleans())
        if draw(st.booleans()):
            point.seed = draw(st.integers(-(2**63), 2**63 - 1))
        trajectory.branched_from.CopyFrom(point)
    return trajectory


@pytest.mark.requirement("R124")
@settings(deadline=None)
@given(trajectories())
@example(pb.Trajectory(rollout_id="r", duration=Duration(seconds=1, nanos=597768315)))
def test_driver_and_client_make_the_same_rows(message: pb.Trajectory) -> None:
    """Whoever exported a rollout, its rows are equal in every value, and in their digests."""
    for table in ROWS:
        made = list(ROWS[table](message))
        assert made == list(CLIENT_ROWS[table](read(message)))
        assert [list(row) for row in made] == [list(COLUMNS[table])] * len(made)


@pytest.mark.requirement("R124", "R129")
@pytest.mark.parametrize("seed", [None, 0, 100])
def test_the_point_of_a_branch_has_its_seed(seed: int | None) -> None:
    point = pb.BranchPoint(parent_rollout_id="p", call_id="c", call_index=2, train_prefix=True, seed=seed)
    (row,) = ROWS[Table.ROLLOUTS](pb.Trajectory(rollout_id="r", branched_from=point))
    assert row["branched_from"] == {
        "parent_rollout_id": "p",
        "call_id": "c",
        "call_index": 2,
        "answer_given": False,
        "train_prefix": True,
        "seed": seed,
    }


@pytest.mark.parametrize("change", [{"loss_mask": b"\1"}, {"logprobs": floats([0.5, -1])}, {"top_count": 1}])
def test_a_broken_sample_makes_no_row(change: dict[str, Any]) -> None:
    right = {"input_ids": ints([1, 2]), "loss_mask": b"\1\1", "logprobs": floats([-1, -1]), "top_token_ids": ints([1])}
    sample = pb.Sample(**(right | change))
    with pytest.raises(BrokenSample, match=r"arrays|logprobs|alternatives"):
        list(ROWS[Table.SEQUENCES](pb.Trajectory(samples=[sample])))


@pytest.mark.requirement("R129")
def test_a_sample_has_the_advantages_that_it_is_given() -> None:
    first, second = (pb.Sample(sample_id=name, input_ids=ints([1, 2]), loss_mask=b"\0\1") for name in "ab")
    rows = list(sequences(pb.Trajectory(samples=[first, second]), {"b": [0.0, -0.5]}))
    assert [row["advantages"] for row in rows] == [None, [0.0, -0.5]]
    assert [row["row_sha256"] for row in rows] == [row_digest(row) for row in rows]


@pytest.mark.parametrize("values", [[-0.5], [0.25, -0.5], [0.0, float("nan")]])
def test_advantages_of_other_tokens_are_refused(values: list[float]) -> None:
    sample = pb.Sample(sample_id="a", input_ids=ints([1, 2]), loss_mask=b"\0\1")
    with pytest.raises(BrokenSample, match="advantages"):
        list(sequences(pb.Trajectory(samples=[sample]), {"a": values}))
