"""Harbor's separate verifier: a sandbox of its own, which gets whole artifacts of the agent's and nothing else of it.

As in Harbor: after the agent's death the collect commands run in its sandbox; then /logs/artifacts and all `artifacts`
are put at the same paths of the verifier's. Its image is `docker_image`, else that of tests/Dockerfile; both bring
their /tests; else the agent's, into which tests/ is put. Different: an artifact that the agent's sandbox lacks is not
in the verifier's either, whatever its image has there.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.tasks.importers import compose
from penstock.tasks.importers.common import Choices, Folder, Refused, plain

_LOGS: Final = "/logs/artifacts"
"""What Harbor always collects."""
_LOGS_MADE: Final = (
    "mkdir -p /logs/agent /logs/artifacts /logs/verifier && chmod 777 /logs/agent /logs/artifacts /logs/verifier"
)
"""In the agent's sandbox, as Harbor mounts them."""
_OF_THE_VERIFIER: Final = "/logs/verifier"
_OF_THE_AGENT: Final = "/logs/agent"
_OF_THE_KERNEL: Final = ("dev", "proc", "sys")
_MAIN: Final = (None, "main")
_COLLECT_S: Final = 60.0
# Of others tar's patterns, which match across slashes, and ours, which match names, differ.
_NAMES: Final = re.compile(r"\**(?:[^*?/\[]|\[[^!^/\]\-]+\])+\**")


@dataclass(frozen=True, slots=True)
class _Artifact:
    """`output` is where Harbor keeps it until the verifier gets it."""

    source: str
    output: str
    exclude: tuple[str, ...]

    def covers(self, other: "_Artifact") -> bool:
        """Whether what Harbor keeps of this one has the other, at its place."""
        below = posixpath.relpath(other.source, self.source)
        if other.source == self.source:
            return other.output == self.output and other.exclude == self.exclude
        return not self.exclude and _is_in(other.source, self.source) and other.output == f"{self.output}/{below}"


def is_separate(verifier: Mapping[str, Any]) -> bool:
    """Whether a task's verifier has an environment of its own. Raises Refused."""
    mode = verifier.get("environment_mode")
    if mode not in (None, "shared", "separate"):
        raise Refused(f"verifier.environment_mode: {mode!r} is neither shared nor separate")
    if mode == "shared" and verifier.get("environment") is not None:
        raise Refused("verifier.environment: it contradicts environment_mode: shared")
    return mode == "separate" or verifier.get("environment") is not None


def put(
    folder: Folder, source: Path, config: Mapping[str, Any], choices: Choices, resources: Mapping[str, Any]
) -> bool:
    """Makes the verifier of `folder` a separate one; returns whether its image has the tests. Raises Refused.

    `resources` are those of an environment of its own.
    """
    verifier, given = folder.content["verifier"], config["verifier"]
    of_agent, environment = config["environment"], config["verifier.environment"]
    image = "" if environment is of_agent else str(environment.get("docker_image") or "")
    has_tests = _put_image(folder, source / "tests", image)
    user = "root" if choices.user is None else choices.user
    if choices.user is None and given.get("user") is not None:
        user = str(given["user"])
    if user:
        verifier["user"] = user
    if environment.get("workdir"):
        verifier["commands"][0]["cwd"] = str(environment["workdir"])
    elif of_agent.get("workdir") and not has_tests:
        raise Refused("verifier.environment.workdir: it is missing, and environment.workdir is in the image of both")
    if resources:
        verifier["resources"] = dict(resources)
    verifier["copies"] = list(_copies(config.get("artifacts") or []))
    folder.notes += _of_agents_logs(verifier["copies"])
    agents_user = str(folder.content["sandbox"].get("user", ""))
    if hooks := list(_collect(given.get("collect"), agents_user, folder.content.get("env", {}))):
        verifier["collect"] = hooks
        # They share its time, and it has all of it again.
        limits = folder.content["limits"]
        limits["verify"] = max(limits["verify"], sum(hook["timeout"] for hook in hooks))
    verifier["fresh_fork"] = True
    folder.content["setup"] = [_LOGS_MADE if agents_user in ("root", "0") else f"{_LOGS_MADE} || true"]
    if agents_user not in ("root", "0"):
        folder.notes.append(f"{_LOGS}: only where {agents_user or 'the ordinary user'} may make it")
    return has_tests


def _put_image(folder: Folder, tests: Path, image: str) -> bool:
    """Sets the verifier's image; returns whether that has /tests."""
    verifier = folder.content["verifier"]
    if image:
        verifier["image"] = image
        return True
    if (tests / compose.NAME).exists():
        raise Refused(f"tests/{compose.NAME}: several containers of a verifier are not supported")
    if (tests / "Dockerfile").is_file():
        verifier["build"] = folder.copy(tests, "verifier")
        return True
    for key in ("build", "image"):
        if key in folder.content:
            verifier[key] = folder.content[key]
    return False


def _copies(artifacts: list[Any]) -> Iterator[dict[str, Any]]:
    """Yields what a verifier gets whole, as in a task file. Raises Refused where Harbor would not keep all of it."""
    found = [_artifact(given, f"artifacts[{index}]") for index, given in enumerate(artifacts)]
    if not any(item.source == _LOGS for item in found):
        found.insert(0, _Artifact(_LOGS, _LOGS.strip("/"), ()))
    kept: list[_Artifact] = []
    for item in found:
        if any(other.covers(item) for other in kept):
            continue
        for other in kept:
            if any(
                _is_in(one, two)
                for one, two in (
                    (item.source, other.source),
                    (other.source, item.source),
                    (item.output, other.output),
                    (other.output, item.output),
                )
            ):
                raise Refused(f"artifacts: {other.source} and {item.source} overlap: Harbor keeps the first only")
        kept.append(item)
        yield {"path": item.source} | ({"exclude": list(item.exclude)} if item.exclude else {})


def _of_agents_logs(artifacts: list[dict[str, Any]]) -> Iterator[str]:
    """Yields notes on artifacts from where Harbor, but not Penstock, keeps logs of the agent."""
    for item in artifacts:
        if _is_in(item["path"], _OF_THE_AGENT):
            yield f"artifacts: {item['path']}: it has what the agent itself writes there, and no log of Harbor's"


def _collect(given: Any, user: str, env: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yields the commands that run in the agent's sandbox before its artifacts are taken. Raises Refused."""
    for index, hook in enumerate(_tables(given, "verifier.collect")):
        where = f"verifier.collect[{index}]"
        plain(hook, ("command", "service", "timeout_sec", "user"), where)
        if hook.get("service") not in _MAIN:
            raise Refused(f"{where}.service: {hook['service']}: several containers are not supported")
        if hook.get("user") is not None and str(hook["user"]) != user:
            raise Refused(
                f"{where}.user: {hook['user']}: all of a sandbox runs as its one user, {user or 'the ordinary'}"
            )
        command = {"argv": ["bash", "-c", str(hook["command"])], "timeout": float(hook.get("timeout_sec", _COLLECT_S))}
        yield command | ({"env": dict(env)} if env else {})


def _artifact(given: Any, where: str) -> _Artifact:
    table = {"source": given} if isinstance(given, str) else given
    if not isinstance(table, Mapping) or not isinstance(table.get("source"), str):
        raise Refused(f"{where}: it is neither a path nor a table with a source")
    plain(table, ("source", "destination", "exclude", "service"), where)
    source, exclude = posixpath.normpath(table["source"]), table.get("exclude") or []
    parts = table["source"].split("/")
    if table.get("service") not in _MAIN:
        raise Refused(f"{where}.service: {table['service']}: several containers are not supported")
    if not source.startswith("/") or source.strip("/") == "" or ".." in parts or parts[1] in _OF_THE_KERNEL:
        raise Refused(f"{where}: {table['source']!r} is no absolute path of files")
    if _is_in(source, _OF_THE_VERIFIER) or _is_in(_OF_THE_VERIFIER, source):
        raise Refused(f"{where}: {source} has {_OF_THE_VERIFIER}, which is the verifier's")
    for pattern in exclude:
        if not _NAMES.fullmatch(str(pattern)):
            raise Refused(f"{where}.exclude: {pattern!r}: only names are left out, with * at their ends")
    output = str(table.get("destination") or source).strip("/")
    return _Artifact(source, posixpath.normpath(output), tuple(map(str, exclude)))


def _is_in(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}/")


def _tables(value: Any, where: str) -> list[dict[str, Any]]:
    value = value or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refused(f"{where}: it is not a list of tables")
    return value
