"""An agent that reads, connects, impersonates and forges whatever it can: each attempt is refused."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.struct_pb2 import Struct
from tests.support.copying import Finished, finish, training
from tests.support.endpoints.endpoint import gate_rollout
from tests.support.network import AGENT_PORT, METADATA, host_addresses
from tests.support.services.stack import Running

from penstock.client import (
    ArtifactCollected,
    Command,
    Phase,
    RewardFrom,
    SeedFile,
    Task,
    Verifier,
)
from penstock.driver.v1 import agent_pb2
from penstock.sandbox.v1 import toolbox_service_pb2
from penstock.trajectory.v1 import trajectory_pb2

SCRIPT = Path(__file__).with_name("hostile_agent.py")
HOST_SECRET = "PENSTOCK_TEST_HOST_SECRET"
VERIFIER = """
[ -L "$0" ] && echo "the verifier is a link"
for process in /proc/[0-9]*; do tr '\\0' ' ' < $process/cmdline; echo; done
if [ "$(cat honest.txt 2>/dev/null)" = yes ]; then echo 1; else echo 0; fi > "$PENSTOCK_REWARD_FILE"
"""


def hostile_spec() -> agent_pb2.AgentSpec:
    """The hostile agent as anybody may register one: pure data."""
    config = Struct()
    config.update({"base_url": "{{base_url}}", "key": "{{api_key}}"})
    return agent_pb2.AgentSpec(
        name="hostile",
        version="1",
        toolbox=toolbox_service_pb2.ToolboxSpec(
            runtimes=[toolbox_service_pb2.Runtime(kind=toolbox_service_pb2.RUNTIME_KIND_PYTHON)],
            files=[toolbox_service_pb2.ToolboxFile(path="bin/hostile", content=SCRIPT.read_bytes())],
        ),
        argv=["python3", "{{toolbox}}/bin/hostile", "{{home}}/config.json"],
        instruction=agent_pb2.InstructionDelivery(
            method=agent_pb2.InstructionDelivery.METHOD_FILE, path="instruction.md"
        ),
        files=[agent_pb2.ConfigFile(path="config.json", json=config)],
        dialects=[trajectory_pb2.DIALECT_CHAT_COMPLETIONS],
        artifacts=[agent_pb2.ArtifactSpec(name="report", path="report.json", required=True)],
    )


def listening_ports() -> set[int]:
    """Every TCP port of this host on which anything listens, whoever it is."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def targets(running: Running, other_path: str, other_key: str, **more: Any) -> dict[str, Any]:
    """What the agent is told to try: more than an attacker would know."""
    ports = listening_ports() | set(running.ports.values())
    assert set(running.ports.values()) <= listening_ports(), "the control plane listens"
    resolvers = re.findall(r"nameserver\s+(\d[\d.]+)", Path("/etc/resolv.conf").read_text())
    state = running.state_dir
    return {
        "port": AGENT_PORT,
        "other_path": other_path,
        "other_key": other_key,
        "addresses": [[address, port] for address in host_addresses() for port in sorted(ports - {AGENT_PORT})]
        + [[METADATA, 80], ["100.100.100.200", 80], ["::1", running.ports["driver"]], ["8.8.8.8", 53]],
        "resolvers": [*resolvers, "127.0.0.53", "8.8.8.8", METADATA],
        "control_plane": [f"127.0.0.1:{port}" for port in running.ports.values()] + [f"{METADATA}:80"],
        "files": [
            "/etc/shadow",
            "/root",
            str(Path.home() / ".ssh"),
            str(Path(__file__).parents[2]),
            str(state),
            str(state / "sandbox"),
            str(state / "interception" / "journal.sqlite"),
            str(running.stack.log_dir),
            "/home",
            "/var/lib",
            "/run",
            "/sys/kernel",
            "/dev/mem",
            "/dev/kmsg",
            "/proc/kcore",
            "/proc/1/environ",
            "/proc/1/root/etc/shadow",
            "/var/run/docker.sock",
            "/proc/sysrq-trigger",
        ],
        **more,
    }


def hostile_task(plan: dict[str, Any]) -> Task:
    """Reward 0 for an honest verifier, since nobody writes honest.txt."""
    return Task(
        task_id="hostile",
        instruction="Get out.",
        files=[SeedFile("targets.json", json.dumps(plan).encode())],
        verifier=Verifier(
            commands=[Command(["bash", "verify.sh"]), Command(["bash", "tests/check.sh"])],
            files=[SeedFile("verify.sh", VERIFIER.encode()), SeedFile("tests/check.sh", b"true\n")],
            reward=RewardFrom.FILE,
        ),
    )


@dataclass(frozen=True)
class Attack:
    """What the agent reported, and how its rollout went."""

    report: dict[str, Any]
    finished: Finished
    running: Running
    own_id: str
    other_calls: int


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def attack(stack: Running) -> Attack:
    """One run of the hostile agent beside another open rollout, at the gate."""
    await stack.ps.agents.register(hostile_spec())
    label = secrets.token_hex(8)
    async with gate_rollout(stack) as other, training(stack, label, lambda _prompt: "the positive control's answer"):
        path = other.base_url.removeprefix("http://").partition("/")[2]
        task = hostile_task(targets(stack, "/" + path, other.api_key))
        handle = await stack.ps.rollouts.create(task, "hostile", labels={"test": label})
        finished = await finish(handle)
        seen = await other.capture()
    artifacts = [item.payload for item in finished.events if isinstance(item.payload, ArtifactCollected)]
    assert artifacts, finished.agent_said()
    return Attack(json.loads(artifacts[0].content), finished, stack, handle.rollout_id, len(seen.calls))


async def test_a_hostile_agents_own_model_endpoint_works(attack: Attack) -> None:
    """The positive control: what follows is refused, not broken."""
    status, body = attack.report["endpoint"]["own"]
    assert status == 200, body
    assert "the positive control's answer" in body


@pytest.mark.requirement("R14")
async def test_no_address_takes_a_connection_but_its_one_endpoint(attack: Attack) -> None:
    """Every listening port of the host at every address, the metadata address, IPv6, UDP and its own loopback."""
    assert attack.report["network"], "it tried nothing"
    assert {target: how for target, how in attack.report["network"].items() if how == "done"} == {}
    assert "done" not in attack.report["datagrams"].values(), attack.report["datagrams"]
    assert attack.report["open ports"] == [AGENT_PORT]
    assert attack.report["interfaces"] == ["lo"]
    assert "\n" not in attack.report["routes"].strip(), "there is a route"
    # Abstract sockets would cross mount namespaces; a network namespace of its own has its own, and none has a name.
    named = [line for line in attack.report["unix sockets"].splitlines()[1:] if len(line.split()) > 7]
    assert named == []


@pytest.mark.requirement("R4", "R5")
async def test_foreign_rollouts_endpoint_looks_like_an_absent_one(attack: Attack) -> None:
    endpoint = attack.report["endpoint"]
    unknown = endpoint["unknown with own token"]
    assert unknown[0] == 401
    for attempt in (
        "own without a token",
        "own with a blank token",
        "own with a wrong token",
        "own with the other's token",
        "other with own token",
        "other without a token",
        "other's models",
    ):
        assert endpoint[attempt] == unknown, attempt
    for attempt in ("other through own", "encoded traversal"):
        assert endpoint[attempt][0] in (400, 401, 404), (attempt, endpoint[attempt])
    assert attack.other_calls == 0


@pytest.mark.requirement("R14", "R16")
async def test_ingress_has_no_administration_and_no_way_to_the_control_plane(attack: Attack) -> None:
    """Other paths, other methods, gRPC, proxying and absolute addresses all end at the ingress."""
    endpoint = attack.report["endpoint"]
    assert {path: status for path, (status, _) in endpoint["admin"].items() if status not in (401, 404)} == {}
    for attempt in ("deleting", "close", "gRPC by HTTP/1.1"):
        assert endpoint[attempt][0] in (401, 404, 405), (attempt, endpoint[attempt])
    for kind in ("proxy", "absolute"):
        for target, answer in endpoint[kind].items():
            assert re.match(r"HTTP/1\.[01] (400|401|404|405|501) ", answer) or not answer, (kind, target, answer)
    assert "\x00\x00" not in endpoint["gRPC preface"], "it speaks HTTP/2"
    assert "HTTP/2" not in endpoint["gRPC preface"].split("\r\n")[0]


@pytest.mark.requirement("R12", "R45")
async def test_no_file_of_the_host_can_be_read(attack: Attack) -> None:
    readable = {path: shown for path, shown in attack.report["files"].items() if ":" in shown}
    harmless = {
        "/root": "entries: ",
        "/home": "entries: agent",
        "/run": "entries: ",
    }
    for path, shown in harmless.items():
        if path in readable:
            assert readable.pop(path).strip() == shown.strip()
    # Its own init's environment is its own business: what is in it is asserted below.
    readable.pop("/proc/1/environ", None)
    readable.pop("/proc/sysrq-trigger", None)
    assert readable == {}


@pytest.mark.requirement("R1", "R12")
async def test_visible_processes_hold_no_secret_and_no_host_environment(attack: Attack) -> None:
    """An allow-list; the key is in the agent's file alone."""
    running = attack.running
    known = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "TMPDIR", "PWD", "LC_CTYPE"}
    assert set(attack.report["environment"]) - known == set()
    everything = json.dumps([attack.report["environment"], attack.report["processes"]])
    for secret in (running.stack.operator_token, running.stack.trainer_token, str(running.state_dir)):
        assert secret not in everything
    assert len(attack.report["processes"]) < 10
    assert attack.report["identity"][0] != 0


@pytest.mark.requirement("R47", "R55", "R60")
async def test_a_hostile_agent_gains_no_privilege(attack: Attack) -> None:
    """Nor trace its init, where its code would live on while the verifier works."""
    assert {name: how for name, how in attack.report["privileges"].items() if how == "done"} == {}


@pytest.mark.requirement("R60", "R72", "R75", "R76")
async def test_a_hostile_agent_cannot_forge_its_reward(attack: Attack) -> None:
    """Its daemon is dead, its links and files are replaced, its dot-files and shims are not run."""
    assert attack.finished.reward == 0.0, attack.finished.agent_said()
    first = attack.finished.commands(Phase.VERIFYING)[0]
    assert first.exit.ok
    seen = first.stdout_tail.decode()
    assert "hostile" not in seen, seen
    assert "the verifier is a link" not in seen


@pytest.mark.requirement("R40", "R59", "R72")
async def test_an_agent_that_kills_everything_it_can_gets_no_reward(stack: Running) -> None:
    """Its parent, its init, then all: however that ends, it is typed and no reward of its own."""
    await stack.ps.agents.register(hostile_spec())
    label = secrets.token_hex(8)
    async with gate_rollout(stack) as other, training(stack, label, lambda _prompt: "yes"):
        plan = targets(stack, "/rollout/none/v1", other.api_key, kills=True, addresses=[], resolvers=[])
        handle = await stack.ps.rollouts.create(hostile_task(plan), "hostile", labels={"test": label})
        finished = await finish(handle)
    outcome = finished.result.outcome
    assert outcome.reward is None or outcome.reward.value == 0.0, finished.agent_said()
    assert outcome.failure is not None, finished.agent_said()
    assert outcome.failure.reason in ("AGENT_CRASHED", "SANDBOX_LOST", "AGENT_KILLED"), outcome.failure
