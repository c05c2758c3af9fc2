"""AgentService: the registry of agents over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from penstock.driver.v1 import agent_service_pb2, agent_service_pb2_grpc
from penstock_chassis import auth
from penstock_chassis.errors import InvalidArgument, PenstockError
from penstock_chassis.validation import foreign_page_token, invalid_field, page_size
from penstock_driver.agents.check import remarks
from penstock_driver.agents.launch import check_command
from penstock_driver.agents.registry import Agent, AgentRegistry
from penstock_driver.agents.specs import AgentSpec
from penstock_driver.domain.ports import Command, CommandReport, PreparedToolbox, Sandboxes, SandboxTerms, SnapshotSpec
from penstock_driver.environments.prepare import CHECK_TIMEOUT_S
from penstock_driver.wire.agents import agent_to_proto, spec_from_proto

_PROGRESS: Final = agent_service_pb2.CheckAgentResponse.OUTCOME_PROGRESS
_OK: Final = agent_service_pb2.CheckAgentResponse.OUTCOME_OK
_FAILED: Final = agent_service_pb2.CheckAgentResponse.OUTCOME_FAILED
_WARNING: Final = agent_service_pb2.CheckAgentResponse.OUTCOME_WARNING


class AgentServicer(agent_service_pb2_grpc.AgentServiceServicer):
    """See agent_service.proto."""

    def __init__(self, registry: AgentRegistry, sandboxes: Sandboxes) -> None:
        self._registry = registry
        self._sandboxes = sandboxes

    async def ListAgents(  # noqa: N802
        self, request: agent_service_pb2.ListAgentsRequest, context: Any
    ) -> agent_service_pb2.ListAgentsResponse:
        """By name, after the agent that the token names: others may have come and gone since the last page."""
        size, after = page_size(request.page_size), _parsed_token(request.page_token)
        agents = self._registry.agents(auth.caller().scope(request.all_namespaces))
        left = [agent for agent in agents if _position(agent) > after]
        return agent_service_pb2.ListAgentsResponse(
            agents=[agent_to_proto(agent) for agent in left[:size]],
            next_page_token=_token(_position(left[size - 1])) if len(left) > size else "",
        )

    async def GetAgent(  # noqa: N802
        self, request: agent_service_pb2.GetAgentRequest, context: Any
    ) -> agent_service_pb2.GetAgentResponse:
        """The newest version, or the requested one."""
        agent = self._registry.get(auth.caller().home, request.name, request.spec_sha256)
        return agent_service_pb2.GetAgentResponse(agent=agent_to_proto(agent))

    async def RegisterAgent(  # noqa: N802
        self, request: agent_service_pb2.RegisterAgentRequest, context: Any
    ) -> agent_service_pb2.RegisterAgentResponse:
        """Checks and stores the spec."""
        if not request.HasField("spec"):
            raise invalid_field("spec", "is required")
        agent = await self._registry.register(auth.caller().home, spec_from_proto(request.spec))
        return agent_service_pb2.RegisterAgentResponse(agent=agent_to_proto(agent))

    async def DeleteAgent(  # noqa: N802
        self, request: agent_service_pb2.DeleteAgentRequest, context: Any
    ) -> agent_service_pb2.DeleteAgentResponse:
        """Idempotent."""
        await self._registry.delete(auth.caller().home, request.name)
        return agent_service_pb2.DeleteAgentResponse()

    async def CheckAgent(  # noqa: N802
        self, request: agent_service_pb2.CheckAgentRequest, context: Any
    ) -> AsyncIterator[agent_service_pb2.CheckAgentResponse]:
        """Checks the spec, installs the agent and runs its check command in a new sandbox."""
        if request.name and request.HasField("spec"):
            raise invalid_field("spec", "give a name or a spec, not both")
        try:
            if request.HasField("spec"):
                spec = spec_from_proto(request.spec)
            else:
                spec = self._registry.get(auth.caller().home, request.name).spec
        except InvalidArgument as error:
            for violation in error.violations:
                yield _finding("spec", _FAILED, f"{violation.field}: {violation.description}")
            return
        for remark in remarks(spec):
            yield _finding("spec", _WARNING, f"{remark.where}: {remark.message}")
        yield _finding("spec", _OK, f"the spec is valid: version {spec.sha256}")
        if not request.spec_only:
            async for finding in self._try_out(spec, request.backend):
                yield finding

    async def _try_out(self, spec: AgentSpec, backend: str) -> AsyncIterator[agent_service_pb2.CheckAgentResponse]:
        terms, step = SandboxTerms(backend=backend), "install"
        try:
            yield _finding(step, _PROGRESS, f"installing {spec.name} {spec.version}")
            lines: asyncio.Queue[str | None] = asyncio.Queue()
            installing = asyncio.create_task(self._install(spec, backend, lines))
            try:
                while (line := await lines.get()) is not None:
                    yield _finding(step, _PROGRESS, line)
                toolbox = await installing
            finally:
                installing.cancel()
                await asyncio.wait([installing])
            yield _finding(step, _OK, f"installed at {toolbox.mount_path}")
            step = "start"
            base = await self._sandboxes.create(terms, CHECK_TIMEOUT_S, {})
            await self._sandboxes.delete(base.sandbox_id)
            argv = check_command(spec, home=base.home, workdir=base.workdir, toolbox=toolbox.mount_path)
            if not argv:
                yield _finding(step, _OK, "the agent has no check command")
                return
            command = Command(argv=argv, timeout_s=CHECK_TIMEOUT_S)
            wanted = SnapshotSpec(terms, (toolbox.toolbox_id,), (), (command,))
            output = "it answered before"
            async for event in self._sandboxes.prepare_snapshot(wanted):
                if isinstance(event, CommandReport):
                    result = event.result
                    output = (result.stdout or result.stderr)[:500].decode("utf-8", "replace").strip()
            yield _finding(step, _OK, output)
        except PenstockError as error:
            yield _finding(step, _FAILED, error.message)

    async def _install(self, spec: AgentSpec, backend: str, lines: asyncio.Queue[str | None]) -> PreparedToolbox:
        """Install the agent and put each line of output in `lines`, then None."""
        try:
            return await self._sandboxes.prepare_toolbox(spec.name, spec.toolbox, backend, lines.put_nowait)
        finally:
            lines.put_nowait(None)


def _position(agent: Agent) -> tuple[str, str]:
    """What the registry's list is ordered by: no two agents of it have the same."""
    return agent.spec.name, agent.namespace


def _token(position: tuple[str, str]) -> str:
    return "/".join(position).encode().hex()


def _parsed_token(token: str) -> tuple[str, str]:
    """The position in a page's token; that before all agents for none. InvalidArgument for a token of another list."""
    if not token:
        return "", ""
    try:
        name, namespace = bytes.fromhex(token).decode().split("/")  # neither has a slash
    except ValueError:
        raise foreign_page_token() from None
    return name, namespace


def _finding(
    step: str, outcome: agent_service_pb2.CheckAgentResponse.Outcome.ValueType, message: str
) -> agent_service_pb2.CheckAgentResponse:
    return agent_service_pb2.CheckAgentResponse(step=step, outcome=outcome, message=message)
