"""An agent's spec in a few lines, for people; the file that `register` takes is `wire.agents.dump_spec`."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import yaml
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.terminal.console import clean, columns, counted
from penstock.client.agents import Agent
from penstock.client.wire.agents import dump_spec

_MOST_LISTED: Final = 3
_INSTRUCTION: Final = {
    "file": "in a file",
    "stdin": "on standard input",
    "argv": "as an argument",
    "config": "in a file",
}


def summary(agent: Agent) -> RenderableType:
    """Shows what an agent is, how it runs, and its options."""
    spec: Mapping[str, Any] = yaml.safe_load(dump_spec(agent.spec))
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name, value in _facts(agent, spec):
        facts.add_row(name, Text(clean(value)))
    origin = "built in" if agent.built_in else "registered"
    parts: list[RenderableType] = [
        Text.assemble((clean(agent.name), "bold"), clean(f" {agent.version}"), (f"  {origin}", "dim")),
        Text(clean(agent.description)),
        Text(),
        facts,
        Text(),
    ]
    parts.append(_options(spec.get("options", ())) if agent.options else Text("no options", style="dim"))
    return Group(*parts)


def _facts(agent: Agent, spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    toolbox = spec.get("toolbox", {})
    yield "speaks", ", ".join(item.replace("_", " ") for item in agent.dialects) or "with no model"
    yield "installs", ", ".join([*toolbox.get("npm_packages", ()), *_python(toolbox)]) or "nothing"
    yield "runs", " ".join(shlex.quote(part) if part.split() != [part] else part for part in spec.get("argv", ()))
    yield "instruction", _INSTRUCTION.get(str(spec.get("instruction", {}).get("method", "")), "unspecified")
    yield "files", ", ".join(item["path"] for item in spec.get("files", ())) or "none"
    yield "MCP servers", "yes" if "mcp" in spec else "no"
    yield "user", "root" if agent.needs_root else "any"
    yield "permissions", "it asks, unless --skip-permissions" if agent.can_skip_permissions else "it does not ask"
    yield "spec", agent.spec_sha256


def _python(toolbox: Mapping[str, Any]) -> list[str]:
    """The Python packages: all that are locked are counted, not listed."""
    packages = [str(item) for item in toolbox.get("python_packages", ())]
    return packages if len(packages) <= _MOST_LISTED else [counted(len(packages), "Python package")]


def _options(options: Sequence[Mapping[str, Any]]) -> Table:
    table = columns("option", "type", "default", "values", "description")
    for item in options:
        cells = (str(item.get("type", "")), _value(item.get("default")), _values(item), item.get("description", ""))
        table.add_row(Text(clean(item["name"]), style="bold"), *(Text(clean(cell)) for cell in cells))
    return table


def _values(option: Mapping[str, Any]) -> str:
    low, high = option.get("minimum"), option.get("maximum")
    if low is None and high is None:
        return ", ".join(map(_value, option.get("choices", ())))
    return f"from {low:g}" if high is None else f"to {high:g}" if low is None else f"{low:g} to {high:g}"


def _value(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
