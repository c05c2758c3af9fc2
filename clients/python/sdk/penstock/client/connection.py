"""The connection: what `connect` gives, with one client per service."""

import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from penstock.client.agents import AgentsClient
from penstock.client.driver import Driver
from penstock.client.endpoints import SERVICES, Endpoints, Target, Tls, resolve
from penstock.client.errors import ConfigurationError
from penstock.client.inference import InferenceClient
from penstock.client.operations import OperationsClient
from penstock.client.rollouts import GroupsClient, RolloutsClient
from penstock.client.rpc import Service
from penstock.client.sandboxes import SandboxesClient
from penstock.client.sessions import InterceptSession, Selector
from penstock.client.terminals import TerminalsClient


class Penstock:
    """The four services, inside an `async with`. Channels connect with their first call."""

    rollouts: RolloutsClient
    """Start, watch and collect rollouts."""
    groups: GroupsClient
    """The same for groups of rollouts whose rewards are compared."""
    sandboxes: SandboxesClient
    """Sandboxes by themselves."""
    agents: AgentsClient
    """The registry of agents."""
    terminals: TerminalsClient
    """Episodes in which the policy itself types the commands."""

    operations: OperationsClient
    """How the services fare."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.endpoints = endpoints
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
        if "inference" in self._services:
            self._inference = InferenceClient(self._services["inference"])
        self.sandboxes = SandboxesClient(self._services["sandbox"], self.endpoints)
        self.operations = OperationsClient(self._services)
        self.agents = AgentsClient(self._services["driver"])
        self.terminals = TerminalsClient(self._services["driver"])
        driver = Driver(self._services["driver"], self._intercept)
        self.rollouts = RolloutsClient(driver)
        self.groups = GroupsClient(driver)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def inference(self) -> InferenceClient:
        """Generate, score, push weights.

        Raises:
            ConfigurationError: `NO_INFERENCE`, the services that this connects to have no inference service.
        """
        if self._inference is None:
            raise ConfigurationError(
                "There is no inference service here: start one with `penstock up --model-dir DIR`",
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
        identity: str = "",
        messages: bool = False,
        bodies: bool = False,
        reconnect_timeout: float = 300.0,
    ) -> InterceptSession:
        """A trainer's session: `async with ps.intercept(run_id=...) as session: async for call in session.calls()`.

        Open it before the rollouts start or later: calls wait at the gate.

        Args:
            selector: whose calls; or the same by run_id, group_id, rollout_ids and labels. Nothing = every call.
            run_id: of one training run.
            group_id: of one group.
            rollout_ids: of these rollouts.
            labels: of rollouts with all of these.
            credits: most calls leased and not answered at once.
            credit_bytes: most bytes of the same; None = 32 MiB.
            policy_version: the newest weights that the trainer has.
            identity: who this is, for people; empty = this machine's name.
            messages: whether calls carry messages and tools beside tokens.
            bodies: whether they carry the agent's request body.
            reconnect_timeout: seconds for which a gate that is away is waited for, at first and later.
        """
        if selector is None:
            selector = Selector(run_id=run_id, group_id=group_id, rollout_ids=rollout_ids, labels=labels or {})
        elif run_id or group_id or rollout_ids or labels:
            raise ConfigurationError("Give a selector or its parts, not both", reason="SELECTOR")
        return InterceptSession(
            self._services["interception"],
            selector,
            credits=credits,
            credit_bytes=credit_bytes,
            identity=identity or socket.gethostname(),
            policy_version=policy_version,
            messages=messages,
            bodies=bodies,
            reconnect_timeout=reconnect_timeout,
        )

    def _intercept(self, selector: Selector, *, credits: int, policy_version: int | None) -> InterceptSession:
        return self.intercept(selector, credits=credits, policy_version=policy_version)


def connect(target: Target | None = None, token: str | None = None, *, tls: Tls | None = None) -> Penstock:
    """Connects to the services: `async with connect() as ps`.

    Args:
        target: a host that has all services on their default ports, a mapping of service to `host:port`, or the path
            of a connection file. None = the environment, else what `penstock up` runs, else loopback.
        token: sent with each call; None = `PENSTOCK_TOKEN`, `PENSTOCK_TOKEN_FILE`, or the connection file's.
        tls: certificates. None = `PENSTOCK_CA_FILE`, or the connection file's; without either plaintext, which
            carries a token to this machine only.

    Raises:
        ConfigurationError: an address, the token or the connection file does not hold.
    """
    return Penstock(resolve(target, token, tls))
