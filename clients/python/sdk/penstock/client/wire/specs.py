"""Converts the client's requests (tasks, agents, limits) to protos."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

from google.protobuf.struct_pb2 import Struct

from penstock.client.errors import InvalidArgument
from penstock.client.tasks import spec as tasks
from penstock.client.tasks.task import Task
from penstock.client.wire.chat import duration, number
from penstock.client.wire.fingerprints import fingerprint
from penstock.driver.v1 import rollout_pb2
from penstock.interception.v1 import interception_pb2
from penstock.sandbox.v1 import process_service_pb2, sandbox_pb2, sandbox_service_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import writer


def struct(values: Mapping[str, Any], what: str) -> Struct:
    """Converts JSON values to a Struct.

    Raises:
        InvalidArgument: a value has no JSON form.
    """
    message = Struct()
    try:
        message.update(dict(values))
    except (ValueError, TypeError, AttributeError):
        raise InvalidArgument(f"{what} has a value that JSON cannot represent", reason="NOT_JSON") from None
    return message


command: Final = writer(tasks.Command, process_service_pb2.Command, renamed={"argv": "argv.args"})
"""Converts a command."""

seed_file: Final = writer(tasks.SeedFile, sandbox_service_pb2.SeedFile)
"""Converts a file to write."""


def _image(value: tasks.Verifier) -> str:
    if value.build is not None and not value.image:
        raise InvalidArgument(
            "The verifier has a Dockerfile: pass penstock.tasks.images.with_image(task)", reason="TASK_IMAGE"
        )
    return value.image


def _judge(value: tasks.Judge) -> rollout_pb2.Judge:
    return rollout_pb2.Judge(
        source=source(value.source), budgets=None if value.budgets is None else budgets(value.budgets)
    )


def user(value: tasks.User) -> rollout_pb2.User:
    """Converts a user."""
    message = rollout_pb2.User(max_instructions=value.max_instructions)
    if value.instructions:
        message.script.instructions.extend(value.instructions)
        return message
    message.model.CopyFrom(
        rollout_pb2.UserModel(
            source=source(value.source),
            prompt=value.prompt,
            budgets=None if value.budgets is None else budgets(value.budgets),
            max_tokens=value.max_tokens,
            temperature=value.temperature,
            timeout=duration(value.timeout),
        )
    )
    return message


verifier: Final = writer(
    tasks.Verifier,
    rollout_pb2.Verifier,
    left_out=("reward", "range", "build"),
    by={
        "image": _image,
        "judge": lambda value: None if value.judge is None else _judge(value.judge),
        "reward_file": lambda value: rollout_pb2.RewardFile() if value.reward is tasks.RewardFrom.FILE else None,
        "passed_share": lambda value: (
            None if value.reward is tasks.RewardFrom.FILE else rollout_pb2.RewardPassedShare()
        ),
        "range_min": lambda value: value.range and value.range[0],
        "range_max": lambda value: value.range and value.range[1],
        "component_ranges": lambda value: {
            name: rollout_pb2.RewardRange(min=low, max=high) for name, (low, high) in value.component_ranges.items()
        },
    },
)
"""Converts a verifier."""

task: Final = writer(
    Task,
    rollout_pb2.Task,
    left_out=(
        "sandbox",
        "limits",
        "budgets",
        "labels",
        "solution",
        "build",
        "companion_builds",
        "keep_end_state",
        "mcp_servers",
        "models",
        "user",
    ),
    by={"metadata": lambda value: struct(value.metadata, "metadata") if value.metadata else None},
)
"""Converts a task; the rollout's terms and agent have what it says of its sandbox, limits, models and so on."""


def digest(value: Task) -> str:
    """Returns a hash of everything that a task's check depends on: its solution, labels and models are not in it.

    It is that of a rollout's spec with the task's own sandbox, limits, budgets, user and MCP servers and nothing else,
    of which no empty message counts: the clients of other languages make it of a spec.
    """
    message = rollout_pb2.RolloutSpec(task=task(value))
    if value.sandbox is not None and fingerprint(choice := sandbox_choice(value.sandbox)):
        message.sandbox.CopyFrom(choice)
    if value.limits is not None and fingerprint(own_limits := limits(value.limits)):
        message.limits.CopyFrom(own_limits)
    if value.budgets is not None and fingerprint(own_budgets := budgets(value.budgets)):
        message.budgets.CopyFrom(own_budgets)
    if value.user is not None:
        message.user.CopyFrom(user(value.user))
    if value.mcp_servers:
        message.agent.mcp_servers.extend(map(_mcp_server, value.mcp_servers))
    return sha256(fingerprint(message)).hexdigest()


_mcp_server: Final = writer(
    tasks.McpServer,
    rollout_pb2.McpServer,
    left_out=("args", "env", "secret_env"),
    by={
        "stdio": lambda value: (
            None
            if value.url
            else rollout_pb2.McpServer.Stdio(args=value.args, env=value.env, secret_env=value.secret_env)
        )
    },
)

agent: Final = writer(
    tasks.AgentChoice,
    rollout_pb2.AgentChoice,
    by={"options": lambda value: struct(value.options, "options") if value.options else None},
)
"""Converts an agent and its options."""

_CONTROL_TOKENS = {
    tasks.ControlTokens.PLAIN: interception_pb2.CONTROL_TOKENS_UNSPECIFIED,
    tasks.ControlTokens.PARSE: interception_pb2.CONTROL_TOKENS_PARSE,
}


def source(value: tasks.ModelSource) -> interception_pb2.ModelSource:
    """Converts the source of answers."""
    match value:
        case tasks.Inference(name, adapter, parser, control_tokens):
            return interception_pb2.ModelSource(
                inference=interception_pb2.ModelSource.Inference(name=name, adapter=adapter),
                tool_call_parser=parser,
                control_tokens=_CONTROL_TOKENS[control_tokens],
            )
        case tasks.Tokenizer(name, parser, control_tokens):
            return interception_pb2.ModelSource(
                tokenizer=interception_pb2.ModelSource.Tokenizer(name=name),
                tool_call_parser=parser,
                control_tokens=_CONTROL_TOKENS[control_tokens],
            )
        case tasks.Upstream():
            upstream = interception_pb2.Upstream(model=value.model)
            if value.name:
                upstream.name = value.name
            else:
                upstream.caller.base_url = value.base_url
                upstream.caller.api_key = value.api_key
            return interception_pb2.ModelSource(upstream=upstream)


def network(value: tasks.Network | None) -> sandbox_pb2.NetworkPolicy | None:
    """Converts a network policy; None stays unset, which is no network."""
    match value:
        case None:
            return None
        case tasks.OneEndpoint():
            return sandbox_pb2.NetworkPolicy(one_endpoint=_endpoint(value))
        case tasks.Allowlist():
            return sandbox_pb2.NetworkPolicy(allowlist=_allowlist(value))
        case tasks.OpenNetwork():
            return sandbox_pb2.NetworkPolicy(open=sandbox_pb2.OpenNetwork())


def _allowlist(value: tasks.Allowlist) -> sandbox_pb2.Allowlist:
    return sandbox_pb2.Allowlist(
        hosts=value.hosts,
        ports=value.ports,
        denied_hosts=value.denied_hosts,
        recording=value.recording,
        recorded_only=value.recorded_only,
        one_endpoint=None if value.one_endpoint is None else _endpoint(value.one_endpoint),
    )


def _endpoint(one: tasks.OneEndpoint) -> sandbox_pb2.OneEndpoint:
    return sandbox_pb2.OneEndpoint(local_port=one.local_port, upstream=one.upstream)


sandbox_choice: Final = writer(
    tasks.SandboxChoice,
    rollout_pb2.SandboxChoice,
    by={
        "setup_network": lambda value: network(value.setup_network),
        "agent_network": lambda value: None if value.agent_network is None else _allowlist(value.agent_network),
        "verifier_network": lambda value: (
            None if value.verifier_network is None else _allowlist(value.verifier_network)
        ),
    },
)
"""Converts a rollout's sandbox choice."""

limits: Final = writer(tasks.Limits, rollout_pb2.Limits)
"""Converts time limits in seconds."""

budgets: Final = writer(tasks.Budgets, interception_pb2.Budgets)
"""Converts a rollout's limits at the gate."""

run_budgets: Final = writer(tasks.RunBudgets, interception_pb2.RunBudgets)
"""Converts a run's limits at the gate."""

token_terms: Final = writer(
    tasks.AgentKeyTerms,
    interception_pb2.TokenTerms,
    by={"scopes": lambda value: [number(interception_pb2.TokenScope, scope, "TOKEN_SCOPE_") for scope in value.scopes]},
)
"""Converts the terms of the agent key; InvalidArgument for a scope that there is not."""

policy: Final = writer(tasks.PolicyConstraint, interception_pb2.PolicyVersionConstraint)
"""Converts the constraint on policy versions."""

writer(
    tasks.CallRule,
    interception_pb2.CallRule,
    by={
        "call_classes": lambda value: [
            number(trajectory_pb2.CallClass, item, "CALL_CLASS_") for item in value.call_classes
        ]
    },
)
model: Final = writer(
    tasks.RolloutModel,
    interception_pb2.RolloutModel,
    by={"source": lambda value: None if value.source is None else source(value.source)},
)
"""Converts one of a rollout's models; InvalidArgument for a class of calls that there is not."""


def replay(value: tasks.Replay | str) -> Any:
    """Returns the number of what further attempts replay."""
    return number(rollout_pb2.Replay, value, "REPLAY_")


def mode(value: tasks.Mode | str) -> Any:
    """Returns a mode's number."""
    return number(interception_pb2.Mode, value, "MODE_")
