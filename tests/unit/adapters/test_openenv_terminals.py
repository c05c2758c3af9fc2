"""The terminal of an OpenEnv environment is opened once, whoever asks for it first."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.adapters.openenv import frames
from penstock.adapters.openenv.rollout_arguments import Defaults
from penstock.adapters.openenv.sessions import Environment
from penstock.adapters.openenv.terminals import EnvironmentTerminal
from penstock.client.connection import Penstock
from penstock.client.errors import FailedPrecondition


class Terminals:
    """Opens terminals when the test lets it."""

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.closed: list[Any] = []
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()

    async def open(self, *_: object, **__: object) -> Any:
        self.asked.set()
        await self.go_on.wait()

        async def close() -> None:
            self.closed.append(handle)

        handle = SimpleNamespace(info=SimpleNamespace(sandbox_id=f"s{len(self.opened)}"), close=close)
        self.opened.append(handle)
        return handle


@pytest.mark.requirement("R70")
async def test_two_ways_into_a_session_open_one_terminal_between_them() -> None:
    """A reset over the WebSocket and a call over HTTP at once left a terminal, and its sandbox, behind."""
    terminals = Terminals()
    terminal = EnvironmentTerminal(cast(Penstock, SimpleNamespace(terminals=terminals)), {}, "", {})
    by_reset, by_call = asyncio.create_task(terminal.open()), asyncio.create_task(terminal.open())
    await terminals.asked.wait()
    terminals.go_on.set()
    assert await by_reset == await by_call == "s0"
    assert len(terminals.opened) == 1
    await terminal.close()
    assert terminals.closed == terminals.opened


@pytest.mark.requirement("R70")
async def test_terminal_closed_while_two_wait_is_given_to_neither() -> None:
    """It is closed once it is there."""
    terminals = Terminals()
    terminal = EnvironmentTerminal(cast(Penstock, SimpleNamespace(terminals=terminals)), {}, "", {})
    waiting = [asyncio.create_task(terminal.open()) for _ in range(2)]
    await terminals.asked.wait()
    await terminal.close()
    terminals.go_on.set()
    for one in waiting:
        with pytest.raises(FailedPrecondition):
            await one
    assert terminals.closed == terminals.opened and len(terminals.opened) == 1


class EndedElsewhere:
    """A terminal whose end no step of this environment saw; `ended` once it is recorded."""

    def __init__(self, reward: float | None) -> None:
        self.info = SimpleNamespace(sandbox_id="s1")
        self._states = [(False, None), (True, reward)]

    async def open(self, *_: object, **__: object) -> EndedElsewhere:
        return self

    async def run(self, _command: str) -> None:
        raise FailedPrecondition("the episode has ended or was answered", reason="EPISODE_ENDED")

    async def refresh(self) -> Any:
        ended, reward = self._states.pop(0)
        return SimpleNamespace(ended=ended, reward=None if reward is None else SimpleNamespace(value=reward))


@pytest.mark.requirement("R70", "R74")
@pytest.mark.parametrize("reward", [0.5, None], ids=["graded", "timed out"])
async def test_a_terminal_that_ends_between_two_steps_is_done_at_the_next(reward: float | None) -> None:
    """A trainer steps until an observation is done; errors alone would go on for ever."""
    ps = cast(Penstock, SimpleNamespace(terminals=EndedElsewhere(reward)))
    environment = Environment(ps, Defaults(), {})
    action = {"type": "call_tool", "tool_name": "terminal", "arguments": {"command": "ls"}}
    early, late = await frames.step(environment, action), await frames.step(environment, action)
    assert (early["done"], early["reward"]) == (False, None)  # an answer of another client is being graded
    assert (late["done"], late["reward"]) == (True, reward) and environment.state.last_reward == reward
    for seen in (early, late):
        error = seen["observation"]["error"]
        assert error["error_type"] == "execution_error" and error["message"].startswith("EPISODE_ENDED")
