"""A client's RolloutSpec, checked, as an order for the domain.

Everything that can be wrong is found here, before anything is started, and told by field and reason.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.duration_pb2 import Duration

from penstock.driver.v1 import rollout_pb2, terminal_service_pb2
from penstock.interception.v1 import interception_pb2
from penstock.sandbox.v1 import process_service_pb2, sandbox_service_pb2
from penstock_chassis import times
from penstock_chassis.errors import Violation
from penstock_driver import restoring, rewards
from penstock_driver.launches import AgentChoice, FileToWrite, McpServer, check_choice
from penstock_driver.ports import Command, SandboxTerms
from penstock_driver.registry import AgentRegistry
from penstock_driver.rollouts import Limits, RolloutOrder, Task, Verifier
from penstock_driver.rpc.findings import Findings
from penstock_driver.rpc.gate_terms import check_gate_terms, gate_terms
from penstock_driver.rpc.values import (
    command_from_proto,
    is_deeper,
    seed_from_proto,
    struct_to_dict,
)
from penstock_driver.terminals.episodes import MAX_COMMANDS as MAX_STEPS
from penstock_driver.terminals.episodes import TerminalOrder
from penstock_driver.terminals.shell import DEFAULT_OUTPUT, MAX_OUTPUT

MAX_NESTED: Final = 24
"""Of objects and lists: protobuf writes deeper ones than it reads, and an answer has a spec deeper than a request."""
_TOO_DEEP: Final = f"is nested in more than {MAX_NESTED} levels"
MAX_INSTRUCTION_BYTES: Final = 1 << 20
MAX_FILE_BYTES: Final = 16 << 20
MAX_COMMANDS: Final = 1000
MAX_ATTEMPTS: Final = 10
MAX_PATHS: Final = 256
MAX_LIMIT_S: Final = 7 * 86400.0
_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9._/-]{0,128}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_RESERVED_LABEL: Final = "penstock_"


def order_from_proto(spec: rollout_pb2.RolloutSpec, registry: AgentRegistry) -> RolloutOrder:
    """The order; InvalidArgument with every wrong field, NotFound (AGENT_UNKNOWN)."""
    found = Findings()
    if not spec.HasField("task"):
        found.add("spec.task", "is required")
    if not spec.agent.name:
        found.add("spec.agent.name", "is required")
    if spec.mode not in interception_pb2.Mode.values()[1:]:
        found.add("spec.mode", "is required: MODE_BLACK_BOX, MODE_TRANSPARENT_PROXY or MODE_INTERCEPTION_GATE")
    found.refuse_rollout()
    agent = registry.get(spec.agent.name, spec.agent.spec_sha256)
    task = _task(spec.task, found)
    limits = _limits(spec.limits, agent.spec.default_timeout_s, found)
    _check_labels(spec, found)
    check_gate_terms(spec, found)
    sandbox = _sandbox_terms(spec.sandbox, found)
    if spec.HasField("max_attempts") and not 1 <= spec.max_attempts <= MAX_ATTEMPTS:
        found.add("spec.max_attempts", f"expected 1 to {MAX_ATTEMPTS}")
    if is_deeper(spec.agent.options, MAX_NESTED):
        found.add("spec.agent.options", _TOO_DEEP)
    found.refuse_rollout()
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
        gate_terms=gate_terms(spec).SerializeToString(),
        run_id=spec.run_id if spec.HasField("run_id") else None,
        labels=dict(spec.labels),
        max_attempts=spec.max_attempts if spec.HasField("max_attempts") else 1,
    )


def terminal_from_proto(request: terminal_service_pb2.OpenTerminalRequest) -> TerminalOrder:
    """The order of a terminal episode; InvalidArgument (TERMINAL_INVALID) with every wrong field."""
    found = Findings()
    if not request.HasField("task"):
        found.add("task", "is required")
    found.refuse_terminal()
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
    found.refuse_terminal()
    return order


def command_of_step(wire: process_service_pb2.Command) -> Command:
    """What a step of a terminal episode runs; InvalidArgument (STEP_INVALID)."""
    found = Findings()
    command = _commands([wire], "command", found)[0]
    if command.user:
        found.add("command.user", "commands of an episode run as its sandbox's user")
    if command.secret_env:
        found.add("command.secret_env", "what the shell of an episode is given stays in it: it can keep no secret")
    found.refuse_step()
    return command


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


def _sandbox_terms(sandbox: rollout_pb2.SandboxChoice, found: Findings) -> SandboxTerms:
    resources = sandbox.resources
    for name in ("cpu", "memory_bytes", "pids", "disk_bytes", "inodes"):
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
        inodes=resources.inodes if resources.HasField("inodes") else None,
        setup_network=sandbox.setup_network.SerializeToString(deterministic=True)
        if sandbox.HasField("setup_network")
        else b"",
    )


def _task(task: rollout_pb2.Task, found: Findings) -> Task:
    size = len(task.instruction.encode())
    if not task.instruction.strip():
        found.add("spec.task.instruction", "is required")
    if size > MAX_INSTRUCTION_BYTES:
        found.add("spec.task.instruction", f"has {size} bytes, at most {MAX_INSTRUCTION_BYTES} are taken")
    if len(task.task_id) > 256:
        found.add("spec.task.task_id", "expected at most 256 characters")
    _check_variables(task.env, "spec.task.env", found)
    if is_deeper(task.metadata, MAX_NESTED):
        found.add("spec.task.metadata", _TOO_DEEP)
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


def _verifier(verifier: rollout_pb2.Verifier, found: Findings) -> Verifier:
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
        fresh_fork=verifier.fresh_fork if verifier.HasField("fresh_fork") else None,
        restore=tuple(verifier.restore),
        changes_below=tuple(verifier.changes_below),
        component_ranges={name: (span.min, span.max) for name, span in verifier.component_ranges.items()},
    )


def _check_grading(verifier: rollout_pb2.Verifier, here: str, found: Findings) -> None:
    for index, pattern in enumerate(verifier.restore):
        if why := restoring.problem(pattern):
            found.add(f"{here}.restore[{index}]", why)
    if len(verifier.restore) > MAX_PATHS:
        found.add(f"{here}.restore", f"at most {MAX_PATHS} patterns")
    if verifier.changes_below and verifier.HasField("fresh_fork") and not verifier.fresh_fork:
        found.add(f"{here}.changes_below", "is of use in a fresh fork only, and fresh_fork is false")
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


def _commands(commands: Iterable[process_service_pb2.Command], where: str, found: Findings) -> tuple[Command, ...]:
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


def _files(files: Iterable[sandbox_service_pb2.SeedFile], where: str, found: Findings) -> tuple[FileToWrite, ...]:
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


def _limits(limits: rollout_pb2.Limits, agent_default_s: float, found: Findings) -> Limits:
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
    found: Findings,
) -> float:
    if not message.HasField(name):  # type: ignore[arg-type]
        return default
    value: Duration = getattr(message, name)
    seconds = times.seconds(value)
    if not 0 < seconds <= MAX_LIMIT_S:
        found.add(f"{where}.{name}", "expected more than 0 and at most 7 days")
    return seconds


def _check_labels(spec: rollout_pb2.RolloutSpec, found: Findings) -> None:
    for label, value in spec.labels.items():
        if not _LABEL.fullmatch(label) or not _LABEL_VALUE.fullmatch(value):
            found.add(
                f"spec.labels.{label[:80]}", "keys and values are letters, digits and . _ / -, at most 63 and 128"
            )
        if label.startswith(_RESERVED_LABEL):
            found.add(f"spec.labels.{label[:80]}", f"labels that begin with {_RESERVED_LABEL} are the service's own")
    if spec.HasField("run_id") and not _LABEL.fullmatch(spec.run_id):
        found.add("spec.run_id", "expected 1 to 63 letters, digits and . _ / -")


def _check_variables(variables: Mapping[str, str], where: str, found: Findings) -> None:
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name):
            found.add(f"{where}.{name[:80]}", "is not the name of an environment variable")
        if "\0" in value:
            found.add(f"{where}.{name[:80]}", "NUL is not allowed")


def _server(server: rollout_pb2.McpServer) -> McpServer:
    stdio = server.stdio
    return McpServer(server.name, tuple(stdio.args), dict(stdio.env), dict(stdio.secret_env), server.url)
