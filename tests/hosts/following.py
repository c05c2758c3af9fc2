"""Follows one rollout from its creation to its trajectory, also while its driver is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from tests.hosts import model
from tests.hosts.records import HOME_LOST, Attempt, End, Seen, Story

from penstock.analysis import export
from penstock.analysis.verify_chain import verify
from penstock.client import (
    AlreadyExists,
    Limits,
    Mode,
    NotFound,
    Penstock,
    PenstockError,
    RolloutHandle,
    Task,
    Unavailable,
)
from penstock.client.types.results import AgentExited, AttemptFailed, Ended, Phase, PhaseChanged, RolloutEvent

LIMIT_S: Final = 600.0
"""Guard on one rollout, its repetitions included."""
_GENERATIONS: Final = 10
_RUN_ID: Final = "hosts"
_PAUSE_S: Final = 0.5
_PLACED: Final = {Phase.SETTING_UP, Phase.RUNNING, Phase.VERIFYING, Phase.COLLECTING}


async def read(story: Story, handle: RolloutHandle) -> None:
    """Read a rewarded rollout's trajectory, or record why it cannot be read now."""
    try:
        trajectory = await handle.trajectory()
    except PenstockError as error:
        story.unread = error.reason
        return
    # A replayed call is the one that it was sampled for.
    sampled = (
        (call.replayed_from.call_id if call.replayed_from else call.call_id, call.completion)
        for call in trajectory.calls
    )
    story.calls = {
        call_id: [int(one) for one in completion.token_ids]
        for call_id, completion in sampled
        if completion is not None and completion.token_ids is not None
    }
    story.unread = ""
    proof = await asyncio.to_thread(
        verify, export.turns(trajectory), export.sequences(trajectory), export.tool_calls(trajectory)
    )
    # An agent that was killed before its first call has none.
    unproven = [] if proof.calls or story.reason else ["no call is proven"]
    story.problems = [problem.message for problem in proof.problems] + unproven


async def list_ends(ps: Penstock) -> dict[str, End | None]:
    """Reason and reward of each rollout that drivers list; None = it has not ended."""
    listed: dict[str, End | None] = {}
    async for one in ps.rollouts.list(run_id=_RUN_ID):
        end = None
        if one.outcome is not None:
            failure, reward = one.outcome.failure, one.outcome.reward
            end = ("" if failure is None else failure.reason, None if reward is None else reward.value)
        listed[one.rollout_id] = end
    return listed


class Follower:
    """Follows rollouts at one driver.

    `task` makes those of each number; None = the model's. `returns`: whether a driver that is away for long comes back
    with its rollouts; one that does not has lost them.
    """

    def __init__(
        self,
        ps: Penstock,
        driver: str,
        work_s: float,
        max_attempts: int,
        *,
        environments: int = 1,
        limits: Limits | None = None,
        parts: int = 1,
        task: Callable[[int], Task] | None = None,
        returns: bool = True,
    ) -> None:
        self._ps = ps
        self._driver = driver
        self._max_attempts = max_attempts
        self._limits = limits or Limits()
        self._task = task or (lambda number: model.task(number, work_s, environments, parts))
        self._returns = returns

    def begin(self, number: int, generation: int) -> Story:
        """An empty story."""
        return Story(f"hosts-{number}-{generation}", number, self._driver, created=time.time())

    async def follow_all(self, number: int, seen: Seen) -> None:
        """Follow the rollout of a number into `seen`, and create it again where its driver has lost it."""
        try:
            async with asyncio.timeout(LIMIT_S):
                for generation in range(_GENERATIONS):
                    story = self.begin(number, generation)
                    seen.stories.append(story)
                    await self.follow(story)
                    if story.reason != HOME_LOST:
                        break
        except (PenstockError, TimeoutError) as error:
            seen.refused[number] = f"{type(error).__name__}: {error}"

    async def follow(self, story: Story) -> None:
        """Create the rollout, and record what happens until its end. Raises PenstockError, and none for an absence."""
        handle = await self._created(story)
        if handle.info.home is not None:
            story.driver = handle.info.home.driver
        await self.observe(story, handle)

    async def observe(self, story: Story, handle: RolloutHandle) -> None:
        """As `follow`, of a rollout that is there."""
        position = 0
        while not story.ends:
            try:
                async for event in handle.events(after=position):
                    position = event.sequence
                    await self._record(story, handle, event)
            except Unavailable:
                if not self._returns:
                    story.lose_home()
                await asyncio.sleep(_PAUSE_S)
            except NotFound as error:
                if error.reason != HOME_LOST:
                    raise
                story.lose_home()
        if story.reason != HOME_LOST and story.attempts:
            await self._locate(story, handle)
        if story.reward is not None:
            await read(story, handle)

    async def _created(self, story: Story) -> RolloutHandle:
        task = self._task(story.number)
        while True:
            try:
                return await self._ps.rollouts.create(
                    task,
                    "shell",
                    rollout_id=story.rollout_id,
                    mode=Mode.TRANSPARENT_PROXY,
                    max_attempts=self._max_attempts,
                    limits=self._limits,
                    run_id=_RUN_ID,
                )
            except AlreadyExists:  # the answer was lost
                return await self._ps.rollouts.attach(story.rollout_id)
            except Unavailable:
                await asyncio.sleep(_PAUSE_S)

    async def _record(self, story: Story, handle: RolloutHandle, event: RolloutEvent) -> None:
        at = time.time() if event.time is None else event.time.timestamp()
        payload, last = event.payload, story.attempts[-1] if story.attempts else None
        if isinstance(payload, PhaseChanged):
            if payload.phase is Phase.PREPARING:
                story.attempts.append(Attempt(began=at))
            elif payload.phase is Phase.COLLECTING and last is not None:
                last.graded = at
            if payload.phase in _PLACED:
                await self._locate(story, handle)
        elif isinstance(payload, AgentExited) and last is not None:
            last.agent_ended = at
        elif isinstance(payload, AttemptFailed) and last is not None:
            if last.reason:  # this one was lost before it was placed
                last = Attempt(began=at)
                story.attempts.append(last)
            last.was_lost(at, payload.failure.reason, payload.failure.message)
        elif isinstance(payload, Ended):
            failure, reward = payload.outcome.failure, payload.outcome.reward
            if failure is not None and last is not None:
                last.was_lost(at, failure.reason, failure.message)
            story.ends.append(("" if failure is None else failure.reason, None if reward is None else reward.value))
            story.ended = at

    async def _locate(self, story: Story, handle: RolloutHandle) -> None:
        """Ask where the current attempt runs; the answer may be about a later one, which is not recorded here yet."""
        try:
            now = await handle.refresh()
        except (Unavailable, NotFound):  # the next look at its events says what it is
            return
        if now.home is not None:
            story.driver = now.home.driver
        if now.home is not None and now.attempts == len(story.attempts) and not story.attempts[-1].place:
            story.attempts[-1].node, story.attempts[-1].gate = now.home.sandbox_service, now.home.gate
