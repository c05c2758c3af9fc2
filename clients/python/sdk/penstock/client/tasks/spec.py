"""The parts of a rollout: task, verifier, agent, sandbox, limits. All values; times are seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

from penstock.client.errors import InvalidArgument
from penstock.values import OpenEnum

_EMPTY: Mapping[str, Any] = {}  # no proxy: tasks are pickled for worker processes


class Mode(OpenEnum):
    """The source of the answers to an agent's model calls, and what is captured."""

    BLACK_BOX = "black_box"
    TRANSPARENT_PROXY = "transparent_proxy"
    INTERCEPTION_GATE = "interception_gate"


class Replay(OpenEnum):
    """What a further attempt at a rollout does with the completions of the one before.

    A call whose prompt has the same token ids as a recorded one is answered with the recorded completion. With `EXACT`,
    a call that differs from what was recorded at its place fails; `OFF`: everything is sampled again.
    """

    OFF = "off"
    UNTIL_DIVERGENCE = "until_divergence"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class SeedFile:
    """A file to write: absolute or relative to the working directory; `mode` are permission bits."""

    path: str
    content: bytes = field(repr=False)
    mode: int | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """A command: an argument vector, or `shell`, a text for the sandbox's shell. Exactly one of the two.

    `secret_env` appears in no log and no listing. `timeout` in seconds; None = none, or the context's.
    """

    argv: Sequence[str] = ()
    shell: str | None = None
    env: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    secret_env: Mapping[str, str] = field(default_factory=lambda: _EMPTY, repr=False)
    cwd: str = ""
    timeout: float | None = None
    user: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.argv, str):
            raise InvalidArgument(
                f"argv must be a list of arguments; for a shell line use Command(shell={self.argv!r})", reason="COMMAND"
            )
        if bool(self.argv) == (self.shell is not None):
            raise InvalidArgument("A command must have either argv or shell", reason="COMMAND")
        object.__setattr__(self, "argv", tuple(self.argv))

    def __str__(self) -> str:
        return self.shell if self.shell is not None else " ".join(self.argv)


class RewardFrom(StrEnum):
    """How the verifier's commands make the reward: by a file that they write, or by the share that passed."""

    FILE = "file"
    PASSED_SHARE = "passed_share"


@dataclass(frozen=True, slots=True)
class CopiedPath:
    """A file or directory of the agent's sandbox that a verifier gets whole; `exclude` are patterns of names in it."""

    path: str
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.exclude, str):
            raise InvalidArgument(f"exclude must be a list of patterns, such as [{self.exclude!r}]", reason="COPIES")
        object.__setattr__(self, "exclude", tuple(self.exclude))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """How a reward is computed, after the agent is dead.

    With `RewardFrom.FILE` the commands write one number, or `{"reward": n, "components": {...}}`, to the file that
    `PENSTOCK_REWARD_FILE` names. `range` is the reward's (default [0, 1]). `command_timeout` in seconds, for commands
    without their own. `component_ranges`: the required components and their ranges; others are then refused.

    Where the backend can, it runs in a fork of the prepared state with the agent's changes in the directories
    `changes_below` (default: the working directory) and nothing else of the agent's. `fresh_fork` true refuses a
    backend that cannot, and false grades in the agent's sandbox, as the agent left it. `restore` first puts paths and
    globs (`tests/**`) back into the prepared state. With `image` it runs in a sandbox of that image, which has the
    agent's changes and nothing else of the task; `resources` are that sandbox's, `user` is its user, and `build` the
    directory of the Dockerfile for it. `copies` are absolute paths that it gets whole, the agent's and
    the image's files alike; it then has no changes but those below `changes_below`. `collect` runs in the agent's
    sandbox before that is read. The last of the `commands` may ask `judge`, a model.

    docs/guides/rewards.md describes what each resists.
    """

    commands: Sequence[Command]
    files: Sequence[SeedFile] = ()
    reward: RewardFrom = RewardFrom.PASSED_SHARE
    range: tuple[float, float] | None = None
    command_timeout: float | None = None
    fresh_fork: bool | None = None
    restore: Sequence[str] = ()
    changes_below: Sequence[str] = ()
    component_ranges: Mapping[str, tuple[float, float]] = field(default_factory=lambda: _EMPTY)
    image: str = ""
    resources: "Resources | None" = None
    copies: Sequence[CopiedPath] = ()
    collect: Sequence[Command] = ()
    user: str = ""
    build: Path | None = None
    judge: "Judge | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A solution of the task, which proves that its verifier can be satisfied. No agent's rollout ever has it."""

    commands: Sequence[Command]
    files: Sequence[SeedFile] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """An MCP server for the agent: a program in the sandbox (`args`), or a `url`."""

    name: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    secret_env: Mapping[str, str] = field(default_factory=lambda: _EMPTY, repr=False)
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentChoice:
    """The agent and its setup: `options` are those of its spec (JSON values)."""

    name: str
    spec_sha256: str = ""
    options: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)
    skip_permissions: bool = False
    mcp_servers: Sequence[McpServer] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Limits of a sandbox; None = the operator's default. One that the backend cannot enforce is refused."""

    cpu: float | None = None
    memory_bytes: int | None = None
    pids: int | None = None
    disk_bytes: int | None = None
    inodes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneEndpoint:
    """A network of one endpoint: `local_port` on 127.0.0.1 inside leads to `upstream` (`host:port`), nothing else."""

    local_port: int
    upstream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowlist:
    """HTTP and HTTPS to named hosts ("name", "*.name", CIDR blocks) and ports (none = 80 and 443), through a proxy.

    Without `hosts`, all that the operator allows but `denied_hosts`; one of both is needed. What is denied stays
    denied, whatever `hosts` match. `"*"` in `hosts` is every name, if the operator allows that.

    All sandboxes with the same `recording` get the same responses ("" = the sandbox's own); `recorded_only` asks
    nothing upstream. `one_endpoint` is reached beside the proxy.
    """

    hosts: Sequence[str] = ()
    ports: Sequence[int] = ()
    denied_hosts: Sequence[str] = ()
    recording: str = ""
    recorded_only: bool = False
    one_endpoint: OneEndpoint | None = None


@dataclass(frozen=True, slots=True)
class OpenNetwork:
    """Unrestricted network; refused unless the operator allows it."""


Network: TypeAlias = OneEndpoint | Allowlist | OpenNetwork
"""Allowed network access; None = nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packages:
    """A task's tools, mounted read-only in its sandboxes: contents of locks, not names of files; empty = none.

    `python`: a requirements file with hashes, for the sandbox's python3. `npm`: a package-lock.json of version 2 or 3.
    `debian`: what `penstock tasks lock` writes, for backends with `debian_packages`. Each has at most 2 MiB. A stored
    spec has a digest in their place.
    """

    python: str = field(default="", repr=False)
    npm: str = field(default="", repr=False)
    debian: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """How a companion shows that it is ready: `argv` runs in it and exits with 0. Empty `argv` = no check.

    It runs at once and then again, at most a second after a failure. The companion has failed if it is not healthy
    after `start_period` + `retries` * (`interval` + `timeout`) seconds, at most 10 minutes.
    """

    argv: Sequence[str] = ()
    interval: float = 30.0
    timeout: float = 30.0
    retries: int = 3
    start_period: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """A container beside a sandbox, such as a database, which programs in the sandbox reach at its `name`.

    It shares the sandbox's network, so no two of them can listen on the same port, and has files of its own, which no
    snapshot, fork or diff has. Empty fields and None are the image's own. `env` is not for secrets. `after` are names
    of companions before it in the list that must be healthy first; `aliases` are further names of it.
    """

    name: str
    image: str
    aliases: Sequence[str] = ()
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    user: str = ""
    workdir: str = ""
    health_check: HealthCheck | None = None
    resources: Resources | None = None
    after: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxChoice:
    """A rollout's choices about its sandbox, within the operator's policy.

    `user` is the account that executes agent, setup and verifier; empty = the backend's ordinary user. `own_kernel`:
    fail rather than run on the kernel of the backend's machine (gVisor and virtual machines have their own).
    `repeatable`: what its programs see is the same at each attempt, as far as the backend can (`Backend.repeatable`);
    None = unless `replay` is off. `packages` are installed outside of sandboxes, once.

    `setup_network`, `agent_network` and `verifier_network` are what each phase may reach, the agent beside its model;
    None = nothing. The verifier's needs a fresh fork (`Verifier.fresh_fork`). Without a `recording` of their own, the
    agents of a group share one, and its verifiers another.

    `companions` run beside the agent's sandbox, not during setup. A verifier in a fresh fork reaches them as the agent
    left them. It then has no image, resources, judge or network of its own, and no end state is kept.
    """

    backend: str = ""
    image: str = ""
    resources: Resources | None = None
    setup_network: Network | None = None
    user: str = ""
    own_kernel: bool = False
    repeatable: bool | None = None
    packages: Packages | None = None
    agent_network: Allowlist | None = None
    verifier_network: Allowlist | None = None
    companions: Sequence[Companion] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds for each part of a rollout; None = the driver's default."""

    prepare: float | None = None
    setup: float | None = None
    agent: float | None = None
    verify: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRate:
    """A rate limit: `calls` per `period` seconds, evenly; `burst` (None = calls) of them at once."""

    calls: int
    period: float = 1.0
    burst: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Limits of one rollout at the gate; None = unlimited, call_timeout (1 h) and max_tool_calls (the operator's) not.

    Times in seconds, sizes in bytes. A call over `call_rate` is refused with a retry time, a body over
    `max_request_bytes_per_call` is refused; any other exhausted limit ends the rollout's calls.
    """

    max_calls: int | None = None
    max_prompt_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_total_tokens: int | None = None
    max_tokens_per_call: int | None = None
    max_request_bytes: int | None = None
    max_request_bytes_per_call: int | None = None
    call_timeout: float | None = None
    wall_time: float | None = None
    call_rate: CallRate | None = None
    max_tool_calls: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBudgets:
    """Limits of all rollouts of a run together; None = unlimited. Times in seconds, sizes in bytes.

    The first rollout of a run that sets them fixes them. An exhausted limit ends the calls of all its rollouts.
    """

    max_calls: int | None = None
    max_prompt_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_total_tokens: int | None = None
    max_request_bytes: int | None = None
    wall_time: float | None = None
    call_rate: CallRate | None = None


class TokenScope(OpenEnum):
    """What a rollout's agent key allows: completions; counting tokens and reading models; host tools."""

    COMPLETIONS = "completions"
    READ = "read"
    TOOLS = "tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentKeyTerms:
    """RolloutKeys of an agent key for the gate: no scopes = all; `ttl` in seconds, None = until its rollout's end."""

    scopes: Sequence[TokenScope | str] = ()
    ttl: float | None = None


# The name before agent keys had one; programs import it from `penstock.client`.
TokenTerms = AgentKeyTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConstraint:
    """Allowed policy versions: at least `min_version`, at most `max_staleness` behind the newest announced.

    Checked when a call is handed out; a version announced while it is held does not make its answer too old.
    """

    min_version: int | None = None
    max_staleness: int | None = None


class ControlTokens(OpenEnum):
    """How control tokens spelled in user texts, tool results, system prompts or tool definitions are encoded."""

    PLAIN = "plain"
    """As plain text: no content of a conversation opens or closes a turn."""
    PARSE = "parse"
    """As control tokens, as engines commonly do."""


@dataclass(frozen=True, slots=True)
class Inference:
    """An inference service answers: one that the operator configured by name (empty = the default one).

    `tool_call_parser` parses tool calls, for templates that do not show their format (empty = the service's);
    `control_tokens` is how control tokens spelled in a conversation's texts are encoded.
    """

    name: str = ""
    adapter: str = ""
    tool_call_parser: str = ""
    control_tokens: ControlTokens = ControlTokens.PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """An OpenAI-compatible endpoint answers: `name` of the operator's, or `base_url` with your own `api_key`."""

    name: str = ""
    base_url: str = ""
    api_key: str = field(default="", repr=False)
    model: str = ""

    def __post_init__(self) -> None:
        if bool(self.name) == bool(self.base_url):
            raise InvalidArgument("An upstream must have either a name or a base_url", reason="UPSTREAM")
        if self.name and self.api_key:
            raise InvalidArgument("A named upstream uses the operator's key: unset api_key", reason="UPSTREAM")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer without an engine, as the operator configured it; the trainer answers every call.

    `tool_call_parser` and `control_tokens` as for Inference; an empty parser is detected from the template.
    """

    name: str
    tool_call_parser: str = ""
    control_tokens: ControlTokens = ControlTokens.PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A model that a verifier asks after the agent is dead: an inference service, or an endpoint of the operator's.

    The verifier's last command has `PENSTOCK_JUDGE_URL` (a base URL for SDKs of Chat Completions), `PENSTOCK_JUDGE_KEY`
    and `PENSTOCK_JUDGE_MODEL`. `budgets` are of its calls alone (`max_calls` None = 100). Needs a fresh fork. Its calls
    are `Trajectory.judge_calls`.
    """

    source: Inference | Upstream = Inference()
    budgets: Budgets | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Sends an agent further instructions, one each time that it has ended: a script, or a model that plays the user.

    The agent goes on in its session and sandbox, within the rollout's limits; the verifier runs after its last end. An
    agent whose spec has no `resume` is refused. What the user decides are `UserTurn` events.

    Attributes:
        instructions: a script's, sent in order: 1 to 64, of at most 64 KiB each. Either this or `prompt` is set.
        prompt: makes a model the user: who it is, what it wants, when it is content; at most 64 KiB. It sees the task's
            instruction and the agent's last message before each end; what it writes is the next instruction, and [END]
            in it ends the conversation. Its calls are `Trajectory.user_calls`.
        source: the model's: an inference service, or an endpoint of the operator's.
        budgets: of the model's calls alone (`max_calls` None = twice the most instructions).
        max_instructions: 1 to 64; None = the whole script, and 8 of a model.
        max_tokens: of one of the model's answers, 1 to 16384; None = 1024.
        temperature: 0 to 2; None = the source's.
        timeout: seconds for one answer, retries included, at most an hour; None = 300.
    """

    instructions: Sequence[str] = ()
    prompt: str = ""
    source: Inference | Upstream = Inference()
    budgets: Budgets | None = None
    max_instructions: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.instructions, str):
            raise InvalidArgument("instructions must be a list of texts", reason="USER")
        if bool(self.instructions) == bool(self.prompt):
            raise InvalidArgument("A user must have either instructions or a prompt", reason="USER")


ModelSource: TypeAlias = Inference | Upstream | Tokenizer
"""The source of answers where the trainer gives none, and of the tokenizer for the prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRule:
    """The calls of a rollout that a model answers: those that match each condition that is set; at least one is.

    Attributes:
        from_index, until_index: position among the rollout's calls, from 0, [from, until).
        from_turn, until_turn: how many answers the call's prompt continues, token for token, [from, until): 0 is a
            conversation's first call. A compacted or edited history counts from 0 again.
        call_classes: such as main, sub_agent, compaction, title; its class when its prompt is made.
    """

    from_index: int | None = None
    until_index: int | None = None
    from_turn: int | None = None
    until_turn: int | None = None
    call_classes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.call_classes, str):
            raise InvalidArgument(f"call_classes must be a list, such as [{self.call_classes!r}]", reason="CALL_RULE")
        object.__setattr__(self, "call_classes", tuple(self.call_classes))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutModel:
    """One of several models that answer a rollout's calls. The first whose name and `calls` fit answers a call.

    Attributes:
        policy_id: the policy, which has versions of its own: 1 to 128 of letters, digits and `_ . -`.
        name: that the agent requests; empty = any name that no other model has. Of the models with one name, the last
            and no other has no `calls`.
        source: answers it as the rollout's `source` does; None = that one. It has the tokenizer and chat template of
            the rollout's source. An untrained model may be an upstream of the operator's, whose answers are text.
        trained: whether its tokens may be trained. If not, they are context.
        policy: which versions may answer. None = the rollout's constraint for a trained model, else any.
        calls: which calls it answers; None = all that no model before it takes.
        delegated: in gate mode, whether `source` answers at once and no trainer gets the call. None = if it is
            untrained and has a source of its own.
    """

    policy_id: str
    name: str = ""
    source: ModelSource | None = None
    trained: bool | None = None
    policy: PolicyConstraint | None = None
    calls: CallRule | None = None
    delegated: bool | None = None
