"""Two rollouts are the same only as far as they were compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.support.terminal.commands import invoke
from tests.unit.analysis.test_recordings import ROW, recorded

from penstock.analysis.differences import compare

PLAIN = ROW | {"prompt_token_ids": None, "completion_token_ids": None, "completion_logprobs": None, "end_reason": None}
"""A call whose answer has no tokens: a provider's, or a program's."""
OTHERWISE: dict[str, Any] = {
    "response_message": {"role": "assistant", "parts": [{"kind": "text", "text": "I gave up."}]},
    "request_body": '{"messages":[{"role":"user","content":"come"}]}',
    "state": "failed",
    "end_reason": "CONTEXT",
    "finish_reason": "length",
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_differing_call_without_tokens_is_reported(name: str, tmp_path: Path) -> None:
    """What was asked, what was answered, and how each call ended."""
    found = compare(recorded(tmp_path, PLAIN), recorded(tmp_path, PLAIN | {name: OTHERWISE[name]}))
    assert not found.same


@pytest.mark.parametrize("name", ["response_message", "request_body", "finish_reason"])
def test_parts_of_only_one_recording_are_not_compared(name: str, tmp_path: Path) -> None:
    """Nothing is passed over in silence."""
    whole, less = recorded(tmp_path, PLAIN), recorded(tmp_path, PLAIN | {name: None})
    found = compare(whole, less)
    assert found.same and len(found.unknown) == len(compare(whole, whole).unknown) + 1


@pytest.mark.parametrize("tool", ["bash", "python"])
def test_answers_of_tool_calls_are_compared_without_their_random_ids(tool: str, tmp_path: Path) -> None:
    """An id is drawn anew each time: the tool and its arguments count."""

    def row(number: int, name: str) -> dict[str, Any]:
        part = {"kind": "toolcall", "id": f"call_{number}", "name": name, "arguments_json": "{}"}
        return PLAIN | {"response_message": {"role": "assistant", "parts": [part]}}

    found = compare(recorded(tmp_path, row(1, "bash")), recorded(tmp_path, row(2, tool)))
    assert found.same is (tool == "bash")
    assert found.divergence is None or (found.divergence.where, found.divergence.right.text) == ("message", "python {}")


@pytest.mark.parametrize("asked", [{"temperature": 1.0}, {"temperature": 1.0, "seed": 7}])
def test_drawn_seed_is_no_difference_and_a_requested_one_is(asked: dict[str, Any], tmp_path: Path) -> None:
    """Siblings that did the same are the same, although each call had random numbers of its own."""

    def row(seed: int) -> dict[str, Any]:
        requested = asked | ({"seed": seed} if "seed" in asked else {})
        return ROW | {"sampling_requested": requested, "sampling_used": {"temperature": 1.0, "seed": seed}}

    found = compare(recorded(tmp_path, row(1)), recorded(tmp_path, row(2)))
    assert found.same is ("seed" not in asked)
    assert [item.name for item in found.differences] == ([] if found.same else ["sampling"])


def test_tokens_against_words_are_reported_as_not_compared(tmp_path: Path) -> None:
    """Where answers cannot be compared it is never said that they are the same."""
    tokens = recorded(tmp_path, ROW | {"request_body": None, "response_message": None})
    words = recorded(tmp_path, PLAIN | {"end_reason": ROW["end_reason"]})
    found = compare(tokens, words)
    assert found.same
    assert {line.partition(":")[0] for line in found.unknown} >= {"requests of call 0", "answers of call 0"}


def test_the_command_line_says_how_far_it_compared(tmp_path: Path) -> None:
    """Exit code 1 for answers that differ; "the same" alone is said only of everything."""
    for name, change in (("a", {}), ("b", {"response_message": OTHERWISE["response_message"]})):
        (tmp_path / f"{name}.jsonl").write_bytes(orjson.dumps(PLAIN | change))
    code, out, err = invoke("diff", "a.jsonl", "b.jsonl", cwd=tmp_path)
    assert code == 1 and "they diverge at call 0, in its message, message part 0" in out and "I gave up." in out, err
    code, out, err = invoke("diff", "a.jsonl", "a.jsonl", cwd=tmp_path)
    assert code == 0 and out.splitlines()[-1] == "no difference in what was compared", err
