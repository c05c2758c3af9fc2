"""Agent specs: everything the driver knows of an agent, as data.

A spec states how an agent is installed, configured, started, given its task, and how its output is parsed. It is YAML
in this package, a proto message on the wire, and this one strict model in between. Invariants: a spec that loads can be
rendered with any accepted options. Every declared option takes effect somewhere (R63). No secret reaches an argv (R1).
A free-form value cannot change the syntax of a file (R2). Its version is the hash of its whole content.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock_chassis.errors import Violation
from penstock_chassis.validation import in_words, invalid
from penstock_driver.agents.output_events import EventRule, Expression
from penstock_driver.agents.templates import is_tail, names, walk

MAX_FILE_BYTES: Final = 1 << 20
MAX_INSTRUCTION_ARGV_BYTES: Final = 100 << 10

PLAIN_VALUES: Final = frozenset({"home", "workdir", "toolbox", "base_url", "model", "rollout_id", "wall_time_seconds"})
"""Values whose characters the driver restricts, so that they may appear in any text."""
SECRETS: Final = frozenset({"api_key"})
VALUES: Final = PLAIN_VALUES | SECRETS | {"instruction", "instruction_path"}
PLACES: Final = frozenset({"home", "workdir", "toolbox"})


def _relative(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or path.endswith("/") or "\0" in path:
        raise ValueError("expected a relative path without '..'")
    return path


def _argument(text: str) -> str:
    if "\0" in text:
        raise ValueError("NUL is not allowed")
    return text


Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,62}$")]
OptionName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
Template = Annotated[str, StringConstraints(max_length=65536), AfterValidator(_argument)]
RelativePath = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_relative)]
Mode = Annotated[int, Field(ge=0, le=0o777)]
DottedVersion = Annotated[str, StringConstraints(pattern=r"^(\d+(\.\d+){0,2})?$")]
NpmPackage = Annotated[
    str,
    StringConstraints(
        max_length=300,
        pattern=r"^(@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]*@\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?$",
    ),
]


_MAX_PACKAGE: Final = 65_536
"""Characters of a Python package with its hashes: one hash per platform's wheel, 140 for pydantic-core today."""


def _python_package(text: str) -> str:
    if len(text) > _MAX_PACKAGE:
        name = text.partition("==")[0][:128]
        raise ValueError(f"{name} has {len(text)} characters with its hashes; at most {_MAX_PACKAGE} are allowed")
    return text


PythonPackage = Annotated[
    str,
    AfterValidator(_python_package),
    StringConstraints(
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?==[0-9][A-Za-z0-9.!+-]*( --hash=sha256:[0-9a-f]{64})+$",
    ),
]

_PARTS: Final = "parts"
"""Pydantic error type whose context has several problems."""

_BY_NAME: Final = Field(strict=False)
"""For enums in strict models: YAML has only their names."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Dialect(StrEnum):
    """An HTTP API through which agents call models."""

    CHAT_COMPLETIONS = "chat_completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GENERATE_CONTENT = "generate_content"


class RuntimeKind(StrEnum):
    """A language runtime."""

    PYTHON = "python"
    NODE = "node"


class Runtime(_Model):
    """A language runtime of the toolbox: its minimum version and the first unsupported one, dotted, empty for any."""

    kind: Annotated[RuntimeKind, _BY_NAME]
    min_version: DottedVersion = ""
    below_version: DottedVersion = ""


class ToolboxFile(_Model):
    """A file of the toolbox, read-only for the agent; `mode` None is the sandbox service's default."""

    path: RelativePath
    content: Base64Bytes
    mode: Mode | None = None


class Toolbox(_Model):
    """Installed once per host and mounted read-only: a rollout never installs anything."""

    runtimes: list[Runtime] = []
    npm_packages: list[NpmPackage] = []
    files: list[ToolboxFile] = []
    path_directories: list[RelativePath] = []
    python_packages: list[PythonPackage] = []

    @model_validator(mode="after")
    def _python_for_its_packages(self) -> Self:
        if self.python_packages and all(runtime.kind is not RuntimeKind.PYTHON for runtime in self.runtimes):
            raise ValueError("python_packages: needs python among the runtimes")
        return self


class PythonTarget(_Model):
    """The Python of sandboxes for which packages are installed: minor version, newest platform of its wheels."""

    version: str
    platform: str


class TaskToolbox(Toolbox):
    """A toolbox of a task's packages: those of an npm lock, those for the sandbox's own Python, and Debian's."""

    npm_lock: str = ""
    debian_lock: str = ""
    python_target: PythonTarget | None = None

    @model_validator(mode="after")
    def _python_for_its_packages(self) -> Self:
        if self.python_packages and self.python_target is None:
            raise ValueError("python_packages: needs python_target")
        return self


class OptionType(StrEnum):
    """The type of an option's value."""

    STRING = "string"
    INTEGER = "integer"
    NUMBER = "number"
    BOOLEAN = "boolean"


class Option(_Model):
    """An option that a rollout may set. Without a default and a value, everything that depends on it is left out."""

    name: OptionName
    description: str = ""
    type: Annotated[OptionType, _BY_NAME]
    choices: list[JsonValue] = []
    default: JsonValue = None
    minimum: float | None = None
    maximum: float | None = None

    def problem(self, value: JsonValue) -> str | None:
        """The reason why `value` is refused, or None."""
        if self.type is OptionType.BOOLEAN:
            if not isinstance(value, bool):
                return "expected a boolean"
        elif self.type is OptionType.STRING:
            if not isinstance(value, str) or "\0" in value:
                return "expected a string without NUL"
        elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"expected {'an integer' if self.type is OptionType.INTEGER else 'a finite number'}"
        elif self.type is OptionType.INTEGER and value != int(value):
            return "expected an integer"
        elif self.minimum is not None and value < self.minimum:
            return f"expected at least {self.minimum:g}"
        elif self.maximum is not None and value > self.maximum:
            return f"expected at most {self.maximum:g}"
        if self.choices and value not in self.choices:
            return f"expected one of {', '.join(str(choice) for choice in self.choices)}"
        return None

    def typed(self, value: JsonValue) -> JsonValue:
        """An accepted value in the option's own type: JSON and protobuf have only one kind of number."""
        return int(value) if self.type is OptionType.INTEGER and isinstance(value, float) else value

    @property
    def is_plain(self) -> bool:
        """Whether every accepted value may appear in any text."""
        return self.type is not OptionType.STRING or bool(self.choices)

    @model_validator(mode="after")
    def _default_is_accepted(self) -> Self:
        if self.default is not None and (problem := self.problem(self.default)):
            raise ValueError(f"default: {problem}")
        return self


class PromptDelivery(StrEnum):
    """How the instruction reaches the agent; argv only if an agent offers no other way (R67).

    CONFIG is a member of a config file with the value `{{instruction}}`.
    """

    FILE = "file"
    STDIN = "stdin"
    ARGV = "argv"
    CONFIG = "config"


class Instruction(_Model):
    """How the instruction reaches the agent; `path`, relative to the home directory, is set exactly with FILE."""

    method: Annotated[PromptDelivery, _BY_NAME]
    path: RelativePath | None = None

    @model_validator(mode="after")
    def _path_only_for_file(self) -> Self:
        if (self.method is PromptDelivery.FILE) != (self.path is not None):
            raise ValueError("path is required when method is file, and refused otherwise")
        return self


class ConfigFile(_Model):
    """A file written before the agent starts: exactly one of `json_`, `json_list`, `toml` (trees) and `text`.

    `path` is relative to the home directory. A file whose text depends on an option that was not given is not written.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_by_name=True, validate_by_alias=True)

    path: Template
    json_: Annotated[dict[str, JsonValue] | None, Field(alias="json")] = None
    json_list: list[JsonValue] | None = None
    toml: dict[str, JsonValue] | None = None
    text: Template | None = None
    mode: Mode = 0o600

    @model_validator(mode="after")
    def _one_content(self) -> Self:
        if sum(content is not None for content in (self.json_, self.json_list, self.toml, self.text)) != 1:
            raise ValueError("exactly one of json, json_list, toml and text is required")
        return self

    @property
    def tree(self) -> JsonValue:
        """The content of a file in tree form."""
        return next((tree for tree in (self.json_, self.json_list, self.toml) if tree is not None), None)


class Mcp(_Model):
    """Where MCP servers are configured: under the dotted `key` of the config file at `path`, each rendered by `entry`.

    `entry` is a JMESPath expression over {name, command, args, env, url, headers}. `command` is null for a server with
    a URL; `headers`, which hold credentials, is null for a server without any. If `entry` ignores headers, the agent
    cannot use host tools.
    """

    path: RelativePath
    key: Annotated[str, StringConstraints(min_length=1)]
    entry: Expression


class EventSource(StrEnum):
    """The output that holds the agent's events."""

    NONE = "none"
    STDOUT_JSON_LINES = "stdout_json_lines"
    STDOUT_LINES = "stdout_lines"


class Events(_Model):
    """How the agent's output becomes events."""

    source: Annotated[EventSource, _BY_NAME] = EventSource.NONE
    rules: list[EventRule] = []


class Artifact(_Model):
    """A file to fetch after the agent is dead, relative to the home directory or absolute."""

    name: Name
    path: Template
    required: bool = False
    max_bytes: Annotated[int, Field(ge=1, le=1 << 20)] = 1 << 20


class AuxiliaryCalls(_Model):
    """How the gate recognizes calls outside the agent's main conversation."""

    title_system_prompts: list[str] = []
    compaction_system_prompts: list[str] = []
    session_headers: list[Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,64}$")]] = []
    volatile_line_patterns: list[str] = []


class Trial(_Model):
    """A scripted model's answers: `work` has the agent run `{{command}}` or write `{{word}}`; "" is a tool call."""

    work: Annotated[str, StringConstraints(max_length=65536)] = ""
    end: Annotated[str, StringConstraints(max_length=65536)] = ""
    end_command: Annotated[str, StringConstraints(max_length=65536)] = ""

    @model_validator(mode="after")
    def _says_what_to_do(self) -> Self:
        if self.work and not {"command", "word"} & set(names(self.work)):
            raise ValueError("work: expected {{command}} or {{word}} in it")
        if self.end and self.end_command:
            raise ValueError("expected end or end_command, not both")
        return self


class Resume(_Model):
    """How the agent goes on with its last session, given a further instruction: see AgentResume.

    `argv` takes the place of the spec's for each further instruction, `first_argv` for the first one, where there may
    be further ones.
    """

    argv: Annotated[list[Template], Field(min_length=1)]
    first_argv: list[Template] = []


class AgentSpec(_Model):
    """One agent, as data."""

    name: Name
    description: str = ""
    version: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    toolbox: Toolbox = Toolbox()
    needs_root: bool = False
    argv: Annotated[list[Template], Field(min_length=1)]
    instruction: Instruction
    files: list[ConfigFile] = []
    env: dict[VariableName, Template] = {}
    dialects: Annotated[list[Annotated[Dialect, _BY_NAME]], Field(min_length=1)]
    mcp: Mcp | None = None
    options: list[Option] = []
    events: Events = Events()
    artifacts: list[Artifact] = []
    skip_permissions_argv: list[Template] = []
    skip_permissions_env: dict[VariableName, Template] = {}
    auxiliary_calls: AuxiliaryCalls = AuxiliaryCalls()
    check_argv: list[Template] = []
    success_exit_codes: Annotated[list[Annotated[int, Field(ge=0, le=255)]], Field(min_length=1)] = [0]
    default_timeout_s: Annotated[float, Field(gt=0, le=7 * 86400)] = 900.0
    trial: Trial | None = None
    resume: Resume | None = None
    """None = it takes one instruction."""

    @property
    def sha256(self) -> str:
        """Hexadecimal sha256 of the whole spec: its version. Without `resume`, it is as before there was that."""
        left_out = {"resume"} if self.resume is None else None
        return digest(self.model_dump(mode="json", by_alias=True, exclude=left_out))

    @property
    def can_skip_permissions(self) -> bool:
        """Whether a rollout may skip the agent's permission prompts (R68)."""
        return bool(self.skip_permissions_argv or self.skip_permissions_env)

    def option(self, name: str) -> Option | None:
        """The declared option of that name."""
        return next((option for option in self.options if option.name == name), None)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        problems = list(self._problems())
        if problems:
            raise PydanticCustomError(_PARTS, "{problems}", {"problems": "; ".join(problems), "each": problems})
        return self

    def _problems(self) -> Iterator[str]:
        """All inconsistencies between the parts, so that one attempt reports every mistake."""
        options = {f"option.{option.name}" for option in self.options}
        plain = PLAIN_VALUES | {f"option.{option.name}" for option in self.options if option.is_plain}
        known = VALUES | options
        used = set[str]()
        for where, name, allowed in self._places(known):
            used.add(name)
            if name not in known:
                yield f"{where}: unknown placeholder {{{{{name}}}}}; known are {', '.join(sorted(known))}"
            elif name not in allowed:
                yield f"{where}: {{{{{name}}}}} may not be used here"
        for index, file in enumerate(self.files):
            for name in names(file.text or ""):
                if name in known and name not in plain and not is_tail(file.text or "", name):
                    where = f"files[{index}].text"
                    yield f"{where}: {{{{{name}}}}} can contain anything, so it may only be at the end of the text"
        declared = Counter(option.name for option in self.options)
        for name, times in declared.items():
            if times > 1:
                yield f"options: {name} is declared twice"
            if f"option.{name}" not in used:
                yield f"options: {name} is declared, but nothing uses it, so it would have no effect"
        if ("instruction" in used) != (self.instruction.method in (PromptDelivery.ARGV, PromptDelivery.CONFIG)):
            yield "instruction: {{instruction}} is used exactly when the method is argv or config"
        if "instruction_path" in used and self.instruction.method is not PromptDelivery.FILE:
            yield "instruction: {{instruction_path}} exists only when the method is file"
        if "base_url" not in used:
            yield "nothing uses {{base_url}}, so the agent would not call the gate"
        if self.resume is not None and self.instruction.method is PromptDelivery.ARGV:
            for where, arguments in (("argv", self.resume.argv), ("first_argv", self.resume.first_argv)):
                if arguments and not any("instruction" in names(argument) for argument in arguments):
                    yield f"resume.{where}: {{{{instruction}}}} is missing, by which the instruction reaches the agent"
        unmergeable = [file.path for file in self.files if file.text is not None or file.json_list is not None]
        if self.mcp and self.mcp.path in unmergeable:
            yield "mcp.path: names a text file or a list, which cannot be merged into"

    def _places(self, known: frozenset[str] | set[str]) -> Iterator[tuple[str, str, frozenset[str] | set[str]]]:
        in_argv, in_env = known - SECRETS, known - {"instruction"}
        if self.instruction.method is PromptDelivery.CONFIG:
            in_argv = in_argv - {"instruction"}
        for where, arguments, allowed in (
            ("argv", self.argv, in_argv),
            ("resume.argv", self.resume.argv if self.resume else [], in_argv),
            ("resume.first_argv", self.resume.first_argv if self.resume else [], in_argv),
            ("skip_permissions_argv", self.skip_permissions_argv, PLACES),
            ("check_argv", self.check_argv, PLACES),
        ):
            for index, argument in enumerate(arguments):
                yield from ((f"{where}[{index}]", name, allowed) for name in names(argument))
        for variable, template in self.env.items():
            yield from ((f"env.{variable}", name, in_env) for name in names(template))
        for variable, template in self.skip_permissions_env.items():
            yield from ((f"skip_permissions_env.{variable}", name, PLACES) for name in names(template))
        for index, file in enumerate(self.files):
            here = f"files[{index}]"
            yield from ((f"{here}.path", name, PLACES) for name in names(file.path))
            yield from ((f"{here}.text", name, known) for name in names(file.text or ""))
            for kind, tree in (("json", file.json_), ("json_list", file.json_list), ("toml", file.toml)):
                yield from ((where, name, known) for where, name in walk(tree, f"{here}.{kind}"))
        for index, artifact in enumerate(self.artifacts):
            yield from ((f"artifacts[{index}].path", name, PLACES) for name in names(artifact.path))


def parse_spec(data: Mapping[str, Any]) -> AgentSpec:
    """Parse a spec from untrusted data; InvalidArgument (FIELD_INVALID) names each wrong field and the reason."""
    try:
        return AgentSpec.model_validate(data)
    except ValidationError as error:
        violations = [
            Violation(".".join(str(part) for part in item["loc"]) or "spec", in_words(problem))
            for item in error.errors(include_url=False, include_input=False)
            for problem in (item["ctx"]["each"] if item["type"] == _PARTS else (item["msg"],))
        ]
        raise invalid(violations) from None


def whole_numbers(value: Any) -> Any:
    """Convert whole numbers to integers, recursively: a Struct has only doubles, and some programs reject `4.0` for
    `4`.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: whole_numbers(item) for key, item in value.items()}
    return value


def digest(value: JsonValue) -> str:
    """Hexadecimal sha256 of the canonical JSON of `value`: equal for 4 and 4.0, and for any order of keys."""
    text = json.dumps(whole_numbers(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
