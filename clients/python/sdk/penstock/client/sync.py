"""The client without `await`: the same names, driven by one event loop in a background thread.

    with connect() as ps:
        group = ps.groups.create(task, "shell", 8)
        for call in group.calls():
            call.deliver(ps.inference.generate(call.prompt_token_ids, call.sampling))
        for rollout in group.results():
            print(rollout.reward)

Without a block, `ps.close()` ends the connection. Each asynchronous object has a class here of the same name:
coroutines become blocking calls, asynchronous iterators iterate, asynchronous blocks are `with` blocks. Values (tasks,
completions, trajectories) are the very same. Thread-safe. `sync.pyi` has the types, made by
`python -m clients.sync_client`.
"""

from types import TracebackType
from typing import Any, Final, Self

from penstock.client import connection
from penstock.client.agents import AgentsClient
from penstock.client.inference.client import InferenceClient
from penstock.client.inference.weights import WeightTransfer
from penstock.client.intercept.calls import ModelCall
from penstock.client.intercept.gate import GateClient, GateRolloutHandle, LeasedCall
from penstock.client.intercept.metric_log import MetricLog
from penstock.client.intercept.session import InterceptSession
from penstock.client.operations import OperationsClient
from penstock.client.pacing.stream import RolloutStream
from penstock.client.rollouts.client import GroupsClient, RolloutsClient
from penstock.client.rollouts.handles import GroupHandle, RolloutHandle
from penstock.client.rollouts.runs import RunsClient
from penstock.client.sandboxes.client import SandboxesClient
from penstock.client.sandboxes.handle import Fork, SandboxHandle
from penstock.client.sandboxes.processes import ProcessHandle
from penstock.client.sandboxes.toolboxes import ToolboxesClient
from penstock.client.terminals import TerminalHandle, TerminalsClient
from penstock.client.transport.blocking import Loop, Standin
from penstock.client.transport.endpoints import Target, Tls

LIVE: Final = (
    connection.Penstock,
    RolloutsClient,
    GroupsClient,
    RunsClient,
    InferenceClient,
    SandboxesClient,
    ToolboxesClient,
    AgentsClient,
    TerminalsClient,
    GateClient,
    OperationsClient,
    RolloutHandle,
    GroupHandle,
    RolloutStream,
    MetricLog,
    SandboxHandle,
    ProcessHandle,
    Fork,
    TerminalHandle,
    GateRolloutHandle,
    InterceptSession,
    ModelCall,
    LeasedCall,
    WeightTransfer,
)
"""Objects that use a service, and so get a wrapper; everything else is a value. A class follows its base."""


class Penstock(Standin):
    """Returned by `connect`: owns the event loop, which ends with the block or with `close`."""

    def __init__(self, target: Any, loop: Loop) -> None:
        super().__init__(target, loop)
        try:
            super().__enter__()
        except BaseException:
            loop.close()
            raise
        self._is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and ends its thread; what other threads wait for raises RuntimeError. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            super().__exit__(None, None, None)
        finally:
            self._loop.close()


def _classes() -> dict[type, type[Standin]]:
    made: dict[type, type[Standin]] = {connection.Penstock: Penstock}
    for live in LIVE[1:]:
        bases = tuple(made[base] for base in live.__bases__ if base in made) or (Standin,)
        made[live] = type(live.__name__, bases, {"__doc__": live.__doc__, "__module__": __name__})
    return made


Standin.classes = _classes()
globals().update({wrapper.__name__: wrapper for wrapper in Standin.classes.values()})


def connect(target: Target | None = None, token: str | None = None, *, tls: Tls | None = None) -> Penstock:
    """As `penstock.client.connect`, for a `with` block, or until `close`.

    Raises:
        ConfigurationError: an address, the token or the connection file is invalid.
    """
    return Penstock(connection.connect(target, token, tls=tls), Loop())
