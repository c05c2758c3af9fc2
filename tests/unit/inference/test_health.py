"""What the inference service takes for trouble: what lasts, and not what a weight update does for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.services import replicas
from tests.support.waiting import eventually
from tests.unit.inference.conftest import OpenEngine

from penstock_chassis.errors import Internal
from penstock_inference.domain.logprob_diff import GapReports
from penstock_inference.engines.base import (
    Engine,
    EngineOptions,
    GenerateRequest,
    PauseMode,
    Sampling,
    UpdateFormat,
    UpdatePhases,
)
from penstock_inference.engines.numpy.engine import NumpyEngine
from penstock_inference.engines.numpy.scheduler import Scheduler
from penstock_inference.replicas.replica_process import ReplicaProcess
from penstock_inference.status import Health
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

    def __init__(self, engine: Engine) -> None:
        self.now = 1000.0
        self.health = Health(engine, GapReports(), lambda: self.now)

    def reasons(self) -> list[str]:
        """What is wrong for somebody with the usual patience."""
        return [trouble.reason for trouble in self.health.troubles(PATIENCE_S)]


async def updating(engine: Stopping, version: int) -> asyncio.Task[UpdatePhases]:
    """An update that has stopped the engine."""
    await engine.begin_update(version, "", UpdateFormat.FULL)
    await engine.push_tensors(random_tensors(CONFIG, version))
    engine.stopped.clear()
    engine.go_on.clear()
    commit = asyncio.create_task(engine.commit_update())
    await engine.stopped.wait()
    return commit


@pytest.mark.requirement("R43")
async def test_an_engine_that_an_update_stops_is_paused_only_when_that_lasts(engine: Stopping) -> None:
    """An update in its time is no trouble, however many there were before; one that does not end is."""
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


@pytest.mark.requirement("R41")
async def test_requests_waiting_too_long_for_a_version_are_named(
    engine: Stopping,
) -> None:
    """Each by its own age, and by what the engine has then."""
    look = Looked(engine)
    ids = np.arange(10, 20, dtype=np.int32)

    def taking(name: str, least: int) -> GenerateRequest:
        return GenerateRequest(
            name, ids, Sampling(max_tokens=2), session_id=f"rollout-{name}", min_policy_version=least
        )

    with look.health.generating(taking("has", 0)), look.health.generating(taking("waits", 1)):
        assert look.reasons() == []
        look.now += PATIENCE_S
        with look.health.generating(taking("young", 2)):
            (trouble,) = look.health.troubles(PATIENCE_S)
        assert (trouble.reason, trouble.subjects) == ("POLICY_STUCK", ("rollout-waits",))
        assert "policy version 1" in trouble.message and trouble.grave
        commit = await updating(engine, 1)
        engine.go_on.set()
        await commit
        assert look.reasons() == []
    assert look.reasons() == []


def request(name: str, max_tokens: int) -> GenerateRequest:
    """Of ten tokens."""
    return GenerateRequest(name, np.arange(10, 20, dtype=np.int32), Sampling(max_tokens=max_tokens))


async def sampled(engine: Engine, request: GenerateRequest) -> None:
    """To its end."""
    async with aclosing(engine.generate(request)) as events:
        async for _ in events:
            pass


@pytest.mark.requirement("R32")
async def test_four_requests_per_place_is_a_long_queue(open_engine: OpenEngine) -> None:
    """A warning, with what would shorten it; four times as many are not."""
    engine = await open_engine(
        config={"max_position_embeddings": 8192, "eos_token_id": None}, max_context_tokens=8192, max_concurrency=1
    )
    look = Looked(engine)
    calls = [asyncio.create_task(sampled(engine, request(f"r{n}", 8000))) for n in range(5)]
    await eventually(lambda: engine.stats().waiting == 4, "one runs and four wait")
    assert look.reasons() == []
    calls.append(asyncio.create_task(sampled(engine, request("r5", 8000))))
    await eventually(lambda: engine.stats().waiting == 5, "the sixth waits as well")
    (trouble,) = look.health.troubles(PATIENCE_S)
    assert (trouble.reason, trouble.grave) == ("ENGINE_QUEUE_LONG", False)
    assert "5 requests wait for 1 place " in trouble.message and "max_running" in trouble.advice
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await eventually(lambda: look.reasons() == [], "nobody waits")


@pytest.mark.requirement("R43")
async def test_engine_with_a_dead_thread_is_dead_unlike_a_closed_one(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers nobody any more, and what it says itself is told with what to do."""
    dies, closed = await open_engine(), await open_engine()
    look = Looked(dies)
    assert look.reasons() == []

    def broken(_: Scheduler) -> Any:
        raise ValueError("no such row")

    monkeypatch.setattr(Scheduler, "step", broken)
    with pytest.raises(Internal, match="restart the inference service"):
        await sampled(dies, request("r", 8))
    (trouble,) = look.health.troubles(PATIENCE_S)
    assert (trouble.reason, trouble.grave) == ("ENGINE_DEAD", True)
    assert "restart the inference service" in trouble.message and "log" in trouble.advice
    await closed.aclose()
    assert Looked(closed).reasons() == []


@pytest.mark.requirement("R23")
async def test_replicas_that_died_are_named_and_are_a_warning_while_one_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two is down, then both, then none; meanwhile each is started again."""
    start, let_start = ReplicaProcess.start, asyncio.Event()

    async def held(*arguments: Any) -> ReplicaProcess:
        await let_start.wait()
        return await start(*arguments)

    async with replicas.pool(tmp_path) as pool:
        monkeypatch.setattr(ReplicaProcess, "start", held)
        look = Looked(pool)
        assert look.reasons() == []
        replicas.kill("r0")
        await eventually(lambda: look.reasons() != [], "its death is known")
        (trouble,) = look.health.troubles(PATIENCE_S)
        assert (trouble.reason, trouble.subjects, trouble.grave) == ("REPLICAS_DOWN", ("r0",), False)
        assert "1 of 2" in trouble.message and "the others answer meanwhile" in trouble.advice
        replicas.kill("r1")
        await eventually(lambda: look.reasons() == ["ENGINE_DEAD"], "the other's death is known")
        (trouble,) = look.health.troubles(PATIENCE_S)
        assert trouble.grave and "every engine" in trouble.message and "log" in trouble.advice
        let_start.set()
        await replicas.all_live(pool)
        assert look.reasons() == []
