"""Renders a spec, a rollout's choices and a launch context into argv, environment, files and standard input.

Pure functions. Invariants: everything that `check_choice` accepts, `plan_launch` can render. The API key is only in
files and in the secret environment. Nothing goes through a shell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import tomli_w
from pydantic import JsonValue

from penstock_chassis.errors import FailedPrecondition, Violation
from penstock_chassis.validation import invalid
from penstock_driver.agents.output_events import compiled, search
from penstock_driver.agents.specs import MAX_INSTRUCTION_ARGV_BYTES, AgentSpec, ConfigFile, Mcp, PromptDelivery
from penstock_driver.agents.templates import Absent, Scope, names, render_text, render_tree, walk

MAX_SERVERS: Final = 64
HOST_TOOLS_SERVER: Final = "penstock"
"""The gate's MCP server is configured under this name for the agent."""

_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,255}")
_NOT_FOR_YAML: Final = re.compile("[\x7f-\x9f\u2028\u2029\ufffe\uffff]")
"""Characters valid in a JSON string but not in a YAML one: agents' YAML files are written as JSON."""
_SERVER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server for the agent: a program (`args` not empty), or a URL with the `headers` to send."""

    name: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class AgentChoice:
    """A rollout's choices for its agent; `options` as given, without defaults."""

    options: Mapping[str, JsonValue] = field(default_factory=dict)
    skip_permissions: bool = False
    mcp_servers: tuple[McpServer, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """The agent's sandbox paths and endpoints. Paths are absolute, as seen in the sandbox; `wall_time_s` in seconds.

    `tools_url` is the gate's MCP server, empty for a rollout without host tools.
    """

    home: str
    workdir: str
    toolbox: str
    base_url: str
    api_key: str = field(repr=False)
    model: str
    rollout_id: str
    wall_time_s: float
    tools_url: str = ""


@dataclass(frozen=True, slots=True)
class FileToWrite:
    """A file to write before the agent starts; `path` is absolute."""

    path: str
    content: bytes
    mode: int


@dataclass(frozen=True, slots=True)
class Launch:
    """The process to start; `stdin` is None when standard input stays empty. `secret_env` is never logged."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    secret_env: Mapping[str, str] = field(repr=False)
    files: tuple[FileToWrite, ...]
    stdin: bytes | None


def check_choice(spec: AgentSpec, choice: AgentChoice, instruction: str) -> None:
    """Raise InvalidArgument (FIELD_INVALID), naming every field that the agent cannot honour (R63)."""
    violations = []
    known = ", ".join(option.name for option in spec.options) or "none"
    for name, value in choice.options.items():
        option = spec.option(name)
        problem = option.problem(value) if option else f"agent {spec.name} has no such option; it has: {known}"
        if problem:
            violations.append(Violation(f"spec.agent.options.{name}", problem))
    if choice.seed is not None and (spec.option("seed") is None or "seed" in choice.options):
        reason = "is also given as an option" if "seed" in choice.options else f"agent {spec.name} has no option seed"
        violations.append(Violation("spec.seed", reason))
    if choice.skip_permissions and not spec.can_skip_permissions:
        violations.append(Violation("spec.agent.skip_permissions", f"agent {spec.name} has no permission prompts"))
    if choice.mcp_servers and spec.mcp is None:
        violations.append(Violation("spec.agent.mcp_servers", f"agent {spec.name} cannot use MCP servers"))
    if len(choice.mcp_servers) > MAX_SERVERS:
        violations.append(Violation("spec.agent.mcp_servers", f"at most {MAX_SERVERS} MCP servers"))
    for index, server in enumerate(choice.mcp_servers[:MAX_SERVERS]):
        here = f"spec.agent.mcp_servers[{index}]"
        if not _SERVER_NAME.fullmatch(server.name):
            violations.append(Violation(f"{here}.name", "expected letters, digits, '-' and '_', at most 64"))
        if server.name == HOST_TOOLS_SERVER:
            violations.append(Violation(f"{here}.name", "is the name of the gate's own server: choose another"))
        if any(other.name == server.name for other in choice.mcp_servers[:index]):
            violations.append(Violation(f"{here}.name", "is used twice"))
        if bool(server.args) == bool(server.url):
            violations.append(Violation(f"{here}.transport", "expected a program with arguments, or a URL"))
    too_big = "\0" in instruction or len(instruction.encode()) > MAX_INSTRUCTION_ARGV_BYTES
    if spec.instruction.method is PromptDelivery.ARGV and too_big:
        limit = f"agent {spec.name} gets the instruction as an argument: at most 100 KiB and no NUL"
        violations.append(Violation("spec.task.instruction", limit))
    if violations:
        raise invalid(violations)


def check_host_tools(spec: AgentSpec, offered: Sequence[str]) -> None:
    """Raise FailedPrecondition (AGENT_WITHOUT_MCP) for host tools with an agent that cannot use them (R69)."""
    if offered and not reaches_host_tools(spec):
        raise FailedPrecondition(
            f"agent {spec.name} cannot use the host tools that the rollout is offered ({', '.join(offered)}): its "
            "spec's mcp entry has no URL and headers",
            reason="AGENT_WITHOUT_MCP",
        )


def reaches_host_tools(spec: AgentSpec) -> bool:
    """Whether the agent's own configuration of a server includes the URL and its headers."""
    if spec.mcp is None:
        return False
    server = McpServer("s", url="http://127.0.0.1/mcp", headers={"Authorization": "Bearer probe"})
    entry = json.dumps(_entry(spec.mcp, server))
    return server.url in entry and "Bearer probe" in entry


class Start(StrEnum):
    """Why an agent is started: for its only instruction, for the first of several, or for a further one."""

    ONLY = "only"
    FIRST = "first"
    FURTHER = "further"


def plan_launch(
    spec: AgentSpec, choice: AgentChoice, place: LaunchContext, instruction: str, start: Start = Start.ONLY
) -> Launch:
    """Render the spec. With FURTHER, which needs `resume`, only the files that hold the instruction are written again.

    FailedPrecondition (MODEL_NAME_UNUSABLE) if the model's name could be misread as syntax.
    """
    if not _MODEL_NAME.fullmatch(place.model):
        raise FailedPrecondition(
            "the model's name may have letters, digits and . _ : / @ + - only, 256 at most, and starts with a letter "
            "or digit: give the rollout another model name",
            reason="MODEL_NAME_UNUSABLE",
        )
    if place.tools_url:
        tools = McpServer(HOST_TOOLS_SERVER, url=place.tools_url, headers={"Authorization": f"Bearer {place.api_key}"})
        choice = replace(choice, mcp_servers=(*choice.mcp_servers, tools))
    scope = _scope(spec, choice, place, instruction)
    argv = _arguments(_argv(spec, start), scope)
    environment = dict(spec.env)
    if choice.skip_permissions:
        argv += _arguments(spec.skip_permissions_argv, scope)
        environment |= spec.skip_permissions_env
    rendered = {name: render_text(template, scope) for name, template in environment.items()}
    env = {name: value for name, value in rendered.items() if not isinstance(value, Absent)}
    secret = {name for name in env if "api_key" in names(environment[name])}
    return Launch(
        argv=tuple(argv),
        env={name: value for name, value in env.items() if name not in secret},
        secret_env={name: value for name, value in env.items() if name in secret},
        files=tuple(_files(spec, choice, place, scope, instruction, only_instruction=start is Start.FURTHER)),
        stdin=instruction.encode() if spec.instruction.method is PromptDelivery.STDIN else None,
    )


def _argv(spec: AgentSpec, start: Start) -> Sequence[str]:
    if start is Start.ONLY or spec.resume is None:
        return spec.argv
    return spec.resume.argv if start is Start.FURTHER else spec.resume.first_argv or spec.argv


def check_command(spec: AgentSpec, *, home: str, workdir: str, toolbox: str) -> tuple[str, ...]:
    """The spec's check command, empty if it has none."""
    return tuple(_arguments(spec.check_argv, {"home": home, "workdir": workdir, "toolbox": toolbox}))


def artifact_paths(spec: AgentSpec, place: LaunchContext) -> list[str]:
    """The absolute path of each artifact of the spec, in order."""
    scope: Scope = {"home": place.home, "workdir": place.workdir, "toolbox": place.toolbox}
    rendered = [render_text(artifact.path, scope) for artifact in spec.artifacts]
    return [_absolute(place.home, path) for path in rendered if not isinstance(path, Absent)]


def _scope(spec: AgentSpec, choice: AgentChoice, place: LaunchContext, instruction: str) -> Scope:
    scope: dict[str, JsonValue] = {
        "home": place.home,
        "workdir": place.workdir,
        "toolbox": place.toolbox,
        "base_url": place.base_url,
        "api_key": place.api_key,
        "model": place.model,
        "rollout_id": place.rollout_id,
        "wall_time_seconds": int(place.wall_time_s),
        "instruction": instruction,
        "instruction_path": f"{place.home}/{spec.instruction.path}",
    }
    given = dict(choice.options) | ({"seed": choice.seed} if choice.seed is not None else {})
    for option in spec.options:
        scope[f"option.{option.name}"] = option.typed(given.get(option.name, option.default))
    return scope


def _arguments(templates: Sequence[str], scope: Scope) -> list[str]:
    rendered = [render_text(template, scope) for template in templates]
    return [argument for argument in rendered if not isinstance(argument, Absent)]


def _files(
    spec: AgentSpec,
    choice: AgentChoice,
    place: LaunchContext,
    scope: Scope,
    instruction: str,
    *,
    only_instruction: bool,
) -> Sequence[FileToWrite]:
    files = []
    pending = spec.mcp if choice.mcp_servers else None
    for file in spec.files:
        if only_instruction and not _holds_instruction(file):
            continue
        path = render_text(file.path, scope)
        if isinstance(path, Absent):
            continue
        merged = pending if pending and path == pending.path else None
        content = _content(file, scope, merged, choice.mcp_servers)
        if merged:
            pending = None
        if content is not None:
            files.append(FileToWrite(_absolute(place.home, path), content, file.mode))
    if pending and not only_instruction:
        tree: dict[str, JsonValue] = {}
        _merge_servers(tree, pending, choice.mcp_servers)
        files.append(FileToWrite(_absolute(place.home, pending.path), _json(tree), 0o600))
    if spec.instruction.path is not None:
        files.append(FileToWrite(_absolute(place.home, spec.instruction.path), instruction.encode(), 0o644))
    return files


def _holds_instruction(file: ConfigFile) -> bool:
    return "instruction" in names(file.text or "") or any(name == "instruction" for _, name in walk(file.tree, ""))


def _content(file: ConfigFile, scope: Scope, mcp: Mcp | None, servers: Sequence[McpServer]) -> bytes | None:
    if file.text is not None:
        text = render_text(file.text, scope)
        return None if isinstance(text, Absent) else text.encode()
    tree = render_tree(file.tree, scope)
    assert not isinstance(tree, Absent)
    if mcp and isinstance(tree, dict):
        _merge_servers(tree, mcp, servers)
    return tomli_w.dumps(tree).encode() if file.toml is not None and isinstance(tree, dict) else _json(tree)


def _merge_servers(tree: dict[str, JsonValue], mcp: Mcp, servers: Sequence[McpServer]) -> None:
    """Put each server's entry under the dotted key, beside the existing ones."""
    at = tree
    for part in mcp.key.split("."):
        inner = at.setdefault(part, {})
        if not isinstance(inner, dict):
            raise FailedPrecondition(f"mcp.key: {part} is not an object in {mcp.path}", reason="SPEC_INVALID")
        at = inner
    for server in servers:
        at[server.name] = _entry(mcp, server)


def _entry(mcp: Mcp, server: McpServer) -> JsonValue:
    """A server in the agent's own configuration format."""
    entry: JsonValue = search(
        compiled(mcp.entry),
        {
            "name": server.name,
            "command": server.args[0] if server.args else None,
            "args": list(server.args[1:]),
            "env": {**server.env, **server.secret_env},
            "url": server.url or None,
            "headers": dict(server.headers) or None,
        },
    )
    return entry


def _json(tree: JsonValue) -> bytes:
    text = json.dumps(tree, ensure_ascii=False, indent=1)
    return _NOT_FOR_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def _absolute(home: str, path: str) -> str:
    return path if path.startswith("/") else f"{home}/{path}"
