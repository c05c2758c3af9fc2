"""How the gate stands, as a message."""

from __future__ import annotations

from typing import Final

from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock_chassis import times
from penstock_interception.rpc import convert
from penstock_interception.standing import SessionStanding, Standing

MOST_SESSIONS: Final = 256
DEFAULT_INTERVAL_S: Final = 1.0


def interval_from(request: pb.WatchGateRequest) -> float:
    """Seconds between two messages. Raises InvalidArgument."""
    interval = times.seconds(request.interval) if request.HasField("interval") else DEFAULT_INTERVAL_S
    if not 0.5 <= interval <= 60.0:
        raise convert.invalid("interval", "500 ms to 1 min")
    return interval


def standing_to(standing: Standing, now: float) -> pb.WatchGateResponse:
    """`now` in seconds since 1970."""
    message = pb.WatchGateResponse(
        open_rollouts=standing.open_rollouts,
        queued_calls=standing.queued,
        paused_calls=standing.paused,
        leased_calls=standing.leased,
        dispatched_calls=standing.dispatched,
        sessions=[_session_to(one) for one in standing.sessions[:MOST_SESSIONS]],
        session_count=len(standing.sessions),
    )
    if standing.oldest_received is not None:
        message.oldest_wait.CopyFrom(times.duration(max(0.0, now - standing.oldest_received)))
    return message


def _session_to(one: SessionStanding) -> pb.GateSession:
    session, lane = one.session, one.session.lane
    return pb.GateSession(
        identity=session.identity,
        run_id=lane.selector.run_id or "",
        group_id=lane.selector.group_id or "",
        rollouts=one.rollouts,
        credit_calls=session.credit.calls,
        credit_bytes=session.credit.bytes,
        held_calls=len(session.held),
        held_bytes=session.held_bytes,
        queued_calls=one.queued,
        lost=session.lost,
        paused=session.id in lane.paused_by,
        policy_version=lane.newest_version,
    )
