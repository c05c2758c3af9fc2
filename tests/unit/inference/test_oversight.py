"""What the inference service takes for trouble: what lasts, and not what a weight update does for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from penstock_inference.engines.base import (
    EngineOptions,
    GenerateRequest,
    PauseMode,
    Sampling,
    UpdateFormat,
    UpdatePhases,
)
from penstock_inference.engines.numpy.engine import NumpyEngine
from penstock_inference.gaps import GapReports
from penstock_inference.oversight import Oversight
from penstock_inference.testing import random_config, random_tensors, write_model

CONFIG = random_config("qwen3", max_position_embeddings=64, eos_token_id=None)
PATIENCE_S = 60.0


class Stopping(NumpyEngine):
    """The numpy engine, which an update stops until the test lets it go on."""

    stopped: asyncio.Event
    go_on: asyncio.Event

    async def commit_update(self, mode: PauseMode = PauseMode.KEEP) -> UpdatePhases:
        """Paused by no request."""
        await self.pause(mode)
        self.stopped.set()
        await self.go_on.wait()
        phases = await super().commit_update(mode)
        await self.resume()
        return phases


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Stopping]:
    """One whose updates wait."""
    opened = await Stopping.open(EngineOptions(write_model(tmp_path / "model", CONFIG, random_tensors(CONFIG)), "tiny"))
    assert isinstance(opened, Stopping)
    opened.stopped, opened.go_on = asyncio.Event(), asyncio.Event()
    yield opened
    await opened.aclose()


class Looked:
    """An oversight whose time the test owns."""

    def __init__(self, engine: Stopping) -> None:
        self.now = 1000.0
        self.oversight = Oversight(engine, GapReports(), lambda: self.now)

    def reasons(self) -> list[str]:
        """What is wrong for somebody with the usual patience."""
        return [trouble.reason for trouble in self.oversight.troubles(PATIENCE_S)]


async def updating(engine: Stopping, version: int) -> asyncio.Task[UpdatePhases]:
    """An update that has stopped the engine."""
    await engine.begin_update(version, "", UpdateFormat.FULL)
    await engine.push_tensors(random_tensors(CONFIG, version))
    engine.stopped.clear()
    engine.go_on.clear()
    commit = asyncio.create_task(engine.commit_update())
    await engine.stopped.wait()
    return commit


async def test_an_engine_that_an_update_stops_is_paused_only_when_that_lasts(engine: Stopping) -> None:
    """R43: an update in its time is no trouble, however many there were before; one that does not end is."""
    look = Looked(engine)
    for version in (1, 2):
        commit = await updating(engine, version)
        assert look.reasons() == []
        engine.go_on.set()
        await commit
        look.now += 10 * PATIENCE_S
    commit = await updating(engine, 3)
    assert look.reasons() == []
    look.now += PATIENCE_S
    assert look.reasons() == ["ENGINE_PAUSED"]
    engine.go_on.set()
    await commit
    assert look.reasons() == []


async def test_requests_that_take_a_version_that_does_not_come_are_named_once_they_have_waited(
    engine: Stopping,
) -> None:
    """R41: each by its own age, and by what the engine has then."""
    look = Looked(engine)
    ids = np.arange(10, 20, dtype=np.int32)

    def request(name: str, least: int) -> GenerateRequest:
        return GenerateRequest(
            name, ids, Sampling(max_tokens=2), session_id=f"rollout-{name}", min_policy_version=least
        )

    with look.oversight.generating(request("has", 0)), look.oversight.generating(request("waits", 1)):
        assert look.reasons() == []
        look.now += PATIENCE_S
        with look.oversight.generating(request("young", 2)):
            (trouble,) = look.oversight.troubles(PATIENCE_S)
        assert (trouble.reason, trouble.subjects) == ("POLICY_STUCK", ("rollout-waits",))
        assert "policy version 1" in trouble.message and trouble.grave
        commit = await updating(engine, 1)
        engine.go_on.set()
        await commit
        assert look.reasons() == []
    assert look.reasons() == []
