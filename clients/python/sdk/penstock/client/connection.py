"""The connection that `connect` returns, with one client per service."""

import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn, Self, Unpack

from penstock.client.agents import AgentsClient
from penstock.client.errors import ConfigurationError
from penstock.client.inference.client import InferenceClient
from penstock.client.intercept.gate import GateClient
from penstock.client.intercept.session import InterceptSession, Selector, SessionOptions
from penstock.client.operations import OperationsClient
from penstock.client.pacing.policies import Policy
from penstock.client.pacing.stream import RolloutStream
from penstock.client.rollouts.client import GroupsClient, RolloutOptions, RolloutsClient
from penstock.client.rollouts.driver_rpc import Drivers
from penstock.client.rollouts.runs import RunsClient
from penstock.client.sandboxes.client import SandboxesClient
from penstock.client.sandboxes.toolboxes import ToolboxesClient
from penstock.client.tasks.spec import AgentChoice
from penstock.client.tasks.task import Task
from penstock.client.terminals import TerminalsClient
from penstock.client.transport.cluster import Cluster, Member
from penstock.client.transport.endpoints import SERVICES, Endpoints, ServiceName, Target, Tls, resolve
from penstock.client.transport.rpc import Service

_CLIENT_OF: Final[Mapping[str, ServiceName]] = {
    "rollouts": "driver",
    "groups": "driver",
    "runs": "driver",
    "agents": "driver",
    "terminals": "driver",
    "sandboxes": "sandbox",
    "toolboxes": "sandbox",
    "gate": "interception",
}
"""The service of each client that a connection may lack."""


class Penstock:
    """Clients for the four services, inside an `async with`. Channels connect with their first call."""

    rollouts: RolloutsClient
    """Starts, watches and collects rollouts."""
    groups: GroupsClient
    """The same for groups of rollouts whose rewards are compared."""
    runs: RunsClient
    """Metrics that trainers log beside the rollouts of a run."""
    sandboxes: SandboxesClient
    """Standalone sandboxes."""
    agents: AgentsClient
    """The registry of agents."""
    terminals: TerminalsClient
    """Episodes in which the policy itself types the commands."""
    gate: GateClient
    """The gate by single requests: rollouts for agents of your own, agent keys, recorded calls."""
    toolboxes: ToolboxesClient
    """Programs that are mounted in sandboxes."""
    operations: OperationsClient
    """Status of the services."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.endpoints: Endpoints = endpoints
        """The services' addresses."""
        self._stack = AsyncExitStack()
        self._services: dict[str, Service] = {}
        self._inference: InferenceClient | None = None

    async def __aenter__(self) -> Self:
        for name in SERVICES:
            if not self.endpoints.address(name):
                continue
            service = Service(name, self.endpoints)
            self._stack.push_async_callback(service.close)
            self._services[name] = service
        self._cluster = Cluster(self.endpoints, self._services)
        self._stack.push_async_callback(self._cluster.close)
        self.operations = OperationsClient(self._services, self._cluster)
        if inference := self._services.get("inference"):
            self._inference = InferenceClient(inference, self._cluster)
        if sandbox := self._services.get("sandbox"):
            self.sandboxes = SandboxesClient(sandbox, self.endpoints, self._cluster)
            self.toolboxes = ToolboxesClient(sandbox)
        if gate := self._services.get("interception"):
            self.gate = GateClient(gate, self._cluster)
        if driver := self._services.get("driver"):
            self.agents = AgentsClient(driver, self._cluster)
            drivers = Drivers(self._cluster, self._intercept)
            self.terminals = TerminalsClient(drivers)
            self.rollouts = RolloutsClient(drivers)
            self.groups = GroupsClient(drivers)
            self.runs = RunsClient(drivers)
        return self

    if not TYPE_CHECKING:  # for a type checker it would give every misspelt attribute a type

        def __getattr__(self, name: str) -> NoReturn:
            """Raises ConfigurationError `NO_SERVICE` for the client of a service that has no address here."""
            if (service := _CLIENT_OF.get(name)) is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise _no_service(service)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def inference(self) -> InferenceClient:
        """Generates, scores, pushes weights.

        Raises:
            ConfigurationError: `NO_INFERENCE`: there is no inference service at this connection.
        """
        if self._inference is None:
            raise ConfigurationError(
                "These services have no inference service: start one with `penstock up --model-dir DIR`",
                reason="NO_INFERENCE",
            )
        return self._inference

    def intercept(
        self,
        selector: Selector | None = None,
        *,
        run_id: str | None = None,
        group_id: str | None = None,
        rollout_ids: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        credits: int = 64,
        credit_bytes: int | None = None,
        policy_version: int | None = None,
        policy_ids: Sequence[str] = (),
        policies: Mapping[str, int] | None = None,
        identity: str = "",
        messages: bool = False,
        bodies: bool = False,
        images: bool = False,
        reconnect_timeout: float = 300.0,
    ) -> InterceptSession:
        """A trainer's session: `async with ps.intercept(run_id=...) as session: async for call in session.calls()`.

        Open it before the rollouts start or later: calls wait at the gate.

        Args:
            selector: which calls; or the same by run_id, group_id, rollout_ids, labels and policy_ids. None set = every
                call.
            run_id: calls of one training run.
            group_id: calls of one group.
            rollout_ids: calls of these rollouts.
            labels: calls of rollouts with all of these labels.
            credits: maximum calls leased and unanswered at once.
            credit_bytes: maximum bytes of the same; None = 32 MiB.
            policy_version: the newest weights that the trainer has.
            policy_ids: calls for these policies only, where rollouts have several; none = for any.
            policies: the newest weights by policy, where rollouts have several.
            identity: a name for this session, for people; empty = this machine's name.
            messages: whether calls carry messages and tools beside tokens.
            bodies: whether they carry the agent's request body.
            images: whether their images carry the files' bytes.
            reconnect_timeout: seconds to wait for an unreachable gate, at first and on reconnects.
        """
        if selector is None:
            selector = Selector(
                run_id=run_id,
                group_id=group_id,
                rollout_ids=rollout_ids,
                labels=labels or {},
                policy_ids=policy_ids,
            )
        elif run_id or group_id or rollout_ids or labels or policy_ids:
            raise ConfigurationError("Set a selector or its parts, not both", reason="SELECTOR")
        if (gate := self._services.get("interception")) is None:
            raise _no_service("interception")
        return InterceptSession(
            self._cluster,
            Member("", gate),
            selector,
            SessionOptions(
                credits=credits,
                credit_bytes=credit_bytes,
                identity=identity or socket.gethostname(),
                policy_version=policy_version,
                messages=messages,
                bodies=bodies,
                images=images,
                reconnect_timeout=reconnect_timeout,
                policies=policies or {},
            ),
            self.runs.metric_log(selector.run_id) if selector.run_id and "driver" in self._services else None,
        )

    def stream(
        self,
        tasks: Iterable[Task],
        agent: str | AgentChoice,
        n: int,
        *,
        pacing: Policy,
        concurrency: int,
        policy_version: int = 0,
        top: bool = False,
        **options: Unpack[RolloutOptions],
    ) -> RolloutStream:
        """Groups for an asynchronous trainer: `async with ps.stream(...) as stream: async for batch in
        stream.batches()`.

        Groups start as fast as the policy admits them, while the trainer trains. Open the session that answers their
        calls first.

        Args:
            tasks: a group of each, in this order; read as groups start, so it may be endless.
            agent: a registered agent's name, or a choice with options.
            n: rollouts of a group, 1 to 256.
            pacing: `Paced(batch=16, max_staleness=8)`, or another policy of `penstock.client.pacing.policies`.
            concurrency: how many rollouts run at once, at least `n`.
            policy_version: the newest weights that the trainer has.
            top: with alternatives (top-k logprobs), as in `group.results`.
            **options: see `RolloutOptions`.
        """
        create = partial(self.groups.create, agent=agent, n=n, **options)
        return RolloutStream(
            create, tasks, size=n, pacing=pacing, concurrency=concurrency, policy_version=policy_version, top=top
        )

    def _intercept(
        self, selector: Selector, *, credits: int, policy_version: int | None, messages: bool, images: bool
    ) -> InterceptSession:
        return self.intercept(
            selector, credits=credits, policy_version=policy_version, messages=messages, images=images
        )


def _no_service(service: ServiceName) -> ConfigurationError:
    return ConfigurationError(
        f"This connection has no {service} service: give its address (PENSTOCK_{service.upper()}_ADDRESS, or {service} "
        "of the target), and use the connection inside `async with`",
        reason="NO_SERVICE",
    )


def connect(
    target: Target | None = None, token: str | None = None, *, tls: Tls | None = None, namespace: str | None = None
) -> Penstock:
    """Connects to the services: `async with connect() as ps`.

    Args:
        target: a host that has all services on their default ports, a mapping of service to `host:port`, or the path
            of a connection file. None = the environment, else the running `penstock up`, else loopback.
        token: sent with each call; None = `PENSTOCK_TOKEN`, `PENSTOCK_TOKEN_FILE`, or the connection file's.
        tls: certificates. None = `PENSTOCK_CA_FILE`, or the connection file's; without either plaintext, which
            carries a token to this machine only.
        namespace: in which an operator acts; None = `PENSTOCK_NAMESPACE`. A trainer's token belongs to one already.

    Raises:
        ConfigurationError: an address, the token or the connection file is invalid.
    """
    return Penstock(resolve(target, token, tls, namespace))
