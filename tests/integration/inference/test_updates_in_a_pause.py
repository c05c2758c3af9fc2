"""An update's mode while the engine is paused: the same of one engine and of several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.services import replicas
from tests.support.waiting import eventually

from penstock_inference.engines.base import (
    Done,
    Engine,
    EngineOptions,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    PauseMode,
    Sampling,
    UpdateFormat,
)
from penstock_inference.engines.numpy.engine import NumpyEngine
from penstock_inference.replicas.replica_process import ReplicaProcess
from penstock_inference.testing import random_tensors, write_model

TOKENS = 600
"""Of a generation that a test lets end."""
ENDLESS = 4000
"""Tokens of a generation that a test ends: most of the model's context. The engine goes on while a test waits."""


@pytest.fixture(params=["one", "two"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engine]:
    """An engine, or a pool of two."""
    if request.param == "two":
        async with replicas.pool(tmp_path) as pool:
            yield pool
        return
    model = write_model(tmp_path / "model", replicas.CONFIG, random_tensors(replicas.CONFIG))
    alone = await NumpyEngine.open(EngineOptions(model, "tiny"))
    yield alone
    await alone.aclose()


async def update(engine: Engine, mode: PauseMode) -> None:
    """A whole new policy."""
    await engine.begin_update(1, "", UpdateFormat.FULL)
    await engine.push_tensors(random_tensors(replicas.CONFIG, 1))
    await engine.commit_update(mode)


async def begun(engine: Engine, stack: AsyncExitStack, tokens: int) -> list[AsyncIterator[GenerateEvent]]:
    """Generations of which each has told something, on each replica."""
    calls: list[AsyncIterator[GenerateEvent]] = []
    for n in range(2):
        wanted = GenerateRequest(
            f"c{n}", np.arange(10, 40, dtype=np.int32), Sampling(max_tokens=tokens), session_id=f"s{n}"
        )
        call = await stack.enter_async_context(aclosing(engine.generate(wanted)))
        await anext(call)
        await anext(call)
        calls.append(call)
    return calls


async def end(call: AsyncIterator[GenerateEvent]) -> Done:
    """Its end."""
    done = [event async for event in call][-1]
    assert isinstance(done, Done)
    return done


@pytest.mark.requirement("R22", "R87")
async def test_an_update_that_aborts_ends_what_a_pause_froze(engine: Engine) -> None:
    """With the tokens of the old policy, and the pause lasts."""
    async with AsyncExitStack() as stack:
        calls = await begun(engine, stack, ENDLESS)
        await engine.pause(PauseMode.KEEP)
        await update(engine, PauseMode.ABORT)
        for call in calls:
            done = await end(call)
            assert done.finish_reason is FinishReason.ABORT
            assert [span.policy_version for span in done.version_spans] == [0]
        assert engine.info().paused and engine.info().policy_version == 1
        await engine.resume()


@pytest.mark.requirement("R22", "R87")
async def test_an_update_that_waits_waits_for_what_a_pause_lets_finish(engine: Engine) -> None:
    """No completion is of both policies."""
    async with AsyncExitStack() as stack:
        calls = await begun(engine, stack, TOKENS)
        pausing = asyncio.create_task(engine.pause(PauseMode.WAIT))
        await eventually(lambda: engine.info().paused, "it pauses")
        await update(engine, PauseMode.WAIT)
        await pausing
        for call in calls:
            done = await end(call)
            assert done.token_ids.size == TOKENS
            assert [span.policy_version for span in done.version_spans] == [0]
        assert engine.info().paused
        await engine.resume()


@pytest.mark.requirement("R22", "R87")
async def test_an_update_that_waits_does_not_wait_for_what_a_pause_froze(engine: Engine) -> None:
    """It would for ever; what is frozen goes on under the new policy."""
    async with AsyncExitStack() as stack:
        calls = await begun(engine, stack, ENDLESS)
        await engine.pause(PauseMode.KEEP)
        await update(engine, PauseMode.WAIT)
        assert engine.info().paused
        await engine.resume()
        for call in calls:
            # All of it would take long on a busy machine.
            while getattr(await anext(call), "policy_version", None) != 1:
                pass
        await engine.abort(everything=True)
        for call in calls:
            assert [span.policy_version for span in (await end(call)).version_spans] == [0, 1]


@pytest.mark.requirement("R22", "R87")
async def test_an_update_waits_for_a_pause_that_began_while_it_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All replicas stand still while they change, those that had not answered the pause yet, too."""
    asked: list[str] = []
    staging, staged, freezing, frozen = (asyncio.Event() for _ in range(4))
    ask = ReplicaProcess.ask

    async def held(life: ReplicaProcess, method: str, *arguments: Any) -> Any:
        asked.append(f"{method} {life.name}")
        if method == "stage":
            answer = await ask(life, method, *arguments)
            staging.set()
            await staged.wait()
            return answer
        slow = method == "pause" and life.name == opened._supervisor.lives()[1].name
        if slow:
            freezing.set()
            await frozen.wait()
        answer = await ask(life, method, *arguments)
        if slow:
            asked.append("all are frozen")
        return answer

    async with replicas.pool(tmp_path) as opened:
        monkeypatch.setattr(ReplicaProcess, "ask", held)
        updating = asyncio.create_task(replicas.push(opened, tmp_path, 1, 1))
        await staging.wait()
        pausing = asyncio.create_task(opened.pause(PauseMode.KEEP))
        await freezing.wait()
        staged.set()
        for _ in range(1000):  # more than an update takes that waits for nobody to ask for the switch
            await asyncio.sleep(0)
        frozen.set()
        await asyncio.gather(updating, pausing)
        first_switch = next(place for place, what in enumerate(asked) if what.startswith("switch"))
        assert asked.index("all are frozen") < first_switch
        assert opened.info().paused
        await opened.resume()
        assert set((await replicas.versions(opened)).values()) == {1}
