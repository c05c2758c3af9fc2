"""Why the calls of a rollout failed, counted: bounded, and the same after a restart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_interception.domain.calls import MOST_FAILURE_KINDS, CallState, Totals
from penstock_interception.domain.completions import Failure
from penstock_interception.domain.state import Call
from penstock_interception.domain.totals import count_ended
from penstock_interception.store import reading, serde


def failed(reason: str, retriable: bool) -> Call:
    call: Any = SimpleNamespace(
        state=CallState.FAILED, failure=Failure(reason, retriable=retriable), completion=None, index=0
    )
    return cast(Call, call)


def ended(index: int, received: float, ended_at: float, state: CallState) -> Call:
    failure = Failure("UPSTREAM_UNREACHABLE") if state is CallState.FAILED else None
    request = SimpleNamespace(body_bytes=1)
    call: Any = SimpleNamespace(
        index=index,
        received=received,
        ended_at=ended_at,
        state=state,
        failure=failure,
        completion=None,
        request=request,
    )
    return cast(Call, call)


ENDS = st.sampled_from([CallState.DELIVERED, CallState.FAILED, CallState.EXPIRED, CallState.CANCELLED, None])


@pytest.mark.requirement("R43", "R72", "R97")
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), ENDS), max_size=24))
def test_losses_count_from_the_last_answer_on_after_a_restart_too(given_calls: list[Any]) -> None:
    """Calls come 0 to 3 ticks after each other, take 1 to 12, and end in any way or not at all."""
    calls: list[Call] = []
    now = 0
    for index, (pause, took, state) in enumerate(given_calls):
        now += pause
        # No two moments are the same.
        at, end = now + index / 100, now + took + 0.5 + index / 100
        calls.append(ended(index, at, end, state or CallState.QUEUED))
        calls[-1].state = cast(Any, state or SimpleNamespace(terminal=False))
    live = Totals()
    moments = [(call.received, call, False) for call in calls]
    moments += [(cast(float, call.ended_at), call, True) for call in calls if call.state.terminal]
    for _, call, ends in sorted(moments, key=lambda moment: moment[0]):
        if ends:
            count_ended(call, live)
        else:
            live.calls += 1
            live.request_bytes += 1
    answers = [cast(float, call.ended_at) for call in calls if call.state is CallState.DELIVERED]
    since = [call.state for call in calls if call.received > max(answers, default=-1.0)]
    assert live.expired_since_answer == since.count(CallState.EXPIRED)
    assert sum(one.calls_since_answer for one in live.failures) == since.count(CallState.FAILED)
    assert reading.count(calls) == live


@pytest.mark.requirement("R72")
def test_flood_that_a_working_source_cannot_answer_loses_nothing() -> None:
    """Whatever expires has waited while others were answered."""
    totals = Totals(calls=64)
    for index in range(10):
        count_ended(ended(index, 0.0, float(index), CallState.DELIVERED), totals)
    for index in range(10, 64):
        count_ended(ended(index, 0.0, 60.0, CallState.EXPIRED), totals)
    assert (totals.expired, totals.expired_since_answer) == (54, 0)


@pytest.mark.requirement("R59", "R96")
def test_reasons_are_separate_up_to_a_bound() -> None:
    """A trainer makes up its own reasons, for as many calls as it likes."""
    totals = Totals()
    for number in range(100):
        for retriable in (False, True):
            count_ended(failed(f"R{number}", retriable), totals)
    count_ended(failed("R0", False), totals)
    assert len(totals.failures) == MOST_FAILURE_KINDS + 2
    assert sum(one.calls for one in totals.failures) == totals.failed == 201
    assert [one.calls for one in totals.failures if (one.reason, one.retriable) == ("R0", False)] == [2]


@pytest.mark.requirement("R97")
def test_they_are_read_back_from_the_journal_and_were_not_there_before() -> None:
    """A rollout that was closed by an earlier release has none."""
    totals = Totals()
    count_ended(failed("UPSTREAM_REFUSED", False), totals)
    stored = serde.dump_totals(totals)
    assert serde.load_totals(stored) == totals
    earlier = {name: value for name, value in orjson.loads(stored).items() if name != "failures"}
    assert serde.load_totals(orjson.dumps(earlier)).failures == []
