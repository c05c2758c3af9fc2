"""Which captures a gate discards that no driver has stored, for any that it keeps and any limits."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock_interception.domain.calls import RolloutState, Totals
from penstock_interception.domain.kept_captures import MOST_RECORDS, CaptureLimits, Discarded, KeptCaptures, Why
from penstock_interception.domain.state import Rollout
from penstock_interception.testing import SPEC

NOW, RETENTION_S = 1000.0, 100.0
LOST = {"", "lost"}


def kept(number: int, closed: float, driver_id: str, calls: int) -> Rollout:
    spec = replace(SPEC, rollout_id=f"r{number}", driver_id=driver_id, keep_capture=True)
    return Rollout(spec, closed, state=RolloutState.CLOSED, closed=closed, totals=Totals(calls=calls))


ROLLOUTS = st.lists(
    st.tuples(st.floats(0, NOW), st.sampled_from(["", "lost", "here"]), st.integers(0, 4)), max_size=12
).map(lambda items: [kept(number, *item) for number, item in enumerate(items)])
LIMITS = st.builds(
    CaptureLimits, count=st.integers(1, 12), size_bytes=st.integers(1, 12 << 12), age_s=st.floats(0, NOW)
)


@given(ROLLOUTS, LIMITS)
def test_what_is_discarded_is_as_little_as_the_limits_let(rollouts: list[Rollout], limits: CaptureLimits) -> None:
    """Nothing within the retention; for room nothing of a driver that is there, and the oldest first."""
    captures = KeptCaptures()
    for rollout in rollouts:
        captures.add(rollout)
        captures.add(rollout)  # counted once
    found = captures.beyond(limits, NOW, RETENTION_S, LOST.__contains__)
    by_id = {rollout.id: rollout for rollout in rollouts}
    assert [one.closed for one in found] == sorted(one.closed for one in found)
    for one in found:
        assert NOW - one.closed >= RETENTION_S
        assert one.driver_id in LOST or one.why is Why.AGE
        assert (one.why is Why.AGE) == (NOW - one.closed >= limits.age_s)
    for one in found:
        captures.remove(by_id[one.rollout_id])
    left = list(captures)
    assert {rollout.id for rollout in left} == by_id.keys() - {one.rollout_id for one in found}
    old = [rollout for rollout in left if NOW - (rollout.closed or 0.0) >= RETENTION_S]
    assert not [rollout for rollout in old if NOW - (rollout.closed or 0.0) >= limits.age_s]
    if captures.is_full(limits):
        assert all(rollout.spec.driver_id not in LOST for rollout in old), "they make room for others"
    if room := [one for one in found if one.why is not Why.AGE]:
        captures.add(by_id[room[-1].rollout_id])
        assert captures.is_full(limits), "the last one was needed"
    for rollout in rollouts:
        captures.remove(rollout)
    assert (len(captures), captures.size_bytes) == (0, 0)


def test_only_the_newest_losses_are_remembered() -> None:
    captures = KeptCaptures()
    captures.record(
        Discarded(f"r{number}", "default", None, "d", 0.0, float(number), 1, Why.AGE)
        for number in range(MOST_RECORDS + 2)
    )
    assert captures.discarded("r1") is None and captures.discarded("r2") is not None
    assert [one.rollout_id for one in captures.discarded_since(MOST_RECORDS)] == [
        f"r{MOST_RECORDS + 1}",
        f"r{MOST_RECORDS}",
    ]
