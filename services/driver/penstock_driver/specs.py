"""Agent specs: everything the driver knows of an agent, as data.

A spec says how an agent is installed, configured, started, told its task and understood. It is YAML in this package, a
proto message on the wire, and this one strict model in between. Invariants: a spec that loads can be rendered with any
accepted options; every option that it declares takes effect somewhere (R63); no secret reaches an argv (R1); a value of
free form cannot change the syntax of a file (R2); its version is the hash of its whole content, files included.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, field_validator, model_validator

from .events import EventRule
from .templates import Text, TemplateError, walk

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,62}$")]
OptionName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Template = Annotated[str, StringConstraints(max_length=65536)]
Argument = Annotated[str, StringConstraints(max_length=65536, pattern=r"^[^\x00]*$")]

SECRETS: Final = frozenset({"key"})
PLAIN_VALUES: Final = frozenset({"home", "workspace", "toolbox", "base_url", "root_url", "model"})
"""Values whose characters the driver restricts, so that they may stand inside any text."""
VALUES: Final = PLAIN_VALUES | SECRETS | {"instruction", "instruction_file"}
CONDITIONS: Final = frozenset({"skip_permissions", "mcp"})
MCP_VALUES: Final = frozenset({"server.command", "server.url"})
MAX_FILE_BYTES: Final = 1 << 20


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _FromYaml(BaseModel):
    """Like `_Strict`, for models with enums: YAML and JSON have only their names."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Dialect(StrEnum):
    """An HTTP API that agents speak to models."""

    CHAT_COMPLETIONS = "chat_completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GENERATE_CONTENT = "generate_content"


class Runtime(_Strict):
    """A language runtime that the toolbox must have; `minimum` is a dotted version, empty for any."""

    name: Literal["node", "python"]
    minimum: Annotated[str, StringConstraints(pattern=r"^(\d+(\.\d+){0,2})?$")] = ""


class NpmPackage(_Strict):
    """One pinned npm package."""

    name: Annotated[str, StringConstraints(pattern=r"^(@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]*$", max_length=214)]
    version: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?$")]


class ToolboxFile(_Strict):
    """A file of the toolbox, read-only for the agent; `path` is relative to the toolbox."""

    path: str
    content: Annotated[str, StringConstraints(max_length=MAX_FILE_BYTES)]
    mode: Annotated[int, Field(ge=0, le=0o777)] = 0o644

    @field_validator("path")
    @classmethod
    def _relative(cls, path: str) -> str:
        return _relative_path(path)


class Toolbox(_Strict):
    """What is installed once per host and mounted read-only: a rollout never installs anything."""

    runtimes: list[Runtime] = []
    npm: list[NpmPackage] = []
    files: list[ToolboxFile] = []


class OptionType(StrEnum):
    """The type of an option's value."""

    STRING = "string"
    INTEGER = "integer"
    NUMBER = "number"
    BOOLEAN = "boolean"


class Option(_FromYaml):
    """One option that a rollout may set; unset leaves the agent's own default."""

    type: OptionType
    description: str
    minimum: float | None = None
    maximum: float | None = None
    choices: list[str] = []
    max_length: Annotated[int, Field(ge=1, le=MAX_FILE_BYTES)] = 65536

    def check(self, value: JsonValue) -> str | None:
        """Why `value` is refused, or None."""
        if self.type is OptionType.BOOLEAN:
            return None if isinstance(value, bool) else "expected a boolean"
        if self.type is OptionType.STRING:
            if not isinstance(value, str):
                return "expected a string"
            if self.choices and value not in self.choices:
                return f"expected one of {', '.join(self.choices)}"
            if "\0" in value or len(value) > self.max_length:
                return f"expected at most {self.max_length} characters and no NUL"
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"expected {'an integer' if self.type is OptionType.INTEGER else 'a finite number'}"
        if self.type is OptionType.INTEGER and value != int(value):
            return "expected an integer"
        if self.minimum is not None and value < self.minimum:
            return f"expected at least {self.minimum:g}"
        if self.maximum is not None and value > self.maximum:
            return f"expected at most {self.maximum:g}"
        return None

    @property
    def is_plain(self) -> bool:
        """Whether every accepted value may stand inside any text."""
        return self.type is not OptionType.STRING or bool(self.choices)


class Conditional(_Strict):
    """Arguments that are given only when a name is set and not false."""

    when: str
    args: Annotated[list[Argument], Field(min_length=1)]


class Delivery(StrEnum):
    """How the instruction reaches the agent; argv only where an agent offers nothing else (R67)."""

    FILE = "file"
    STDIN = "stdin"
    ARGV = "argv"


class Instruction(_FromYaml):
    """How the instruction reaches the agent; `path` is where the file goes when `via` is file."""

    via: Delivery
    path: Template = ""

    @model_validator(mode="after")
    def _path_only_for_file(self) -> Self:
        if (self.via is Delivery.FILE) != bool(self.path):
            raise ValueError("path is required when via is file, and refused otherwise")
        return self


class FileFormat(StrEnum):
    """How a file's content is written out."""

    JSON = "json"
    TOML = "toml"
    TEXT = "text"


class ConfigFile(_FromYaml):
    """A file written into the sandbox before the agent starts, as a tree (json, toml) or one string (text)."""

    path: Template
    format: FileFormat
    content: JsonValue
    when: str = ""

    @model_validator(mode="after")
    def _content_fits_format(self) -> Self:
        if self.format is FileFormat.TEXT and not isinstance(self.content, str):
            raise ValueError("content: a text file's content is a string")
        if self.format is FileFormat.TOML and not isinstance(self.content, dict):
            raise ValueError("content: a toml file's content is a mapping")
        return self


class McpMethod(StrEnum):
    """How MCP servers are configured in the agent."""

    NONE = "none"
    CONFIG_FILE = "config_file"


class Mcp(_FromYaml):
    """The agent's shape of one MCP server; the rendered servers go where a file has the node `{$mcp: true}`.

    In `stdio` and `http`, `{$value: ...}` takes `server.command` (a list), `server.environment`, `server.headers`
    (mappings) and `server.url` (a string).
    """

    method: McpMethod = McpMethod.NONE
    stdio: dict[str, JsonValue] | None = None
    http: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _shape_only_with_method(self) -> Self:
        if (self.method is McpMethod.NONE) != (self.stdio is None and self.http is None):
            raise ValueError("stdio or http is required unless method is none, and refused then")
        return self


class ArtifactFormat(StrEnum):
    """What an artifact holds."""

    TEXT = "text"
    JSON = "json"
    JSONL = "jsonl"
    BYTES = "bytes"


class Artifact(_FromYaml):
    """A file to collect after the agent is dead; absent is an error only when `required`."""

    name: Name
    path: Template
    format: ArtifactFormat = ArtifactFormat.TEXT
    required: bool = False
    max_bytes: Annotated[int, Field(ge=1, le=64 << 20)] = 1 << 20


class AuxiliaryHint(_Strict):
    """A call that is not part of the task's conversation; every condition that is given must hold."""

    label: Name
    system_contains: str = ""
    no_tools: bool = False

    @model_validator(mode="after")
    def _some_condition(self) -> Self:
        if not self.system_contains and not self.no_tools:
            raise ValueError("a hint needs system_contains or no_tools")
        return self


class AgentSpec(_FromYaml):
    """One agent, as data. Paths in templates are absolute after rendering, inside the sandbox."""

    name: Name
    version: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    description: str
    homepage: str = ""
    dialects: Annotated[list[Dialect], Field(min_length=1)]
    needs_root: bool = False
    toolbox: Toolbox = Toolbox()
    prepare: list[list[Argument]] = []
    """Commands run once per prepared snapshot, without network; not for secrets or options."""
    argv: Annotated[list[Argument | Conditional], Field(min_length=1)]
    instruction: Instruction
    env: dict[VariableName, Template] = {}
    files: list[ConfigFile] = []
    mcp: Mcp = Mcp()
    options: dict[OptionName, Option] = {}
    events: list[EventRule] = []
    artifacts: list[Artifact] = []
    success_exit_codes: list[Annotated[int, Field(ge=0, le=255)]] = [0]
    limit_exit_codes: list[Annotated[int, Field(ge=0, le=255)]] = []
    """Exit codes by which the agent says that it stopped at a limit of its own: it is graded, and truncated."""
    skips_permissions: bool = False
    """Whether `skip_permissions` is accepted; it must then be used as a condition."""
    auxiliary_calls: list[AuxiliaryHint] = []
    session_headers: list[Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,64}$")]] = []
    check: list[Argument] = []
    """A command that exits 0 when the agent is usable, such as one that prints its version."""

    @property
    def content_hash(self) -> str:
        """sha256 of the canonical JSON of the whole spec, 64 hex digits: the spec's version."""
        return digest(self.model_dump(mode="json"))

    @model_validator(mode="after")
    def _names_are_known_and_used(self) -> Self:
        used = set(self._check_texts())
        known = {*VALUES, *CONDITIONS, *(f"options.{name}" for name in self.options)}
        for name in sorted(used - known):
            raise ValueError(f"unknown placeholder {name}: known are {', '.join(sorted(known))}")
        for option in self.options:
            if f"options.{option}" not in used:
                raise ValueError(f"options.{option}: declared, but nothing uses it, so it would have no effect")
        if self.skips_permissions != ("skip_permissions" in used):
            raise ValueError("skips_permissions: must be true exactly when a condition uses skip_permissions")
        has_mcp_node = any(kind == "mcp" for file in self.files for _, kind, _ in walk(file.content))
        if has_mcp_node != (self.mcp.method is McpMethod.CONFIG_FILE):
            raise ValueError("mcp.method: config_file needs a file with a {$mcp: true} node, and the reverse")
        if self.instruction.via is not Delivery.ARGV and "instruction" in used:
            raise ValueError("instruction.via: {instruction} may be used only when via is argv")
        if self.instruction.via is Delivery.ARGV and "instruction" not in used:
            raise ValueError("instruction.via: argv needs {instruction} in argv")
        if self.instruction.via is not Delivery.FILE and "instruction_file" in used:
            raise ValueError("instruction.via: {instruction_file} exists only when via is file")
        if not {"base_url", "root_url"} & used:
            raise ValueError("no template uses {base_url} or {root_url}: the agent would call somebody else (R18)")
        return self

    def _check_texts(self) -> Iterator[str]:
        """Check every template where it stands and yield the names that it uses."""
        for index, item in enumerate(self.argv):
            arguments = [item] if isinstance(item, str) else item.args
            if isinstance(item, Conditional):
                yield item.when
            for argument in arguments:
                yield from self._names(argument, f"argv[{index}]", refused=SECRETS)
        for index, command in enumerate([*self.prepare, self.check]):
            for argument in command:
                yield from self._names(argument, f"prepare[{index}]", allowed=frozenset({"home", "toolbox"}))
        for name, template in self.env.items():
            yield from self._names(template, f"env.{name}", refused=frozenset({"instruction"}))
        places = frozenset({"home", "workspace", "toolbox"})
        for index, file in enumerate(self.files):
            here = f"files[{index}]"
            if file.when:
                yield file.when
            list(self._names(file.path, f"{here}.path", allowed=places))
            if isinstance(file.content, str) and file.format is FileFormat.TEXT:
                yield from self._names_in_text(file.content, f"{here}.content")
            else:
                yield from self._names_in_tree(file.content, f"{here}.content")
        for index, artifact in enumerate(self.artifacts):
            list(self._names(artifact.path, f"artifacts[{index}].path", allowed=places))
        if self.instruction.path:
            list(self._names(self.instruction.path, "instruction.path", allowed=places))
        for kind, shape in (("stdio", self.mcp.stdio), ("http", self.mcp.http)):
            for path, _, name in _walked(shape or {}, f"mcp.{kind}"):
                if name not in ("server.command", "server.environment", "server.url", "server.headers"):
                    raise ValueError(f"mcp.{kind}.{path}: unknown name {name}")

    def _names(
        self, source: str, where: str, *, refused: frozenset[str] = frozenset(), allowed: frozenset[str] | None = None
    ) -> Iterator[str]:
        try:
            names = Text.parse(source).names
        except TemplateError as error:
            raise ValueError(f"{where}: {error}") from None
        for name in names:
            if name in refused or name in CONDITIONS or (allowed is not None and name not in allowed):
                raise ValueError(f"{where}: {{{name}}} may not be used here")
            yield name

    def _names_in_text(self, source: str, where: str) -> Iterator[str]:
        """Text has no quoting, so a value of free form may only be the whole of it."""
        plain = PLAIN_VALUES | {f"options.{name}" for name, option in self.options.items() if option.is_plain}
        for name in self._names(source, where):
            if name not in plain and not Text.parse(source).is_whole:
                raise ValueError(f"{where}: {{{name}}} has a free form, so it may only be a text file's whole content")
            yield name

    def _names_in_tree(self, tree: JsonValue, where: str) -> Iterator[str]:
        for path, kind, name in _walked(tree, where):
            if kind == "mcp":
                continue
            if kind != "when" and name in CONDITIONS:
                raise ValueError(f"{where}.{path}: {name} is a condition, not a value")
            yield name


def _walked(tree: JsonValue, where: str) -> Iterator[tuple[str, str, str]]:
    try:
        yield from walk(tree)
    except TemplateError as error:
        raise ValueError(f"{where}{'.' if error.path else ''}{error.path}: {error}") from None


def digest(value: JsonValue) -> str:
    """sha256 of the canonical JSON of `value`, 64 hex digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _relative_path(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError("expected a relative path without ..")
    return path
