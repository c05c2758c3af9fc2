"""The registry of agents: the agents that can run, and specs of your own."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from penstock.client.transport.cluster import Cluster
from penstock.client.transport.rpc import Service
from penstock.client.wire import chat
from penstock.client.wire.agents import load_spec
from penstock.driver.v1 import agent_pb2, agent_service_pb2_grpc
from penstock.driver.v1 import agent_service_pb2 as pb
from penstock.values import reader


@dataclass(frozen=True, slots=True)
class AgentOptionInfo:
    """An option that a rollout may set; `type` is string, integer, number or boolean."""

    name: str
    type: str
    description: str


@dataclass(frozen=True, slots=True)
class Agent:
    """A registered agent. `spec` is the whole description, a proto."""

    name: str
    description: str
    version: str
    spec_sha256: str
    built_in: bool
    needs_root: bool
    dialects: tuple[str, ...]
    options: tuple[AgentOptionInfo, ...]
    register_time: datetime | None
    spec: agent_pb2.AgentSpec
    namespace: str = ""
    """Empty for a built-in one, which every namespace has."""

    @property
    def can_skip_permissions(self) -> bool:
        """Whether its permission prompts can be switched off: `AgentChoice.skip_permissions`."""
        return bool(self.spec.skip_permissions_argv or self.spec.skip_permissions_env)


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """A finding of `check`; `outcome` is progress, ok, warning (it works but could be better) or failed."""

    step: str
    outcome: str
    message: str


class AgentsClient:
    """`ps.agents`."""

    def __init__(self, service: Service, cluster: Cluster) -> None:
        self._service = service
        self._cluster = cluster
        self._stub = agent_service_pb2_grpc.AgentServiceStub(service.channel)

    async def list(self) -> AsyncGenerator[Agent, None]:
        """Yields all agents, sorted by name."""
        request = pb.ListAgentsRequest()
        async for page in self._service.pages(self._stub.ListAgents, request):
            for item in page.agents:
                yield _agent(item)

    async def get(self, name: str, *, spec_sha256: str = "") -> Agent:
        """Returns one agent; an older version of it by its digest. Raises NotFound `AGENT_UNKNOWN`."""
        request = pb.GetAgentRequest(name=name, spec_sha256=spec_sha256)
        answer = await self._service.call(self._stub.GetAgent, request, repeatable=True)
        return _agent(answer.agent)

    async def register(self, spec: agent_pb2.AgentSpec | str | Path) -> Agent:
        """Adds an agent, or a new version of one of your own, at every driver.

        Args:
            spec: a spec, or the path of its YAML file.

        Raises:
            InvalidArgument: the file or the spec is invalid; `violations` name the fields.
            AlreadyExists: `AGENT_BUILT_IN`.
            Unavailable: a driver is away, which the message names; repeat it when that one is back.
        """
        message = spec if isinstance(spec, agent_pb2.AgentSpec) else load_spec(Path(spec))
        request = pb.RegisterAgentRequest(spec=message)
        answers = await asyncio.gather(
            *(
                service.call(
                    agent_service_pb2_grpc.AgentServiceStub(service.channel).RegisterAgent, request, repeatable=True
                )
                for service in await self._everywhere()
            )
        )
        return _agent(answers[0].agent)

    async def delete(self, name: str) -> None:
        """Removes an agent of your own, at every driver. Idempotent."""
        request = pb.DeleteAgentRequest(name=name)
        await asyncio.gather(
            *(
                service.call(
                    agent_service_pb2_grpc.AgentServiceStub(service.channel).DeleteAgent, request, repeatable=True
                )
                for service in await self._everywhere()
            )
        )

    async def _everywhere(self) -> Sequence[Service]:
        return [member.service for member in await self._cluster.members("driver")]

    async def check(
        self, agent: str | agent_pb2.AgentSpec | Path, *, backend: str = "", spec_only: bool = False
    ) -> AsyncGenerator[CheckFinding, None]:
        """Checks an agent: reads its spec, installs it, runs its check command in a sandbox; yields findings meanwhile.

        Args:
            agent: a registered agent's name; or a spec or the path of its file, which need not be registered.
            backend: of the sandbox; empty = the operator's default.
            spec_only: install nothing.

        Raises:
            NotFound: `AGENT_UNKNOWN`.
            InvalidArgument: `AGENT_FILE`: the file is invalid.
        """
        request = pb.CheckAgentRequest(backend=backend, spec_only=spec_only)
        if isinstance(agent, str):
            request.name = agent
        else:
            request.spec.CopyFrom(load_spec(agent) if isinstance(agent, Path) else agent)
        async with aclosing(self._service.stream(self._stub.CheckAgent, request)) as findings:
            async for item in findings:
                outcome = chat.word(pb.CheckAgentResponse.Outcome, item.outcome, "OUTCOME_")
                yield CheckFinding(item.step, outcome, item.message)


reader(
    AgentOptionInfo,
    agent_pb2.AgentOption,
    left_out=("choices", "default_value", "minimum", "maximum"),
)
_agent: Final = reader(
    Agent,
    pb.Agent,
    renamed={name: f"spec.{name}" for name in ("name", "description", "version", "needs_root", "dialects", "options")},
)
