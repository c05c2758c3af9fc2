"""Launchers of clusters: what they refuse, and what an order shows."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.waiting import eventually

from penstock.client.errors import ConfigurationError
from penstock.client.transport.endpoints import SERVICES, ServiceName
from penstock.client.types.sandboxes import NodeStatus
from penstock.launchers import Stack, on_ray
from penstock.launchers.cluster import ClusterStack
from penstock.launchers.growth import wanted
from penstock.launchers.node import NodeService
from penstock.launchers.on_ray import RayStack
from penstock.launchers.orders import Order, member_settings
from penstock.launchers.slurm_nodes import service_names
from penstock.local.processes import StackFailed, hold


def order() -> Order:
    """For one sandbox service."""
    return Order(
        name="n0",
        service="sandbox",
        settings={"operator_token": "token-of-the-node"},
        hosts={"node-1": "10.0.0.1"},
        members={"driver": {"d0": "10.0.0.1:7702"}},
        authority="authority",
        certificate="certificate",
        key="private-key",
        scratch="/tmp/x",
        log_dir=None,
        start_timeout=60.0,
        stop_timeout=12.0,
        max_restarts=3,
    )


def test_an_order_arrives_as_it_was_sent() -> None:
    assert Order.loads(order().dumps()) == order()


def test_an_order_shows_no_secret_when_it_is_printed() -> None:
    shown = repr(order())
    assert "n0" in shown
    assert "token-of-the-node" not in shown
    assert "private-key" not in shown


def test_a_node_gives_its_name_to_its_service_where_it_can() -> None:
    assert service_names(["gpu-07", "CPU_1.site", "cpu-1-site", "-"]) == {
        "gpu-07": "gpu-07",
        "CPU_1.site": "cpu-1-site",
        "cpu-1-site": "n2",
        "-": "n3",
    }


def test_an_unknown_cluster_manager_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match="local, ray, slurm, kubernetes") as caught:
        Stack(on="nomad")
    assert caught.value.reason == "STACK_ON_UNKNOWN"


def test_an_option_of_another_cluster_manager_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="resources is not an option of a stack on slurm") as caught:
        Stack(on="slurm", resources={"CPU": 1})
    assert caught.value.reason == "STACK_OPTION"
    with pytest.raises(ConfigurationError, match="nodes is not an option of a stack on local"):
        Stack(nodes=2)


@pytest.mark.parametrize("option", [{"gpus": 1}, {"engines": 2}])
def test_engines_without_a_model_are_refused(option: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="need") as caught:
        Stack(on="slurm", **option)  # type: ignore[arg-type]
    assert caught.value.reason == "STACK_OPTION"


@pytest.mark.parametrize("option", ["drivers", "gates", "engines"])
def test_a_stack_without_a_driver_gate_or_engine_is_refused(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option}=0: from 1 to 100") as caught:
        Stack(on="slurm", model_dir="model", **{option: 0})  # type: ignore[arg-type]
    assert caught.value.reason == "STACK_OPTION"


class Placing(ClusterStack):
    """Places nothing: what it would place is looked at."""

    async def find(self) -> None: ...
    async def place(self, services: Mapping[str, ServiceName]) -> None: ...
    async def place_nodes(self) -> None: ...
    async def remove(self, kinds: Collection[ServiceName]) -> None: ...
    async def close(self) -> None: ...


def test_the_first_of_each_kind_is_here_and_others_are_placed(tmp_path: Path) -> None:
    stack = Placing(drivers=2, gates=3, engines=2, model_dir="model", state_dir=tmp_path)
    assert list(stack.services) == ["inference", "interception", "driver"]
    assert stack.placed == {"g1": "interception", "g2": "interception", "d1": "driver", "e1": "inference"}


def test_engines_with_gpus_are_all_placed(tmp_path: Path) -> None:
    stack = Placing(engines=2, gpus=1, model_dir="model", state_dir=tmp_path)
    assert list(stack.services) == ["interception", "driver"]
    assert stack.placed == {"e0": "inference", "e1": "inference"}


def test_a_stack_of_one_each_places_only_sandbox_services(tmp_path: Path) -> None:
    assert Placing(model_dir="model", state_dir=tmp_path).placed == {}


def test_a_service_finds_the_kinds_that_the_stack_has(tmp_path: Path) -> None:
    all_kinds: dict[ServiceName, dict[str, str]] = {kind: {} for kind in SERVICES}
    assert member_settings("driver", tmp_path, all_kinds) == {
        "sandbox_members": f"file:{tmp_path}/sandboxes.json",
        "interception_members": f"file:{tmp_path}/gates.json",
        "driver_members": f"file:{tmp_path}/drivers.json",
    }
    assert member_settings("interception", tmp_path, all_kinds) == {
        "inference_members": f"file:{tmp_path}/engines.json"
    }
    assert member_settings("interception", tmp_path, {"driver": {}}) == {}


class Reporting(Placing):
    """All its services are elsewhere, and report as soon as they are placed: sandbox services but `failing`."""

    failing: Collection[str] = ()

    @property
    def services(self) -> Sequence[ServiceName]:
        return ()

    async def place(self, services: Mapping[str, ServiceName]) -> None:
        for name, kind in services.items():
            self.joined(name, kind, f"{name}:7000")

    async def place_nodes(self) -> None:
        for name in ("n0", "n1"):
            if name in self.failing:
                self.gave_up(name, "sandbox", "no user namespaces")
            else:
                self.joined(name, "sandbox", f"{name}:7000")


@pytest.mark.requirement("R125")
async def test_a_machine_that_comes_later_and_is_broken_ends_no_stack(tmp_path: Path) -> None:
    """An autoscaler brings machines at any time: those that are there go on, down to the last one."""
    block = Reporting(nodes=2, state_dir=tmp_path / "stack", scratch=tmp_path)
    with pytest.raises(StackFailed, match=r"sandbox service n0 failed: its disk is full") as failed:
        async with block as stack:
            stack.gave_up("n2", "sandbox", "no user namespaces")
            stack.gave_up("n1", "sandbox", "its disk is full")
            assert stack._failure is None and stack.members["sandbox"] == {"n0": "n0:7000"}
            stack.gave_up("n0", "sandbox", "its disk is full")
            await stack.wait()
    assert failed.value.reason == "SERVICE_DIED"


async def test_a_machine_that_is_broken_at_the_start_ends_it_with_the_reason(tmp_path: Path) -> None:
    stack = Reporting(nodes=2, state_dir=tmp_path / "stack", scratch=tmp_path)
    stack.failing = ("n1",)
    with pytest.raises(StackFailed, match=r"sandbox service n1 failed: no user namespaces"):
        async with stack:
            pass


@pytest.mark.requirement("R125")
async def test_a_machine_that_is_broken_at_the_start_ends_no_stack_that_has_enough(tmp_path: Path) -> None:
    """Without `nodes` the block waits for one sandbox service, however many come while a model loads."""
    stack = Reporting(state_dir=tmp_path / "stack", scratch=tmp_path)
    stack.failing = ("n1",)
    async with stack:
        assert stack._failure is None and stack.members["sandbox"] == {"n0": "n0:7000"}


@pytest.mark.requirement("R125")
async def test_a_directory_has_one_stack_at_a_time(tmp_path: Path) -> None:
    """A second one would replace the authority that clients of the first one know."""
    first, second, later = (Reporting(state_dir=tmp_path / "stack", scratch=tmp_path) for _ in range(3))
    async with first:
        authority = (tmp_path / "stack" / "ca.pem").read_bytes()
        with pytest.raises(ConfigurationError, match=f"{tmp_path}/stack is in use by .*{os.getpid()}") as refused:
            async with second:
                pass
        assert refused.value.reason == "STATE_DIR_IN_USE"
        assert (tmp_path / "stack" / "ca.pem").read_bytes() == authority
    async with later:
        assert (tmp_path / "stack" / "ca.pem").read_bytes() != authority
    async with Reporting(scratch=tmp_path) as alone:
        assert alone.directory == alone.state_dir


async def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some shared ones have none, and a stack on Slurm needs a shared one."""
    lock = fcntl.flock

    def refused(descriptor: int, operation: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(tmp_path / "stack"):
            raise OSError(errno.ENOSYS, "Function not implemented")
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refused)
    async with Reporting(state_dir=tmp_path / "stack", scratch=tmp_path):
        assert (tmp_path / "stack" / "ca.pem").exists()


class RayReporting(Reporting, RayStack):
    """A stack on Ray without Ray."""

    async def _removed(self, slot: on_ray._Slot, *, graceful: bool = True) -> None: ...


@pytest.mark.requirement("R125")
async def test_a_machine_that_gets_the_name_of_one_that_left_is_judged_for_itself(tmp_path: Path) -> None:
    stack = RayReporting(state_dir=tmp_path / "stack", scratch=tmp_path)
    async with stack:
        slot = on_ray._Slot("n1", "sandbox", 1, None, "10.0.0.1")
        stack._slots.append(slot)
        stack.gave_up("n1", "sandbox", "its disk is full")
        assert stack.members["sandbox"].keys() == {"n0"}
        await stack._retire(slot)
        stack.joined("n1", "sandbox", "n1:7001")
        assert stack.was_ready("n1", "sandbox")
        stack.gave_up("n1", "sandbox", "its disk is full")
        assert stack._failure is None and stack.members["sandbox"].keys() == {"n0"}


class RayStopping(Reporting, RayStack):
    """A stack on Ray without Ray, which stops its actors."""


class Actor:
    """One whose service does not get ready. Keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, method: str) -> SimpleNamespace:
        def remote(*_: object) -> asyncio.Future[str]:
            self.calls.append(method)
            answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            if method != "run":
                answer.set_result("10.0.0.1")
            return answer

        return SimpleNamespace(remote=remote)


@pytest.mark.requirement("R125")
async def test_an_actor_that_has_its_order_is_asked_to_stop_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its service may not be ready yet: what it has on the machine is removed all the same."""
    monkeypatch.setattr("ray.kill", lambda actor, *, no_restart: actor.calls.append("kill"))
    async with RayStopping(state_dir=tmp_path / "stack", scratch=tmp_path) as stack:
        actor, waiting = Actor(), Actor()
        slot = on_ray._Slot("n7", "sandbox", 7, actor)
        stack._start_slot(slot)
        await eventually(lambda: "run" in actor.calls, "the actor has its order")
        await stack._removed(slot)
        assert actor.calls == ["host", "run", "stop", "kill"]
        await stack._removed(on_ray._Slot("n8", "sandbox", 8, waiting))
        assert waiting.calls == ["kill"]  # nowhere yet: it could not answer


@pytest.mark.requirement("R97")
async def test_a_stacks_limit_of_restarts_is_that_of_services_elsewhere_too(tmp_path: Path) -> None:
    async with Reporting(state_dir=tmp_path / "stack", scratch=tmp_path, max_restarts=0) as stack:
        order = Order.loads(stack.order("n0", "sandbox", {"": "127.0.0.1"}).dumps())
    assert order.max_restarts == 0
    assert NodeService(order, "127.0.0.1")._max_restarts == 0


@pytest.mark.usefixtures("genuine_starts")
async def test_a_service_that_is_stopped_while_it_starts_leaves_nothing_on_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, started = tmp_path / "programs" / "penstock_sandbox", tmp_path / "started"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    text = f"import os, signal\nopen({str(started)!r}, 'x').close()\nsignal.pause()\n"
    (package / "__main__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    scratch = tmp_path / "scratch"
    service = NodeService(replace(order(), scratch=str(scratch)), "127.0.0.1")
    start = asyncio.create_task(service.__aenter__())
    await eventually(started.exists, "the service is started")
    assert scratch.exists()
    start.cancel()
    await asyncio.wait([start])
    assert not scratch.exists()


async def test_a_service_whose_directory_another_one_has_leaves_it(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    other = hold(scratch, "")
    try:
        with pytest.raises(ConfigurationError, match="is in use by"):
            async with NodeService(replace(order(), scratch=str(scratch)), "127.0.0.1"):
                pass
        assert scratch.exists()
    finally:
        os.close(other)


async def test_slurm_outside_an_allocation_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigurationError, match=r"sbatch deploy/slurm/penstock\.sbatch") as caught:
        async with Stack(on="slurm", state_dir=tmp_path / "state", scratch=tmp_path):
            pass
    assert caught.value.reason == "SLURM_NO_ALLOCATION"
    assert list(tmp_path.iterdir()) == []


def test_a_stack_without_ray_names_the_extra(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "sys.modules['ray'] = None\n"
        "from penstock.launchers import Stack\n"
        "async def main():\n"
        f"    async with Stack(on='ray', scratch={str(tmp_path)!r}):\n"
        "        pass\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'penstock[ray]'" in done.stderr


def node(taken: int, room: int, waiting: int = 0) -> NodeStatus:
    """What a sandbox service says of itself."""
    return NodeStatus(taken, waiting, room, None, 0.0, 0.0, (), ())


@pytest.mark.requirement("R125")
@pytest.mark.parametrize(
    ("nodes", "machines"),
    [
        ([], 1),
        ([node(0, 10)], 1),
        ([node(8, 2)], 1),
        ([node(9, 1)], 2),
        ([node(10, 0, waiting=30)], 5),
        ([node(10, 0, waiting=300)], 7),
        ([node(1, 9), node(0, 10), node(0, 10)], 1),
        ([node(0, 0), node(0, 0)], 3),
        ([node(3, 0), node(3, 9)], 1),
    ],
)
def test_a_stack_wants_machines_of_which_a_fifth_is_free(nodes: list[NodeStatus], machines: int) -> None:
    assert wanted(nodes, most=7) == machines


@pytest.mark.parametrize("options", [{"max_nodes": 0}, {"max_nodes": 4, "nodes": 2}])
def test_a_growing_stack_has_no_fixed_number_of_machines(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="max_nodes") as caught:
        RayStack(scratch=tmp_path, **options)
    assert caught.value.reason == "STACK_OPTION"
