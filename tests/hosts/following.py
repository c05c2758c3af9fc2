"""Follows one rollout from its creation to its trajectory, also while its driver is away."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from tests.hosts import model
from tests.hosts.records import HOME_LOST, Attempt, Story

from penstock.analysis import export
from penstock.analysis.verify_chain import verify
from penstock.client import AlreadyExists, Limits, Mode, NotFound, Penstock, PenstockError, RolloutHandle, Unavailable
from penstock.client.types.results import AgentExited, AttemptFailed, Ended, Phase, PhaseChanged, RolloutEvent

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


class Follower:
    """Follows rollouts at one driver."""

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
    ) -> None:
        self._ps = ps
        self._driver = driver
        self._work_s = work_s
        self._max_attempts = max_attempts
        self._environments = environments
        self._limits = limits or Limits()
        self._parts = parts

    def begin(self, number: int, generation: int) -> Story:
        """An empty story."""
        return Story(f"hosts-{number}-{generation}", number, self._driver, created=time.time())

    async def follow(self, story: Story) -> None:
        """Create the rollout, and record what happens until its end. Raises PenstockError, and none for an absence."""
        await self.observe(story, await self._created(story))

    async def observe(self, story: Story, handle: RolloutHandle) -> None:
        """As `follow`, of a rollout that is there."""
        position = 0
        while not story.ends:
            try:
                async for event in handle.events(after=position):
                    position = event.sequence
                    await self._record(story, handle, event)
            except Unavailable:
                await asyncio.sleep(_PAUSE_S)
            except NotFound as error:
                if error.reason != HOME_LOST:
                    raise
                story.ends.append((HOME_LOST, None))
                story.ended = time.time()
        if story.reason != HOME_LOST and story.attempts:
            await self._locate(story, handle)
        if story.reward is not None:
            await read(story, handle)

    async def _created(self, story: Story) -> RolloutHandle:
        task = model.task(story.number, self._work_s, self._environments, self._parts)
        while True:
            try:
                return await self._ps.rollouts.create(
                    task,
                    "shell",
                    rollout_id=story.rollout_id,
                    mode=Mode.TRANSPARENT_PROXY,
                    max_attempts=self._max_attempts,
                    limits=self._limits,
                    run_id="hosts",
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
