"""Updates of weights on the vLLM engine, where something fails or comes twice; vLLM itself is a stand-in."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from penstock_chassis.errors import Aborted
from penstock_inference.engines.base import PauseMode, UpdateFormat

CORE = "penstock_inference.engines.vllm.core"
UPDATES = "penstock_inference.engines.vllm.weight_updates"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`updates`, imported without vLLM, which the core alone needs; it does not stay imported."""
    monkeypatch.setitem(sys.modules, CORE, MagicMock())
    monkeypatch.delitem(sys.modules, UPDATES, raising=False)
    yield importlib.import_module(UPDATES)
    del sys.modules[UPDATES]


class Core:
    """What `Updates` asks of an engine's core; it stands still once the test lets it."""

    def __init__(self) -> None:
        self.version = 1
        self.unsaved = False
        self.features = SimpleNamespace(platform="cpu")
        self.checkpoint: Any = SimpleNamespace(sources={}, updated=lambda files, kind: self.checkpoint)
        self.spool = SimpleNamespace(keep_only=lambda files: None)
        self.runtime = MagicMock()
        self.asked = asyncio.Event()
        self.still = asyncio.Event()
        self.standing = 0
        self.failure: Exception | None = None

    @asynccontextmanager
    async def stopped(self, mode: PauseMode) -> AsyncIterator[None]:
        self.asked.set()
        await self.still.wait()
        self.standing += 1
        try:
            yield
        finally:
            self.standing -= 1

    async def ask(self, call: Any) -> None:
        return None

    async def load(self, checkpoint: object) -> None:
        return None

    async def put_in_force(self, version: int, label: str, checkpoint: object) -> None:
        if self.failure is not None:
            raise self.failure


@pytest.mark.requirement("R87", "R130")
async def test_loaded_weights_that_failed_to_apply_are_not_sampled_from(module: Any) -> None:
    """Their tokens would be labelled with the version before; vLLM begins anew with those in force."""
    core = Core()
    core.still.set()
    core.failure = RuntimeError("the worker did not answer")
    updates = module.Updates(core)
    await updates.begin(2, "", UpdateFormat.FULL)
    with pytest.raises(RuntimeError):
        await updates.commit(PauseMode.KEEP)
    core.runtime.kill.assert_called_once_with()
    assert core.standing == 0


@pytest.mark.requirement("R49")
async def test_a_transfer_that_waits_for_its_turn_keeps_every_other_update_out(module: Any) -> None:
    """Two that both began would leave the engine standing still for ever."""
    core = Core()
    updates = module.Updates(core)
    first = asyncio.create_task(updates.start_transfer(2, PauseMode.WAIT))
    await core.asked.wait()
    for other in (updates.start_transfer(2, PauseMode.WAIT), updates.begin(3, "", UpdateFormat.FULL)):
        with pytest.raises(Aborted) as refused:
            await asyncio.wait_for(other, 30)
        assert refused.value.reason == "UPDATE_IN_PROGRESS"
    core.still.set()
    await first
    await updates.finish_transfer(False)
    assert core.standing == 0


@pytest.mark.requirement("R49")
async def test_a_transfer_that_was_given_up_while_it_waited_keeps_nobody_out(module: Any) -> None:
    """What it took is given back."""
    core = Core()
    updates = module.Updates(core)
    first = asyncio.create_task(updates.start_transfer(2, PauseMode.WAIT))
    await core.asked.wait()
    first.cancel()
    await asyncio.wait([first])
    await updates.begin(2, "", UpdateFormat.FULL)
