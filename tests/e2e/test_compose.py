"""docker-compose.yml on a real engine: the images build, the stack comes up, a rollout runs, nothing is left."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from pathlib import Path

import aiohttp
import pytest
from tests.e2e.composed import CONTAINERS, Composed, composed
from tests.support.policy import bash
from tests.support.wheels import ROOT

TASK = ROOT / "examples" / "grpo" / "task.yaml"
SCRIPT = {
    "strict": False,
    "turns": [
        {
            "when": {"has_tool_result": False},
            "repeat": True,
            "reply": bash("read -r _ _ _ word < note.txt; echo ${word%.} > b.txt"),
        },
        {"repeat": True, "reply": "The word is copied."},
    ],
}


@pytest.mark.requirement("R9", "R11", "R14")
@pytest.mark.timeout(1500)
async def test_compose_stack_runs_a_rollout_in_docker_and_leaves_nothing(tmp_path: Path) -> None:
    """TLS and tokens between all, sandboxes with no network but the ingress, and `down -v` is the end."""
    async with composed(tmp_path, SCRIPT) as project:
        for name in CONTAINERS:
            _is_confined(project, name)
        await _is_the_dashboard(project)
        saved = tmp_path / "saved"
        argv = ["-m", "penstock.cli.main", "rollout", "--agent", "shell", "--task", str(TASK), "--save", str(saved)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *argv,
            "--json",
            env=project.client,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, errors = await process.communicate()
        told = f"{said.decode()}\n{errors.decode()}\n"
        assert process.returncode == 0, told + await asyncio.to_thread(project.logs)
        results = [line for line in map(json.loads, said.splitlines()) if "reward" in line]
        assert [line["reward"] for line in results] == [1.0], told
        assert list(saved.glob("*/turns.jsonl")), told
        assert "docker" in _backends_of(await asyncio.to_thread(project.logs))
    left = [item for item in project.engine.remains() if "penstock" in item]
    label = {"label": f"com.docker.compose.project={project.name}"}
    left += project.engine.api.containers(all=True, filters=label)
    left += project.engine.api.volumes(filters=label).get("Volumes") or []
    left += project.engine.api.networks(filters=label)
    assert left == []


def _is_confined(project: Composed, service: str) -> None:
    """What the compose file asks for is what the engine does."""
    container = project.container(service)
    host = container["HostConfig"]
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["Privileged"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["Memory"] > 0 and host["PidsLimit"] > 0 and host["NanoCpus"] > 0
    assert container["Config"]["User"] == "10001:10001"
    secrets = [path.read_text().strip() for path in project.credentials.glob("*.token")]
    assert secrets and not [secret for secret in secrets if secret in json.dumps(container)]
    sockets = [mount for mount in container["Mounts"] if mount["Destination"] == "/var/run/docker.sock"]
    assert len(sockets) == (service == "sandbox")


async def _is_the_dashboard(project: Composed) -> None:
    """Its page by the authority's certificate, what a service says to the page's own token, and no other name."""
    page = f"https://{project.address}:7790/"
    listing = f"{page}rpc/penstock.driver.v1.AgentService/ListAgents"
    token = (project.credentials / "observer.token").read_text().strip()
    nobody = {"content-type": "application/grpc-web+proto"}
    observer = {**nobody, "authorization": f"Bearer {token}"}
    trusted = ssl.create_default_context(cafile=project.credentials / "ca.pem")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted)) as http:
        async with http.get(page) as response:
            assert response.status == 200 and "<title>Penstock</title>" in await response.text()
        async with http.post(listing, data=bytes(5), headers=observer) as response:
            answer = await response.read()
            assert b"opencode" in answer and b"grpc-status: 0" in answer
        async with http.post(listing, data=bytes(5), headers=nobody) as response:
            assert b"grpc-status: 16" in await response.read()
        async with http.get(page, headers={"host": "elsewhere.example"}) as response:
            assert response.status == 421


def _backends_of(logs: str) -> set[str]:
    return {name for name in ("docker", "local") if f"{name} backend ready" in logs}
