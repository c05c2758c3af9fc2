"""How the gate stands, for those who watch it: counts of what is open, and what each session can take."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock_chassis.errors import InvalidArgument
from penstock_interception.domain.calls import Mode, RolloutSpec, RolloutState
from penstock_interception.domain.state import Credits, Rollout, Selector, SelectorQueue, Session, View
from penstock_interception.rpc.watch_gate import interval_from, snapshot_to
from penstock_interception.status.gate_snapshot import take_snapshot


def rollout(rollout_id: str, state: RolloutState = RolloutState.OPEN) -> Rollout:
    """One without calls."""
    opening = RolloutSpec(request_id=rollout_id, rollout_id=rollout_id, mode=Mode.INTERCEPTION_GATE, run_id="run")
    return Rollout(opening, 1.0, state=state)


def session(name: str, queue: SelectorQueue, calls: int) -> Session:
    """A trainer's, with credit for some calls."""
    return Session(name, queue, name, Credits(calls, 1 << 20), View())


@pytest.mark.requirement("R30")
def test_closed_rollouts_do_not_count_and_queued_ones_are_listed_by_session() -> None:
    """An operator sees what is open, and with whom it could be."""
    queue, other = SelectorQueue(Selector(run_id="run")), SelectorQueue(Selector(group_id="g"))
    opened = [rollout("a"), rollout("b", RolloutState.EXHAUSTED), rollout("c", RolloutState.CLOSED)]
    queue.rollouts = {one.id: one for one in opened[:2]}
    queue.newest[""], lost = 7, session("lost", other, 4)
    lost.lost = True
    found = take_snapshot(opened, [session("b-trainer", queue, 3), session("a-trainer", queue, 2), lost])
    message = snapshot_to(found, now=100.0)
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


@pytest.mark.requirement("R8")
def test_snapshot_hides_resumable_session_ids() -> None:
    """Whoever only looks learns nothing by which he could take a trainer's calls."""
    message = snapshot_to(take_snapshot([], [session("secret-session-id", SelectorQueue(Selector()), 1)]), now=0.0)
    message.sessions[0].identity = ""
    assert b"secret-session-id" not in message.SerializeToString()


@pytest.mark.parametrize(
    ("asked", "seconds"), [(None, 1.0), (Duration(nanos=500_000_000), 0.5), (Duration(seconds=60), 60.0)]
)
def test_the_interval_is_the_watchers(asked: Duration | None, seconds: float) -> None:
    """A page asks as often as it draws."""
    assert interval_from(pb.WatchGateRequest(interval=asked)) == seconds


@pytest.mark.requirement("R80")
@pytest.mark.parametrize("asked", [Duration(), Duration(nanos=499_000_000), Duration(seconds=61), Duration(seconds=-1)])
def test_costly_or_empty_interval_is_refused_by_field(asked: Duration) -> None:
    """Bad input names its field."""
    with pytest.raises(InvalidArgument) as caught:
        interval_from(pb.WatchGateRequest(interval=asked))
    assert [item.field for item in caught.value.violations] == ["interval"]
