"""What a service says of the members of which it has a list: to clients, to operators, in its metrics."""

from __future__ import annotations

from typing import Final

from penstock.ops.v1 import operations_service_pb2 as pb
from penstock_chassis.membership.peers import Host, Peer, State
from penstock_chassis.operations import Trouble
from penstock_chassis.telemetry.metrics import gauge

STATES: Final = {
    State.NEW: pb.MEMBER_STATE_UNSPECIFIED,
    State.SERVING: pb.MEMBER_STATE_UP,
    State.DRAINING: pb.MEMBER_STATE_DRAINING,
    State.LOST: pb.MEMBER_STATE_LOST,
}
"""As GetServerInfo has them."""
PEER_UP: Final = gauge("penstock_peer_up", "Members of the other services that answer", "kind")
PEER_LOST: Final = gauge("penstock_peer_lost", "Members of the other services that do not answer", "kind")


def member_lost(kind: str, peer: Peer) -> Trouble:
    """The diagnostic of a lost member; `kind` is its kind of service."""
    where = f"the {kind} service {peer.name} at {peer.member.address}"
    if peer.host is Host.SILENT:
        return Trouble(
            "MEMBER_LOST",
            f"{where} does not answer, and its host is silent",
            "check that the host runs and can be reached; if it is gone for good, take it off the members",
            subjects=(peer.name,),
        )
    return Trouble(
        "MEMBER_LOST",
        f"{where} does not answer or is not used, although its host answers",
        "start it there; if it runs, the log of the service that lists it says why it is not used: its certificate, "
        "token or name",
        subjects=(peer.name,),
    )
