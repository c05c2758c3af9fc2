"""Where new attempts go by what sandbox services and gates say of their load."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.unit.driver.placement.test_fleet import World, opened, spec

from penstock_driver.domain.ports import Load
from penstock_driver.domain.rollout import Failure
from penstock_driver.placement import loads as module
from penstock_driver.placement.loads import SLOW
from penstock_driver.placement.placement import Avoid


@pytest.fixture(autouse=True)
def _reads_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_EVERY_S", 0.001)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with opened(tmp_path) as made:
        yield made


def ignored(_failure: Failure) -> None:
    """No member is lost here."""


async def placed(world: World, stack: ExitStack, count: int, key: str = "") -> Counter[str]:
    """How many of so many new attempts are at each sandbox service; they stay there."""
    nodes: Counter[str] = Counter()
    for number in range(count):
        place = await world.placement.place(spec(key or str(number)), Avoid())
        # Each attempt has a callback of its own.
        stack.enter_context(world.placement.occupied(place, lambda failure, _=number: ignored(failure)))  # type: ignore[misc]
        nodes[place.node] += 1
    return nodes


async def test_a_full_sandbox_service_is_not_tried(world: World) -> None:
    await world.read(n0=Load(1, room=0), n1=Load(900, room=100))
    with ExitStack() as stack:
        assert await placed(world, stack, 20) == {"n1": 20}


async def test_the_last_room_is_taken_once(world: World) -> None:
    """Attempts since the last reading count."""
    await world.read(n0=Load(0, room=2), n1=Load(0, room=50))
    world.said.clear()
    with ExitStack() as stack:
        assert (await placed(world, stack, 30))["n0"] <= 2


@pytest.mark.parametrize(("room", "has_room"), [(3, True), (0, False)])
async def test_a_place_knows_whether_another_sandbox_service_has_room(world: World, room: int, has_room: bool) -> None:
    await world.read(n0=Load(0, room=room), n1=Load(0, room=room))
    place = await world.placement.place(spec(), Avoid())
    assert place.services.has_room_elsewhere() is has_room


async def test_full_sandbox_services_are_tried_where_all_are_full(world: World) -> None:
    await world.read(n0=Load(9, room=0), n1=Load(9, room=0))
    assert (await world.placement.place(spec(), Avoid())).node in {"n0", "n1"}


async def test_a_sandbox_service_without_the_memory_is_not_tried(world: World) -> None:
    await world.read(n0=Load(0, room=9, free_memory_bytes=1 << 30), n1=Load(0, room=9, free_memory_bytes=8 << 30))
    places = [await world.placement.place(spec(str(number), memory_bytes=2 << 30), Avoid()) for number in range(8)]
    assert {place.node for place in places} == {"n1"}


async def test_what_others_run_at_a_sandbox_service_counts(world: World) -> None:
    """Another driver has its sandboxes there."""
    await world.read(n0=Load(400, room=100), n1=Load(0, room=500))
    with ExitStack() as stack:
        assert await placed(world, stack, 40) == {"n1": 40}


async def test_this_drivers_own_sandboxes_count_once(world: World) -> None:
    with ExitStack() as stack:
        mine = await placed(world, stack, 16)
        await world.read(n0=Load(mine["n0"], room=99), n1=Load(mine["n1"], room=99))
        (nodes,) = (world.placement._nodes.all(),)
        assert world.placement._node_loads.of(nodes) == {name: float(count) for name, count in mine.items()}


async def test_an_older_service_has_this_drivers_own_count(world: World) -> None:
    await world.read()
    with ExitStack() as stack:
        nodes = await placed(world, stack, 40)
    assert set(nodes) == {"n0", "n1"}


async def test_a_service_that_says_nothing_any_more_has_the_own_count_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.read(n0=Load(900, room=1), n1=Load(0, room=9))
    world.said.clear()
    monkeypatch.setattr(module, "LASTS_S", -1.0)
    with ExitStack() as stack:
        assert set(await placed(world, stack, 20)) == {"n0", "n1"}


async def test_a_full_service_that_says_nothing_any_more_stays_full(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout that may have one attempt failed there: the status of a busy service came late."""
    await world.read(n0=Load(0, room=0), n1=Load(0, room=9))
    world.said.clear()
    monkeypatch.setattr(module, "LASTS_S", -1.0)
    with ExitStack() as stack:
        assert await placed(world, stack, 20) == {"n1": 20}


async def test_a_slow_sandbox_service_gets_less_than_half_its_share(world: World) -> None:
    await world.read(n0=Load(0, room=99, creation_s=20.0), n1=Load(0, room=99, creation_s=1.0))
    with ExitStack() as stack:
        nodes = await placed(world, stack, 60)
    assert nodes["n0"] < 60 / 4


async def test_a_little_slower_service_gets_as_much(world: World) -> None:
    await world.read(n0=Load(3, creation_s=0.9 * SLOW), n1=Load(3, creation_s=1.0))
    loads = world.placement._node_loads.of(world.placement._nodes.all())
    assert loads["n0"] == loads["n1"] == 3


async def test_a_service_with_the_snapshot_comes_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another driver made it there."""
    nodes = {node.name: node for node in world.placement._nodes.all()}
    for holder in nodes:
        await world.read(n0=Load(0, room=9), n1=Load(0, room=9))
        await world.read(**{holder: Load(0, room=9, snapshot_keys=frozenset({"content"}))})
        for node in nodes.values():
            monkeypatch.setattr(type(node.services.environments), "content", lambda *_: "content")
        places = [await world.placement.place(spec(str(number)), Avoid()) for number in range(8)]
        assert {place.node for place in places} == {holder}


async def test_the_gate_with_the_fewest_open_rollouts_is_taken(world: World) -> None:
    await world.read(g0=Load(7), g1=Load(3))
    assert (await world.placement.place(spec(), Avoid())).gate == "g1"
    await world.read(g0=Load(1), g1=Load(3))
    assert (await world.placement.place(spec(), Avoid())).gate == "g0"
