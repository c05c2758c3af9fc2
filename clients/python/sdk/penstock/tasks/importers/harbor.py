"""Harbor's task directories (Terminal-Bench 2 and others): task.toml, instruction.md, environment/, tests/, solution/.

    https://www.harborframework.com/docs/tasks (up to schema 1.4; `version = "1.0"` is the same table)

A source is one of them, a directory of them (with a dataset.toml, those that it lists), or a registry
(harbor_registry.py). The guarantees of Harbor for a verifier are kept: tests/ at /tests, the reward in
/logs/verifier/reward.txt (a number) or reward.json (names and numbers), root by default; a separate verifier has its
own sandbox (harbor_separate.py). Different: an agent reaches its model only, or hosts of an allow-list, and a verifier
nothing, or such hosts where it is separate.
"""

import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import ValidationError

from penstock.client.errors import InvalidArgument
from penstock.client.tasks.rollout_keys import McpServerTable
from penstock.tasks.importers import compose, harbor_registry, harbor_separate
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
    solution_place,
    substituted,
    text_of,
)
from penstock.tasks.importers.companion_grading import put_grading
from penstock.tasks.importers.dockerfile import put_environment
from penstock.tasks.importers.git import lfs_pointers

_TOP: Final = (
    "schema_version", "version", "task", "metadata", "verifier", "agent", "environment", "solution", "source",
    "artifacts",
)  # fmt: skip
_VERIFIER: Final = (
    "timeout_sec", "env", "user", "network_mode", "allowed_hosts", "environment", "environment_mode", "collect",
)  # fmt: skip
_AGENT: Final = ("timeout_sec", "user", "network_mode", "allowed_hosts")
_ENVIRONMENT: Final = (
    "build_timeout_sec", "docker_image", "cpus", "memory_mb", "memory", "storage_mb", "storage", "gpus", "gpu_types",
    "allow_internet", "network_mode", "allowed_hosts", "env", "os", "workdir", "mcp_servers",
)  # fmt: skip
_MEBI: Final = 1 << 20


def import_all(source: Path, destination: Path, choices: Choices) -> Iterator[Imported]:
    """Imports every task directory of a source that `choices.only` selects."""
    if source.is_file():
        yield from harbor_registry.import_all(source, destination, choices, fill)
        return
    if choices.dataset:
        raise InvalidArgument(f"{source} is no registry, of which to import {choices.dataset}", reason="TASK_IMPORT")
    for path in directories(source, "task.toml"):
        if choices.selects(path.name):
            folder = Folder(destination, path.name)
            yield folder.filled(partial(fill, folder, path, choices))
    for name in filter(choices.selects, harbor_registry.absent(source)):
        yield Imported(name, None, "dataset.toml lists it, and it is not there: download the data set again")


def fill(folder: Folder, source: Path, choices: Choices) -> None:
    """Fills a task directory from one of Harbor's. Raises Refused."""
    config = _config(source)
    verifier, agent, environment = (_table(config, name) for name in ("verifier", "agent", "environment"))
    own = harbor_separate.is_separate(verifier)
    of_its_own = config["verifier.environment"]
    if not (source / "tests" / "test.sh").is_file() and not (own and of_its_own.get("docker_image")):
        raise Refused("it has no tests/test.sh")
    if not own and verifier.get("collect"):
        raise Refused("verifier.collect: it needs a separate verifier: in the agent's sandbox it could change the work")
    if own and not choices.image:
        raise Refused("verifier.environment: a separate verifier needs an image: import it with images")
    if pointers := lfs_pointers(source):
        raise Refused(f"{pointers[0]} is a pointer of Git LFS in the place of the file: run git lfs pull in its clone")
    folder.notes += _notes(config)
    folder.content["instruction_file"] = folder.copy(source / "instruction.md", "instruction.md")
    workdir = put_environment(folder, source / "environment", str(environment.get("docker_image") or ""), choices)
    seeds = _put_seeds(folder, source / "environment")
    _put_workdir(folder, str(environment.get("workdir") or ""))
    if choices.image and choices.user is None and agent.get("user") is not None:
        folder.content["sandbox"]["user"] = str(agent["user"])
        if not own and verifier.get("user") is None and folder.content["sandbox"]["user"] not in ("root", "0"):
            folder.notes.append(f"agent.user: its verifier is {agent['user']} too; in Harbor it is root")
    _put_networks(folder, environment, agent, verifier, of_its_own if own else None)
    env = substituted(environment.get("env", {}), choices.env, "environment.env")
    if env:
        folder.content["env"] = {**folder.content.get("env", {}), **env}
    if (file := source / "environment" / compose.NAME).exists():
        if own:
            what = "several containers beside a separate verifier: its sandbox would not have them as the agent left"
            raise Refused(f"environment/{file.name}: {what} them")
        compose.put_companions(folder, file, "main", choices)
    if servers := list(_servers(environment, choices, _companions(folder))):
        folder.content["mcp_servers"] = servers
    if choices.resources and (resources := _resources(environment)):
        folder.content.setdefault("sandbox", {})["resources"] = resources
    limits = {
        "prepare": environment.get("build_timeout_sec"),
        "agent": agent.get("timeout_sec"),
        "verify": _more(verifier.get("timeout_sec", 600.0)),
    }
    folder.content["limits"] = {name: float(value) for name, value in limits.items() if value is not None}
    command: dict[str, Any] = {
        "argv": ["sh", f"{GRADER_FOLDER}/harbor.sh"],
        "timeout": float(verifier.get("timeout_sec", 600.0)),
    }
    # Here a verifier does not inherit the environment of its sandbox; in Harbor it does.
    inherited = folder.content.get("env", {})
    if own:
        inherited = substituted(of_its_own.get("env", {}), choices.env, "verifier.environment.env")
    of_verifier = substituted(verifier.get("env", {}), choices.env, "verifier.env")
    if both := {**inherited, **of_verifier}:
        command["env"] = both
    if workdir:
        command["cwd"] = workdir
    files = [{"path": f"{GRADER_FOLDER}/harbor.sh", "from": folder.program("harbor.sh")}]
    folder.content["verifier"] = {"commands": [command], "files": files, "reward": "file"}
    if own:
        resources = _resources(of_its_own) if choices.resources and of_its_own is not environment else {}
        has_tests = harbor_separate.put(folder, source, config, choices, resources)
        files += [] if has_tests else seeds
    else:
        has_tests = False
        put_grading(folder, source / "environment" / "Dockerfile", source / "tests")
        if verifier.get("user") is not None:
            command["user"] = str(verifier["user"])
    if not has_tests:
        files.append(
            {"path": f"{GRADER_FOLDER}/manifest", "from": folder.write("manifest", manifest(source / "tests"))}
        )
        files.append({"path": "/tests", "from": folder.copy(source / "tests", "tests")})
    _put_solution(folder, source, _table(config, "solution"), choices, workdir)
    named = {name: value for name, value in _table(config, "task").items() if name in ("name", "version")}
    folder.content["metadata"] = {"format": "harbor", **named, **_table(config, "metadata")}
    folder.notes += fetches(source / "tests" / "test.sh")


def _config(source: Path) -> dict[str, Any]:
    """Returns task.toml. Raises Refused for what would change the task's meaning, by its name."""
    # What is empty or at its default says nothing: files that Harbor writes have every key.
    config = {name: value for name, value in tomllib.loads(text_of(source / "task.toml")).items() if value != []}
    plain(config, _TOP, "task.toml")
    for name, known in (("verifier", _VERIFIER), ("agent", _AGENT), ("environment", _ENVIRONMENT)):
        table = config[name] = {key: value for key, value in _table(config, name).items() if value not in ([], "")}
        plain(table, known, name)
    # A separate verifier has a copy of the agent's environment, unless it has one of its own.
    own = config["verifier"].get("environment")
    config["verifier.environment"] = config["environment"] if own is None else _own_environment(own)
    for name in ("environment", "verifier.environment"):
        if config[name].get("gpus"):
            raise Refused(f"{name}.gpus: sandboxes have no GPUs")
        if str(config[name].get("os", "linux")).lower() != "linux":
            raise Refused(f"{name}.os: {config[name]['os']}: sandboxes have Linux")
    return config


def _own_environment(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise Refused("verifier.environment: it is not a table")
    table = {key: value for key, value in given.items() if value not in ([], "")}
    plain(table, _ENVIRONMENT, "verifier.environment")
    return table


def _put_seeds(folder: Folder, source: Path) -> list[dict[str, str]]:
    """Puts environment/ into the working directory of an image that is not made of it, as Harbor does."""
    if "image" not in folder.content or (source / "Dockerfile").exists() or not source.is_dir():
        return []
    seeds = [{"path": ".", "from": folder.copy(source, "environment")}] if any(source.iterdir()) else []
    folder.content["files"] = [*folder.content.get("files", []), *seeds]
    return seeds


def _notes(config: dict[str, Any]) -> Iterator[str]:
    environment, agent = config["environment"], config["agent"]
    mode = agent.get("network_mode") or environment.get("network_mode")
    if mode == "public" or (mode is None and environment.get("allow_internet", True)):
        yield "its agent may use the internet in Harbor; in Penstock it reaches its model only"
    verifier_mode = config["verifier"].get("network_mode")
    if verifier_mode == "public":
        yield "verifier.network_mode: public: a verifier reaches nothing, or the hosts of sandbox.verifier_network"
    if config.get("artifacts") and not harbor_separate.is_separate(config["verifier"]):
        yield "artifacts: they are not collected; keep_files and keep_end_state keep what the agent left"


def _put_workdir(folder: Folder, workdir: str) -> None:
    """Makes the image begin in a directory: agent, setup and verifier begin where their image does."""
    if not workdir:
        return
    if not workdir.startswith("/") or "\n" in workdir:
        raise Refused(f"environment.workdir: {workdir!r} is not an absolute path")
    if "build" not in folder.content:
        raise Refused(
            "environment.workdir: it can be set where the image is built, not for docker_image or without one"
        )
    dockerfile = folder.path / str(folder.content["build"]) / "Dockerfile"
    with dockerfile.open("a", encoding="utf-8") as file:
        file.write(f"\nWORKDIR {workdir}\n")


def _put_networks(
    folder: Folder,
    environment: dict[str, Any],
    agent: dict[str, Any],
    verifier: dict[str, Any],
    separate: dict[str, Any] | None,
) -> None:
    """Makes allow-lists those of the phases; a phase without one of its own has its environment's."""
    phases = ((agent, environment, "agent_network"), (verifier, separate or environment, "verifier_network"))
    for phase, around, key in phases:
        table = phase if phase.get("network_mode") else around
        if table.get("network_mode") != "allowlist":
            continue
        if key == "verifier_network" and separate is None:
            folder.notes.append("the verifier's allowed_hosts are left out: in the agent's sandbox it has no network")
            continue
        hosts = [str(host) for host in table.get("allowed_hosts") or ()]
        if not hosts:
            raise Refused("network_mode: allowlist: allowed_hosts is empty")
        folder.content.setdefault("sandbox", {})[key] = {"hosts": hosts}


def _companions(folder: Folder) -> set[str]:
    """Returns the names by which the task's programs reach its companions."""
    found = folder.content.get("sandbox", {}).get("companions", ())
    return {name for one in found for name in (one["name"], *one.get("aliases", ()))} - {"main"}


def _servers(environment: dict[str, Any], choices: Choices, companions: set[str]) -> Iterator[dict[str, Any]]:
    """Yields the MCP servers that are programs of the task's container, or in a companion. Raises Refused."""
    servers = environment.get("mcp_servers") or []
    if not isinstance(servers, list) or not all(isinstance(server, dict) for server in servers):
        raise Refused("environment.mcp_servers: it is not a list of tables")
    for index, server in enumerate(servers):
        where = f"environment.mcp_servers[{index}]"
        found: dict[str, Any] = {"name": str(server.get("name") or "")}
        if server.get("transport") == "streamable-http" and _host(server.get("url")) in companions:
            plain(server, ("name", "transport", "url"), where)
            found["url"] = server["url"]
        elif server.get("transport") == "stdio" and server.get("command"):
            plain(server, ("name", "transport", "command", "args", "env"), where)
            found["args"] = [str(server["command"]), *map(str, server.get("args") or ())]
            if env := substituted(server.get("env") or {}, choices.env, f"{where}.env"):
                found["env"] = env
        else:
            what = "a program (transport stdio, with a command), or a service of its compose file (streamable-http)"
            raise Refused(f"{where}: it must be {what}: agents reach no other")
        try:
            McpServerTable.model_validate(found)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            raise Refused(
                f"{where}.{'.'.join(map(str, wrong['loc']))}: {wrong['msg'].removeprefix('Value error, ')}"
            ) from None
        yield found


def _host(url: object) -> str | None:
    """Returns the host of a server's address; None = there is none."""
    try:
        return urlsplit(url).hostname if isinstance(url, str) else None
    except ValueError:
        return None


def _put_solution(folder: Folder, source: Path, config: dict[str, Any], choices: Choices, workdir: str) -> None:
    if not (source / "solution" / "solve.sh").is_file():
        return
    place = solution_place(folder.content, "/solution")
    command: dict[str, Any] = {"argv": ["bash", f"{place}/solve.sh"]}
    env = substituted(config.get("env", {}), choices.env, "solution.env")
    command |= ({"env": env} if env else {}) | ({"cwd": workdir} if workdir else {})
    folder.content["solution"] = {
        "files": [{"path": place, "from": folder.copy(source / "solution", "solution")}],
        "commands": [command],
    }
    folder.notes += fetches(source / "solution" / "solve.sh")
    if place != "/solution" and b"/solution/" in (source / "solution" / "solve.sh").read_bytes():
        folder.notes.append(
            f"solve.sh names /solution, but the solution is in {place} for this user, who may not write to /: "
            "change the script, or import with --user root"
        )


def _resources(environment: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if environment.get("cpus") is not None:
        found["cpu"] = float(environment["cpus"])
    for ours, megabytes, text in (("memory_bytes", "memory_mb", "memory"), ("disk_bytes", "storage_mb", "storage")):
        if environment.get(megabytes) is not None:
            found[ours] = int(environment[megabytes]) * _MEBI
        elif environment.get(text) is not None:
            found[ours] = str(environment[text]).upper().removesuffix("B").removesuffix("I") + "iB"
    return found


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name, {})
    if not isinstance(value, dict):
        raise Refused(f"task.toml: {name} is not a table")
    return value


def _more(seconds: float) -> float:
    """Returns the whole verifier's limit: longer than its command's, whose timeout error is more specific."""
    return float(seconds) + 30.0
