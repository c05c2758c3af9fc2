"""The registry of agents: the built-in ones, read from YAML files, and those registered by clients.

Invariants: `agents()` lists exactly the agents that a rollout may name (R66). A built-in name cannot be registered. A
spec is identified by the hash of its content, so running rollouts keep the version with which they began. Registered
specs are in the journal and survive a restart.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import yaml

from penstock.values.similar_names import did_you_mean
from penstock_chassis.errors import AlreadyExists, FailedPrecondition, NotFound
from penstock_chassis.journal import Journal
from penstock_chassis.validation import invalid_field
from penstock_driver.agents.specs import AgentSpec, parse_spec

MIGRATION: Final = """
CREATE TABLE agent_specs (
    name TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    spec TEXT NOT NULL,
    register_time REAL NOT NULL,
    deleted INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (name, sha256)
);
"""
MIGRATION_NAMESPACES: Final = """
ALTER TABLE agent_specs RENAME TO former_agent_specs;
CREATE TABLE agent_specs (
    namespace TEXT NOT NULL,
    name TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    spec TEXT NOT NULL,
    register_time REAL NOT NULL,
    deleted INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (namespace, name, sha256)
);
INSERT INTO agent_specs SELECT 'default', name, sha256, spec, register_time, deleted FROM former_agent_specs;
DROP TABLE former_agent_specs;
"""
_BUILT_IN: Final = ""
"""Stands for a namespace: built-in agents belong to all of them."""

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader if PyYAML has it: each start reads all specs."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A version of an agent; `register_time` in seconds since the epoch, 0 for a built-in one.

    `namespace` is empty for a built-in one.
    """

    spec: AgentSpec
    sha256: str
    built_in: bool
    register_time: float
    namespace: str = _BUILT_IN


class AgentRegistry:
    """The agents of one driver; open it with `open()`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._newest: dict[tuple[str, str], Agent] = {}
        """By namespace and name."""
        self._versions: dict[tuple[str, str, str], Agent] = {}
        self._kept: set[str] = set()
        """Versions of built-in agents that are in the journal."""

    @classmethod
    async def open(cls, journal: Journal) -> AgentRegistry:
        """Open the registry with the built-in agents and those of the journal."""
        registry = cls(journal)
        for spec in built_in_specs():
            registry._add(Agent(spec, spec.sha256, True, 0.0))
        rows = await journal.query(
            "SELECT namespace, sha256, spec, register_time, deleted FROM agent_specs ORDER BY register_time"
        )
        for namespace, sha256, text, registered, deleted in rows:
            is_built_in = namespace == _BUILT_IN
            agent = Agent(AgentSpec.model_validate_json(text), sha256, is_built_in, registered, namespace)
            registry._versions.setdefault((namespace, agent.spec.name, sha256), agent)
            if is_built_in:
                registry._kept.add(sha256)
            elif not deleted:
                registry._newest[namespace, agent.spec.name] = agent
        return registry

    def agents(self, namespace: str | None) -> list[Agent]:
        """The newest version of every agent of a namespace (None = of all) and of every built-in one, by name."""
        found = [agent for (owner, _), agent in self._newest.items() if namespace is None or owner in ("", namespace)]
        return sorted(found, key=lambda agent: (agent.spec.name, agent.namespace))

    def get(self, namespace: str, name: str, sha256: str = "") -> Agent:
        """An agent's newest version, or the one with that hash; NotFound (AGENT_UNKNOWN) lists the known agents."""
        agent = None
        for owner in (_BUILT_IN, namespace):
            agent = agent or (self._versions.get((owner, name, sha256)) if sha256 else self._newest.get((owner, name)))
        if agent is None:
            version = f" in version {sha256[:12]}" if sha256 else ""
            known = [agent.spec.name for agent in self.agents(namespace)]
            meant = "" if name in known else did_you_mean(name, known)
            message = f"there is no agent {name}{version}{meant or ';'} known agents: {', '.join(known)}"
            raise NotFound(message, reason="AGENT_UNKNOWN")
        return agent

    async def register(self, namespace: str, spec: AgentSpec) -> Agent:
        """Add an agent or a version of one; AlreadyExists (AGENT_BUILT_IN) for a built-in agent's name."""
        if (_BUILT_IN, spec.name) in self._newest:
            raise AlreadyExists(f"{spec.name} is a built-in agent: choose another name", reason="AGENT_BUILT_IN")
        agent = Agent(spec, spec.sha256, False, time.time(), namespace)
        await self._journal.execute(
            "INSERT INTO agent_specs (namespace, name, sha256, spec, register_time) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET register_time = excluded.register_time, deleted = 0",
            (namespace, spec.name, agent.sha256, spec.model_dump_json(by_alias=True), agent.register_time),
        )
        self._add(agent)
        return agent

    async def keep(self, agent: Agent) -> None:
        """Keep the version of a built-in agent, for a later driver that comes with another one and goes on with this
        one's rollouts.
        """
        if agent.built_in and agent.sha256 not in self._kept:
            await self._journal.execute(
                "INSERT OR IGNORE INTO agent_specs (namespace, name, sha256, spec, register_time, deleted)"
                " VALUES (?, ?, ?, ?, 0, 1)",
                (_BUILT_IN, agent.spec.name, agent.sha256, agent.spec.model_dump_json(by_alias=True)),
            )
            self._kept.add(agent.sha256)

    async def delete(self, namespace: str, name: str) -> None:
        """Remove an agent from the list; running rollouts keep it. FailedPrecondition (AGENT_BUILT_IN) if built in."""
        if (_BUILT_IN, name) in self._newest:
            raise FailedPrecondition(f"{name} is a built-in agent", reason="AGENT_BUILT_IN")
        await self._journal.execute(
            "UPDATE agent_specs SET deleted = 1 WHERE namespace = ? AND name = ?", (namespace, name)
        )
        self._newest.pop((namespace, name), None)

    def _add(self, agent: Agent) -> None:
        self._newest[agent.namespace, agent.spec.name] = agent
        self._versions[agent.namespace, agent.spec.name, agent.sha256] = agent


def built_in_specs() -> Iterator[AgentSpec]:
    """The specs that come with this package, by file name."""
    directory = resources.files(__package__) / "catalog"
    for entry in sorted(directory.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".yaml"):
            siblings = {item.name: item for item in directory.iterdir()}
            yield load_spec(entry.read_text(encoding="utf-8"), siblings)


def load_spec(text: str, siblings: Mapping[str, Any]) -> AgentSpec:
    """Load a spec from YAML; a toolbox file has `content`, or `from`, which names one of `siblings` (name to path).

    `toolbox.python_packages` is a list, or `{from: NAME}`: the requirements file of that name.
    """
    try:
        data = yaml.load(text, _LOADER)  # noqa: S506 - a safe loader
    except yaml.YAMLError as error:
        raise invalid_field("spec", f"is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise invalid_field("spec", "is not a mapping")
    toolbox = data.get("toolbox")
    packages = toolbox.get("python_packages") if isinstance(toolbox, dict) else None
    if isinstance(toolbox, dict) and isinstance(packages, dict):
        source = siblings.get(str(packages.get("from")))
        if source is None or len(packages) != 1:
            raise invalid_field("toolbox.python_packages", "from names a requirements file beside the spec")
        toolbox["python_packages"] = requirements(source.read_text("utf-8"))
    files = toolbox.get("files") if isinstance(toolbox, dict) else None
    for file in files if isinstance(files, list) else []:
        if not isinstance(file, dict):
            continue
        if "from" in file:
            source = siblings.get(str(file.pop("from")))
            if source is None or "content" in file:
                raise invalid_field("toolbox.files", "from names a file beside the spec, instead of content")
            file["content"] = base64.b64encode(source.read_bytes())
        elif isinstance(file.get("content"), str):
            file["content"] = base64.b64encode(file["content"].encode())
    return parse_spec(data)


def requirements(text: str) -> list[str]:
    """The requirements of a file, one per line: without comments, continuations and needless white space."""
    joined = text.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in joined if line.strip() and not line.lstrip().startswith("#")]
