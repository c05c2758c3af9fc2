"""The audit log: one line for an event, few for many, and nothing in it that a stranger wrote."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from penstock_interception.domain.audit import ALL_BURST, BURST, INTERVAL_S, MAX_KEYS, Audit, Event


class Time:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.requirement("R13", "R26")
def test_a_flood_of_one_kind_is_a_few_lines_and_a_count() -> None:
    """The first events are told one by one, the rest as a number on the next line."""
    time = Time()
    audit = Audit(time)
    with capture_logs() as lines:
        for _ in range(1000):
            audit.record(Event.CREDENTIAL_REFUSED, rollout_id="r", peer="127.0.0.1", reason="expired")
        assert len(lines) == BURST
        time.now = INTERVAL_S
        audit.record(Event.CREDENTIAL_REFUSED, rollout_id="r", peer="127.0.0.1", reason="expired")
    expected = {"audit": "credential_refused", "rollout_id": "r", "peer": "127.0.0.1", "reason": "expired"}
    assert lines[0] == {"event": "audit", "log_level": "warning", **expected}
    assert lines[-1]["left_out"] == 1000 - BURST


@pytest.mark.requirement("R4")
def test_rollouts_flood_does_not_hide_other_rollouts_events() -> None:
    """Kinds, rollouts and peers are counted apart."""
    audit = Audit(Time())
    with capture_logs() as lines:
        for _ in range(100):
            audit.record(Event.CREDENTIAL_REFUSED, rollout_id="loud", peer="a")
        audit.record(Event.CREDENTIAL_REFUSED, rollout_id="quiet", peer="a")
        audit.record(Event.BUDGET_EXHAUSTED, rollout_id="loud", peer="a", budget="max_calls")
    assert [line["rollout_id"] for line in lines[BURST:]] == ["quiet", "loud"]


@pytest.mark.requirement("R13", "R23")
def test_many_strangers_together_are_bounded_in_lines_and_in_memory() -> None:
    """Whoever makes up rollouts' names gets no more room with them."""
    audit = Audit(Time())
    with capture_logs() as lines:
        for number in range(3 * MAX_KEYS):
            audit.record(Event.CREDENTIAL_REFUSED, rollout_id=f"r{number}", peer="a")
    assert len(lines) == ALL_BURST
    assert len(audit._meters) == MAX_KEYS


@pytest.mark.requirement("R8")
@given(st.text(max_size=300))
def test_a_name_that_is_no_rollouts_is_not_repeated(text: str) -> None:
    """What a stranger sends cannot write into the log."""
    found: list[Any] = []
    with capture_logs() as lines:
        Audit(Time()).record(Event.ROUTE_UNKNOWN, rollout_id=text)
        found = list(lines)
    told = found[0].get("rollout_id", "")
    assert told in ("", "?") or (told == text and told.isascii() and told.isprintable() and len(told) <= 128)
