"""The rules that a client's specs and requests must hold, each stated once.

All violations of a request are found here, before anything starts, and reported by field; `where` in the functions is
the path of the field that holds the checked value, empty for the request itself or ending with a dot.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import ListValue, Struct
from packaging.markers import InvalidMarker, Marker

from penstock.interception.v1 import interception_pb2, rollout_gate_service_pb2
from penstock.sandbox.v1 import sandbox_pb2
from penstock.values import companions, hosts, models, recordings
from penstock.values.locks import LockProblem, debian_lock, npm_lock, python_lock
from penstock.values.metrics import run_problem
from penstock_chassis import times
from penstock_chassis.errors import Violation
from penstock_chassis.validation import invalid, invalid_field
from penstock_driver.agents.launch import FileToWrite
from penstock_driver.domain import users
from penstock_driver.domain.ports import LIMITED, Command, Packages, SandboxTerms
from penstock_driver.domain.records import GroupPlan
from penstock_driver.domain.rollout import OF_A_JUDGE, Replay, RolloutSpec, Task, Verifier
from penstock_driver.domain.terminal_episode import MAX_COMMANDS as MAX_STEPS
from penstock_driver.domain.terminal_episode import MAX_OUTPUT, TerminalSpec
from penstock_driver.domain.users import User


class Violations:
    """The violations found so far in one request."""

    def __init__(self) -> None:
        self.found: list[Violation] = []

    def add(self, field: str, description: str) -> None:
        self.found.append(Violation(field, description))

    def refuse(self) -> None:
        """Raise InvalidArgument (FIELD_INVALID) with all violations, if there are any."""
        if self.found:
            raise invalid(self.found)


MAX_NESTED: Final = 24
"""Nesting limit of objects and lists: protobuf writes deeper messages than it reads, and a response nests a spec deeper
than a request.
"""
MAX_INSTRUCTION_BYTES: Final = 1 << 20
MAX_FILE_BYTES: Final = 16 << 20
MAX_COMMANDS: Final = 1000
MAX_COMPONENTS: Final = 256
MAX_ATTEMPTS: Final = 10
MAX_PATHS: Final = 256
IN_MEMORY: Final = frozenset({"dev", "proc", "sys", "tmp"})
"""Directories of the root that every sandbox has in memory: no diff has changes in them."""
OF_THE_KERNEL: Final = IN_MEMORY - {"tmp"}
"""Those that cannot be copied either."""
MAX_LIMIT_S: Final = 7 * 86400.0
MAX_GROUP: Final = 256
MAX_SEED: Final = (1 << 63) - 1
_MAX_TTL_S: Final = 366 * 86_400
_MAX_PERIOD_S: Final = 86_400
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9._/-]{0,128}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_RESERVED_LABEL: Final = "penstock_"
_TOKEN_SCOPES: Final = frozenset(interception_pb2.TokenScope.values()) - {interception_pb2.TOKEN_SCOPE_UNSPECIFIED}


def id_problem(value: str) -> str:
    """Why a chosen id cannot be used; empty if it can."""
    for end in (OF_A_JUDGE, users.OF_A_USER):
        if value.endswith(end):
            return f"must not end with {end}, as the gate's ids of judges and users do"
    return "" if _ID.fullmatch(value) else "expected 1 to 120 letters, digits and . _ -"


def check_chosen_id(value: str, field: str) -> None:
    """Raise InvalidArgument (FIELD_INVALID) for a chosen id that cannot be used; empty is not chosen."""
    if value and (problem := id_problem(value)):
        raise invalid_field(field, problem)


def check_group(plan: GroupPlan, found: Violations) -> None:
    if not 1 <= plan.size <= MAX_GROUP:
        found.add("size", f"expected 1 to {MAX_GROUP}")
    if not 0 <= plan.spares <= plan.size:
        found.add("spares", "expected 0 to size")
    if plan.quorum != plan.size and not 1 <= plan.quorum <= plan.size:
        found.add("quorum", "expected 1 to size")
    if plan.grace_s is not None and plan.grace_s < 0:
        found.add("stragglers.grace", "must not be negative")


def check_seeds(spec: RolloutSpec, count: int) -> None:
    """Check that each of a group's `count` rollouts has a seed. InvalidArgument (FIELD_INVALID)."""
    seed = spec.choice.seed
    if seed is not None and seed + count - 1 > MAX_SEED:
        raise invalid_field("spec.seed", f"at most {MAX_SEED - count + 1}: the seeds of the group count up from it")


def check_recordings(spec: RolloutSpec) -> None:
    """Check the recordings that a client names. InvalidArgument (FIELD_INVALID).

    A branch's spec has its parent's, which the driver named.
    """
    found = Violations()
    for name, listed in (("agent_network", spec.agent_network), ("verifier_network", spec.verifier_network)):
        if listed is not None:
            _check_recording(listed, f"spec.sandbox.{name}", found)
    found.refuse()


def check_rollout(spec: RolloutSpec, found: Violations) -> None:
    """Check a rollout's whole spec, but for its agent's options (`launch.check_choice`)."""
    where = "spec."
    _check_task(spec.task, where, found)
    check_nesting(spec.request.task.metadata, f"{where}task.metadata", found)
    check_nesting(spec.request.agent.options, f"{where}agent.options", found)
    for name in ("prepare", "setup", "agent", "verify"):
        _check_limit(getattr(spec.limits, f"{name}_s"), f"{where}limits.{name}", found)
    _check_labels(spec.labels, where, found)
    if spec.run_id is not None and (problem := run_problem(spec.run_id)):
        found.add(f"{where}run_id", problem)
    _check_gate_terms(spec.gate_terms, where, found)
    _check_sandbox(spec.sandbox, where, found)
    _check_networks(spec, where, found)
    if spec.sandbox.companions:
        _check_grading_beside(spec, where, found)
    _check_packages(spec.packages, where, found)
    if spec.user is not None:
        _check_user(spec, spec.user, f"{where}user", found)
    if not 1 <= spec.max_attempts <= MAX_ATTEMPTS:
        found.add(f"{where}max_attempts", f"expected 1 to {MAX_ATTEMPTS}")


def _check_user(spec: RolloutSpec, user: User, here: str, found: Violations) -> None:
    agent = spec.agent.spec
    if agent.resume is None:
        found.add(here, f"agent {agent.name} takes one instruction: its spec has no resume")
    for field, problem in users.problems(user):
        found.add(f"{here}{field}", problem)
    if user.model is None:
        return
    _check_model(user.model.terms, f"{here}.model", "a user", found)
    if spec.replay is Replay.EXACT:
        found.add(
            "spec.replay", "a further attempt's user writes something else: with a model as user, nothing is exact"
        )


def check_terminal(spec: TerminalSpec, found: Violations) -> None:
    _check_limit(spec.limits.agent_s, "wall_time", found)
    _check_limit(spec.command_s, "command_timeout", found)
    if not 0 <= spec.output_limit <= MAX_OUTPUT:
        found.add("output_limit_bytes", f"expected 0 to {MAX_OUTPUT}")
    if not 1 <= spec.max_commands <= MAX_STEPS:
        found.add("max_steps", f"expected 1 to {MAX_STEPS}")
    _check_labels(spec.labels, "", found)
    _check_task(spec.task, "", found)
    verifier = spec.task.verifier
    if verifier and verifier.fresh_fork:
        found.add("task.verifier.fresh_fork", "a terminal episode is graded in its own sandbox: leave it unset")
    if verifier and (named := verifier.needs_fork):
        found.add(f"task.verifier.{named}", "a terminal episode is graded in its own sandbox: leave it unset")
    if verifier and verifier.restore:
        found.add("task.verifier.restore", "a terminal episode restores no files: use a command")
    if spec.task.keep_diff:
        found.add("task.keep_diff", "a terminal episode keeps no diff: print it by a command")
    if spec.task.keep_files:
        found.add("task.keep_files", "a terminal episode keeps no files: print them by a command")
    _check_sandbox(spec.sandbox, "", found)
    for name in ("agent_network", "verifier_network"):
        if spec.request.sandbox.HasField(name):
            found.add(
                f"sandbox.{name}", "a terminal episode has no agent and one sandbox: only its setup has a network"
            )
    _check_packages(spec.packages, "", found)


def check_step_command(command: Command, found: Violations) -> None:
    """Check the command of a terminal episode's step."""
    _check_commands([command], "command", found)
    if command.user:
        found.add("command.user", "commands of an episode run as its sandbox's user")
    if command.secret_env:
        found.add("command.secret_env", "an episode's shell keeps its environment, so it cannot have secrets")


def restore_problem(pattern: str) -> str:
    """Why a pattern of paths to restore cannot be used; empty if it can."""
    names = [name for name in pattern.split("/") if name not in ("", ".")]
    if not names or "\0" in pattern or ".." in names:
        return "expected a path or a pattern of paths, without '..'"
    if any("**" in name and name != "**" for name in names):
        return "'**' must be alone between slashes"
    if set(names) <= {"**", "~"}:
        return "would restore everything, the agent's work too"
    return ""


def _check_task(task: Task, where: str, found: Violations) -> None:
    here = f"{where}task"
    size = len(task.instruction.encode())
    if not task.instruction.strip():
        found.add(f"{here}.instruction", "is required")
    if size > MAX_INSTRUCTION_BYTES:
        found.add(f"{here}.instruction", f"has {size} bytes; at most {MAX_INSTRUCTION_BYTES} are allowed")
    if len(task.task_id) > 256:
        found.add(f"{here}.task_id", "expected at most 256 characters")
    _check_variables(task.env, f"{here}.env", found)
    _check_files(task.files, f"{here}.files", found)
    _check_commands(task.setup, f"{here}.setup", found)
    if task.verifier:
        _check_verifier(task.verifier, f"{here}.verifier", found)


def _check_verifier(verifier: Verifier, here: str, found: Violations) -> None:
    if not verifier.commands:
        found.add(f"{here}.commands", "at least one is required")
    if not _is_range(verifier.range_min, verifier.range_max):
        found.add(f"{here}.range_max", "expected finite numbers, range_min below range_max")
    for index, pattern in enumerate(verifier.restore):
        if problem := restore_problem(pattern):
            found.add(f"{here}.restore[{index}]", problem)
    if len(verifier.restore) > MAX_PATHS:
        found.add(f"{here}.restore", f"at most {MAX_PATHS} patterns")
    if verifier.changes_below and verifier.fresh_fork is False:
        found.add(f"{here}.changes_below", "needs a fresh fork, but fresh_fork is false")
    if verifier.fresh_fork is False and (named := verifier.needs_fork):
        found.add(f"{here}.{named}", "needs a fresh fork, but fresh_fork is false")
    if verifier.sandbox.user and not verifier.sandbox.image:
        found.add(f"{here}.user", "needs an image of the verifier's own")
    _check_resources(verifier.sandbox, here, found)
    _check_taken(verifier, here, found)
    if verifier.component_ranges and not verifier.reward_by_file:
        found.add(f"{here}.component_ranges", "needs reward_file")
    if len(verifier.component_ranges) > MAX_COMPONENTS:
        found.add(f"{here}.component_ranges", f"at most {MAX_COMPONENTS} components")
    for name, (low, high) in verifier.component_ranges.items():
        if not _is_range(low, high):
            found.add(f"{here}.component_ranges.{name[:80]}", "expected finite numbers, min below max")
    _check_commands(verifier.commands, f"{here}.commands", found)
    _check_commands(verifier.collect, f"{here}.collect", found)
    _check_files(verifier.files, f"{here}.files", found)
    _check_limit(verifier.command_timeout_s, f"{here}.command_timeout", found)
    if verifier.judge is not None:
        _check_model(verifier.judge, f"{here}.judge", "a judge", found)


def _check_model(terms: rollout_gate_service_pb2.OpenRolloutRequest, here: str, who: str, found: Violations) -> None:
    """Check the model of a judge or of a user."""
    _check_source(terms, f"{here}.", found)
    _check_budgets(terms.budgets, f"{here}.budgets", found)
    if terms.source.upstream.HasField("caller"):
        found.add(f"{here}.source.upstream.caller", f"{who} is one of the operator's: name an endpoint")


def _check_taken(verifier: Verifier, here: str, found: Violations) -> None:
    """Check what a fresh fork gets of the agent's work."""
    if len(verifier.changes_below) > MAX_PATHS:
        found.add(f"{here}.changes_below", f"at most {MAX_PATHS} directories")
    for index, path in enumerate(verifier.changes_below):
        if problem := _taken_problem(path, "a directory", IN_MEMORY):
            found.add(f"{here}.changes_below[{index}]", problem)
    if len(verifier.copies) > MAX_PATHS:
        found.add(f"{here}.copies", f"at most {MAX_PATHS} paths")
    for index, copied in enumerate(verifier.copies):
        problem = _taken_problem(copied.path, "a path", OF_THE_KERNEL)
        if not copied.path.startswith("/") or copied.path.startswith("//"):
            problem = "expected an absolute path"
        if problem:
            found.add(f"{here}.copies[{index}].path", problem)
        if len(copied.exclude) > MAX_PATHS:
            found.add(f"{here}.copies[{index}].exclude", f"at most {MAX_PATHS} patterns")
        if outer := _around(copied.path, [other.path for other in verifier.copies[:index]]):
            found.add(f"{here}.copies[{index}].path", f"is, contains or is in {outer}, which is copied already")
        for number, pattern in enumerate(copied.exclude):
            if not pattern or "/" in pattern or "\0" in pattern:
                found.add(f"{here}.copies[{index}].exclude[{number}]", "expected a pattern of names, without '/'")


def _around(path: str, others: Iterable[str]) -> str:
    """The first of other absolute paths that is the same, contains this one or is in it; empty if there is none."""
    parts = _parts(path)
    for other in others:
        known = _parts(other)
        common = min(len(parts), len(known))
        if parts[:common] == known[:common]:
            return other
    return ""


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _taken_problem(path: str, what: str, memory: Collection[str]) -> str:
    """Why nothing can be taken from a path of the agent's sandbox; empty if it can."""
    parts = _parts(path)
    if not path or "\0" in path or ".." in parts or (path.startswith("/") and not parts):
        return f"expected {what} that is not the root, without '..'"
    if path.startswith("/") and parts[0] in memory:
        return f"/{parts[0]} is memory, and what is there is in no fork: name {what} elsewhere"
    return ""


def _is_range(low: float, high: float) -> bool:
    return math.isfinite(low) and math.isfinite(high) and low < high


def _check_commands(commands: Iterable[Command], where: str, found: Violations) -> None:
    count = 0
    for count, command in enumerate(commands, 1):
        here = f"{where}[{count - 1}]"
        if bool(command.argv) == bool(command.shell.strip()):
            found.add(f"{here}.command", "expected an argv that is not empty, or a shell text")
        if any("\0" in part for part in (*command.argv, command.shell, command.cwd)):
            found.add(here, "NUL is not allowed")
        if command.timeout_s is not None:
            _check_limit(command.timeout_s, f"{here}.timeout", found)
        _check_variables(command.env, f"{here}.env", found)
        _check_variables(command.secret_env, f"{here}.secret_env", found)
    if count > MAX_COMMANDS:
        found.add(where, f"at most {MAX_COMMANDS} commands")


def _check_files(files: Iterable[FileToWrite], where: str, found: Violations) -> None:
    for index, file in enumerate(files):
        here = f"{where}[{index}]"
        if not file.path or "\0" in file.path or ".." in file.path.split("/") or file.path.endswith("/"):
            found.add(f"{here}.path", "expected the path of a file, without '..'")
        if len(file.content) > MAX_FILE_BYTES:
            found.add(f"{here}.content", f"at most {MAX_FILE_BYTES} bytes")
        if not 0 <= file.mode <= 0o777:
            found.add(f"{here}.mode", "expected permission bits, 0 to 0777")


def _check_limit(seconds: float, where: str, found: Violations) -> None:
    if not 0 < seconds <= MAX_LIMIT_S:
        found.add(where, "expected more than 0 and at most 7 days")


def _check_labels(labels: Mapping[str, str], where: str, found: Violations) -> None:
    for label, value in labels.items():
        here = f"{where}labels.{label[:80]}"
        if not _LABEL.fullmatch(label) or not _LABEL_VALUE.fullmatch(value):
            found.add(here, "keys and values are letters, digits and . _ / -, at most 63 and 128")
        if label.startswith(_RESERVED_LABEL):
            found.add(here, f"labels that begin with {_RESERVED_LABEL} are reserved")


def _check_variables(variables: Mapping[str, str], where: str, found: Violations) -> None:
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name):
            found.add(f"{where}.{name[:80]}", "is not a valid name of an environment variable")
        if "\0" in value:
            found.add(f"{where}.{name[:80]}", "NUL is not allowed")


def _check_sandbox(terms: SandboxTerms, where: str, found: Violations) -> None:
    if terms.setup_network is not None and terms.setup_network.HasField("allowlist"):
        listed, here = terms.setup_network.allowlist, f"{where}sandbox.setup_network.allowlist"
        _check_allowlist(listed, here, found)
        _check_recording(listed, here, found)
    _check_resources(terms, f"{where}sandbox", found)
    for place, problem in companions.problems(terms.companions):
        found.add(f"{where}sandbox.companions{place}", problem)


def _check_resources(terms: SandboxTerms, here: str, found: Violations) -> None:
    for name in LIMITED:
        value = getattr(terms, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            found.add(f"{here}.resources.{name}", "expected a positive number")


def _check_allowlist(listed: sandbox_pb2.Allowlist, here: str, found: Violations) -> None:
    for field, index, problem in hosts.problems(listed.hosts, listed.denied_hosts):
        found.add(f"{here}.{field}" if index is None else f"{here}.{field}[{index}]", problem)
    for index, port in enumerate(listed.ports):
        if not 0 < port < 65536:
            found.add(f"{here}.ports[{index}]", "expected 1 to 65535")


def _check_recording(listed: sandbox_pb2.Allowlist, here: str, found: Violations) -> None:
    if problem := recordings.problem(listed.recording):
        found.add(f"{here}.recording", problem)


def _check_networks(spec: RolloutSpec, where: str, found: Violations) -> None:
    for name, listed in (("agent_network", spec.agent_network), ("verifier_network", spec.verifier_network)):
        if listed is None:
            continue
        _check_allowlist(listed, f"{where}sandbox.{name}", found)
        if listed.HasField("one_endpoint"):
            found.add(f"{where}sandbox.{name}.one_endpoint", "the driver sets it: leave it unset")
    verifier = spec.task.verifier
    if spec.verifier_network is not None and (verifier is None or verifier.fresh_fork is False):
        found.add(f"{where}sandbox.verifier_network", "needs a verifier that runs in a fresh fork")


def _check_grading_beside(spec: RolloutSpec, where: str, found: Violations) -> None:
    """Check that a rollout with companions can be graded where they are: in the network that they share, now."""
    if spec.keep_end_state:
        found.add(f"{where}keep_end_state", "would not have what the agent did to sandbox.companions: leave it unset")
    verifier = spec.task.verifier
    if verifier is None:
        return
    if verifier.has_own_sandbox:
        named = "image" if verifier.sandbox.image else "resources"
        found.add(f"{where}task.verifier.{named}", "a verifier has the agent's own sandbox.companions: leave it unset")
    # They could answer in the place of what a verifier reaches there.
    if verifier.judge is not None:
        found.add(f"{where}task.verifier.judge", "sandbox.companions would share its network: leave it unset")
    if spec.verifier_network is not None:
        found.add(f"{where}sandbox.verifier_network", "sandbox.companions would share it: leave it unset")


def _check_packages(packages: Packages, where: str, found: Violations) -> None:
    if packages.npm:
        try:
            npm_lock(packages.npm)
        except LockProblem as problem:
            found.add(f"{where}sandbox.packages.npm", str(problem))
    if packages.debian:
        try:
            debian_lock(packages.debian)
        except LockProblem as problem:
            found.add(f"{where}sandbox.packages.debian", str(problem))
    if not packages.python:
        return
    try:
        pinned = python_lock(packages.python)
    except LockProblem as problem:
        found.add(f"{where}sandbox.packages.python", str(problem))
        return
    for package in pinned:
        try:
            Marker(package.marker or "python_version > '3'")
        except InvalidMarker:
            found.add(f"{where}sandbox.packages.python", f"{package.name}: {package.marker} is not a condition")


def check_nesting(struct: Struct, field: str, found: Violations) -> None:
    """Check how deep a Struct's objects and lists nest, the Struct itself counted."""
    pending: list[tuple[Struct | ListValue, int]] = [(struct, 1)]
    while pending:
        holder, level = pending.pop()
        if level > MAX_NESTED:
            found.add(field, f"is nested in more than {MAX_NESTED} levels")
            return
        for value in holder.fields.values() if isinstance(holder, Struct) else holder.values:
            if value.HasField("struct_value"):
                pending.append((value.struct_value, level + 1))
            elif value.HasField("list_value"):
                pending.append((value.list_value, level + 1))


# What the gate would refuse after the rollout has begun ---------------------------------------------------------------


def _check_gate_terms(terms: rollout_gate_service_pb2.OpenRolloutRequest, where: str, found: Violations) -> None:
    _check_source(terms, where, found)
    _check_budgets(terms.budgets, f"{where}budgets", found)
    _check_budgets(terms.run_budgets, f"{where}run_budgets", found)
    if terms.HasField("run_budgets") and not terms.run_id:
        found.add(f"{where}run_budgets", "needs run_id")
    for index, scope in enumerate(terms.token_terms.scopes):
        if scope not in _TOKEN_SCOPES:
            found.add(f"{where}token_terms.scopes[{index}]", "unknown")
    if terms.token_terms.HasField("ttl") and not 1 <= times.seconds(terms.token_terms.ttl) <= _MAX_TTL_S:
        found.add(f"{where}token_terms.ttl", "expected 1 second to 1 year")
    for field, value in terms.policy.ListFields():
        if value < 0:
            found.add(f"{where}policy.{field.name}", "expected at least 0")
    for place, problem in models.problems(terms.models, terms.mode, terms.source):
        found.add(f"{where}models{place}", problem)


def _check_budgets(
    budgets: interception_pb2.Budgets | interception_pb2.RunBudgets, where: str, found: Violations
) -> None:
    for field, value in budgets.ListFields():
        if isinstance(value, Duration):
            if times.seconds(value) <= 0:
                found.add(f"{where}.{field.name}", "expected more than 0")
        elif isinstance(value, interception_pb2.CallRate):
            if value.calls < 1:
                found.add(f"{where}.call_rate.calls", "expected at least 1")
            if value.HasField("period") and not 0 < times.seconds(value.period) <= _MAX_PERIOD_S:
                found.add(f"{where}.call_rate.period", "expected more than 0 and at most 1 day")
            if value.HasField("burst") and value.burst < 1:
                found.add(f"{where}.call_rate.burst", "expected at least 1")
        elif value < 1:
            found.add(f"{where}.{field.name}", "expected at least 1")


def _check_source(terms: rollout_gate_service_pb2.OpenRolloutRequest, where: str, found: Violations) -> None:
    source, upstream = terms.source, terms.source.upstream
    kind = source.WhichOneof("source")
    if kind == "upstream" and upstream.WhichOneof("endpoint") is None:
        found.add(f"{where}source.upstream.endpoint", "is required: the name of an endpoint, or the caller's own")
    if upstream.HasField("caller"):
        key = upstream.caller.api_key
        if key and (not key.strip() or key != key.strip() or not key.isascii() or not key.isprintable()):
            found.add(f"{where}source.upstream.caller.api_key", "expected printable ASCII without whitespace around it")
    if terms.mode == interception_pb2.MODE_BLACK_BOX and kind != "upstream":
        found.add(f"{where}source", "black box mode needs an upstream")
    if kind == "tokenizer" and terms.mode != interception_pb2.MODE_INTERCEPTION_GATE:
        found.add(f"{where}source.tokenizer", "needs gate mode: a tokenizer answers no calls")
