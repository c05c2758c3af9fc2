"""Exported files as they are looked at again: what they say, and what a file may be that nobody exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Group
from tests.unit.cli.test_watch_replay_diff import HOSTILE, drawn, foreign

from penstock.analysis.differences import compare
from penstock.analysis.recordings import Recording, of_files
from penstock.cli.commands import diff, replay
from penstock.cli.views.json_shapes import turn_shape
from penstock.cli.views.replay_steps import steps
from penstock.client import InvalidArgument

ROW: dict[str, Any] = {
    "rollout_id": "r", "group_id": "g", "group_index": 0, "run_id": "n", "task_id": "t", "agent": "a",
    "labels": {"x": "y"}, "error": "E", "error_cause": "agent", "error_caused_by": "agent", "tokenizer_sha256": "00",
    "turn_index": 0, "call_id": "c", "parent_call_id": "b", "branch_id": "b", "role": "main", "state": "delivered",
    "answerer": "upstream", "prompt_token_ids": [1, 2], "prompt_shared_count": 0, "completion_token_ids": [3],
    "completion_logprobs": [-0.5], "policy_spans": [{"policy_version": 1, "start": 0, "end": 1}],
    "finish_reason": "stop", "end_reason": "e", "engine": "v", "model": "m", "sampling_used": {"temperature": 1.0},
    "normalisations": ["n"], "tools": [{"name": "bash"}], "injected": False,
    "response_message": {"role": "assistant", "parts": [{"kind": "text", "text": "Hello."}]},
    "request_body": '{"messages":[{"role":"user","content":"go"}]}',
    "receive_time": "2026-01-01T00:00:00+00:00", "end_time": "2026-01-01T00:00:01+00:00",
}  # fmt: skip
"""A row of the table `turns`, with a value in each field that is read."""


def recorded(folder: Path, *rows: dict[str, Any]) -> Recording:
    """What of_files makes of a file of these rows."""
    file = folder / "turns.jsonl"
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return of_files(file)


def shown(recording: Recording) -> str:
    """Everything that replay and diff draw of it."""
    pages = steps(recording)
    book = replay.Book(recording, pages, tokens=False)
    parts = []
    for page in pages:
        parts += [book.frame(), Group(*page.draw(True))]
        book.press("n")
    return drawn([*parts, *diff.drawn(compare(recording, recording), recording, recording)])


def _with(value: Any, text: str) -> Any:
    """A value with every text in it followed by `text`."""
    if isinstance(value, str):
        return value + text
    if isinstance(value, list):
        return [_with(item, text) for item in value]
    return {name: _with(item, text) for name, item in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("name", ROW)
def test_no_field_of_a_file_drives_the_terminal(name: str, tmp_path: Path) -> None:
    """A file is anybody's: what stands in any of its fields is drawn clean, or refused."""
    hostile = "".join(letter for letter in HOSTILE if letter.isascii() or letter == "\u202e")
    if name.endswith("_time"):
        with pytest.raises(InvalidArgument):
            recorded(tmp_path, ROW | {name: ROW[name] + hostile})
    else:
        assert not foreign(shown(recorded(tmp_path, ROW | {name: _with(ROW[name], hostile)})))


ODD: list[Any] = [
    0, -1, 1.5, True, "", "x", [], ["x"], [[1]], [None], {}, {"x": "y"}, [{"x": []}], {"parts": "x"}, {"parts": [1]},
    {"parts": [{"kind": "text"}]}, {"parts": [{"kind": "toolcall", "arguments_json": {}}]}, [1099511627776],
    [-0.5, -0.5], "2026-01-01T00:00:00", "[1]", "{", {"temperature": [1]}, [{"name": {}}],
    [{"policy_version": "x", "start": 0, "end": 1}, {"policy_version": 1, "start": 0, "end": 1}],
]  # fmt: skip


@pytest.mark.parametrize("name", ROW)
def test_invalid_file_is_refused_or_drawn_without_a_traceback(name: str, tmp_path: Path) -> None:
    """Anything in any field: the program says what is wrong with the file, or shows it."""
    for value in ODD:
        try:
            recording = recorded(tmp_path, ROW | {name: value})
        except InvalidArgument as refused:
            assert refused.reason in ("ROW_INVALID", "RECORDING_UNREADABLE")
            continue
        shown(recording)
        orjson.dumps([turn_shape(recording, turn, tokens=False) for turn in recording.turns], default=str)


def test_answer_without_tokens_is_exported_and_shown_alike(tmp_path: Path) -> None:
    """A provider's answer has no tokens: its texts and tool calls stand in the message."""
    parts = [
        {"kind": "text", "text": "Let me look."},
        {"kind": "toolcall", "id": "1", "name": "bash", "arguments_json": '{"command":"ls"}'},
    ]
    plain = {"completion_token_ids": None, "completion_logprobs": None, "response_message": {"parts": parts}}
    recording = recorded(tmp_path, ROW | plain)
    (turn,) = recording.turns
    answer = turn_shape(recording, turn, tokens=False)["answer"]
    assert answer == 'Let me look.\nbash {"command":"ls"}'
    assert all(line in shown(recording) for line in answer.splitlines())


def _sample(ids: list[int], *spans: tuple[str, int, int, str]) -> dict[str, Any]:
    """A row of `sequences` with these turns: call, start, end, and why it is not trained."""
    mask = [0] * len(ids)
    for _, start, end, why in spans:
        mask[start:end] = [int(not why)] * (end - start)
    names = ("call_id", "start", "end", "untrained_reason")
    return {
        "rollout_id": "r", "sequence_index": 0, "input_ids": ids, "loss_mask": mask,
        "logprobs": [-0.5 * trained for trained in mask],
        "turn_spans": [dict(zip(names, span, strict=True)) for span in spans],
    }  # fmt: skip


@pytest.mark.parametrize("why", ["", "TRUNCATED"])
@pytest.mark.parametrize("is_partial_first", [True, False])
def test_call_of_which_a_branch_shares_the_beginning_is_read_whole(
    tmp_path: Path, is_partial_first: bool, why: str
) -> None:
    """Its answer, the reason and the shared prefixes are of the sample that has all of it, whatever the order."""
    whole = _sample([1, 2, 3, 4, 5, 6, 7], ("p", 2, 5, why), ("a", 6, 7, ""))
    partial = _sample([1, 2, 3, 9, 8], ("p", 2, 3, "PARTIAL"), ("b", 4, 5, ""))
    rows = (partial, whole) if is_partial_first else (whole, partial)
    turns = {turn.call_id: turn for turn in recorded(tmp_path, *rows).turns}
    parent = turns["p"]
    assert parent.sampled is not None and parent.sampled.tolist() == [3, 4, 5]
    assert (parent.logprobs is not None, parent.untrained) == (not why, why)
    assert (turns["a"].shared, turns["b"].shared) == (5, 3)
    assert [turns[name].parent_call_id for name in "pab"] == [None, "p", "p"]


def test_reason_of_a_whole_call_outlives_that_of_its_beginning(tmp_path: Path) -> None:
    """Rows of calls, too, have the reason of the sample with all of the call's tokens."""
    whole = _sample([1, 2, 3, 4], ("c", 2, 4, "TRUNCATED"))
    partial = _sample([1, 2, 3, 9], ("c", 2, 3, "PARTIAL"))
    (turn,) = recorded(tmp_path, ROW, whole, partial).turns
    assert turn.untrained == "TRUNCATED"
