"""`WatchGate`: its interval, and the gate's snapshot as its message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock_chassis import times
from penstock_chassis.validation import invalid_field
from penstock_interception.status.gate_snapshot import GateSnapshot, SessionSnapshot

MOST_SESSIONS: Final = 256
DEFAULT_INTERVAL_S: Final = 1.0


def interval_from(request: pb.WatchGateRequest) -> float:
    """Returns the seconds between two messages. Raises InvalidArgument."""
    interval = times.seconds(request.interval) if request.HasField("interval") else DEFAULT_INTERVAL_S
    if not 0.5 <= interval <= 60.0:
        raise invalid_field("interval", "500 ms to 1 min")
    return interval


def snapshot_to(snapshot: GateSnapshot, now: float, unreachable_inference: Iterable[str] = ()) -> pb.WatchGateResponse:
    """`now` in seconds since 1970; `unreachable_inference` are the names of the sources that do not answer."""
    message = pb.WatchGateResponse(
        open_rollouts=snapshot.open_rollouts,
        queued_calls=snapshot.queued,
        paused_calls=snapshot.paused,
        leased_calls=snapshot.leased,
        dispatched_calls=snapshot.dispatched,
        sessions=[_session_to(one) for one in snapshot.sessions[:MOST_SESSIONS]],
        session_count=len(snapshot.sessions),
        unreachable_inference=unreachable_inference,
    )
    if snapshot.oldest_received is not None:
        message.oldest_wait.CopyFrom(times.duration(max(0.0, now - snapshot.oldest_received)))
    return message


def _session_to(one: SessionSnapshot) -> pb.GateSession:
    session, queue = one.session, one.session.queue
    return pb.GateSession(
        identity=session.identity,
        run_id=queue.selector.run_id or "",
        group_id=queue.selector.group_id or "",
        namespace=session.namespace or "",
        rollouts=one.rollouts,
        credit_calls=session.credit.calls,
        credit_bytes=session.credit.bytes,
        held_calls=len(session.held),
        held_bytes=session.held_bytes,
        queued_calls=one.queued,
        lost=session.lost,
        paused=session.id in queue.paused_by,
        policy_version=queue.newest_version,
    )
