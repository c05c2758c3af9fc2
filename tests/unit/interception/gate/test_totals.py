"""Why the calls of a rollout failed, counted: bounded, and the same after a restart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from penstock_interception.domain.calls import MOST_FAILURE_KINDS, CallState, Totals
from penstock_interception.domain.completions import Failure
from penstock_interception.domain.state import Call
from penstock_interception.domain.totals import count_ended
from penstock_interception.store import serde


def failed(reason: str, retriable: bool) -> Call:
    call: Any = SimpleNamespace(state=CallState.FAILED, failure=Failure(reason, retriable=retriable), completion=None)
    return cast(Call, call)


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
