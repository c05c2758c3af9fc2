"""An export is what the gate recorded, or the check says where it is not."""

import copy
import tempfile
import tracemalloc
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.services.inner_gate import completion, inner_gate
from tests.support.waiting import eventually

from penstock.analysis.export import read_rows
from penstock.analysis.verify_chain import Row, verify
from penstock.analysis.verify_samples import check_policies, check_samples
from penstock.client import ConfigurationError, InvalidArgument
from penstock.tables import rows
from penstock.tables.columns import sealed
from penstock.trajectory.v1 import trajectory_pb2
from penstock_codec.chat import FinishReason, Message, Sampling
from penstock_interception.domain.calls import CallState
from penstock_interception.graph.record import chain_next, chain_start
from penstock_interception.graph.values import LogprobsMode, Sampled, TopLogprobs, VersionSpan
from penstock_interception.rollouts.trajectory import capture
from penstock_interception.rpc.trajectory import fragments

TENSOR = {"name": "routed_experts", "dtype": "uint8", "start": 3, "shape": [4, 1, 1], "sha256": "00" * 32, "data": None}
TOP = ("completion_top_token_ids", "completion_top_logprobs")


def recorded(
    calls: int = 3, rollout_id: str = "r", top: int = 0, prompt: Sequence[int] = (1, 2, 3)
) -> tuple[list[Row], list[Row]]:
    """Rows of both tables, with the chain as the gate makes it; `top` alternatives in each call but the first, whose
    prompt is `prompt`.
    """
    rng = np.random.default_rng(7)
    head, line, turns = chain_start(rollout_id), np.array(prompt, np.int32), []
    spans, mask, logs = [], [0] * len(prompt), [0.0] * len(prompt)
    for index in range(calls):
        ids = rng.integers(0, 100, 4).astype(np.int32)
        logprobs = -rng.random(4).astype(np.float32)
        sampling = Sampling(temperature=0.7, top_p=0.95, stop=("</s>",), response_format="{}") if index else None
        sampled = Sampled(
            Message.assistant("x"), FinishReason.STOP, ids, logprobs, LogprobsMode.PROCESSED,
            (VersionSpan(index, 0, 4),), sampling_used=sampling,
            top=alternatives(index, top) if index and top else None,
        )  # fmt: skip
        head = chain_next(head, f"{rollout_id}-{index}", line, sampled)
        used = {"temperature": 0.7, "top_p": 0.95, "stop": ["</s>"], "response_format_json": "{}"}
        turns.append(
            {
                "rollout_id": rollout_id, "call_id": f"{rollout_id}-{index}", "capture_level": "tokens_and_logprobs",
                "prompt_token_ids": line.tolist(), "completion_token_ids": ids.tolist(),
                "completion_logprobs": logprobs.tolist(), "logprobs_mode": "processed",
                "policy_spans": [{"policy_version": index, "start": 0, "end": 4}],
                "sampling_used": used if index else None, "chain_index": index, "chain_sha256": head.hex(),
                **(columns(sampled.top) if top else {}),
            }
        )  # fmt: skip
        spans.append({"call_id": f"{rollout_id}-{index}", "start": line.size, "end": line.size + 4})
        mask += [1, 1, 1, 1, 0]
        logs += [*logprobs.tolist(), 0.0]
        line = np.concatenate([line, ids, np.array([9], np.int32)])
    for row in turns:
        row["rollout_chain_sha256"] = head.hex()
    sample = {
        "rollout_id": rollout_id, "sample_id": f"{rollout_id}-{rollout_id}-{calls - 1}",
        "input_ids": line[:-1].tolist(), "loss_mask": mask[:-1], "logprobs": logs[:-1],
        "turn_spans": spans,
    }  # fmt: skip
    if top:
        rest = [row["completion_top_token_ids"] for row in turns[1:]]
        values = [row["completion_top_logprobs"] for row in turns[1:]]
        sample["top_token_ids"] = [[-1] * top] * 4 + [line for lines in rest for line in lines]
        sample["top_logprobs"] = [[None] * top] * 4 + [line for lines in values for line in lines]
    return turns, [sample]


def alternatives(seed: int, count: int) -> TopLogprobs:
    """Rows for four tokens; the last entry of each is excluded by a filter."""
    rng = np.random.default_rng(seed)
    values = -np.sort(rng.random((4, count))).astype(np.float32)
    values[:, -1] = -np.inf
    return TopLogprobs(rng.integers(0, 100, (4, count)).astype(np.int32), values)


def columns(top: TopLogprobs | None) -> Row:
    """A call's alternatives as an export writes them."""
    if top is None:
        return {"completion_top_count": 0, "completion_top_sha256": None} | dict.fromkeys(TOP)
    values = [[None if value == -np.inf else value for value in line] for line in top.logprobs.tolist()]
    return {
        "completion_top_token_ids": top.token_ids.tolist(), "completion_top_logprobs": values,
        "completion_top_count": top.count, "completion_top_sha256": top.sha256.hex(),
    }  # fmt: skip


@pytest.mark.requirement("R82")
def test_recorded_chain_is_valid() -> None:
    """In whatever order the rows come."""
    turns, sequences = recorded()
    others, _ = recorded(2, "other")
    proof = verify([*reversed(turns), *others], sequences)
    assert not proof.problems
    assert (proof.rollouts, proof.calls, proof.tokens, proof.samples, proof.unproven) == (2, 5, 20, 1, 0)


def peak(rollouts: int) -> int:
    """Bytes of Python's memory at most, while rollouts are verified whose rows come mixed and one at a time."""
    prompt = range(1000, 2500)

    def rows(table: int) -> Iterator[Row]:
        for index in range(2 - table):
            for number in range(rollouts):
                row = recorded(2, f"r{number}", prompt=prompt)[table][index]
                yield row | {"replayed_from": {name: row.get(name) for name in ("rollout_id", "call_id")}}

    tracemalloc.start()
    try:
        proof = verify(rows(0), rows(1), against=rows(0))
        found = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (proof.problems, proof.rollouts, proof.calls, proof.samples) == ([], rollouts, 2 * rollouts, rollouts)
    assert proof.replayed == 2 * rollouts
    return found


@pytest.mark.requirement("R82")
def test_memory_holds_one_rollout_however_many_there_are() -> None:
    """Each call has its whole prompt, so an export is larger than memory; one rollout of it is not."""
    peak(1)  # takes what only the first verification in a process needs
    assert peak(12) < 1.5 * peak(4)


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("disk", ["there is none", "it is full"])
def test_a_disk_that_takes_no_rows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str) -> None:
    if disk == "it is full":
        monkeypatch.setattr(tempfile, "TemporaryFile", partial(Path("/dev/full").open, "w+b"))
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="cannot be written") as caught:
        verify(*recorded(prompt=range(5000)))
    assert caught.value.reason == "FILE_NOT_WRITTEN"


@pytest.mark.requirement("R82")
def test_rows_of_any_depth_are_kept_or_refused() -> None:
    """As deep as an export can be, they are kept."""
    turns, _ = recorded()
    deep: Any = {}
    for _ in range(250):
        deep = {"a": deep}
    turns[0]["tools"] = deep
    assert not verify([sealed(turns[0] | {"schema_version": 3}, 1)]).problems[1:]
    for _ in range(5000):
        deep = [deep]
    turns[0]["tools"] = deep
    with pytest.raises(InvalidArgument, match="A row of turns is nested too deeply"):
        verify(turns)
    with pytest.raises(InvalidArgument, match="A row of turns is nested too deeply"):
        verify([turns[1] | {"replayed_from": turns[0]}], against=turns)


@pytest.mark.requirement("R103")
@pytest.mark.parametrize(
    ("sampled", "shared", "holds"), [(None, 3, True), (None, 4, False), ([5, 6], 5, True), ([5], 5, False)]
)
def test_tokens_that_a_call_shares_with_its_parent_are_compared(
    sampled: list[int] | None, shared: int, holds: bool
) -> None:
    """With its prompt, then with what was sampled."""
    turns, _ = recorded(2)
    turns[0]["completion_token_ids"] = sampled
    turns[1] |= {"parent_call_id": "r-0", "prompt_shared_count": shared, "prompt_token_ids": [1, 2, 3, 5, 6, 7]}
    found = [problem.message for problem in verify(turns).problems]
    assert ("its shared tokens differ from its parent's" not in found) is holds


@pytest.mark.requirement("R82", "R106")
@pytest.mark.parametrize("left_out", [False, True], ids=["with rows", "without rows"])
def test_chain_with_alternatives_is_valid_without_their_rows(left_out: bool) -> None:
    """The chain covers their digest."""
    turns, sequences = recorded(top=3)
    if left_out:
        turns = [row | dict.fromkeys(TOP) for row in turns]
    assert not verify(turns, sequences).problems
    turns[1]["completion_top_sha256"] = "00" * 32
    assert "differ from the record" in verify(turns, sequences).problems[0].message


@pytest.mark.requirement("R82", "R106")
def test_changed_alternatives_are_found() -> None:
    """In a call by its digest, in a sample by its calls."""
    for name, value in (("completion_top_token_ids", 7777), ("completion_top_logprobs", -9.0)):
        turns, _ = recorded(top=2)
        turns[2][name][3][0] = value
        (problem,) = verify(turns).problems
        assert (problem.call_id, problem.message) == ("r-2", "its alternatives differ from the record")
    for name, value in (("top_token_ids", 7777), ("top_logprobs", -9.0)):
        turns, sequences = recorded(top=2)
        sequences[0][name] = [[*line] for line in sequences[0][name]]
        sequences[0][name][5][0] = value
        assert [problem.message for problem in verify(turns, sequences).problems] == [
            f"sample r-r-2: {name} does not match its calls"
        ]


CHANGES: dict[str, Any] = {
    "a sampled token": lambda row: row["completion_token_ids"].__setitem__(1, row["completion_token_ids"][1] + 1),
    "a prompt's token": lambda row: row["prompt_token_ids"].__setitem__(0, 77),
    "a logprob": lambda row: row["completion_logprobs"].__setitem__(3, row["completion_logprobs"][3] / 2),
    "the version": lambda row: row["policy_spans"][0].update(policy_version=9),
    "the temperature": lambda row: row.update(sampling_used={"temperature": 0.1}),
    "the mode": lambda row: row.update(logprobs_mode="raw"),
    "the call's id": lambda row: row.update(call_id="someone else"),
}


@given(place=st.integers(0, 2), change=st.sampled_from(sorted(CHANGES)))
def test_any_change_is_found_at_its_call(place: int, change: str) -> None:
    """One broken call is one problem."""
    turns, _ = recorded()
    CHANGES[change](turns[place])
    (problem,) = verify(turns).problems
    assert problem.call_id == turns[place]["call_id"]


@given(place=st.integers(0, 2))
def test_a_call_that_was_left_out_or_doubled_is_missed(place: int) -> None:
    """Also the last."""
    turns, _ = recorded()
    assert "missing" in verify(turns[:place] + turns[place + 1 :]).problems[0].message
    assert "twice" in verify([*turns, copy.deepcopy(turns[place])]).problems[0].message


@pytest.mark.requirement("R84")
def test_a_sample_that_trains_other_tokens_than_were_sampled_is_found() -> None:
    turns, sequences = recorded()
    for name, place, value in (("input_ids", 3, 5000), ("input_ids", 0, 5000), ("logprobs", 4, -9.0)):
        changed = copy.deepcopy(sequences)
        changed[0][name][place] = value
        assert verify(turns, changed).problems
    changed = copy.deepcopy(sequences)
    changed[0]["loss_mask"][0] = 1
    assert "no call sampled" in verify(turns, changed).problems[0].message
    assert "not in turns" in verify(turns[:-1], sequences).problems[-1].message


def test_a_sample_without_the_tensors_of_its_calls_is_found() -> None:
    """As one that is exported without their rows has them too."""
    turns, sequences = recorded()
    turns[2]["completion_tensors"], sequences[0]["tensors"] = [TENSOR], None
    said = [problem.message for problem in verify(turns, sequences).problems]
    assert any("tensors are left out, which its calls have" in one for one in said)


@pytest.mark.requirement("R84")
@pytest.mark.parametrize("column", ["images", "tensors"])
@pytest.mark.parametrize("parents", [(2, 1), (None, 2)], ids=["of each other", "of itself"])
def test_calls_that_are_their_own_parents_are_found(column: str, parents: tuple[int | None, int]) -> None:
    """An export may come from anybody: its verification ends."""
    turns, sequences = recorded()
    for row, parent in zip(turns[1:], parents, strict=True):
        row["prompt_shared_count"], row["prompt_images"] = 3, [{"sha256": "00", "token_start": 0, "token_count": 1}]
        row["parent_call_id"] = row["call_id"] if parent is None else turns[parent]["call_id"]
    sequences[0][column] = []
    said = [problem.message for problem in verify(turns, sequences).problems]
    assert any("among its own parents" in one for one in said)


@pytest.mark.requirement("R84", "R133")
@pytest.mark.parametrize("why", ["MODEL_UNTRAINED", "PARENT", "PARTIAL"])
def test_a_part_of_a_call_is_context_for_whatever_reason(why: str) -> None:
    """A history that was edited within an answer of an untrained model has a part of it: no problem."""
    turns, sequences = recorded(2)
    first, last = sequences[0]["turn_spans"]
    mask = [0 if at >= 8 else value for at, value in enumerate(sequences[0]["loss_mask"])]
    row = sequences[0] | {"loss_mask": mask, "logprobs": None, "turn_spans": [first, last | {"end": 10}]}
    row["turn_spans"][1]["untrained_reason"] = why
    assert not [what for _, what in check_samples([row], {one["call_id"]: one for one in turns}) if "its mask" in what]
    row["turn_spans"][1]["untrained_reason"] = "TRUNCATED"
    assert any("its mask" in what for _, what in check_samples([row], {one["call_id"]: one for one in turns}))


@pytest.mark.requirement("R133")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"policies": None}, "its policies are not those of its calls"),
        ({"policies": [{"policy_id": "b", "trained": True, "calls": 2, "samples": 1}]}, "are not those of its calls"),
        ({"policies": [{"policy_id": "a", "trained": True, "calls": 3, "samples": 1}]}, "2 calls of policy a are in"),
        ({"policies": [{"policy_id": "a", "trained": True, "calls": 2, "samples": 2}]}, "1 samples of policy a are in"),
        ({"policies": [{"policy_id": "a", "trained": None, "calls": 2, "samples": 1}]}, "policy a is trained differs"),
        ({"trained": False}, "policy a is trained differs"),
    ],
)
def test_the_policies_of_an_export_are_those_of_its_rows(changes: Row, message: str) -> None:
    """A list that an older version lacks is no problem, nor are samples that are not compared."""
    stated = [{"policy_id": "a", "trained": True, "calls": 2, "samples": 1}]
    turns = [{"policy_id": "a", "trained": True, "policies": stated} | changes for _ in range(2)]
    found = list(check_policies(turns, [{"policy_id": "a"}]))
    assert len(found) == bool(message) and all(message in one for one in found)
    assert not list(check_policies([{"policy_id": "a"}], ()))


def test_other_policies_than_a_list_are_refused() -> None:
    turns, _ = recorded()
    for wrong in ("a", [1], [{"policy_id": "a", "calls": 1}]):
        turns[0]["policies"] = wrong
        with pytest.raises(InvalidArgument, match="policies are not a list of policies"):
            verify(turns)


def test_text_without_tokens_is_marked() -> None:
    """A link that cannot be computed is no proof and no breach."""
    turns, _ = recorded()
    turns[1]["capture_level"] = "text"
    proof = verify(turns)
    assert (proof.problems, proof.calls, proof.unproven) == ([], 2, 1)


def test_other_files_than_exports_are_refused(tmp_path: Path) -> None:
    """With the line, or the column that is missing."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(orjson.dumps({"a": 1}) + b"\n[]\n")
    with pytest.raises(InvalidArgument, match="line 2"):
        list(read_rows(file))
    with pytest.raises(InvalidArgument, match="rollout_id"):
        verify([{"a": 1}])


def replayed(calls: int = 2, parent: str = "parent") -> tuple[list[Row], list[Row]]:
    """A rollout whose calls were all replayed, and its parent's rows with the same tokens."""
    turns, _ = recorded(calls)
    origins, _ = recorded(calls, parent)
    for index, row in enumerate(turns):
        row["replayed_from"] = {"rollout_id": parent, "attempt": 1, "call_id": f"{parent}-{index}"}
    return turns, origins


@pytest.mark.requirement("R103", "R129")
def test_replayed_calls_have_what_their_origins_have() -> None:
    """Calls whose origin is not there are unproven, and no problem; without origins none is compared."""
    turns, origins = replayed()
    for against, counts in ((origins, (2, 0)), (origins[1:], (1, 1)), ([], (0, 2)), (None, (0, 0))):
        proof = verify(turns, against=against)
        assert (proof.problems, (proof.replayed, proof.unproven_replays)) == ([], counts)
    sampled = [row | {"replayed_from": None} for row in turns]
    proof = verify(sampled, against=origins)
    assert (proof.problems, proof.replayed, proof.unproven_replays) == ([], 0, 0)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("prompt_token_ids", [1, 2, 4], "its prompt differs"),
        ("completion_token_ids", [1, 2, 3, 4], "its sampled ids differ"),
        ("completion_token_ids", None, "its sampled ids differ"),
        ("completion_logprobs", [-1.0, -1.0, -1.0, -1.0], "its logprobs differ"),
        ("completion_logprobs", [-1.0], "its logprobs differ"),
        ("completion_logprobs", None, "its logprobs differ"),
        ("logprobs_mode", "raw", "its mode of logprobs differs"),
        ("policy_spans", [{"policy_version": 8, "start": 0, "end": 4}], "its policy versions differ"),
        ("policy_id", "teacher", "its policy differs"),
        ("completion_tensors", [TENSOR], "its tensors differ"),
    ],
)
def test_a_replayed_call_that_differs_from_its_origin_is_found(column: str, value: Any, said: str) -> None:
    """Its own chain holds, since it is another call's; the problem names both."""
    turns, origins = replayed()
    turns[0].setdefault(column, None)
    origins[0][column] = value
    assert not verify(turns).problems
    (problem,) = verify(turns, against=origins).problems
    assert (problem.rollout_id, problem.call_id) == ("r", "r-0")
    assert problem.message == f"{said} from call parent-0 of rollout parent, which it names as its origin"


def test_an_origin_of_another_attempt_or_that_was_altered_is_found() -> None:
    turns, origins = replayed()
    origins[0]["attempt"] = 2
    (problem,) = verify(turns, against=origins).problems
    assert "names attempt 1" in problem.message and "is of attempt 2" in problem.message
    origins[0] |= {"attempt": 1, "schema_version": 3, "row_sha256": "00" * 32}
    (problem,) = verify(turns, against=origins).problems
    assert (problem.rollout_id, problem.call_id) == ("parent", "parent-0") and "was changed" in problem.message


def test_logprobs_are_compared_as_float32() -> None:
    """Parquet has them so, and JSON the shortest digits."""
    turns, origins = replayed()
    for row in origins:
        row["completion_logprobs"] = [float(str(np.float32(value))) for value in row["completion_logprobs"]]
    assert origins[0]["completion_logprobs"] != turns[0]["completion_logprobs"]
    assert not verify(turns, against=origins).problems


def test_origins_without_token_ids_prove_nothing() -> None:
    turns, origins = replayed()
    origins[0]["prompt_token_ids"] = None
    proof = verify(turns, against=origins)
    assert (proof.problems, proof.replayed, proof.unproven_replays) == ([], 1, 1)


@pytest.mark.parametrize("named", ["x", {}, {"rollout_id": "r", "call_id": 1}, [1]])
def test_an_origin_that_names_no_call_is_refused(named: Any) -> None:
    """In both files."""
    turns, origins = replayed()
    turns[0]["replayed_from"] = named
    with pytest.raises(InvalidArgument, match="replayed_from"):
        verify(turns)
    with pytest.raises(InvalidArgument, match="replayed_from"):
        verify(origins, against=turns)


@pytest.mark.requirement("R82", "R84")
async def test_what_a_gate_recorded_of_one_model_is_valid_as_it_is_exported(tmp_path: Path) -> None:
    """With each column of both tables, those included that only rollouts of several models use."""
    async with inner_gate(tmp_path) as gate:
        rollout, session = await gate.open(), gate.join()
        call = await gate.ask(rollout, "list the files")
        await eventually(lambda: call.state is CallState.LEASED, "it is sampled")
        await gate.interceptor.deliver(call.id, "", completion("four", version=3), session=session)
        await call.ended
        await gate.interceptor.rollouts.close(rollout.id, "completed")
        conversation = await gate.interceptor.conversations.of(rollout)
        whole = trajectory_pb2.Trajectory()
        captured = capture(rollout, conversation, include_top=True)
        async for part in fragments(captured, conversation, None, include_top=True):
            whole.MergeFrom(part)
    turns, sequences = list(rows.turns(whole)), list(rows.sequences(whole))
    proof = verify(turns, sequences)
    assert not proof.problems and (proof.calls, proof.samples) == (1, 1)
    sequences[0]["turn_policies"] = ["another"]
    assert verify(turns, sequences).problems
