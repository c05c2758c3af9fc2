"""The part of a task file about its rollouts: image, sandbox, limits, budgets, labels.

The keys are those of the client's classes (`SandboxChoice`, `Limits`, `Budgets`); times are seconds, sizes bytes or
texts such as `2GiB`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from penstock.client.tasks.field_types import (
    MAX_SERVERS,
    Address,
    Count,
    Environment,
    LabelKey,
    LabelValue,
    LargeCount,
    Limit,
    Period,
    Plain,
    Seconds,
    ServerName,
    not_json,
)
from penstock.client.tasks.model_keys import ModelTables
from penstock.client.tasks.named_files import Beside, CannotRead
from penstock.client.tasks.sandbox_keys import CompanionTables, ResourcesTable, Size, SmallSize
from penstock.client.tasks.spec import (
    Allowlist,
    Budgets,
    CallRate,
    Limits,
    McpServer,
    Network,
    OpenNetwork,
    Packages,
    SandboxChoice,
)
from penstock.client.tasks.strict_model import Place, Strict
from penstock.values import hosts
from penstock.values.locks import MAX_LOCK_BYTES, LockProblem, debian_lock, npm_lock, python_lock

_LOCKS: Final[Mapping[str, Callable[[str], object]]] = {
    "python": python_lock,
    "npm": npm_lock,
    "debian": debian_lock,
}


def _lock(beside: Beside, name: str) -> str:
    try:
        return beside.read(name, MAX_LOCK_BYTES)[0].decode("utf-8")
    except UnicodeDecodeError:
        raise CannotRead(f"{name} is not text in UTF-8") from None


class AllowlistTable(Strict):
    """`sandbox.setup_network`, where it is not the word `open`, `sandbox.agent_network`, `sandbox.verifier_network`."""

    hosts: list[str] = Field(
        default_factory=list,
        description='"name", "*.name", CIDR blocks, or "*" for every name. None: all that the operator allows.',
    )
    ports: list[Annotated[int, Field(ge=1, le=65535)]] = Field(default_factory=list)
    denied_hosts: list[str] = Field(
        default_factory=list, description="Refused, whatever hosts match; as in hosts, without *."
    )
    recording: str = ""
    recorded_only: bool = False

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], beside: Beside | None) -> Iterator[tuple[Place, str]]:
        """Checks the entries."""
        given = [value.get(name, []) for name in ("hosts", "denied_hosts")]
        if all(isinstance(one, list) and all(isinstance(entry, str) for entry in one) for one in given):
            for name, index, problem in hosts.problems(*given):
                yield (name,) if index is None else (name, index), problem

    def made(self) -> Allowlist:
        """Returns the value."""
        return Allowlist(
            hosts=self.hosts,
            ports=self.ports,
            denied_hosts=self.denied_hosts,
            recording=self.recording,
            recorded_only=self.recorded_only,
        )


class PackagesTable(Strict):
    """`sandbox.packages`: names of locks beside the task file."""

    python: str | None = Field(None, description="A requirements file with hashes: every package that is installed.")
    npm: str | None = Field(None, description="A package-lock.json.")
    debian: str | None = Field(None, description="Debian packages, as `penstock tasks lock` writes them.")

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], beside: Beside | None) -> Iterator[tuple[Place, str]]:
        """Also reads the locks."""
        named = [(name, value.get(name)) for name in _LOCKS]
        if not any(file for _, file in named):
            yield (), "set python, npm or debian"
        for name, file in named:
            if isinstance(file, str) and beside is not None:
                try:
                    _LOCKS[name](_lock(beside, file))
                except CannotRead as error:
                    yield (name,), str(error)
                except LockProblem as error:
                    yield (name,), f"{file}: {error}"

    def made(self, beside: Beside) -> Packages:
        """Returns the value. Raises CannotRead."""
        return Packages(
            python="" if self.python is None else _lock(beside, self.python),
            npm="" if self.npm is None else _lock(beside, self.npm),
            debian="" if self.debian is None else _lock(beside, self.debian),
        )


class SandboxTable(Strict):
    """`sandbox`."""

    backend: str = ""
    image: str = ""
    resources: ResourcesTable | None = None
    setup_network: Literal["open"] | AllowlistTable | None = None
    agent_network: AllowlistTable | None = None
    verifier_network: AllowlistTable | None = None
    user: str = ""
    own_kernel: bool = False
    repeatable: bool | None = None
    packages: PackagesTable | None = None
    companions: CompanionTables = Field(
        default_factory=list, description="Containers beside it, such as a database; reached by their names."
    )

    def made(self, image: str, beside: Beside) -> SandboxChoice:
        """Returns the value; `image` comes from the short key. Raises CannotRead for a lock."""
        network: Network | None = None
        if isinstance(self.setup_network, AllowlistTable):
            network = self.setup_network.made()
        elif self.setup_network is not None:
            network = OpenNetwork()
        return SandboxChoice(
            backend=self.backend,
            image=image or self.image,
            resources=None if self.resources is None else self.resources.made(),
            setup_network=network,
            user=self.user,
            own_kernel=self.own_kernel,
            repeatable=self.repeatable,
            packages=None if self.packages is None else self.packages.made(beside),
            agent_network=None if self.agent_network is None else self.agent_network.made(),
            verifier_network=None if self.verifier_network is None else self.verifier_network.made(),
            companions=tuple(companion.made() for companion in self.companions),
        )


class McpServerTable(Strict):
    """One of `mcp_servers`."""

    name: ServerName
    args: list[Plain] = Field(default_factory=list, description="A program in the sandbox, with its arguments.")
    env: Environment = Field(default_factory=dict, description="Environment of the program.")
    url: Address = Field("", description="A server that the sandbox's network reaches.")

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], beside: Beside | None) -> Iterator[tuple[Place, str]]:
        """Refuses a server that is neither a program nor at an address, or both."""
        if bool(value.get("args")) == bool(value.get("url")):
            yield (), "set args (a program) or url"
        elif value.get("env") and value.get("url"):
            yield ("env",), "is of a program, but url is set"

    def made(self) -> McpServer:
        """Returns the value."""
        return McpServer(name=self.name, args=self.args, env=self.env, url=self.url)


class LimitsTable(Strict):
    """`limits`."""

    prepare: Limit | None = None
    setup: Limit | None = None
    agent: Limit | None = None
    verify: Limit | None = None

    def made(self) -> Limits:
        """Returns the value."""
        return Limits(prepare=self.prepare, setup=self.setup, agent=self.agent, verify=self.verify)


class CallRateTable(Strict):
    """`budgets.call_rate`."""

    calls: Count
    period: Period = 1.0
    burst: Count | None = None


class BudgetsTable(Strict):
    """`budgets`."""

    max_calls: Count | None = None
    max_prompt_tokens: LargeCount | None = None
    max_completion_tokens: LargeCount | None = None
    max_total_tokens: LargeCount | None = None
    max_tokens_per_call: Count | None = None
    max_request_bytes: Size | None = None
    max_request_bytes_per_call: SmallSize | None = None
    call_timeout: Seconds | None = None
    wall_time: Seconds | None = None
    call_rate: CallRateTable | None = None
    max_tool_calls: Count | None = None

    def made(self) -> Budgets:
        """Returns the value."""
        plain = {item.name: getattr(self, item.name) for item in fields(Budgets) if item.name != "call_rate"}
        rate = self.call_rate
        return Budgets(
            **plain,
            call_rate=None if rate is None else CallRate(calls=rate.calls, period=rate.period, burst=rate.burst),
        )


class RolloutKeys(Strict):
    """The keys that a task file and the defaults of a task set have in common."""

    image: str = Field("", description="The sandbox's image; short for sandbox.image.")
    sandbox: SandboxTable | None = Field(
        None, description="The sandbox that the task needs, within the operator's policy."
    )
    limits: LimitsTable | None = Field(None, description="Seconds for each part of a rollout.")
    budgets: BudgetsTable | None = Field(None, description="Limits of a rollout at the gate.")
    labels: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, description="Labels of the task's rollouts, to find them by."
    )
    env: Environment = Field(default_factory=dict, description="Environment of setup and agent, not of the verifier.")
    mcp_servers: list[McpServerTable] = Field(
        default_factory=list, max_length=MAX_SERVERS, description="MCP servers for the agent, beside the rollout's own."
    )
    models: ModelTables = Field(
        default_factory=list, description="Several models that answer the calls; default: one, the rollout's."
    )
    metadata: dict[str, Any] = Field(default_factory=dict, description="Any values; they are copied to the trajectory.")
    keep_diff: bool = Field(
        False, description="Keep the agent's changes in its working directory as the artifact changes.diff."
    )
    keep_files: bool = Field(
        False, description="Keep the small files of the working directory at the end, as artifacts files/PATH."
    )
    keep_end_state: bool | None = Field(
        None,
        description="Keep what the agent leaves, for `penstock regrade`; default: if it is graded in a fresh fork.",
    )

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], beside: Beside | None) -> Iterator[tuple[Place, str]]:
        """Refuses an image given twice, and metadata that JSON cannot represent."""
        sandbox = value.get("sandbox")
        if value.get("image") and isinstance(sandbox, Mapping) and sandbox.get("image"):
            yield ("image",), "set image or sandbox.image"
        yield from not_json(value.get("metadata"), ("metadata",))
        servers = value.get("mcp_servers")
        given = servers[:MAX_SERVERS] if isinstance(servers, list) else []
        names = [server.get("name") if isinstance(server, Mapping) else None for server in given]
        for index, name in enumerate(names):
            if isinstance(name, str) and name in names[:index]:
                yield ("mcp_servers", index, "name"), f"{name} is used twice"
