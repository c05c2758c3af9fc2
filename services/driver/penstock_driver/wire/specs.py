"""Converts the specs in clients' requests to the domain's, which `domain.validation` checks, and to effective specs.

Only what is missing is found here: a field that is required has nothing to convert.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from google.protobuf.duration_pb2 import Duration

from penstock.driver.v1 import rollout_pb2, terminal_service_pb2
from penstock.interception.v1 import interception_pb2, rollout_gate_service_pb2
from penstock.values import reader
from penstock_chassis import times
from penstock_driver.agents.launch import AgentChoice, McpServer, check_choice
from penstock_driver.agents.registry import AgentRegistry
from penstock_driver.domain import validation
from penstock_driver.domain.ports import LIMITED, Packages, SandboxTerms
from penstock_driver.domain.rollout import Limits, Replay, RolloutSpec, Task, Verifier
from penstock_driver.domain.terminal_episode import DEFAULT_OUTPUT, MAX_COMMANDS, Action, Answer, TerminalSpec
from penstock_driver.domain.validation import Violations
from penstock_driver.wire import users
from penstock_driver.wire.converters import command_from_proto, struct_to_dict

T = TypeVar("T")

LONG_LOCKS: Final = 32 << 10
"""Bytes of a task's locks that are read on the event loop, in a few milliseconds."""
_REPLAYS: Final = {
    rollout_pb2.REPLAY_UNSPECIFIED: Replay.UNTIL_DIVERGENCE,
    rollout_pb2.REPLAY_OFF: Replay.OFF,
    rollout_pb2.REPLAY_UNTIL_DIVERGENCE: Replay.UNTIL_DIVERGENCE,
    rollout_pb2.REPLAY_EXACT: Replay.EXACT,
}


def rollout_spec(request: rollout_pb2.RolloutSpec, agents: AgentRegistry, namespace: str) -> RolloutSpec:
    """The domain's spec, checked; InvalidArgument with every wrong field, NotFound (AGENT_UNKNOWN)."""
    found = Violations()
    if not request.HasField("task"):
        found.add("spec.task", "is required")
    if not request.agent.name:
        found.add("spec.agent.name", "is required")
    if request.mode not in interception_pb2.Mode.values()[1:]:
        found.add("spec.mode", "is required: MODE_BLACK_BOX, MODE_TRANSPARENT_PROXY or MODE_INTERCEPTION_GATE")
    if request.replay not in _REPLAYS:
        found.add("spec.replay", "expected REPLAY_OFF, REPLAY_UNTIL_DIVERGENCE or REPLAY_EXACT")
    found.refuse()
    agent = agents.get(namespace, request.agent.name, request.agent.spec_sha256)
    limits = limits_from_proto(request.limits)
    if not request.limits.HasField("agent"):
        limits = replace(limits, agent_s=agent.spec.default_timeout_s)
    spec = RolloutSpec(
        agent=agent,
        choice=AgentChoice(
            options=struct_to_dict(request.agent.options),
            skip_permissions=request.agent.skip_permissions,
            mcp_servers=tuple(map(_server, request.agent.mcp_servers)),
            seed=request.seed if request.HasField("seed") else None,
        ),
        task=_task(request.task, "spec.", found),
        limits=limits,
        sandbox=_sandbox_terms(request.sandbox),
        gate_terms=_gate_terms(request),
        request=request,
        environment_key=_environment_key(namespace, request.task, request.sandbox, request.limits),
        run_id=request.run_id if request.HasField("run_id") else None,
        labels=dict(request.labels),
        max_attempts=request.max_attempts if request.HasField("max_attempts") else 1,
        replay=_REPLAYS[request.replay],
        repeatable=is_repeatable(request),
        namespace=namespace,
        user=users.user_from_proto(request),
        keep_end_state=request.keep_end_state if request.HasField("keep_end_state") else None,
        verifier_sha256=verifier_sha256(request.task.verifier) if request.task.HasField("verifier") else "",
        packages=_packages(request.sandbox.packages),
        agent_network=request.sandbox.agent_network if request.sandbox.HasField("agent_network") else None,
        verifier_network=request.sandbox.verifier_network if request.sandbox.HasField("verifier_network") else None,
    )
    validation.check_rollout(spec, found)
    found.refuse()
    check_choice(agent.spec, spec.choice, spec.task.instruction)
    return spec


async def with_locks(packages: rollout_pb2.Packages, read: Callable[[], T]) -> T:
    """Return what `read` makes of a request with these locks: in a thread if they are long, since it parses them."""
    if len(packages.python) + len(packages.npm) + len(packages.debian) > LONG_LOCKS:
        return await asyncio.to_thread(read)
    return read()


def verifier_sha256(verifier: rollout_pb2.Verifier) -> str:
    """The SHA-256 of a verifier, in hex, whatever `fresh_fork` says: the driver fills that in."""
    known = rollout_pb2.Verifier()
    known.CopyFrom(verifier)
    known.ClearField("fresh_fork")
    return hashlib.sha256(known.SerializeToString(deterministic=True)).hexdigest()


def is_repeatable(request: rollout_pb2.RolloutSpec) -> bool:
    """Whether the agent's sandbox shall be repeatable: as chosen, else unless nothing is ever replayed."""
    chosen = request.sandbox
    return chosen.repeatable if chosen.HasField("repeatable") else request.replay != rollout_pb2.REPLAY_OFF


def terminal_spec(request: terminal_service_pb2.OpenTerminalRequest, namespace: str) -> TerminalSpec:
    """The spec of a terminal episode, checked; InvalidArgument (FIELD_INVALID) with every wrong field."""
    found = Violations()
    if not request.HasField("task"):
        found.add("task", "is required")
    found.refuse()
    spec = TerminalSpec(
        task=_task(request.task, "", found),
        sandbox=_sandbox_terms(request.sandbox),
        limits=Limits(agent_s=_seconds(request, "wall_time", 1800.0)),
        request=request,
        environment_key=_environment_key(namespace, request.task, request.sandbox, rollout_pb2.Limits()),
        command_s=_seconds(request, "command_timeout", 120.0),
        output_limit=request.output_limit_bytes if request.HasField("output_limit_bytes") else DEFAULT_OUTPUT,
        max_commands=request.max_steps if request.HasField("max_steps") else MAX_COMMANDS,
        labels=dict(request.labels),
        namespace=namespace,
        packages=_packages(request.sandbox.packages),
    )
    validation.check_terminal(spec, found)
    found.refuse()
    return spec


def step_action(request: terminal_service_pb2.StepRequest) -> Action:
    """A step's action, which must be set; InvalidArgument (FIELD_INVALID) for a command that cannot run."""
    if request.WhichOneof("action") == "final_answer":
        return Answer(request.final_answer)
    found, command = Violations(), command_from_proto(request.command)
    validation.check_step_command(command, found)
    found.refuse()
    return command


def _environment_key(
    namespace: str, task: rollout_pb2.Task, sandbox: rollout_pb2.SandboxChoice, limits: rollout_pb2.Limits
) -> str:
    """A digest of what a prepared state depends on, except agent and backend: equal keys share the state.

    A default backend has no name yet: `Preflight` names it, and users of this key add the name.
    """
    relevant = rollout_pb2.RolloutSpec(
        task=rollout_pb2.Task(files=task.files, setup=task.setup, env=task.env if task.setup else {}),
        sandbox=sandbox,
        limits=rollout_pb2.Limits(setup=limits.setup if limits.HasField("setup") else None),
    )
    for name in ("backend", "repeatable", "agent_network", "verifier_network"):
        relevant.sandbox.ClearField(name)
    return hashlib.sha256(namespace.encode() + b"\0" + relevant.SerializeToString(deterministic=True)).hexdigest()


def _gate_terms(spec: rollout_pb2.RolloutSpec) -> rollout_gate_service_pb2.OpenRolloutRequest:
    """The terms as the gate expects them, without the fields that the driver adds when it opens the rollout."""
    request = rollout_gate_service_pb2.OpenRolloutRequest(mode=spec.mode)
    if spec.HasField("source"):
        request.source.CopyFrom(spec.source)
    if spec.HasField("budgets"):
        request.budgets.CopyFrom(spec.budgets)
    if spec.HasField("run_budgets"):
        request.run_budgets.CopyFrom(spec.run_budgets)
    if spec.HasField("token_terms"):
        request.token_terms.CopyFrom(spec.token_terms)
    if spec.HasField("policy"):
        request.policy.CopyFrom(spec.policy)
    if spec.HasField("run_id"):
        request.run_id = spec.run_id
    if spec.HasField("sampling_override"):
        request.sampling_override.CopyFrom(spec.sampling_override)
    request.models.extend(spec.models)
    return request


_sandbox_terms: Final = reader(
    SandboxTerms,
    rollout_pb2.SandboxChoice,
    renamed={name: f"resources.{name}" for name in LIMITED},
    left_out=("repeatable", "packages", "agent_network", "verifier_network"),
)
_packages: Final = reader(Packages, rollout_pb2.Packages)


MOST_QUESTIONS: Final = 100
"""Calls of a verifier to its judge, unless its budgets say otherwise."""


def _judge(verifier: rollout_pb2.Verifier) -> rollout_gate_service_pb2.OpenRolloutRequest | None:
    if not verifier.HasField("judge"):
        return None
    given = verifier.judge
    terms = rollout_gate_service_pb2.OpenRolloutRequest(
        mode=interception_pb2.MODE_TRANSPARENT_PROXY,
        budgets=given.budgets,
        token_terms=interception_pb2.TokenTerms(
            scopes=[interception_pb2.TOKEN_SCOPE_COMPLETIONS, interception_pb2.TOKEN_SCOPE_READ]
        ),
    )
    if given.HasField("source"):
        terms.source.CopyFrom(given.source)
    if not given.budgets.HasField("max_calls"):
        terms.budgets.max_calls = MOST_QUESTIONS
    return terms


def _verifiers_sandbox(verifier: rollout_pb2.Verifier) -> SandboxTerms:
    given = verifier.resources
    return SandboxTerms(
        image=verifier.image,
        user=verifier.user,
        **{name: getattr(given, name) for name in LIMITED if given.HasField(name)},
    )


_verifier: Final = reader(
    Verifier,
    rollout_pb2.Verifier,
    left_out=("reward_file", "passed_share", "image", "user", "resources"),
    by={
        "sandbox": _verifiers_sandbox,
        "judge": _judge,
        "reward_by_file": lambda verifier: verifier.HasField("reward_file"),
        "component_ranges": lambda verifier: {
            name: (span.min, span.max) for name, span in verifier.component_ranges.items()
        },
    },
)

_read_task: Final = reader(Task, rollout_pb2.Task, left_out=("metadata",))
limits_from_proto: Final = reader(Limits, rollout_pb2.Limits)
_server: Final = reader(
    McpServer,
    rollout_pb2.McpServer,
    renamed={name: f"stdio.{name}" for name in ("args", "env", "secret_env")},
    left_out=("headers",),
)


def _task(task: rollout_pb2.Task, where: str, found: Violations) -> Task:
    if task.HasField("verifier") and task.verifier.WhichOneof("reward") is None:
        found.add(f"{where}task.verifier.reward", "is required: reward_file or passed_share")
    return _read_task(task)


def _seconds(request: terminal_service_pb2.OpenTerminalRequest, name: str, default: float) -> float:
    value: Duration = getattr(request, name)
    return times.seconds(value) if request.HasField(name) else default  # type: ignore[arg-type]


def effective_spec(spec: RolloutSpec) -> rollout_pb2.RolloutSpec:
    """The spec to store and to return: defaults filled in, and file contents, keys and secret environments removed. Of
    locks it has digests.
    """
    wire = rollout_pb2.RolloutSpec()
    wire.CopyFrom(spec.request)
    wire.agent.spec_sha256 = spec.agent.sha256
    for option in spec.agent.spec.options:
        if option.default is not None and option.name not in wire.agent.options:
            wire.agent.options[option.name] = option.default
    if wire.source.upstream.HasField("caller"):
        wire.source.upstream.caller.api_key = ""
    for server in wire.agent.mcp_servers:
        for name in list(server.stdio.secret_env) if server.HasField("stdio") else ():
            server.stdio.secret_env[name] = ""
    wire.sandbox.repeatable = spec.repeatable
    for name in ("python", "npm", "debian"):
        if getattr(wire.sandbox.packages, name):
            digest = hashlib.sha256(getattr(wire.sandbox.packages, name).encode()).hexdigest()
            setattr(wire.sandbox.packages, name, f"sha256:{digest}")
    for name in ("prepare", "setup", "agent", "verify"):
        getattr(wire.limits, name).CopyFrom(times.duration(getattr(spec.limits, f"{name}_s")))
    make_effective(wire.task, spec.task)
    if spec.user is not None:
        users.make_effective(wire.user, spec.user)
    return wire


def make_effective(wire: rollout_pb2.Task, task: Task) -> None:
    """Remove file contents and the values of secrets from a task, and fill in its verifier's defaults."""
    for file in [*wire.files, *wire.verifier.files]:
        file.content = b""
    for command in [*wire.setup, *wire.verifier.collect, *wire.verifier.commands]:
        for name in list(command.secret_env):
            command.secret_env[name] = ""
    if task.verifier:
        wire.verifier.range_min, wire.verifier.range_max = task.verifier.range_min, task.verifier.range_max
        wire.verifier.command_timeout.CopyFrom(times.duration(task.verifier.command_timeout_s))
        wire.verifier.fresh_fork = bool(task.verifier.fresh_fork)
        if task.verifier.judge is not None:
            wire.verifier.judge.budgets.CopyFrom(task.verifier.judge.budgets)
