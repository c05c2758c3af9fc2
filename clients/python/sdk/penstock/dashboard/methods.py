"""What the page may call: reads, and starting and cancelling rollouts. Everything else is closed here, whoever asks.

The services decide again by the role of the token: this list only keeps a page that was taken over from what no page
needs, such as commands in sandboxes, files, tokens of rollouts, weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.client.endpoints import ServiceName


@dataclass(frozen=True, slots=True)
class Method:
    """Who serves it, and whether its answer is a stream."""

    service: ServiceName | None
    """None = every service does; the request's header `SERVICE_HEADER` names the one that is asked."""
    streaming: bool = False


def _methods(name: ServiceName, service: str, unary: str, streaming: str = "") -> dict[str, Method]:
    prefix = f"penstock.{name}.v1.{service}/"
    found = {prefix + method: Method(name) for method in unary.split()}
    return found | {prefix + method: Method(name, streaming=True) for method in streaming.split()}


SERVICE_HEADER: Final = "penstock-service"

ALLOWED: Final[Mapping[str, Method]] = {
    **_methods(
        "driver",
        "RolloutService",
        "CreateRollout GetRollout ListRollouts WaitRollout CancelRollout"
        " CreateGroup GetGroup ListGroups WaitGroup CancelGroup",
        "WatchRollout WatchRollouts WatchGroup GetTrajectory",
    ),
    "penstock.ops.v1.OperationsService/GetStatus": Method(None),
    **_methods("driver", "AgentService", "ListAgents GetAgent"),
    **_methods(
        "interception", "RolloutGateService", "CheckSource GetRollout ListRollouts", "GetCapture WatchCalls WatchGate"
    ),
    **_methods("interception", "InterceptService", "ListCalls GetCall"),
    **_methods(
        "sandbox",
        "SandboxService",
        "GetSandbox ListSandboxes ListBackends ListSnapshots GetStats",
        "WatchSandbox WatchSandboxes DiffSandbox",
    ),
    **_methods("inference", "InferenceService", "GetInfo ListAdapters", "WatchStats GetTokenizer"),
}
"""By `package.Service/Method`."""
