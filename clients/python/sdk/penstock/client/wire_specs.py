"""What the client asks for (tasks, agents, limits) as protos."""

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.struct_pb2 import Struct

from penstock.client import tasks
from penstock.client.errors import InvalidArgument
from penstock.client.wire import duration, number
from penstock.driver.v1 import rollout_pb2
from penstock.interception.v1 import interception_pb2
from penstock.sandbox.v1 import process_service_pb2, sandbox_pb2, sandbox_service_pb2


def struct(values: Mapping[str, Any], what: str) -> Struct:
    """JSON values as a Struct.

    Raises:
        InvalidArgument: a value has no JSON form.
    """
    message = Struct()
    try:
        message.update(dict(values))
    except (ValueError, TypeError, AttributeError):
        raise InvalidArgument(f"{what} holds something that JSON cannot say", reason="NOT_JSON") from None
    return message


def command(value: tasks.Command) -> process_service_pb2.Command:
    """A command."""
    message = process_service_pb2.Command(
        env=value.env,
        secret_env=value.secret_env,
        cwd=value.cwd,
        timeout=duration(value.timeout),
        user=value.user,
    )
    if value.shell is not None:
        message.shell = value.shell
    else:
        message.argv.args.extend(value.argv)
    return message


def seed_files(values: Iterable[tasks.SeedFile]) -> list[sandbox_service_pb2.SeedFile]:
    """Files to put in place."""
    return [sandbox_service_pb2.SeedFile(path=item.path, content=item.content, mode=item.mode) for item in values]


def verifier(value: tasks.Verifier) -> rollout_pb2.Verifier:
    """A verifier."""
    message = rollout_pb2.Verifier(
        files=seed_files(value.files),
        commands=[command(item) for item in value.commands],
        command_timeout=duration(value.command_timeout),
        fresh_fork=value.fresh_fork,
        restore=value.restore,
        changes_below=value.changes_below,
        component_ranges={
            name: rollout_pb2.RewardRange(min=low, max=high) for name, (low, high) in value.component_ranges.items()
        },
    )
    if value.reward is tasks.RewardFrom.FILE:
        message.reward_file.SetInParent()
    else:
        message.passed_share.SetInParent()
    if value.range is not None:
        message.range_min, message.range_max = value.range
    return message


def task(value: tasks.Task) -> rollout_pb2.Task:
    """A task."""
    return rollout_pb2.Task(
        task_id=value.task_id,
        instruction=value.instruction,
        files=seed_files(value.files),
        setup=[command(item) for item in value.setup],
        verifier=None if value.verifier is None else verifier(value.verifier),
        env=value.env,
        metadata=struct(value.metadata, "metadata") if value.metadata else None,
        keep_diff=value.keep_diff,
        keep_files=value.keep_files,
    )


def agent(value: tasks.AgentChoice) -> rollout_pb2.AgentChoice:
    """An agent and its options."""
    servers = []
    for item in value.mcp_servers:
        server = rollout_pb2.McpServer(name=item.name)
        if item.url:
            server.url = item.url
        else:
            server.stdio.CopyFrom(rollout_pb2.McpServer.Stdio(args=item.args, env=item.env, secret_env=item.secret_env))
        servers.append(server)
    return rollout_pb2.AgentChoice(
        name=value.name,
        spec_sha256=value.spec_sha256,
        options=struct(value.options, "options") if value.options else None,
        skip_permissions=value.skip_permissions,
        mcp_servers=servers,
    )


_CONTROL_TOKENS = {
    tasks.ControlTokens.PLAIN: interception_pb2.CONTROL_TOKENS_UNSPECIFIED,
    tasks.ControlTokens.PARSE: interception_pb2.CONTROL_TOKENS_PARSE,
}


def source(value: tasks.ModelSource) -> interception_pb2.ModelSource:
    """Who answers where the trainer does not."""
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
    """A network policy; None stays unset, which is no network."""
    match value:
        case None:
            return None
        case tasks.OneEndpoint():
            one = sandbox_pb2.OneEndpoint(local_port=value.local_port, upstream=value.upstream)
            return sandbox_pb2.NetworkPolicy(one_endpoint=one)
        case tasks.Allowlist():
            return sandbox_pb2.NetworkPolicy(allowlist=sandbox_pb2.Allowlist(hosts=value.hosts, ports=value.ports))
        case tasks.OpenNetwork():
            return sandbox_pb2.NetworkPolicy(open=sandbox_pb2.OpenNetwork())


def resources(value: tasks.Resources | None) -> sandbox_pb2.Resources | None:
    """Limits of a sandbox."""
    if value is None:
        return None
    return sandbox_pb2.Resources(
        cpu=value.cpu,
        memory_bytes=value.memory_bytes,
        pids=value.pids,
        disk_bytes=value.disk_bytes,
        inodes=value.inodes,
    )


def sandbox_choice(value: tasks.SandboxChoice) -> rollout_pb2.SandboxChoice:
    """What a rollout chooses about its sandbox."""
    return rollout_pb2.SandboxChoice(
        backend=value.backend,
        image=value.image,
        resources=resources(value.resources),
        setup_network=network(value.setup_network),
        user=value.user,
        own_kernel=value.own_kernel,
    )


def limits(value: tasks.Limits) -> rollout_pb2.Limits:
    """Seconds for each part."""
    return rollout_pb2.Limits(
        prepare=duration(value.prepare),
        setup=duration(value.setup),
        agent=duration(value.agent),
        verify=duration(value.verify),
    )


def budgets(value: tasks.Budgets) -> interception_pb2.Budgets:
    """A rollout's limits at the gate."""
    return interception_pb2.Budgets(
        max_calls=value.max_calls,
        max_prompt_tokens=value.max_prompt_tokens,
        max_completion_tokens=value.max_completion_tokens,
        max_total_tokens=value.max_total_tokens,
        max_tokens_per_call=value.max_tokens_per_call,
        max_request_bytes=value.max_request_bytes,
        max_request_bytes_per_call=value.max_request_bytes_per_call,
        call_timeout=duration(value.call_timeout),
        wall_time=duration(value.wall_time),
        call_rate=_rate(value.call_rate),
        max_tool_calls=value.max_tool_calls,
    )


def run_budgets(value: tasks.RunBudgets) -> interception_pb2.RunBudgets:
    """A run's limits at the gate."""
    return interception_pb2.RunBudgets(
        max_calls=value.max_calls,
        max_prompt_tokens=value.max_prompt_tokens,
        max_completion_tokens=value.max_completion_tokens,
        max_total_tokens=value.max_total_tokens,
        max_request_bytes=value.max_request_bytes,
        wall_time=duration(value.wall_time),
        call_rate=_rate(value.call_rate),
    )


def token_terms(value: tasks.TokenTerms) -> interception_pb2.TokenTerms:
    """Terms of the agent's token."""
    scopes = [number(interception_pb2.TokenScope, scope, "TOKEN_SCOPE_") for scope in value.scopes]
    return interception_pb2.TokenTerms(scopes=scopes, ttl=duration(value.ttl))


def _rate(value: tasks.CallRate | None) -> interception_pb2.CallRate | None:
    if value is None:
        return None
    return interception_pb2.CallRate(calls=value.calls, period=duration(value.period), burst=value.burst)


def policy(value: tasks.PolicyConstraint) -> interception_pb2.PolicyVersionConstraint:
    """Which weights may answer."""
    return interception_pb2.PolicyVersionConstraint(min_version=value.min_version, max_staleness=value.max_staleness)


def mode(value: tasks.Mode | str) -> Any:
    """A mode's number."""
    return number(interception_pb2.Mode, value, "MODE_")
