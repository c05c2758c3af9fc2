"""kill -9 of a real driver at its writes about exports, and between many rollouts: what ended is stored, once.

The short form kills before and after the commits of exports in turn. `python -m tests.hosts export` has the same with
an S3 server that fails and is killed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from tests.faults.driver.test_every_write import AGENT, SPEC, driver_of, leaked, play, services
from tests.integration.driver.stack import TOKEN, Process
from tests.support.services.dying import Warm, insisting
from tests.support.waiting import eventually, eventually_async

from penstock.analysis.export import read_exports
from penstock.driver.v1 import agent_service_pb2, agent_service_pb2_grpc
from penstock.driver.v1 import rollout_service_pb2 as pb
from penstock.driver.v1 import rollout_service_pb2_grpc as pb_grpc
from penstock.interception.v1 import rollout_gate_service_pb2 as gate_pb
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as gate_grpc
from penstock_chassis.channel import connect

__all__ = ["services"]
pytestmark = pytest.mark.timeout(1200)  # a guard: a driver is killed at each of its writes

HANGS_S = 120.0
OF_EXPORTS = (
    *("INSERT OR IGNORE INTO exports", "INSERT INTO export_files", "UPDATE exports SET file"),
    *("UPDATE rollouts SET export", "DELETE FROM exports"),
)
"""How the writes begin that concern exports, the one that ends a rollout included."""


@pytest.fixture
async def warm() -> AsyncIterator[Warm]:
    """The process that forks drivers."""
    process = await Warm.start("driver")
    yield process
    await process.close()


def stored(place: Path) -> Counter[tuple[str, int]]:
    """The keys of the rollouts that a reader finds."""
    return Counter((row["rollout_id"], row["attempt"]) for row in read_exports(place, "rollouts"))


@pytest.mark.requirement("R124")
@pytest.mark.parametrize(
    "full",
    [
        pytest.param(False, id="short"),
        pytest.param(True, id="full", marks=pytest.mark.on_demand("each such write, before or after, shows it")),
    ],
)
async def test_a_kill_at_any_write_of_an_export_loses_nothing(
    warm: Warm, services: tuple[Process, Process], tmp_path: Path, full: bool
) -> None:
    """The rollout is deleted at the end, which no driver does before it is stored."""
    failed: dict[str, list[str]] = {}
    deaths = [(0, False)]
    for number, (at, committed) in enumerate(deaths):
        place = tmp_path / f"store-{number}"
        driver = driver_of(warm, tmp_path / str(number), services, export_url=f"file://{place}", export_wait_s="0")
        await driver.start(at, committed=committed)
        driver.restart()
        async with asyncio.timeout(HANGS_S):
            found = await play(driver, SPEC)
        if stored(place) != {("r", 1): 1}:
            found.append(f"stored: {stored(place)}")
        found += await leaked(services)
        writes = driver.writes()
        await driver.kill()
        if at == 0:
            about = [index for index, write in enumerate(writes, 1) if any(x.startswith(OF_EXPORTS) for x in write)]
            assert len(about) >= 5, writes
            turn = cycle([False, True])
            deaths += [(index, later) for index in about for later in ((False, True) if full else (next(turn),))]
        if found:
            failed[f"{'after' if committed else 'before'} write {at}: {writes[at - 1 : at]}"] = found
    assert not failed


@pytest.mark.requirement("R124", "R50")
async def test_rollouts_that_end_around_a_kill_are_all_stored(
    warm: Warm, services: tuple[Process, Process], tmp_path: Path
) -> None:
    """Some are stored, some are queued, some run: after the next start each one is there, under one key."""
    place, ids = tmp_path / "store", [f"r{index}" for index in range(12)]
    driver = driver_of(
        warm, tmp_path / "driver", services, export_url=f"file://{place}", export_wait_s="0.2", max_running="2"
    )
    await driver.start()
    driver.restart()
    async with asyncio.timeout(HANGS_S), connect(driver.address, TOKEN) as channel:
        rollouts: Any = pb_grpc.RolloutServiceStub(channel)
        agents: Any = agent_service_pb2_grpc.AgentServiceStub(channel)
        register = agent_service_pb2.RegisterAgentRequest(spec=AGENT)
        await insisting(lambda: agents.RegisterAgent(register, wait_for_ready=True))
        for name in ids:
            create = pb.CreateRolloutRequest(request_id=name, spec=SPEC, rollout_id=name)
            await insisting(lambda create=create: rollouts.CreateRollout(create, wait_for_ready=True))  # type: ignore[misc]
        await eventually(lambda: place.is_dir() and bool(stored(place)), "some are stored")
        warm.kill()
        locations = {}
        for name in ids:
            wait = pb.WaitRolloutRequest(rollout_id=name)
            while name not in locations:
                rollout = (await insisting(lambda wait=wait: rollouts.WaitRollout(wait, wait_for_ready=True))).rollout  # type: ignore[misc]
                if rollout.HasField("export"):
                    locations[name] = rollout.export.location
    assert driver.died
    assert stored(place) == {(name, 1): 1 for name in ids}
    for location in locations.values():
        assert Path(f"{location.removeprefix('file://')}.rollouts.parquet").is_file()
    await driver.kill()
    await leaked(services)


@pytest.mark.requirement("R124")
async def test_a_gate_forgets_only_what_is_stored(services: tuple[Process, Process], tmp_path: Path) -> None:
    """The store is away while rollouts end, for which the gate, which forgets at once, keeps their captures."""
    sandbox, gate = services
    gate.stop()
    gate.set("retention_s", "0")
    gate.start()
    place, aside = tmp_path / "store", tmp_path / "aside"
    addresses = {"sandbox_address": sandbox.address, "interception_address": gate.address}
    tokens = {"sandbox_token": TOKEN, "interception_token": TOKEN}
    (tmp_path / "driver").mkdir()
    settings = {**addresses, **tokens, "export_url": f"file://{place}", "export_wait_s": "0"}
    driver = Process("driver", tmp_path / "driver", settings)
    driver.start()
    async with connect(driver.address, TOKEN) as channel, connect(gate.address, TOKEN) as gate_channel:
        rollouts: Any = pb_grpc.RolloutServiceStub(channel)
        agents: Any = agent_service_pb2_grpc.AgentServiceStub(channel)
        captures: Any = gate_grpc.RolloutGateServiceStub(gate_channel)
        await agents.RegisterAgent(agent_service_pb2.RegisterAgentRequest(spec=AGENT))

        async def end(names: list[str]) -> None:
            for name in names:
                await rollouts.CreateRollout(pb.CreateRolloutRequest(request_id=name, spec=SPEC, rollout_id=name))
            for name in names:
                while not (await rollouts.WaitRollout(pb.WaitRolloutRequest(rollout_id=name))).rollout.HasField(
                    "outcome"
                ):
                    pass

        async def gate_has(names: set[str]) -> bool:
            listed = await captures.ListRollouts(gate_pb.ListRolloutsRequest())
            return {rollout.rollout_id for rollout in listed.rollouts} == names

        await end(["a", "b"])
        await eventually_async(lambda: gate_has(set()), "the gate has forgotten what is stored")
        place.rename(aside)
        place.write_text("no directory")
        await end(["c", "d"])
        await end(["e"])
        assert await gate_has({"c", "d", "e"})
        place.unlink()
        aside.rename(place)
        await eventually_async(lambda: gate_has(set()), "the gate has forgotten the others")
    assert stored(place) == {(name, 1): 1 for name in "abcde"}
    driver.stop()
