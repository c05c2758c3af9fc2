"""Harbor's task directories: task.toml, instruction.md, environment/, tests/test.sh, solution/.

    https://www.harborframework.com/docs/tasks (seen as of schema 1.1; `version = "1.0"` is the same table)

The guarantees of Harbor for a verifier are kept: tests/ at /tests, the reward in /logs/verifier/reward.txt (a number)
or reward.json (names and numbers), root by default. Different: the agent's network is its model only, and a verifier
has none.
"""

import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock.tasks.importers.common import (
    GRADER_FOLDER,
    Choices,
    Folder,
    Imported,
    Refused,
    directories,
    fetches,
    manifest,
    plain,
    substituted,
)
from penstock.tasks.importers.dockerfile import put_environment

_TOP: Final = (
    "schema_version",
    "version",
    "task",
    "metadata",
    "verifier",
    "agent",
    "environment",
    "solution",
    "source",
)
_VERIFIER: Final = ("timeout_sec", "env", "user", "network_mode", "allowed_hosts")
_AGENT: Final = ("timeout_sec", "user", "network_mode", "allowed_hosts")
_ENVIRONMENT: Final = (
    "build_timeout_sec", "docker_image", "cpus", "memory_mb", "memory", "storage_mb", "storage", "gpus", "gpu_types",
    "allow_internet", "network_mode", "allowed_hosts", "env",
)  # fmt: skip
_MEBI: Final = 1 << 20


def import_all(source: Path, destination: Path, choices: Choices) -> Iterator[Imported]:
    """Imports every task directory of a source."""
    for path in directories(source, "task.toml"):
        folder = Folder(destination, path.name)
        yield folder.filled(partial(_fill, folder, path, choices))


def _fill(folder: Folder, source: Path, choices: Choices) -> None:
    config = tomllib.loads((source / "task.toml").read_text(encoding="utf-8"))
    plain(config, _TOP, "task.toml")
    verifier, agent, environment = (_table(config, name) for name in ("verifier", "agent", "environment"))
    plain(verifier, _VERIFIER, "verifier")
    plain(agent, _AGENT, "agent")
    plain(environment, _ENVIRONMENT, "environment")
    if environment.get("gpus"):
        raise Refused("environment.gpus: sandboxes have no GPUs")
    if (source / "environment" / "docker-compose.yaml").exists():
        raise Refused("environment/docker-compose.yaml: several containers are not supported")
    if not (source / "tests" / "test.sh").is_file():
        raise Refused("it has no tests/test.sh")
    folder.content["instruction_file"] = folder.copy(source / "instruction.md", "instruction.md")
    workdir = put_environment(folder, source / "environment", str(environment.get("docker_image") or ""), choices)
    env = substituted(environment.get("env", {}), choices.env, "environment.env")
    if env:
        folder.content["env"] = {**folder.content.get("env", {}), **env}
    if choices.resources:
        _put_resources(folder, environment)
    limits = {
        "prepare": environment.get("build_timeout_sec"),
        "agent": agent.get("timeout_sec"),
        "verify": _more(verifier.get("timeout_sec", 600.0)),
    }
    folder.content["limits"] = {name: float(value) for name, value in limits.items() if value is not None}
    tests = folder.copy(source / "tests", "tests")
    command: dict[str, Any] = {
        "argv": ["sh", f"{GRADER_FOLDER}/harbor.sh"],
        "timeout": float(verifier.get("timeout_sec", 600.0)),
    }
    # Here a verifier does not inherit the task's environment; in Harbor it does.
    of_verifier = substituted(verifier.get("env", {}), choices.env, "verifier.env")
    if both := {**folder.content.get("env", {}), **of_verifier}:
        command["env"] = both
    if workdir:
        command["cwd"] = workdir
    if verifier.get("user") is not None:
        command["user"] = str(verifier["user"])
    folder.content["verifier"] = {
        "files": [
            {"path": f"{GRADER_FOLDER}/harbor.sh", "from": folder.program("harbor.sh")},
            {
                "path": f"{GRADER_FOLDER}/manifest",
                "from": folder.write("manifest", manifest(source / "tests")),
            },
            {"path": "/tests", "from": tests},
        ],
        "commands": [command],
        "reward": "file",
        # In Harbor, too, the tests run in the agent's container, with everything that it installed.
        "fresh_fork": False,
    }
    _put_solution(folder, source, _table(config, "solution"), choices, workdir)
    folder.content["metadata"] = {"format": "harbor", **_table(config, "metadata")}
    if environment.get("allow_internet", True) and environment.get("network_mode") in (None, "public"):
        folder.notes.append("its agent may use the internet in Harbor; in Penstock it reaches its model only")
    folder.notes += fetches(source / "tests" / "test.sh")


def _put_solution(folder: Folder, source: Path, config: dict[str, Any], choices: Choices, workdir: str) -> None:
    if not (source / "solution" / "solve.sh").is_file():
        return
    command: dict[str, Any] = {"argv": ["bash", "/solution/solve.sh"]}
    env = substituted(config.get("env", {}), choices.env, "solution.env")
    command |= ({"env": env} if env else {}) | ({"cwd": workdir} if workdir else {})
    folder.content["solution"] = {
        "files": [{"path": "/solution", "from": folder.copy(source / "solution", "solution")}],
        "commands": [command],
    }
    folder.notes += fetches(source / "solution" / "solve.sh")


def _put_resources(folder: Folder, environment: dict[str, Any]) -> None:
    found: dict[str, Any] = {}
    if environment.get("cpus") is not None:
        found["cpu"] = float(environment["cpus"])
    for ours, megabytes, text in (("memory_bytes", "memory_mb", "memory"), ("disk_bytes", "storage_mb", "storage")):
        if environment.get(megabytes) is not None:
            found[ours] = int(environment[megabytes]) * _MEBI
        elif environment.get(text) is not None:
            found[ours] = str(environment[text]).upper().removesuffix("B").removesuffix("I") + "iB"
    if found:
        folder.content.setdefault("sandbox", {})["resources"] = found


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name, {})
    if not isinstance(value, dict):
        raise Refused(f"task.toml: {name} is not a table")
    return value


def _more(seconds: float) -> float:
    """Returns the whole verifier's limit: longer than its command's, whose timeout error is more specific."""
    return float(seconds) + 30.0
