"""docker-compose.yml and the Dockerfiles say what the settings, docs/interfaces.md and `penstock credentials` say."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.docs.pages import ROOT
from tests.unit.docs.test_commands import SETTINGS

from penstock.cli.commands.credentials import make
from penstock.client.transport.endpoints import DEFAULT_DASHBOARD_PORT, DEFAULT_INGRESS_PORT, DEFAULT_PORTS

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
REPLICATED = ("sandbox", "driver", "interception")
# The clients' and the health check's, of no service's own.
SHARED = {"PENSTOCK_CONFIG", "PENSTOCK_CA_FILE"}


def dockerfile(service: str) -> str:
    """A service's Dockerfile."""
    return (ROOT / f"services/{service}/Dockerfile").read_text(encoding="utf-8")


def installed(folder: Path, service: str, extras: str) -> list[str]:
    """The pins and the arguments with which its Dockerfile installs a service with these extras."""
    (line,) = re.findall(rf"^RUN (.+ install .*\./services/{service}.*?) *\\?$", dockerfile(service), re.MULTILINE)
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf \'%s\\n\' "$PIP_CONSTRAINT" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "EXTRAS": extras, "PIP_CONSTRAINT": "pins"}
    command = ["/bin/sh", "-euc", line.replace("/opt/penstock/bin/python", str(python))]
    return subprocess.run(command, env=environment, check=True, capture_output=True).stdout.decode().split()


@pytest.mark.parametrize("service", SETTINGS)
def test_containers_environment_is_its_services_settings(service: str) -> None:
    """A setting that was renamed would be refused when the container starts."""
    names = {SETTINGS[service].env_name(field) for field in SETTINGS[service].model_fields} | SHARED
    assert set(SERVICES[service]["environment"]) <= names
    assert set(re.findall(r"\b(PENSTOCK_[A-Z_]+)=", dockerfile(service))) <= names


@pytest.mark.requirement("R1", "R8")
@pytest.mark.parametrize("service", SETTINGS)
def test_no_secret_is_in_an_environment_or_a_layer(service: str) -> None:
    """Tokens and keys come as files, of the directory that is no part of any image's context."""
    told = SERVICES[service]["environment"]
    assert not [name for name in told if name.endswith(("_TOKEN", "_API_KEY"))]
    assert set(SERVICES[service]["secrets"]) == {"ca.pem", f"{service}.toml", f"{service}.pem", f"{service}.key"}
    for value in filter(None, told.values()):
        if value.startswith("/run/secrets/"):
            assert value.removeprefix("/run/secrets/") in SERVICES[service]["secrets"]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored and not [line for line in ignored if line.startswith("!") and "credentials" in line]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile(service), re.MULTILINE)
    for source in " ".join(copied).split():
        assert any(f"!{source.rstrip('*')}".startswith(line) for line in ignored if line.startswith("!")), source


def test_the_secrets_are_the_files_that_the_command_makes(tmp_path: Path) -> None:
    """`make credentials`, then `docker compose up`."""
    make(tmp_path / "credentials", (), 1)
    for name, secret in COMPOSE["secrets"].items():
        place, _, file = secret["file"].rpartition("/")
        assert place == "${PENSTOCK_CREDENTIALS:-./credentials}"
        assert file == name and (tmp_path / "credentials" / file).is_file()


@pytest.mark.requirement("R124")
def test_drivers_image_can_export() -> None:
    """Whoever builds it: Compose, docker for a chart's registry, or a machine that gathered wheels."""
    default = re.findall(r"^ARG EXTRAS=(\S+)$", dockerfile("driver"), re.MULTILINE)
    assert SERVICES["driver"]["build"]["args"]["EXTRAS"] == f"${{PENSTOCK_EXPORT_EXTRAS-{default[0]}}}", (
        "empty = without, as docs/guides/compose.md says"
    )
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"^DRIVER_EXTRAS \?= (\S+)$", makefile, re.MULTILINE) == default
    assert '"./services/driver[$(DRIVER_EXTRAS)]"' in makefile
    project = tomllib.loads((ROOT / "services/driver/pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    needed = {re.split(r"[\[><=]", one)[0] for name in ("export", "s3") for one in extras[name]}
    assert default == ["s3"] and {"fsspec", "pyarrow", "s3fs"} <= needed


@pytest.mark.parametrize("service", SETTINGS)
def test_a_container_is_confined(service: str) -> None:
    """Issue 3, 9: read-only roots, no capabilities, no root, limits; one of them alone has the engine's socket."""
    asked = SERVICES[service]
    assert asked["read_only"] and asked["cap_drop"] == ["ALL"] and asked["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "user"} & set(asked)
    assert {"mem_limit", "cpus", "pids_limit", "restart"} <= set(asked)
    assert ("docker.sock" in str(asked["volumes"])) == (service == "sandbox")
    assert re.findall(r"^USER (.+)$", dockerfile(service), re.MULTILINE) == ["10001:10001"]
    assert "--privileged" not in dockerfile(service) and "HEALTHCHECK" in dockerfile(service)
    bases = re.findall(r"^FROM (\S+)", dockerfile(service), re.MULTILINE)
    assert bases == ["${BASE}", "${BASE}"]
    default = re.findall(r"^ARG BASE=(\S+)$", dockerfile(service), re.MULTILINE)
    assert default == [COMPOSE["x-build"]["BASE"].removeprefix("${PENSTOCK_BASE_IMAGE:-").removesuffix("}")]


@pytest.mark.requirement("R9")
@pytest.mark.parametrize("service", SETTINGS)
def test_ports_are_the_documented_ones_and_the_ingress_is_published_nowhere(service: str) -> None:
    """On the host they are loopback's unless the operator says otherwise."""
    port = dict(DEFAULT_PORTS.items())[service]  # type: ignore[index]
    published = SERVICES[service].get("ports", []) + (SERVICES["door"]["ports"] if service in REPLICATED else [])
    assert f"${{PENSTOCK_BIND:-127.0.0.1}}:{port}:{port}" in published
    assert ("ports" in SERVICES[service]) == (service not in REPLICATED), "two replicas cannot have one port"
    exposed = re.findall(r"^EXPOSE (.+)$", dockerfile(service), re.MULTILINE)[0].split()
    assert exposed == [str(port), *([str(DEFAULT_INGRESS_PORT)] if service == "interception" else [])]
    assert f'"localhost:{port}"]' in dockerfile(service)


@pytest.mark.requirement("R9")
def test_the_door_publishes_the_replicated_services_and_is_confined_too() -> None:
    """It has no token, no key and no state: it passes bytes on."""
    door = SERVICES["door"]
    ports = {name: DEFAULT_PORTS[name] for name in REPLICATED}  # type: ignore[index]
    assert sorted(door["command"]) == sorted(f"{port}={name}:{port}" for name, port in ports.items())
    assert sorted(door["ports"]) == sorted(f"${{PENSTOCK_BIND:-127.0.0.1}}:{port}:{port}" for port in ports.values())
    assert door["read_only"] and door["cap_drop"] == ["ALL"] and door["security_opt"] == ["no-new-privileges:true"]
    assert door["secrets"] == ["ca.pem"] and "volumes" not in door
    assert {"mem_limit", "cpus", "pids_limit", "restart"} <= set(door)


def test_replicas_share_their_volume_and_are_found_by_name() -> None:
    for name in REPLICATED:
        assert SERVICES[name]["environment"][f"PENSTOCK_{name.upper()}_STATE_DIR_SHARED"] == "true"
        listed = SERVICES["driver"]["environment"][f"PENSTOCK_DRIVER_{name.upper()}_MEMBERS"]
        assert listed == f"dns:{name}:{DEFAULT_PORTS[name]}"  # type: ignore[index]


@pytest.mark.requirement("R124")
@pytest.mark.parametrize(("extras", "wanted"), [("", "./services/driver"), ("export", "./services/driver[export]")])
def test_a_drivers_image_may_be_built_without_exports(tmp_path: Path, extras: str, wanted: str) -> None:
    """pip takes empty brackets for a part of the path."""
    assert installed(tmp_path, "driver", extras) == ["pins", "-m", "pip", "install", wanted]


@pytest.mark.parametrize(("extras", "wanted"), [("", "./services/inference"), ("vllm", "./services/inference[vllm]")])
def test_the_engines_that_an_image_is_built_with_reach_pip(tmp_path: Path, extras: str, wanted: str) -> None:
    """Issue 5: vLLM is a build option, off unless it is asked for; it brings its own pins, and compose passes it on."""
    pins = "/dev/null" if extras else "pins"
    assert installed(tmp_path, "inference", extras) == [pins, "-m", "pip", "install", wanted]
    assert re.findall(r"^ARG EXTRAS=(.*)$", dockerfile("inference"), re.MULTILINE) == [""]
    assert SERVICES["inference"]["build"]["args"]["EXTRAS"] == "${PENSTOCK_ENGINE_EXTRAS:-}"


@pytest.mark.requirement("R1", "R9")
def test_the_dashboard_is_confined_as_the_services_are_and_has_no_token() -> None:
    """It passes on what each page brings; its container has a certificate and nothing else that is secret."""
    asked = SERVICES["dashboard"]
    text = (ROOT / asked["build"]["dockerfile"]).read_text(encoding="utf-8")
    assert asked["read_only"] and asked["cap_drop"] == ["ALL"] and asked["security_opt"] == ["no-new-privileges:true"]
    assert set(asked["secrets"]) == {"ca.pem", "dashboard.pem", "dashboard.key"}
    assert asked["ports"] == [f"${{PENSTOCK_BIND:-127.0.0.1}}:{DEFAULT_DASHBOARD_PORT}:{DEFAULT_DASHBOARD_PORT}"]
    assert {asked["environment"][f"PENSTOCK_{name.upper()}_ADDRESS"] for name in DEFAULT_PORTS} == {
        f"{name}:{port}" for name, port in DEFAULT_PORTS.items()
    }
    names = "${PENSTOCK_BIND:-127.0.0.1} ${PENSTOCK_DASHBOARD_NAMES:-}"
    assert asked["environment"]["PENSTOCK_DASHBOARD_NAMES"] == names, (
        "it answers at the address that it is published on"
    )
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["10001:10001"]
    assert re.findall(r"^EXPOSE (.+)$", text, re.MULTILINE) == [str(DEFAULT_DASHBOARD_PORT)]
    assert not [name for name in asked["environment"] if name.endswith("_TOKEN")]
