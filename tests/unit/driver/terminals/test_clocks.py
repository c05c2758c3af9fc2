"""The machine's clock is set while terminal episodes are open, and between two lives of their driver."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from tests.unit.driver.terminals.test_terminals import World, world  # noqa: F401 - a fixture

from penstock.driver.v1 import terminal_service_pb2
from penstock_driver.domain.records import RequestKey
from penstock_driver.wire.specs import terminal_spec

WALL_S = 900.0
HOURS = 5 * 3600.0


async def opened(world: World) -> str:  # noqa: F811
    """An episode of WALL_S that a restart can take up again."""
    request = terminal_service_pb2.OpenTerminalRequest(request_id="q")
    request.task.task_id, request.task.instruction = "t", "write out.txt"
    request.wall_time.FromSeconds(int(WALL_S))
    record = await world.terminals.open(RequestKey("q", "d"), terminal_spec(request, "default"))
    return record.terminal_id


def left_s(world: World, terminal_id: str) -> float:  # noqa: F811
    """Seconds until the episode ends unanswered, as its timer has it."""
    return world.terminals._live[terminal_id]._timer.when() - asyncio.get_running_loop().time()


@pytest.mark.requirement("R50", "R78")
@pytest.mark.parametrize("jump", [HOURS, -HOURS])
async def test_clock_set_while_an_episode_opens_does_not_change_its_time(
    world: World,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    jump: float,
) -> None:
    """The machine's clock is asked for nothing: forwards would end it at once, backwards hours too late."""
    real, times = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: real() + jump * next(times))
    terminal_id = await opened(world)
    assert WALL_S - 60 < left_s(world, terminal_id) <= WALL_S


@pytest.mark.requirement("R50", "R78")
@pytest.mark.parametrize(("jump", "most"), [(-HOURS, WALL_S), (300.0, WALL_S - 300.0)])
async def test_resumed_episode_keeps_its_deadline(
    world: World,  # noqa: F811
    jump: float,
    most: float,
) -> None:
    """What was left, by a clock that may have been set back since."""
    terminal_id = await opened(world)
    before = world.terminals  # as if killed: what it would do next is done by nobody
    world.now += jump
    world.terminals = world.make()
    assert await world.terminals.recover() == 1
    assert most - 60 < left_s(world, terminal_id) <= most
    before._live[terminal_id]._timer.cancel()
