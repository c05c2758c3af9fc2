"""Selects a command's services: running ones, or its own for its duration; checks whether they accept the token."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.markup import escape

from penstock.cli.terminal.console import err
from penstock.client import Endpoints, Penstock, Unavailable, connect
from penstock.client.errors import DeadlineExceeded, InvalidArgument
from penstock.client.transport.endpoints import of_state_dir, resolve
from penstock.client.transport.rpc import Service
from penstock.driver.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
)
from penstock.local.stack import LocalStack, UpstreamEndpoint
from penstock.local.supervision import ServiceRestart

_ACCESS_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model options of a stack of one's own."""

    model_dir: Path | None = None
    engine: str = "numpy"
    script: Path | None = None
    upstreams: Mapping[str, UpstreamEndpoint] = field(default_factory=dict)
    engine_options: Mapping[str, str] = field(default_factory=dict)
    engine_key: str = field(default="", repr=False)
    """API key of the endpoint behind the engine."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further settings by service."""

    @property
    def given(self) -> bool:
        """Whether the command line requests an engine of its own."""
        return self.model_dir is not None or self.script is not None

    def stack(
        self,
        ports: Mapping[str, int],
        state_dir: Path | None,
        on_restart: Callable[[ServiceRestart], None] | None = None,
        *,
        takes_up: bool = True,
    ) -> LocalStack:
        """Returns the stack, not yet started."""
        return LocalStack(ports=ports, state_dir=state_dir, on_restart=on_restart, takes_up=takes_up, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The options of a stack, as in `LocalStack`."""
        options = dict(self.engine_options)
        if self.script is not None:
            options["script"] = str(self.script.absolute())
        settings = {name: dict(values) for name, values in self.settings.items()}
        if self.engine_key:
            settings.setdefault("inference", {})["upstream_api_key"] = self.engine_key
        return {
            "model_dir": None if self.model_dir is None else self.model_dir.absolute(),
            "engine": self.engine,
            "engine_options": options,
            "settings": settings,
            "upstreams": self.upstreams,
        }


def running(state_dir: Path | None) -> Endpoints:
    """Returns running services: those of a state directory, or those that a client finds without one.

    Raises:
        Unavailable: `STACK_NOT_RUNNING`, nothing runs in the directory.
        ConfigurationError: the connection file or the environment is invalid.
    """
    if state_dir is None:
        return resolve()
    found = of_state_dir(state_dir)
    if found is None:
        what = f"No services run in {state_dir}: start them with `penstock up --state-dir {state_dir}`"
        raise Unavailable(what, reason="STACK_NOT_RUNNING")
    return found


@asynccontextmanager
async def services(
    choice: ModelChoice | None = None,
    *,
    state_dir: Path | None = None,
    before_start: Callable[[], None] = lambda: None,
) -> AsyncIterator[Penstock]:
    """Yields a client of the running services; without any, or if an engine is requested, of a stack for the block.

    With a `state_dir` only its own services count as running. `before_start` may end the program before a stack is
    started.

    Raises:
        ConfigurationError: `ROLLOUTS_LEFT`, without a `choice`: the command needs no model, and its stack would end
            rollouts that a killed `penstock up` has left to its next start.
    """
    takes_up = choice is not None
    choice = choice or ModelChoice()
    endpoints = None if choice.given else resolve() if state_dir is None else of_state_dir(state_dir)
    if endpoints is not None and (endpoints.origin != "the defaults" or await _answers(endpoints)):
        async with connect(endpoints) as ps:
            yield ps
        return
    before_start()
    where = "" if state_dir is None else f" in {state_dir}"
    why = "with its own engine" if choice.given else f"because none run{where} (`penstock up` keeps them running)"
    with err.status(f"starting services {why}"):
        stack = choice.stack({}, state_dir, takes_up=takes_up)
        await stack.__aenter__()
    try:
        err.print(f"[dim]services for this command only, {escape(why)}; logs in {escape(str(stack.log_dir))}[/]")
        async with connect(stack.endpoints) as ps:
            yield ps
    except BaseException as error:
        await stack.__aexit__(type(error), error, error.__traceback__)
        raise
    else:
        await stack.__aexit__(None, None, None)


async def _answers(endpoints: Endpoints) -> bool:
    """Whether something listens at the driver's address."""
    host, _, port = endpoints.driver.rpartition(":")
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def check_access(endpoints: Endpoints, *, starts_rollouts: bool) -> bool:
    """Asks the driver once, without an effect, so that a server does not learn it by its clients' calls.

    Args:
        endpoints: of the services.
        starts_rollouts: whether the token must allow that; otherwise reading.

    Returns:
        Whether the driver answered: False = it is not up, and the token is unchecked.

    Raises:
        Unauthenticated: there is no token, or an unknown one; the message names its origin.
        PermissionDenied: its role may not do that.
    """
    service = Service("driver", endpoints)
    try:
        if starts_rollouts:
            # An authorized caller gets violations for the empty request; any other caller is refused before (R5).
            rollouts = rollout_service_pb2_grpc.RolloutServiceStub(service.channel)
            order = rollout_service_pb2.CreateRolloutRequest()
            await service.call(rollouts.CreateRollout, order, timeout=_ACCESS_S)
        else:
            agents = agent_service_pb2_grpc.AgentServiceStub(service.channel)
            await service.call(agents.ListAgents, agent_service_pb2.ListAgentsRequest(page_size=1), timeout=_ACCESS_S)
    except InvalidArgument:
        return True
    except (Unavailable, DeadlineExceeded):
        return False
    finally:
        await service.close()
    return True
