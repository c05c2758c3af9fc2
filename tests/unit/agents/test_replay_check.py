"""What two prompts that differ look like, and what a replay that went wrong says."""

from __future__ import annotations

import pytest

from penstock.agents.replay_check import Cause, Divergence, cause_in_finding, cause_of

BEFORE, AFTER = "[user]\nHello, this is the text before.\n", "\nand this is what follows it in both.\n"


@pytest.mark.requirement("R128")
@pytest.mark.parametrize(
    ("recorded", "new", "cause"),
    [
        ("Today is 2026-11-28.", "Today is 2026-11-29.", Cause.DATE),
        ("Now it is 2026-11-28 01:55:52.937617917", "Now it is 2026-11-28 01:55:52.824339429", Cause.DATE),
        ("2026-11-28T01:55:52.937Z", "2026-11-28T01:55:52.938Z", Cause.DATE),
        ("Sat Nov 28 16:29:01 UTC", "Sat Nov 28 16:29:07 UTC", Cause.DATE),
        ("Ran 1 test in 0.012s", "Ran 1 test in 0.015s", Cause.DURATION),
        ("Wall time: 0.0522 seconds", "Wall time: 0.0611 seconds", Cause.DURATION),
        ("call call_0a1b2c3d4e bash", "call call_9f8e7d6c5b bash", Cause.TOOL_CALL_ID),
        ("result known-1", "result known-2", Cause.TOOL_CALL_ID),
        ("key=pst_abcdefgh12345", "key=pst_zyxwvuts98765", Cause.AGENT_KEY),
        ("listening on 127.0.0.1:41234", "listening on 127.0.0.1:51234", Cause.PORT),
        ("pid 1234", "pid 1301", Cause.PROCESS),
        ("/tmp/one/a.txt", "/tmp/two/a.txt", Cause.PATH),
        ("commit 3f786850e387", "commit 89e6c98d9288", Cause.RANDOM_ID),
        ("score 17", "score 18", Cause.NUMBER),
        ("alpha\nbeta\ngamma", "beta\ngamma\nalpha", Cause.ORDER),
        ("$ make\ncompiled\n", "$ make\n", Cause.TIMING),
        ("yes", "no", Cause.UNKNOWN),
    ],
)
def test_a_difference_is_named_by_what_it_looks_like(recorded: str, new: str, cause: Cause) -> None:
    left, right = BEFORE + recorded + AFTER, BEFORE + new + AFTER
    at = next(index for index, (one, other) in enumerate(zip(left, right, strict=False)) if one != other)
    assert cause_of(left, right, at, {"known-1", "known-2"}) is cause
    assert cause_of(right, left, at, {"known-1", "known-2"}) is cause


FINDING = "Call 1 differs from the recorded call c1 from token 9 of its prompt on: {!r} was recorded, {!r} is new."
"""As the gate words it."""


@pytest.mark.requirement("R128")
@pytest.mark.parametrize(
    ("recorded", "new", "cause"),
    [
        ("on 2026-11-28", "on 2026-11-29", Cause.DATE),
        ("id 3f786850e387\n", "id 89e6c98d9288\n", Cause.RANDOM_ID),
        ("it's /tmp/one/a", "it's /tmp/two/a", Cause.PATH),
        ("'a' was recorded, \"b\" is new. \\ pid 12", "'a' was recorded, \"b\" is new. \\ pid 13", Cause.PROCESS),
        ("b.txt\na.txt", "a.txt\nb.txt", Cause.ORDER),
        ("yes", "no", None),
    ],
)
def test_the_cause_is_read_from_the_gates_finding(recorded: str, new: str, cause: Cause | None) -> None:
    assert cause_in_finding(FINDING.format(recorded, new)) is cause


@pytest.mark.parametrize(
    "message", ["", "Replayed: 1 of 3.", "'a", "'\\x' was recorded, 'b' is new.", "'\n' was recorded, 'b' is new."]
)
def test_another_message_has_no_cause(message: str) -> None:
    """A file may come from anybody."""
    assert cause_in_finding(message) is None


def test_a_divergence_names_its_call_its_token_and_both_texts() -> None:
    told = str(Divergence(7, 212, "on Saturday", "on Sunday", Cause.DATE))
    assert told == "parts at call 7, token 212: 'on Saturday' was recorded, 'on Sunday' is new: probably a date or time"
    assert str(Divergence(7, None, "a", "b", Cause.UNKNOWN)).startswith("parts at call 7: ")
