"""The methods that the page may call: reads, and starting, branching and cancelling rollouts. All others are refused.

The services authorize by the token's role as well: this list only keeps a compromised page from methods that no page
needs, such as commands in sandboxes, files, agent keys of rollouts, weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.client.transport.endpoints import ServiceName


@dataclass(frozen=True, slots=True)
class Method:
    """The service of a method, and whether its answer is a stream."""

    service: ServiceName | None
    """None = every service has it; the request's header `SERVICE_HEADER` names the one to call."""
    streaming: bool = False


def _methods(name: ServiceName, service: str, unary: str, streaming: str = "") -> dict[str, Method]:
    prefix = f"penstock.{name}.v1.{service}/"
    found = {prefix + method: Method(name) for method in unary.split()}
    return found | {prefix + method: Method(name, streaming=True) for method in streaming.split()}


SERVICE_HEADER: Final = "penstock-service"
MEMBER_HEADER: Final = "penstock-member"
"""The name of one of several services of a kind."""

ALLOWED: Final[Mapping[str, Method]] = {
    **_methods(
        "driver",
        "RolloutService",
        "CreateRollout GetRollout ListRollouts WaitRollout CancelRollout BranchRollout"
        " CreateGroup GetGroup ListGroups WaitGroup CancelGroup",
        "WatchRollout WatchRollouts WatchGroup GetTrajectory",
    ),
    **_methods("driver", "RunService", "", "ListMetrics"),
    "penstock.ops.v1.OperationsService/GetServerInfo": Method(None),
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
