"""What was made at one of two drivers is found from the other's address alone, and from that of an Envoy in front."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import pytest_asyncio
from tests.conformance.clients.fleet import Fleet
from tests.conformance.clients.subjects import SUBJECTS, Subject
from tests.conformance.clients.world import World
from tests.integration.driver.stack import TOKEN
from tests.support import envoy
from tests.support.policy import sampled

from penstock.client import Completion, Endpoints, RolloutHandle, Task, connect
from penstock.driver.v1 import rollout_pb2, rollout_service_pb2, rollout_service_pb2_grpc
from penstock_chassis.channel import error_from_rpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

_TASK: Final = Task(task_id="t", instruction="wait")
_WAYS: Final = ("d1", "envoy")


@dataclass
class Place:
    """Two drivers, and the ways to them: by name the address of a driver and whether others are asked for."""

    fleet: Fleet
    ways: Mapping[str, tuple[str, bool]]

    def endpoints(self, driver: str, *, discover: bool = True) -> Endpoints:
        """Those that a client of one driver is given."""
        at = self.fleet.addresses(driver)
        return Endpoints(
            driver=at["driver"],
            interception=at["interception"],
            sandbox=at["sandbox"],
            inference=at["inference"],
            token=TOKEN,
            discover=discover,
        )

    def connecting(self, way: str) -> dict[str, Any]:
        """A subject's command to connect with that one address; no other service can be reached by it."""
        address, discover = self.ways[way]
        nobody = {"sandbox": "127.0.0.1:1", "interception": "127.0.0.1:1", "inference": "127.0.0.1:1"}
        addresses = {"driver": address, **nobody}
        return {"do": "connect", "client": way, "addresses": addresses, "token": TOKEN, "discover": discover}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(world: World, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    """The services, and Envoy in front of the two drivers. What names no driver goes to d1."""
    fleet = await world.fleet()
    drivers = {name: fleet.processes[name].address for name in ("d0", "d1")}
    async with envoy.front(drivers, "d1", tmp_path_factory.mktemp("envoy")) as front:
        yield Place(fleet, {"d1": (fleet.proxies["d1"].address, True), "envoy": (front, False)})


async def made_at_d0(place: Place, run_id: str) -> tuple[RolloutHandle, RolloutHandle]:
    """By Python: one whose call waits for a trainer, and one that has ended."""
    async with (
        connect(place.endpoints("d0", discover=False)) as ps,
        connect(place.endpoints("d0")) as trainer,  # of all gates
    ):
        ended = await ps.rollouts.create(_TASK, "shell", run_id=f"{run_id}-ended")
        async with trainer.intercept(run_id=f"{run_id}-ended") as session:
            async for call in session.calls():
                await call.deliver(Completion.of_tokens(*sampled("done")))
                break
            await ended.result()
        waiting = await ps.rollouts.create(_TASK, "shell", run_id=run_id)
        assert {waiting.rollout_id.split(".")[1], ended.rollout_id.split(".")[1]} == {"d0"}
        return waiting, ended


@pytest.mark.requirement("R118")
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("language", SUBJECTS)
async def test_a_rollout_made_by_python_is_found_in_every_language(
    place: Place, subject_of: Callable[[str], Awaitable[Subject]], language: str, way: str
) -> None:
    """It is watched, cancelled and read with the address of the other driver, and with that of an Envoy, alone."""
    run_id = secrets.token_hex(8)
    waiting, ended = await made_at_d0(place, run_id)
    subject = await subject_of(language)

    async def ask(do: str, **given: Any) -> Any:
        answer = await subject.ask({"do": do, "client": way, "session": "main", **given})
        assert "ok" in answer, answer
        return answer["ok"]

    await ask(**place.connecting(way))
    _, watching = subject.send({"do": "events", "client": way, "session": "main", "rollout_id": waiting.rollout_id})
    await ask("cancel", rollout_id=waiting.rollout_id, reason="enough")
    seen = await subject.wait(watching, "events")
    assert len(seen["ok"]["sequences"]) > 1
    assert (await ask("get_rollout", rollout_id=waiting.rollout_id))["phase"] == "ended"
    read = await ask("result", rollout_id=ended.rollout_id)
    assert (read["failure"], len(read["samples"])) == (None, 1)
    assert (await subject.ask({"do": "reset"})).get("error") is None


@pytest.mark.requirement("R118")
@pytest.mark.parametrize("language", SUBJECTS)
async def test_a_list_has_the_rollouts_of_both_drivers(
    place: Place, subject_of: Callable[[str], Awaitable[Subject]], language: str
) -> None:
    """With the address of either driver."""
    run_id = secrets.token_hex(8)
    async with AsyncExitStack() as stack:
        made = []
        for name in ("d0", "d1"):
            ps = await stack.enter_async_context(connect(place.endpoints(name, discover=False)))
            made.append(await ps.rollouts.create(_TASK, "shell", run_id=run_id))
        subject = await subject_of(language)
        assert "ok" in await subject.ask({**place.connecting("d1"), "session": "main"})
        listed = await subject.ask({"do": "list_rollouts", "client": "d1", "session": "main", "run_id": run_id})
        assert listed["ok"]["rollout_ids"] == [handle.rollout_id for handle in reversed(made)]
        for handle in made:
            await handle.cancel()
    assert (await subject.ask({"do": "reset"})).get("error") is None


@pytest.mark.requirement("R118")
@pytest.mark.parametrize("way", _WAYS)
async def test_the_commands_find_a_rollout_of_another_driver(place: Place, tmp_path: Path, way: str) -> None:
    """`penstock watch`, `replay` and `cancel`."""
    run_id = secrets.token_hex(8)
    waiting, ended = await made_at_d0(place, run_id)
    address, discover = place.ways[way]

    async def penstock(*arguments: str) -> list[dict[str, Any]]:
        surroundings = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli.main"),
            *([] if discover else ["--no-discover"]),
            *arguments,
            env={**surroundings, "PENSTOCK_DRIVER_ADDRESS": address, "PENSTOCK_TOKEN": TOKEN},
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complaints = await process.communicate()
        assert process.returncode == 0, complaints.decode()
        return [json.loads(line) for line in said.splitlines()]

    if discover:  # what is asked for names no rollout: through Envoy it is of one driver
        assert [item["rollout_id"] for item in await penstock("watch", "--once", "--json", "--run", run_id)] == [
            waiting.rollout_id
        ]
    assert await penstock("replay", "--json", "--all", ended.rollout_id)
    (cancelled,) = await penstock("cancel", "--json", waiting.rollout_id)
    assert (cancelled["rollout_id"], cancelled["phase"]) == (waiting.rollout_id, "ended")


@pytest.mark.requirement("R118")
async def test_a_client_without_our_sdk_follows_the_address_of_the_home(place: Place) -> None:
    """With generated stubs: the other driver names the home and its address, and the rollout is there."""
    waiting, _ = await made_at_d0(place, secrets.token_hex(8))
    token = (("authorization", f"Bearer {TOKEN}"),)
    request = rollout_service_pb2.GetRolloutRequest(rollout_id=waiting.rollout_id)
    async with grpc.aio.insecure_channel(place.fleet.proxies["d1"].address) as other:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rollout_service_pb2_grpc.RolloutServiceStub(other).GetRollout(request, metadata=token)
    error = error_from_rpc(refused.value)
    assert (error.reason, error.metadata["home"]) == ("HOME_ELSEWHERE", "d0")
    async with grpc.aio.insecure_channel(error.metadata["address"]) as home:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(home)
        await stub.CancelRollout(
            rollout_service_pb2.CancelRolloutRequest(rollout_id=waiting.rollout_id), metadata=token
        )
        answer = await stub.WaitRollout(
            rollout_service_pb2.WaitRolloutRequest(rollout_id=waiting.rollout_id), metadata=token
        )
    assert answer.rollout.phase == rollout_pb2.PHASE_ENDED
