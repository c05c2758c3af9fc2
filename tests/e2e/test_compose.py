"""docker-compose.yml on a real engine: the images build, the stack comes up, a rollout runs, nothing is left."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from tests.e2e.composed import CONTAINERS, Composed, composed
from tests.support.policy import bash
from tests.support.waiting import eventually_async
from tests.support.wheels import ROOT

from penstock.client import Home, Mode, RolloutHandle, SeedFile, Task, connect

TASK = ROOT / "examples" / "grpo" / "task.yaml"
SCALE = {"sandbox": 3, "interception": 2, "driver": 2}
KINDS = ("driver", "gate", "sandbox_service")
AT_ONCE = 4
"""Rollouts of a round: two for each driver, which gives them to different gates."""
ROUNDS = 12
"""More than enough: each has a task of its own, which is equally likely at each of three sandbox services."""
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
        assert "docker" in _backends_of(await asyncio.to_thread(project.compose, "logs", "--no-color", "sandbox"))
        await _is_scaled(project, results[0]["rollout_id"])
        await _is_exported(project, results[0]["rollout_id"])
    left = [item for item in project.engine.remains() if "penstock" in item]
    label = {"label": f"com.docker.compose.project={project.name}"}
    left += project.engine.api.containers(all=True, filters=label)
    left += project.engine.api.volumes(filters=label).get("Volumes") or []
    left += project.engine.api.networks(filters=label)
    assert left == []


def _is_confined(project: Composed, service: str) -> None:
    """What the compose file asks for is what the engine does."""
    [container] = project.containers(service)
    host = container["HostConfig"]
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["Privileged"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["Memory"] > 0 and host["PidsLimit"] > 0 and host["NanoCpus"] > 0
    assert container["Config"]["User"] == "10001:10001"
    secrets = [path.read_text().strip() for path in project.credentials.glob("*.token")]
    assert secrets and not [secret for secret in secrets if secret in json.dumps(container)]
    sockets = [mount for mount in container["Mounts"] if mount["Destination"] == "/var/run/docker.sock"]
    assert len(sockets) == (service == "sandbox")


async def _is_scaled(project: Composed, earlier: str) -> None:
    """More replicas beside the first ones get rollouts, and what was there before is there still.

    By the connection file alone: the client learns of all drivers from the one behind the door.
    """
    await project.scale(SCALE)
    async with connect(project.credentials / "connection.json") as ps:

        async def are_known() -> bool:
            listed = [await ps.operations.members(kind) for kind in ("sandbox", "interception", "driver")]
            states = [[one.state for one in members] for members in listed]
            return states == [["up"] * count for count in SCALE.values()]

        await eventually_async(are_known, "all replicas are members", within=120.0)
        made: list[RolloutHandle] = []
        homes: list[Home] = []
        for number in range(ROUNDS):
            if all(len({getattr(home, kind) for home in homes}) >= 2 for kind in KINDS):
                break
            task = _variant(number)
            begun = [await ps.rollouts.create(task, "shell", mode=Mode.TRANSPARENT_PROXY) for _ in range(AT_ONCE)]
            made += begun
            for result in await asyncio.gather(*(one.result() for one in begun)):
                assert result.reward is not None and result.reward.value == 1.0, result.outcome.failure
                assert result.rollout.home is not None
                homes.append(result.rollout.home)
        for kind in KINDS:
            assert len({getattr(home, kind) for home in homes}) >= 2, f"one {kind} got all rollouts"
        listed = {one.rollout_id async for one in ps.rollouts.list()}
        assert listed == {earlier, *(one.rollout_id for one in made)}
        assert (await (await ps.rollouts.attach(earlier)).trajectory()).calls


def _variant(number: int) -> Task:
    """The task with one more file: a state of its own to prepare, which is prepared at one of the sandbox services."""
    task = Task.load(TASK)
    return replace(task, files=(*task.files, SeedFile(path="variant.txt", content=str(number).encode())))


async def _is_exported(project: Composed, rollout_id: str) -> None:
    """The driver's image has what `export_url` needs, and the rollout is there once its batch was due."""
    command = (
        "import glob, pyarrow.parquet as pq;"
        "files = glob.glob('/var/lib/penstock/exports/**/*.rollouts.parquet', recursive=True);"
        "print(*(row for file in files for row in pq.read_table(file)['rollout_id'].to_pylist()))"
    )

    async def is_there() -> bool:
        listed = await asyncio.to_thread(project.compose, "exec", "-T", "driver", "python3", "-c", command)
        return rollout_id in listed.split()

    await eventually_async(is_there, "the first rollout is exported", within=120.0)


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
