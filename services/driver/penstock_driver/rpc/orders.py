"""A client's RolloutSpec, checked, as an order for the domain; and the same spec as it is shown and kept.

Everything that can be wrong is found here, before anything is started, and told by field and reason. What is kept and
shown has the defaults filled in, and no upstream key, no value of a secret environment and no content of a file.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.duration_pb2 import Duration

from penstock.driver.v1 import rollout_pb2, terminal_service_pb2
from penstock.interception.v1 import interception_pb2, rollout_gate_service_pb2
from penstock.sandbox.v1 import process_service_pb2, sandbox_service_pb2
from penstock_chassis.errors import InvalidArgument, Violation
from penstock_driver import restoring, rewards
from penstock_driver.launches import AgentChoice, FileToWrite, McpServer, check_choice
from penstock_driver.ports import Command, SandboxTerms
from penstock_driver.registry import AgentRegistry
from penstock_driver.rollouts import Limits, RolloutOrder, Task, Verifier
from penstock_driver.rpc.values import (
    command_from_proto,
    duration_to_seconds,
    seconds_to_duration,
    seed_from_proto,
    struct_to_dict,
)
from penstock_driver.terminals.episodes import MAX_COMMANDS as MAX_STEPS
from penstock_driver.terminals.episodes import TerminalOrder
from penstock_driver.terminals.shell import DEFAULT_OUTPUT, MAX_OUTPUT

MAX_INSTRUCTION_BYTES: Final = 1 << 20
MAX_FILE_BYTES: Final = 16 << 20
MAX_COMMANDS: Final = 1000
MAX_ATTEMPTS: Final = 10
MAX_PATHS: Final = 256
MAX_LIMIT_S: Final = 7 * 86400.0
_TOKEN_SCOPES: Final = frozenset(interception_pb2.TokenScope.values()) - {interception_pb2.TOKEN_SCOPE_UNSPECIFIED}
_MAX_TTL_S: Final = 366 * 86_400
_MAX_PERIOD_S: Final = 86_400
_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9._/-]{0,128}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_RESERVED_LABEL: Final = "penstock_"


class _Findings:
    """The violations of one request, as they are found."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def add(self, field: str, description: str) -> None:
        self.violations.append(Violation(field, description))

    @property
    def summary(self) -> str:
        return "; ".join(f"{item.field}: {item.description}" for item in self.violations[:5])

    def raise_if_any(self) -> None:
        if self.violations:
            raise InvalidArgument(self.summary, reason="ROLLOUT_INVALID", violations=self.violations)

    def raise_for_terminal(self) -> None:
        if self.violations:
            raise InvalidArgument(self.summary, reason="TERMINAL_INVALID", violations=self.violations)

    def raise_for_step(self) -> None:
        if self.violations:
            raise InvalidArgument(self.summary, reason="STEP_INVALID", violations=self.violations)


def order_from_proto(spec: rollout_pb2.RolloutSpec, registry: AgentRegistry) -> RolloutOrder:
    """The order; InvalidArgument with every wrong field, NotFound (AGENT_UNKNOWN)."""
    found = _Findings()
    if not spec.HasField("task"):
        found.add("spec.task", "is required")
    if not spec.agent.name:
        found.add("spec.agent.name", "is required")
    if spec.mode not in interception_pb2.Mode.values()[1:]:
        found.add("spec.mode", "is required: MODE_BLACK_BOX, MODE_TRANSPARENT_PROXY or MODE_INTERCEPTION_GATE")
    found.raise_if_any()
    agent = registry.get(spec.agent.name, spec.agent.spec_sha256)
    task = _task(spec.task, found)
    limits = _limits(spec.limits, agent.spec.default_timeout_s, found)
    _check_labels(spec, found)
    _check_source(spec, found)
    _check_gate_terms(spec, found)
    sandbox = _sandbox_terms(spec.sandbox, found)
    if spec.HasField("max_attempts") and not 1 <= spec.max_attempts <= MAX_ATTEMPTS:
        found.add("spec.max_attempts", f"expected 1 to {MAX_ATTEMPTS}")
    found.raise_if_any()
    choice = AgentChoice(
        options=struct_to_dict(spec.agent.options),
        skip_permissions=spec.agent.skip_permissions,
        mcp_servers=tuple(_server(server) for server in spec.agent.mcp_servers),
        seed=spec.seed if spec.HasField("seed") else None,
    )
    check_choice(agent.spec, choice, task.instruction)
    return RolloutOrder(
        agent=agent,
        choice=choice,
        task=task,
        limits=limits,
        sandbox=sandbox,
        gate_terms=_gate_terms(spec).SerializeToString(),
        run_id=spec.run_id if spec.HasField("run_id") else None,
        labels=dict(spec.labels),
        max_attempts=spec.max_attempts if spec.HasField("max_attempts") else 1,
    )


def terminal_from_proto(request: terminal_service_pb2.OpenTerminalRequest) -> TerminalOrder:
    """The order of a terminal episode; InvalidArgument (TERMINAL_INVALID) with every wrong field."""
    found = _Findings()
    if not request.HasField("task"):
        found.add("task", "is required")
    found.raise_for_terminal()
    wall_s = _seconds(request, "wall_time", 1800.0, "spec", found)
    limit, commands = DEFAULT_OUTPUT, MAX_STEPS
    if request.HasField("output_limit_bytes"):
        limit = request.output_limit_bytes
        if not 0 <= limit <= MAX_OUTPUT:
            found.add("spec.output_limit_bytes", f"expected 0 to {MAX_OUTPUT}")
    if request.HasField("max_steps"):
        commands = request.max_steps
        if not 1 <= commands <= MAX_STEPS:
            found.add("spec.max_steps", f"expected 1 to {MAX_STEPS}")
    _check_labels(rollout_pb2.RolloutSpec(labels=request.labels), found)
    task = _task(request.task, found)
    if task.verifier and task.verifier.fresh_fork:
        found.add("spec.task.verifier.fresh_fork", "a terminal episode is graded in its own sandbox: leave it unset")
    if task.verifier and task.verifier.restore:
        found.add("spec.task.verifier.restore", "nothing is restored in a terminal episode: have a command do it")
    if task.keep_diff:
        found.add("spec.task.keep_diff", "no diff is kept of a terminal episode: have a command print it")
    if task.keep_files:
        found.add("spec.task.keep_files", "no files are kept of a terminal episode: have a command print them")
    order = TerminalOrder(
        task=task,
        sandbox=_sandbox_terms(request.sandbox, found),
        limits=Limits(agent_s=wall_s),
        command_s=_seconds(request, "command_timeout", 120.0, "spec", found),
        output_limit=limit,
        max_commands=commands,
        labels=dict(request.labels),
    )
    # A terminal's fields have the names of a rollout's, one level up.
    found.violations = [Violation(item.field.removeprefix("spec."), item.description) for item in found.violations]
    found.raise_for_terminal()
    return order


def command_of_step(wire: process_service_pb2.Command) -> Command:
    """What a step of a terminal episode runs; InvalidArgument (STEP_INVALID)."""
    found = _Findings()
    command = _commands([wire], "command", found)[0]
    if command.user:
        found.add("command.user", "commands of an episode run as its sandbox's user")
    if command.secret_env:
        found.add("command.secret_env", "what the shell of an episode is given stays in it: it can keep no secret")
    found.raise_for_step()
    return command


def as_applied(spec: rollout_pb2.RolloutSpec, order: RolloutOrder) -> rollout_pb2.RolloutSpec:
    """The spec to keep and to show."""
    shown = rollout_pb2.RolloutSpec()
    shown.CopyFrom(spec)
    shown.agent.spec_sha256 = order.agent.sha256
    for option in order.agent.spec.options:
        if option.default is not None and option.name not in shown.agent.options:
            shown.agent.options[option.name] = option.default
    if shown.source.upstream.HasField("caller"):
        shown.source.upstream.caller.api_key = ""
    for server in shown.agent.mcp_servers:
        for name in list(server.stdio.secret_env) if server.HasField("stdio") else ():
            server.stdio.secret_env[name] = ""
    without_contents(shown.task)
    for name in ("prepare", "setup", "agent", "verify"):
        getattr(shown.limits, name).CopyFrom(seconds_to_duration(getattr(order.limits, f"{name}_s")))
    fill_verifier(shown.task, order.task)
    return shown


def without_contents(task: rollout_pb2.Task) -> None:
    """Take the contents of files and the values of secrets out of a task that is kept and shown."""
    for file in [*task.files, *task.verifier.files]:
        file.content = b""
    for command in [*task.setup, *task.verifier.commands]:
        for name in list(command.secret_env):
            command.secret_env[name] = ""


def fill_verifier(shown: rollout_pb2.Task, task: Task) -> None:
    """Fill in what the verifier leaves to the driver."""
    if task.verifier:
        shown.verifier.range_min, shown.verifier.range_max = task.verifier.range_min, task.verifier.range_max
        shown.verifier.command_timeout.CopyFrom(seconds_to_duration(task.verifier.command_timeout_s))


def preparation_key(
    task: rollout_pb2.Task, sandbox: rollout_pb2.SandboxChoice, limits: rollout_pb2.Limits | None = None
) -> str:
    """A digest of all that a prepared state depends on beside an agent: equal keys share it."""
    relevant = rollout_pb2.RolloutSpec(
        task=rollout_pb2.Task(files=task.files, setup=task.setup, env=task.env if task.setup else {}),
        sandbox=sandbox,
        limits=rollout_pb2.Limits(setup=limits.setup if limits and limits.HasField("setup") else None),
    )
    return hashlib.sha256(relevant.SerializeToString(deterministic=True)).hexdigest()


def _sandbox_terms(sandbox: rollout_pb2.SandboxChoice, found: _Findings) -> SandboxTerms:
    resources = sandbox.resources
    for name in ("cpu", "memory_bytes", "pids", "disk_bytes"):
        value = getattr(resources, name) if resources.HasField(name) else None
        if value is not None and not (math.isfinite(value) and value > 0):
            found.add(f"spec.sandbox.resources.{name}", "expected a positive number")
    return SandboxTerms(
        backend=sandbox.backend,
        image=sandbox.image,
        user=sandbox.user,
        own_kernel=sandbox.own_kernel,
        cpu=resources.cpu if resources.HasField("cpu") else None,
        memory_bytes=resources.memory_bytes if resources.HasField("memory_bytes") else None,
        pids=resources.pids if resources.HasField("pids") else None,
        disk_bytes=resources.disk_bytes if resources.HasField("disk_bytes") else None,
        setup_network=sandbox.setup_network.SerializeToString(deterministic=True)
        if sandbox.HasField("setup_network")
        else b"",
    )


def _gate_terms(spec: rollout_pb2.RolloutSpec) -> rollout_gate_service_pb2.OpenRolloutRequest:
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
    return request


def _task(task: rollout_pb2.Task, found: _Findings) -> Task:
    size = len(task.instruction.encode())
    if not task.instruction.strip():
        found.add("spec.task.instruction", "is required")
    if size > MAX_INSTRUCTION_BYTES:
        found.add("spec.task.instruction", f"has {size} bytes, at most {MAX_INSTRUCTION_BYTES} are taken")
    if len(task.task_id) > 256:
        found.add("spec.task.task_id", "expected at most 256 characters")
    _check_variables(task.env, "spec.task.env", found)
    return Task(
        task_id=task.task_id,
        instruction=task.instruction,
        files=_files(task.files, "spec.task.files", found),
        setup=_commands(task.setup, "spec.task.setup", found),
        verifier=_verifier(task.verifier, found) if task.HasField("verifier") else None,
        env=dict(task.env),
        keep_diff=task.keep_diff,
        keep_files=task.keep_files,
    )


def _verifier(verifier: rollout_pb2.Verifier, found: _Findings) -> Verifier:
    here = "spec.task.verifier"
    if not verifier.commands:
        found.add(f"{here}.commands", "at least one is required")
    kind = verifier.WhichOneof("reward")
    if kind is None:
        found.add(f"{here}.reward", "is required: reward_file or passed_share")
    low = verifier.range_min if verifier.HasField("range_min") else 0.0
    high = verifier.range_max if verifier.HasField("range_max") else 1.0
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        found.add(f"{here}.range_max", "expected finite numbers, range_min below range_max")
    _check_grading(verifier, here, found)
    default = Verifier(commands=()).command_timeout_s
    return Verifier(
        commands=_commands(verifier.commands, f"{here}.commands", found),
        files=_files(verifier.files, f"{here}.files", found),
        reward_by_file=kind == "reward_file",
        range_min=low,
        range_max=high,
        command_timeout_s=_seconds(verifier, "command_timeout", default, here, found),
        fresh_fork=verifier.fresh_fork,
        restore=tuple(verifier.restore),
        changes_below=tuple(verifier.changes_below),
        component_ranges={name: (span.min, span.max) for name, span in verifier.component_ranges.items()},
    )


def _check_grading(verifier: rollout_pb2.Verifier, here: str, found: _Findings) -> None:
    for index, pattern in enumerate(verifier.restore):
        if why := restoring.problem(pattern):
            found.add(f"{here}.restore[{index}]", why)
    if len(verifier.restore) > MAX_PATHS:
        found.add(f"{here}.restore", f"at most {MAX_PATHS} patterns")
    if verifier.changes_below and not verifier.fresh_fork:
        found.add(f"{here}.changes_below", "is of use with fresh_fork only")
    if len(verifier.changes_below) > MAX_PATHS:
        found.add(f"{here}.changes_below", f"at most {MAX_PATHS} directories")
    for index, path in enumerate(verifier.changes_below):
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if not path or "\0" in path or ".." in parts or (path.startswith("/") and not parts):
            found.add(f"{here}.changes_below[{index}]", "expected a directory that is not the root, without '..'")
    if verifier.component_ranges and verifier.WhichOneof("reward") != "reward_file":
        found.add(f"{here}.component_ranges", "is of use with reward_file only")
    if len(verifier.component_ranges) > rewards.MAX_COMPONENTS:
        found.add(f"{here}.component_ranges", f"at most {rewards.MAX_COMPONENTS} components")
    for name, span in verifier.component_ranges.items():
        if not (math.isfinite(span.min) and math.isfinite(span.max) and span.min < span.max):
            found.add(f"{here}.component_ranges.{name[:80]}", "expected finite numbers, min below max")


def _commands(commands: Iterable[process_service_pb2.Command], where: str, found: _Findings) -> tuple[Command, ...]:
    result = []
    for index, wire in enumerate(commands):
        here = f"{where}[{index}]"
        command = command_from_proto(wire)
        if bool(command.argv) == bool(command.shell.strip()):
            found.add(f"{here}.command", "expected an argv that is not empty, or a shell text")
        if any("\0" in part for part in (*command.argv, command.shell, command.cwd)):
            found.add(here, "NUL is not allowed")
        if command.timeout_s is not None and not 0 < command.timeout_s <= MAX_LIMIT_S:
            found.add(f"{here}.timeout", "expected more than 0 and at most 7 days")
        _check_variables(command.env, f"{here}.env", found)
        _check_variables(command.secret_env, f"{here}.secret_env", found)
        result.append(command)
    if len(result) > MAX_COMMANDS:
        found.add(where, f"at most {MAX_COMMANDS} commands")
    return tuple(result)


def _files(files: Iterable[sandbox_service_pb2.SeedFile], where: str, found: _Findings) -> tuple[FileToWrite, ...]:
    result = []
    for index, wire in enumerate(files):
        here, file = f"{where}[{index}]", seed_from_proto(wire)
        if not file.path or "\0" in file.path or ".." in file.path.split("/") or file.path.endswith("/"):
            found.add(f"{here}.path", "expected the path of a file, without '..'")
        if len(file.content) > MAX_FILE_BYTES:
            found.add(f"{here}.content", f"at most {MAX_FILE_BYTES} bytes")
        if not 0 <= file.mode <= 0o777:
            found.add(f"{here}.mode", "expected permission bits, 0 to 0777")
        result.append(file)
    return tuple(result)


def _limits(limits: rollout_pb2.Limits, agent_default_s: float, found: _Findings) -> Limits:
    default, here = Limits(agent_s=agent_default_s), "spec.limits"
    return Limits(
        prepare_s=_seconds(limits, "prepare", default.prepare_s, here, found),
        setup_s=_seconds(limits, "setup", default.setup_s, here, found),
        agent_s=_seconds(limits, "agent", default.agent_s, here, found),
        verify_s=_seconds(limits, "verify", default.verify_s, here, found),
    )


def _seconds(
    message: rollout_pb2.Limits | rollout_pb2.Verifier | terminal_service_pb2.OpenTerminalRequest,
    name: str,
    default: float,
    where: str,
    found: _Findings,
) -> float:
    if not message.HasField(name):  # type: ignore[arg-type]
        return default
    value: Duration = getattr(message, name)
    seconds = duration_to_seconds(value)
    if not 0 < seconds <= MAX_LIMIT_S:
        found.add(f"{where}.{name}", "expected more than 0 and at most 7 days")
    return seconds


def _check_labels(spec: rollout_pb2.RolloutSpec, found: _Findings) -> None:
    for label, value in spec.labels.items():
        if not _LABEL.fullmatch(label) or not _LABEL_VALUE.fullmatch(value):
            found.add(
                f"spec.labels.{label[:80]}", "keys and values are letters, digits and . _ / -, at most 63 and 128"
            )
        if label.startswith(_RESERVED_LABEL):
            found.add(f"spec.labels.{label[:80]}", f"labels that begin with {_RESERVED_LABEL} are the service's own")
    if spec.HasField("run_id") and not _LABEL.fullmatch(spec.run_id):
        found.add("spec.run_id", "expected 1 to 63 letters, digits and . _ / -")


def _check_gate_terms(spec: rollout_pb2.RolloutSpec, found: _Findings) -> None:
    """What the gate would refuse once the rollout has begun."""
    _check_budgets(spec.budgets, "spec.budgets", found)
    _check_budgets(spec.run_budgets, "spec.run_budgets", found)
    if spec.HasField("run_budgets") and not spec.run_id:
        found.add("spec.run_budgets", "needs run_id")
    for index, scope in enumerate(spec.token_terms.scopes):
        if scope not in _TOKEN_SCOPES:
            found.add(f"spec.token_terms.scopes[{index}]", "unknown")
    if spec.token_terms.HasField("ttl") and not 1 <= duration_to_seconds(spec.token_terms.ttl) <= _MAX_TTL_S:
        found.add("spec.token_terms.ttl", "expected 1 second to 1 year")
    for field, value in spec.policy.ListFields():
        if value < 0:
            found.add(f"spec.policy.{field.name}", "expected at least 0")


def _check_budgets(
    budgets: interception_pb2.Budgets | interception_pb2.RunBudgets, where: str, found: _Findings
) -> None:
    for field, value in budgets.ListFields():
        if isinstance(value, Duration):
            if duration_to_seconds(value) <= 0:
                found.add(f"{where}.{field.name}", "expected more than 0")
        elif isinstance(value, interception_pb2.CallRate):
            if value.calls < 1:
                found.add(f"{where}.call_rate.calls", "expected at least 1")
            if value.HasField("period") and not 0 < duration_to_seconds(value.period) <= _MAX_PERIOD_S:
                found.add(f"{where}.call_rate.period", "expected more than 0 and at most 1 day")
            if value.HasField("burst") and value.burst < 1:
                found.add(f"{where}.call_rate.burst", "expected at least 1")
        elif value < 1:
            found.add(f"{where}.{field.name}", "expected at least 1")


def _check_source(spec: rollout_pb2.RolloutSpec, found: _Findings) -> None:
    source, upstream = spec.source, spec.source.upstream
    kind = source.WhichOneof("source")
    if kind == "upstream" and upstream.WhichOneof("endpoint") is None:
        found.add("spec.source.upstream.endpoint", "is required: the name of an endpoint, or the caller's own")
    if upstream.HasField("caller"):
        key = upstream.caller.api_key
        if key and (not key.strip() or key != key.strip() or not key.isascii() or not key.isprintable()):
            found.add("spec.source.upstream.caller.api_key", "expected printable ASCII without whitespace around it")
    if spec.mode == interception_pb2.MODE_BLACK_BOX and kind != "upstream":
        found.add("spec.source", "black box mode needs an upstream, which answers the agent")
    if kind == "tokenizer" and spec.mode != interception_pb2.MODE_INTERCEPTION_GATE:
        found.add("spec.source.tokenizer", "only in gate mode: nobody else would answer")


def _check_variables(variables: Mapping[str, str], where: str, found: _Findings) -> None:
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name):
            found.add(f"{where}.{name[:80]}", "is not the name of an environment variable")
        if "\0" in value:
            found.add(f"{where}.{name[:80]}", "NUL is not allowed")


def _server(server: rollout_pb2.McpServer) -> McpServer:
    stdio = server.stdio
    return McpServer(server.name, tuple(stdio.args), dict(stdio.env), dict(stdio.secret_env), server.url)
