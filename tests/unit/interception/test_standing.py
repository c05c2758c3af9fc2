"""How the gate stands, for those who watch it: counts of what is open, and what each session can take."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock_chassis.errors import InvalidArgument
from penstock_interception.calls import Mode, Opening, Rollout, RolloutState
from penstock_interception.rpc.standing import interval_from, standing_to
from penstock_interception.sessions import Credits, Lane, Selector, Session, View
from penstock_interception.standing import standing


def rollout(rollout_id: str, state: RolloutState = RolloutState.OPEN) -> Rollout:
    """One without calls."""
    opening = Opening(request_id=rollout_id, rollout_id=rollout_id, mode=Mode.INTERCEPTION_GATE, run_id="run")
    return Rollout(opening, 1.0, state=state)


def session(name: str, lane: Lane, calls: int) -> Session:
    """A trainer's, with credit for some calls."""
    return Session(name, lane, name, Credits(calls, 1 << 20), View())


def test_closed_rollouts_count_for_nothing_and_those_of_a_lane_are_told_with_each_session() -> None:
    """R30: an operator sees what is open, and with whom it could be."""
    lane, other = Lane(Selector(run_id="run")), Lane(Selector(group_id="g"))
    opened = [rollout("a"), rollout("b", RolloutState.EXHAUSTED), rollout("c", RolloutState.CLOSED)]
    lane.rollouts = {one.id: one for one in opened[:2]}
    lane.newest_version, lost = 7, session("lost", other, 4)
    lost.lost = True
    found = standing(opened, [session("b-trainer", lane, 3), session("a-trainer", lane, 2), lost])
    message = standing_to(found, now=100.0)
    assert (message.open_rollouts, message.queued_calls, message.leased_calls, message.dispatched_calls) == (2, 0, 0, 0)
    assert not message.HasField("oldest_wait")
    told = [
        (one.identity, one.run_id, one.group_id, one.rollouts, one.credit_calls, one.lost) for one in message.sessions
    ]
    assert told == [
        ("a-trainer", "run", "", 2, 2, False),
        ("b-trainer", "run", "", 2, 3, False),
        ("lost", "", "g", 0, 4, True),
    ]
    assert message.sessions[0].policy_version == 7
    assert not message.sessions[2].HasField("policy_version")
    assert message.session_count == 3


def test_no_session_id_is_told_which_could_be_resumed_by_another() -> None:
    """R8: whoever only looks learns nothing by which he could take a trainer's calls."""
    message = standing_to(standing([], [session("secret-session-id", Lane(Selector()), 1)]), now=0.0)
    message.sessions[0].identity = ""
    assert b"secret-session-id" not in message.SerializeToString()


@pytest.mark.parametrize(
    ("asked", "seconds"), [(None, 1.0), (Duration(nanos=500_000_000), 0.5), (Duration(seconds=60), 60.0)]
)
def test_the_interval_is_the_watchers(asked: Duration | None, seconds: float) -> None:
    """A page asks as often as it draws."""
    assert interval_from(pb.WatchGateRequest(interval=asked)) == seconds


@pytest.mark.parametrize("asked", [Duration(), Duration(nanos=499_000_000), Duration(seconds=61), Duration(seconds=-1)])
def test_an_interval_that_costs_too_much_or_says_nothing_is_refused_by_field(asked: Duration) -> None:
    """R80: bad input names its field."""
    with pytest.raises(InvalidArgument) as caught:
        interval_from(pb.WatchGateRequest(interval=asked))
    assert [item.field for item in caught.value.violations] == ["interval"]
