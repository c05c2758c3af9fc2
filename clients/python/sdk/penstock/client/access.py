"""Whether the services take the token: asked before a program that serves others begins to, and not by their calls."""

from typing import Final

from penstock.client.endpoints import Endpoints
from penstock.client.errors import DeadlineExceeded, InvalidArgument, Unavailable
from penstock.client.rpc import Service
from penstock.driver.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
)

_PATIENCE_S: Final = 10.0


async def check_access(endpoints: Endpoints, *, starts_rollouts: bool) -> bool:
    """Asks the driver once, without an effect.

    Args:
        endpoints: of the services.
        starts_rollouts: whether the token must be good for that; else for reading.

    Returns:
        Whether the driver answered: False = it is not up, which says nothing of the token.

    Raises:
        Unauthenticated: there is no token, or none of theirs; the message says where it was found.
        PermissionDenied: it may not do that.
    """
    service = Service("driver", endpoints)
    try:
        if starts_rollouts:
            # Whoever may order is told what the empty order lacks; nobody else gets that far (R5).
            rollouts = rollout_service_pb2_grpc.RolloutServiceStub(service.channel)
            order = rollout_service_pb2.CreateRolloutRequest()
            await service.call(rollouts.CreateRollout, order, timeout=_PATIENCE_S)
        else:
            agents = agent_service_pb2_grpc.AgentServiceStub(service.channel)
            await service.call(agents.ListAgents, agent_service_pb2.ListAgentsRequest(page_size=1), timeout=_PATIENCE_S)
    except InvalidArgument:
        return True
    except (Unavailable, DeadlineExceeded):
        return False
    finally:
        await service.close()
    return True
