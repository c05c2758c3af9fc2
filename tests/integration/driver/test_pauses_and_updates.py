"""Pauses over weight updates, and between two attempts: which weights answer which call, and when an agent starts.

Engine, gate, driver and sandboxes are real. The engine follows a script: its weights are a version and nothing else.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.support.copying import Finished, copy_task, finish
from tests.support.services.stack import Running, running

from penstock.client import (
    Completion,
    InterceptSession,
    LogprobsMode,
    ModelCall,
    Phase,
    PhaseChanged,
    PolicyConstraint,
    RolloutPaused,
    RolloutResumed,
    StalePolicy,
    Trajectory,
)
from penstock.client.types.results import AttemptFailed

pytestmark = pytest.mark.asyncio(loop_scope="module")

Before = Callable[[ModelCall], Awaitable[bool]]
"""What happens before a call goes to the engine; False: it does not go there."""
WAITING = (Phase.QUEUED, Phase.PREPARING, Phase.CONFIGURING)
"""The phases of an attempt that has not begun."""
TRIES = 8
"""To pause a rollout between two attempts, which are half a second apart."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    async with running(tmp_path_factory.mktemp("stack"), agents=False) as found:
        yield found


@asynccontextmanager
async def delegating(stack: Running, run_id: str, before: Before) -> AsyncIterator[InterceptSession]:
    """A trainer that lets the engine answer the calls of a run."""
    async with stack.ps.intercept(run_id=run_id) as session, asyncio.TaskGroup() as tasks:

        async def one(call: ModelCall) -> None:
            if await before(call):
                await call.delegate()

        async def serve() -> None:
            async for call in session.calls():
                tasks.create_task(one(call))

        serving = tasks.create_task(serve())
        yield session
        serving.cancel()


async def push(stack: Running, session: InterceptSession) -> int:
    """Push weights, and announce them; the gates know of them on return. Returns their version."""
    version = (await stack.ps.inference.info()).policy_version + 1
    await stack.ps.inference.update_weights(version, {"weight": np.zeros(1, np.float32)})
    session.announce(version)
    await session.resume()  # acknowledged after what was sent before
    return version


def versions(trajectory: Trajectory) -> list[int]:
    """Of the weights that answered each call."""
    found = []
    for call in trajectory.calls:
        assert call.completion is not None
        (span,) = call.completion.versions
        found.append(span.policy_version)
    return found


def places(finished: Finished, *wanted: type) -> list[int]:
    """Where events of these kinds are among all of a rollout."""
    return [place for place, event in enumerate(finished.events) if isinstance(event.payload, wanted)]


def entered(finished: Finished, *phases: Phase) -> list[int]:
    """Where a rollout entered one of these phases, among all of its events."""
    changes = places(finished, PhaseChanged)
    return [place for place in changes if getattr(finished.events[place].payload, "phase", None) in phases]


@pytest.mark.requirement("R87", "R131")
@pytest.mark.parametrize("bound", ["max_staleness", "min_version"])
async def test_calls_after_a_pause_are_answered_by_the_weights_that_were_pushed_in_it(
    stack: Running, bound: str
) -> None:
    """Those before it keep theirs. The bound of the rollout is judged anew when the held call is given out again."""
    run_id = secrets.token_hex(8)
    old = (await stack.ps.inference.info()).policy_version
    at, policy = (1, PolicyConstraint(max_staleness=0)) if bound == "max_staleness" else (0, None)
    policy = policy or PolicyConstraint(min_version=old + 1)
    waits, refused = asyncio.Event(), asyncio.Event()
    leases: list[int | None] = []

    async def before(call: ModelCall) -> bool:
        if call.index != at:
            return True
        leases.append(call.min_policy_version)
        if len(leases) == 1:
            waits.set()
            await paused.wait()
            await call.release()
            return False
        ids, logprobs = np.arange(3), np.zeros(3)
        with pytest.raises(StalePolicy):
            await call.deliver(
                Completion.of_tokens(ids, logprobs, policy_version=old, logprobs_mode=LogprobsMode.PROCESSED)
            )
        refused.set()
        return True

    paused = asyncio.Event()
    async with delegating(stack, run_id, before) as session:
        session.announce(old)
        handle = await stack.ps.rollouts.create(copy_task(stack), "shell", run_id=run_id, policy=policy)
        await waits.wait()
        await handle.pause("weights")
        paused.set()
        new = await push(stack, session)
        await handle.resume()
        finished = await finish(handle)
    assert finished.reward == 1.0, finished.agent_said()
    assert finished.result.rollout.attempts == 1
    assert leases == [old if at else new, new] and refused.is_set()
    trajectory = await handle.trajectory()
    assert versions(trajectory) == [old if number < at else new for number in range(2)]
    (sample,) = trajectory.samples
    assert [span.policy_version for span in sample.versions] == versions(trajectory)


@pytest.mark.requirement("R128", "R131")
@pytest.mark.parametrize("bound", [None, 0], ids=["no bound", "a bound"])
async def test_a_pause_between_two_attempts_holds_the_second_one(stack: Running, bound: int | None) -> None:
    """Three others run meanwhile, one after the other, which is longer than the time between attempts. Weights that
    are pushed in the pause answer what is not replayed: with a bound that the recorded answer does not meet any more,
    all.
    """
    old = (await stack.ps.inference.info()).policy_version
    asked: list[int] = []

    async def before(call: ModelCall) -> bool:
        if call.rollout_id == handle.rollout_id:
            asked.append(call.index)
            if asked == [0, 1]:
                await stack.ps.sandboxes.delete_all({"penstock_rollout": call.rollout_id})
                return False
        return True

    for _ in range(TRIES):
        asked.clear()
        run_id = secrets.token_hex(8)
        async with delegating(stack, run_id, before) as session:
            session.announce(old)
            given: dict[str, Any] = {} if bound is None else {"policy": PolicyConstraint(max_staleness=bound)}
            handle = await stack.ps.rollouts.create(copy_task(stack), "shell", run_id=run_id, max_attempts=2, **given)
            async for event in handle.events():
                if isinstance(event.payload, AttemptFailed):
                    break
            await handle.pause("between")
            if (await handle.refresh()).phase not in WAITING:
                # The pause may have come too late for what this proves; one that came in time has to hold.
                await handle.resume()
                finished = await finish(handle)
                (lost,), (held,) = (places(finished, kind) for kind in (AttemptFailed, RolloutPaused))
                assert any(lost < place < held for place in entered(finished, Phase.SETTING_UP, Phase.RUNNING))
                continue
            for _ in range(3):
                other = await stack.ps.rollouts.create(copy_task(stack), "shell", run_id=run_id)
                assert (await finish(other)).reward == 1.0
            assert asked == [0, 1]
            assert (await handle.refresh()).phase in WAITING
            new = await push(stack, session)
            await handle.resume()
            finished = await finish(handle)
            trajectory = await handle.trajectory()
            break
    else:
        raise AssertionError(f"no pause of {TRIES} came between the attempts")
    assert finished.reward == 1.0, finished.agent_said()
    assert finished.result.rollout.attempts == 2
    (lost,), (held,), (resumed,) = (places(finished, kind) for kind in (AttemptFailed, RolloutPaused, RolloutResumed))
    started = entered(finished, Phase.RUNNING)
    assert len(started) == 2 and started[0] < lost < held < resumed < started[1]
    assert versions(trajectory) == [old if bound is None else new, new]
    replayed = [call.replayed_from is not None for call in trajectory.calls]
    assert replayed == [bound is None, False]
    assert asked == ([0, 1, 1] if bound is None else [0, 1, 0, 1])
