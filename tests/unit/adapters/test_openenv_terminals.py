"""The terminal of an OpenEnv environment is opened once, whoever asks for it first."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

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
