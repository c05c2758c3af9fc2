"""What the driver serves: its servicers, ready to register. Each translates and holds no logic."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.driver.v1 import agent_service_pb2_grpc, rollout_service_pb2_grpc, terminal_service_pb2_grpc
from penstock_chassis.server import Registration
from penstock_driver.fleet import Fleet
from penstock_driver.ports import Sandboxes
from penstock_driver.preflight import Preflight
from penstock_driver.registry import AgentRegistry
from penstock_driver.rows import Rows
from penstock_driver.rpc.agent_service import AgentServicer
from penstock_driver.rpc.rollout_service import Captures, RolloutServicer
from penstock_driver.rpc.terminal_service import TerminalServicer
from penstock_driver.terminals.fleet import Terminals


def registrations(
    fleet: Fleet,
    rows: Rows,
    terminals: Terminals,
    registry: AgentRegistry,
    preflight: Preflight,
    sandboxes: Sandboxes,
    gate: Captures,
) -> Sequence[Registration]:
    """The servicers with the generated functions that add them to a server."""
    return [
        (AgentServicer(registry, sandboxes), agent_service_pb2_grpc.add_AgentServiceServicer_to_server),
        (
            RolloutServicer(fleet, rows, registry, preflight, gate),
            rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server,
        ),
        (TerminalServicer(terminals), terminal_service_pb2_grpc.add_TerminalServiceServicer_to_server),
    ]
