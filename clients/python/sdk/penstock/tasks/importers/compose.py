"""The compose file of a task with several containers: the services beside the agent's become companions of its sandbox.

Kept are images, commands, environments, health checks, the order of starts and names. The Dockerfile of a companion is
copied with its directory, and built as the agent's is. Ports are ignored: all that a companion listens on is reached.
What would change the task's meaning is refused by its name: files shared with a container, further networks, and keys
that are not known here.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from penstock.client.tasks.sandbox_keys import CompanionTables
from penstock.tasks.importers.common import Choices, Folder, Refused, plain, yaml_of
from penstock.values.companions import MOST, MOST_ALIASES

NAME: Final = "docker-compose.yaml"
"""The one name that Harbor and Terminal-Bench look for: a file with another is the agent's material."""
_TOP: Final = ("version", "name", "services", "networks", "volumes")
_WITHOUT_EFFECT: Final = (
    "container_name", "depends_on", "expose", "hostname", "init", "labels", "links", "logging", "networks", "platform",
    "ports", "pull_policy", "restart", "shm_size", "stdin_open", "stop_grace_period", "stop_signal", "tmpfs", "tty",
)  # fmt: skip
"""Keys that are ignored, but for the names in them."""
_MAIN: Final = (*_WITHOUT_EFFECT, "build", "command", "deploy", "environment", "healthcheck", "image", "volumes")
_SIDE: Final = (
    *_WITHOUT_EFFECT, "build", "command", "cpus", "deploy", "entrypoint", "environment", "healthcheck", "image",
    "mem_limit", "pids_limit", "user", "volumes", "working_dir",
)  # fmt: skip
_KEEPS_RUNNING: Final = re.compile(r"(?:(?:/bin/)?(?:ba)?sh -c )?['\"]?(?:sleep infinity|tail -f /dev/null)['\"]?")
_HARNESS: Final = re.compile(r"\$\{?(?:T_BENCH_|HOST_|ENV_)\w*\}?")
_VARIABLE: Final = re.compile(r"\$(?:(\$)|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|(\{[^}]*\}?))")
_PERIOD: Final = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+)ms)?")
_CONDITIONS: Final = ("service_started", "service_healthy")


def put_companions(folder: Folder, file: Path, main: str, choices: Choices) -> None:
    """Makes the services of a compose file but `main` the task's companions. Raises Refused."""
    content = _mapping(yaml_of(file), file.name)
    content = {name: value for name, value in content.items() if not str(name).startswith("x-")}
    plain(content, _TOP, file.name)
    listed = _of(content, "services")
    if len(listed) > MOST + 1:
        # Before anything that takes time for each.
        raise Refused(f"{file.name}: {len(listed)} services: a sandbox has at most {MOST} companions")
    services = {str(name): _mapping(value, f"services.{name}") for name, value in listed.items()}
    reader = _Services(file.name, services, main, choices.env)
    reader.check(content)
    own, beside = services.get(main, {}), [name for name in services if name != main]
    env = reader.environment(own, main)
    if env:
        folder.content["env"] = {**folder.content.get("env", {}), **env}
    if not beside:
        return
    if not choices.image:
        raise Refused(f"{file.name}: {', '.join(beside)} are containers of images: import it with images")
    ordered = reader.in_order(beside)
    found = [reader.companion(name) for name in ordered]
    for name, entry in zip(ordered, found, strict=True):
        if (source := reader.context(name, file.parent)) is not None:
            entry["build"] = folder.copy(source, f"companion-{entry['name']}")
    # All of these names lead to the same address: so does the agent's container, whose name others may use.
    found[0]["aliases"] = [*found[0].get("aliases", []), main, *reader.names(own, main)][:MOST_ALIASES]
    try:
        TypeAdapter(CompanionTables).validate_python(found)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise Refused(f"{file.name}: companions: {place} {wrong['msg'].removeprefix('Value error, ')}") from None
    folder.content.setdefault("sandbox", {})["companions"] = found
    again = [name for name in beside if services[name].get("restart", "no") not in ("no", False)]
    if again:
        folder.notes.append(f"restart: a companion that ends is not started again ({', '.join(again)})")


class _Services:
    """The services of one file, each with the agent's; `env` resolves `${NAME}`."""

    def __init__(self, file: str, services: Mapping[str, Mapping[str, Any]], main: str, env: Mapping[str, str]) -> None:
        self._file = file
        self._services = services
        self._main = main
        self._env = env

    def check(self, content: Mapping[str, Any]) -> None:
        """Refuses what is shared beyond names and ports."""
        networks = set(_of(content, "networks"))
        for name, network in _of(content, "networks").items():
            where = f"{self._file}: networks.{name}"
            plain(_mapping(network, where), ("attachable", "driver", "internal", "labels", "name"), where)
            if _mapping(network, where).get("driver", "bridge") != "bridge":
                raise Refused(f"{where}.driver: {network['driver']}: not supported")
        ports: dict[str, str] = {}
        volumes: dict[str, str] = {}
        for name, service in self._services.items():
            where = f"{self._file}: services.{name}"
            plain(service, _MAIN if name == self._main else _SIDE, where)
            self._check_deployment(_of(service, "deploy"), f"{where}.deploy")
            used = service.get("networks") or {}
            networks |= set(used if isinstance(used, Mapping) else map(str, used))
            for port in self._ports(service):
                if ports.setdefault(port, name) != name:
                    raise Refused(
                        f"{where}: {ports[port]} listens on port {port} too, and they share one network: change one"
                    )
            for volume in service.get("volumes") or ():
                self._check_volume(volume, name, volumes)
        if len(networks - {"default"}) > 1:
            raise Refused(f"{self._file}: networks: {', '.join(sorted(networks))}: only one is supported")
        self._check_main(self._services.get(self._main, {}))

    @staticmethod
    def _check_deployment(deploy: Mapping[str, Any], where: str) -> None:
        plain(deploy, ("mode", "replicas", "resources", "restart_policy"), where)
        if deploy.get("replicas", 1) != 1:
            raise Refused(f"{where}.replicas: {deploy['replicas']}: a companion is one container")
        resources = _of(deploy, "resources")
        plain(resources, ("limits", "reservations"), f"{where}.resources")
        for kind in resources:
            plain(_of(resources, kind), ("cpus", "memory", "pids"), f"{where}.resources.{kind}")

    def _check_main(self, service: Mapping[str, Any]) -> None:
        where = f"{self._file}: services.{self._main}"
        command = service.get("command") or ""
        words = " ".join(map(str, command)) if isinstance(command, list) else str(command)
        if words and not _KEEPS_RUNNING.fullmatch(words):
            raise Refused(f"{where}.command: {words}: no program of the agent's container is started for it")
        if "build" not in service and "$" not in str(service.get("image", "$")):
            raise Refused(f"{where}.image: {service['image']}: the agent's image is the task's, not this file's")
        build = service.get("build") or "."
        table = build if isinstance(build, Mapping) else {"context": build}
        plain(table, ("context", "dockerfile"), f"{where}.build")
        if not re.fullmatch(r"\./?|.*\$.*", str(table.get("context", "."))):
            raise Refused(f"{where}.build: {table['context']}: its Dockerfile must be beside this file")
        if table.get("dockerfile", "Dockerfile") not in ("Dockerfile", "./Dockerfile"):
            raise Refused(f"{where}.build: {table['dockerfile']}: only Dockerfile is read")

    def _check_volume(self, volume: Any, name: str, volumes: dict[str, str]) -> None:
        where = f"{self._file}: services.{name}.volumes"
        if isinstance(volume, Mapping):
            source = "" if volume.get("type") == "tmpfs" else str(volume.get("source") or "")
        else:
            source = str(volume).rpartition(":")[0] and str(volume).split(":")[0]
        if not source or (name == self._main and _HARNESS.match(source)):
            return  # files of the container's own, or where the harness keeps its logs
        if source.startswith((".", "/", "~", "$")):
            raise Refused(f"{where}: {source}: containers have no files of the task but those in their image")
        if volumes.setdefault(source, name) != name or name == self._main:
            raise Refused(f"{where}: {source}: containers share no files")

    def in_order(self, names: Sequence[str]) -> list[str]:
        """Returns services with those first that others depend on."""
        ordered: list[str] = []
        left = list(names)
        while left:
            ready = [name for name in left if set(self._needed(name)) <= {*ordered, self._main}]
            if not ready:
                raise Refused(f"{self._file}: depends_on: {', '.join(left)} depend on each other or on none of these")
            ordered += ready
            left = [name for name in left if name not in ready]
        return ordered

    def _needed(self, name: str) -> Iterator[str]:
        needed = self._services[name].get("depends_on") or {}
        for other, terms in (needed if isinstance(needed, Mapping) else dict.fromkeys(map(str, needed))).items():
            condition = (terms or {}).get("condition", _CONDITIONS[0])
            if condition not in _CONDITIONS or (other == self._main and condition != _CONDITIONS[0]):
                raise Refused(f"{self._file}: services.{name}.depends_on.{other}: {condition}: not supported")
            yield str(other)

    def companion(self, name: str) -> dict[str, Any]:
        """Returns a service as an entry of `sandbox.companions`."""
        service, where = self._services[name], f"services.{name}"
        if not service.get("image") and not service.get("build"):
            raise Refused(f"{self._file}: {where}.image: is required")
        label = _label(name)
        aliases = [alias for alias in dict.fromkeys((name, *self.names(service, name))) if alias != label]
        found = {
            "name": label,
            # Beside a build, it is the name that the image gets there.
            "image": "" if service.get("build") else self._resolved(service["image"], f"{where}.image"),
            "aliases": aliases,
            "entrypoint": self._words(service, "entrypoint", where),
            "command": self._words(service, "command", where),
            "env": self.environment(service, name),
            "user": self._resolved(service.get("user", ""), f"{where}.user"),
            "workdir": self._resolved(service.get("working_dir", ""), f"{where}.working_dir"),
            "health_check": self._health(service, where),
            "resources": self._resources(service, where),
            "after": [_label(other) for other in self._needed(name) if other != self._main],
        }
        return {key: value for key, value in found.items() if value or (key == "health_check" and value is not None)}

    def context(self, name: str, beside: Path) -> Path | None:
        """Returns the directory of the Dockerfile of a companion, below that of the file; None = it names an image."""
        build, where = self._services[name].get("build"), f"{self._file}: services.{name}.build"
        if not build:
            return None
        table = build if isinstance(build, Mapping) else {"context": build}
        plain(table, ("context", "dockerfile"), where)
        given = self._resolved(table.get("context", "."), where)
        source = (beside / given).resolve()
        if beside.resolve() not in source.parents:
            raise Refused(f"{where}: {given}: its Dockerfile must be in a directory of its own below this file's")
        if table.get("dockerfile", "Dockerfile") not in ("Dockerfile", "./Dockerfile"):
            raise Refused(f"{where}: {table['dockerfile']}: only Dockerfile is read")
        if not (source / "Dockerfile").is_file():
            raise Refused(f"{where}: {given} has no Dockerfile")
        return source

    def environment(self, service: Mapping[str, Any], name: str) -> dict[str, str]:
        """Returns a service's variables."""
        where = f"services.{name}.environment"
        given = service.get("environment") or {}
        if isinstance(given, list):
            pairs = (str(item).partition("=") for item in given)
            given = {key: value if equals else None for key, equals, value in pairs}
        found = {}
        for key, value in _mapping(given, f"{self._file}: {where}").items():
            if name == self._main and _HARNESS.search(str(value)):
                continue  # a path of the harness's own
            text = f"${{{key}}}" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            found[str(key)] = self._resolved(text, f"{where}.{key}")
        return found

    def names(self, service: Mapping[str, Any], name: str) -> Iterator[str]:
        """Yields further names at which a service is reached."""
        for key in ("container_name", "hostname"):
            if service.get(key) and "$" not in str(service[key]):
                yield str(service[key])
        networks = service.get("networks")
        for network in networks.values() if isinstance(networks, Mapping) else ():
            yield from map(str, (network or {}).get("aliases") or ())
        for other in self._services.values():
            for link in other.get("links") or ():
                target, _, alias = str(link).partition(":")
                if target == name and alias:
                    yield alias

    def _ports(self, service: Mapping[str, Any]) -> set[str]:
        """Returns the ports of a service's own that it lists."""
        found = set()
        for port in [*(service.get("ports") or ()), *(service.get("expose") or ())]:
            own = port.get("target") if isinstance(port, Mapping) else str(port).rpartition(":")[2]
            found.add(str(own).removesuffix("/tcp"))
        return found

    def _words(self, service: Mapping[str, Any], key: str, where: str) -> list[str]:
        given = service.get(key) or []
        words = shlex.split(given) if isinstance(given, str) else list(given)
        return [self._resolved(word, f"{where}.{key}") for word in words]

    def _health(self, service: Mapping[str, Any], where: str) -> dict[str, Any] | None:
        check = service.get("healthcheck")
        if check is None:
            return None
        where = f"{where}.healthcheck"
        known = ("test", "interval", "timeout", "retries", "start_period", "start_interval", "disable")
        plain(_mapping(check, where), known, f"{self._file}: {where}")
        test = check.get("test")
        if check.get("disable") or test == ["NONE"]:
            return {"argv": []}
        if isinstance(test, str):
            argv = ["/bin/sh", "-c", test]
        elif isinstance(test, list) and test[:1] == ["CMD-SHELL"] and len(test) == 2:
            argv = ["/bin/sh", "-c", str(test[1])]
        elif isinstance(test, list) and test[:1] == ["CMD"] and len(test) > 1:
            argv = list(map(str, test[1:]))
        else:
            raise Refused(f"{self._file}: {where}.test: it is neither a text nor CMD or CMD-SHELL with a command")
        found: dict[str, Any] = {"argv": [self._resolved(word, f"{where}.test") for word in argv]}
        for key in ("interval", "timeout", "start_period"):
            if check.get(key) is not None:
                found[key] = self._seconds(check[key], f"{where}.{key}")
        if check.get("retries") is not None:
            found["retries"] = int(check["retries"])
        return found

    def _seconds(self, value: Any, where: str) -> float:
        text = str(value)
        parts = _PERIOD.fullmatch(text)
        if not text or parts is None:
            raise Refused(f"{self._file}: {where}: {text} is not a time such as 10s or 1m30s")
        hours, minutes, seconds, thousandths = (float(part or 0) for part in parts.groups())
        return hours * 3600 + minutes * 60 + seconds + thousandths / 1000

    def _resources(self, service: Mapping[str, Any], where: str) -> dict[str, Any]:
        limits = _of(_of(_of(service, "deploy"), "resources"), "limits")
        found: dict[str, Any] = {}
        for ours, own, deployed in (
            ("cpu", "cpus", "cpus"),
            ("memory_bytes", "mem_limit", "memory"),
            ("pids", "pids_limit", "pids"),
        ):
            value = service.get(own, limits.get(deployed))
            if value is None:
                continue
            text = self._resolved(value, f"{where}.{own}")
            try:
                found[ours] = float(text) if ours == "cpu" else int(text) if ours == "pids" else _bytes(text)
            except ValueError:
                raise Refused(f"{self._file}: {where}: {own}: {text[:40]} is not a number") from None
        return found

    def _resolved(self, value: Any, where: str) -> str:
        """Returns a text with variables replaced, from the choices only."""

        def answer(match: re.Match[str]) -> str:
            if match[1]:
                return "$"
            if match[5]:
                raise Refused(f"{self._file}: {where}: ${match[5]} is not supported")
            name = match[2] or match[3]
            given = self._env.get(name, match[4])
            if given is None:
                raise Refused(f"{self._file}: {where} needs the variable {name}: set it with --env {name}=VALUE")
            return given

        return _VARIABLE.sub(answer, str(value))


def _bytes(text: str) -> str:
    """Returns an amount of memory as task files have it: in compose files, k, m and g are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)i?b?", text.strip().lower())
    if found is None:
        raise Refused(f"{text} is not an amount of memory")
    return f"{found[1]}{found[2].upper()}iB" if found[2] else found[1]


def _label(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _of(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return _mapping(table.get(name) or {}, name)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Refused(f"{where} is not a mapping")
    return value
