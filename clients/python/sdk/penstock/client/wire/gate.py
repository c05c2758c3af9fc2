"""Converts the gate's reports to values."""

from typing import Final

from penstock.client.types import gate
from penstock.client.wire import results
from penstock.client.wire.chat import token_ids
from penstock.interception.v1 import intercept_service_pb2, interception_pb2
from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock.values import reader, writer

agent_key: Final = reader(gate.AgentKey, pb.RolloutToken, renamed={"key_id": "token_id"})
"""Converts an agent key's description."""

rollout: Final = reader(gate.GateRollout, pb.GateRollout, renamed={"keys": "tokens"})
"""Converts a rollout at the gate."""

issued_key: Final = reader(gate.IssuedKey, pb.IssueTokenResponse)
"""Converts a new agent key."""

source_check: Final = reader(gate.SourceCheck, pb.CheckSourceResponse)
"""Converts the answer about a model source."""

hints: Final = writer(gate.CallHints, interception_pb2.CallHints)
"""Converts hints about an agent's calls."""

load: Final = reader(gate.GateLoad, pb.WatchGateResponse)
"""Converts the gate's load."""

_closed: Final = reader(gate.RolloutClosed, pb.WatchCallsResponse.RolloutClosed)


def call(message: intercept_service_pb2.GetCallResponse) -> gate.RecordedCall:
    """Converts a call with its prompt."""
    return gate.RecordedCall(results.call(message.call), token_ids(message.prompt_token_ids))


def event(message: pb.WatchCallsResponse) -> gate.GateEvent | None:
    """Converts an event; None for a heartbeat, and for a kind that this client does not know."""
    match message.WhichOneof("event"):
        case "started":
            return gate.WatchStarted(message.started.sequence)
        case "changed":
            return gate.CallChanged(message.changed.sequence, results.call(message.changed.call))
        case "closed":
            return _closed(message.closed)
        case _:
            return None
