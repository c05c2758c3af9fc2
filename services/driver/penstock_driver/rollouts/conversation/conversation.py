"""An agent's conversation with its user, within one attempt: which instruction it is at, and how much time is left.

Invariants: a turn of the user is on disk before the agent is started with it, so no instruction is given twice, nor
another one in its place. The agent's limit is that of the whole conversation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from penstock_driver.agents.launch import Start
from penstock_driver.domain.ports import Gate, ModelRequest
from penstock_driver.domain.rollout import Cause, Failure, Phase, RolloutFailed
from penstock_driver.domain.unended import AttemptPlace
from penstock_driver.domain.users import EndReason, UserTurn
from penstock_driver.environments.cleanup import DRIVER_LABEL
from penstock_driver.rollouts.context import AttemptSpec
from penstock_driver.rollouts.conversation.user import RolloutUser
from penstock_driver.rollouts.recorder import RolloutRecorder

AGENT_PROCESS: Final = "agent"


class Conversation:
    """Without a user, the agent has the task's instruction alone."""

    def __init__(self, attempt: AttemptSpec, gate: Gate, recorder: RolloutRecorder) -> None:
        self._recorder = recorder
        self._task = attempt.rollout.task.instruction
        self._user = _user_of(attempt, gate)
        self._limit_s = attempt.rollout.limits.agent_s
        self._pausing = attempt.pausing
        self._held_s = attempt.pausing.held_s
        self._until = 0.0  # by the loop's clock, without the time in which it was held

    @property
    def has_user(self) -> bool:
        """Whether the agent may get further instructions."""
        return self._user is not None

    @property
    def _instructions(self) -> list[str]:
        return [turn.instruction for turn in self._recorder.user_turns if turn.instruction]

    @property
    def is_further(self) -> bool:
        """Whether the agent is at a further instruction."""
        return bool(self._instructions)

    @property
    def is_over(self) -> bool:
        """Whether the user has decided that there is no further instruction."""
        turns = self._recorder.user_turns
        return bool(turns) and bool(turns[-1].end_reason)

    @property
    def failure(self) -> Failure | None:
        """Why the conversation failed, where its agent's last end is no failure."""
        turns = self._recorder.user_turns
        if not turns or turns[-1].end_reason != EndReason.AGENT_TIMED_OUT:
            return None
        message = f"the agent's {self._limit_s:g} s were over before its user had answered"
        return Failure(Cause.TIMEOUT, "AGENT_TIMED_OUT", message, False, Phase.RUNNING)

    @property
    def instruction(self) -> str:
        """What the agent is given now."""
        return self._instructions[-1] if self.is_further else self._task

    @property
    def start(self) -> Start:
        """How the agent is started with it."""
        if self._user is None:
            return Start.ONLY
        return Start.FURTHER if self.is_further else Start.FIRST

    @property
    def process_id(self) -> str:
        """The id of the process that has it."""
        return f"{AGENT_PROCESS}-{len(self._instructions) + 1}" if self.is_further else AGENT_PROCESS

    def begin(self, place: AttemptPlace | None = None) -> None:
        """Count the agent's time from now on. `place` is of one that runs already; pauses since its start cost no time.

        Called before this process holds that agent: `held_s` then has what is still to come of a pause in force.
        """
        left_s = self._limit_s
        if place is not None:
            now, pause = time.time(), self._recorder.pause
            paused_s = self._recorder.paused_s - place.paused_s
            if pause is not None:
                paused_s += max(0.0, now - pause.start_time)
            left_s = min(left_s, place.deadline - now + paused_s)
        self._until = asyncio.get_running_loop().time() + left_s - self._held_s()

    @property
    def left_s(self) -> float:
        """How much of the agent's time is left, at least a moment."""
        return max(0.1, self._until + self._held_s() - asyncio.get_running_loop().time())

    async def goes_on(self, agent_message: str, classified: Callable[[], Awaitable[Failure | None]]) -> bool:
        """Whether the agent, which has ended, gets a further instruction, which is on disk then.

        `classified` returns the failure of that end, None for a success. RolloutFailed as of `RolloutUser.turn`.
        """
        turns = self._recorder.user_turns
        if self._user is None or self.is_over:
            return False
        if await classified() is None:
            turn = await self._asked(self._user, turns, agent_message)
        else:
            turn = UserTurn(len(turns) + 1, agent_message, end_reason=EndReason.AGENT_FAILED)
        self._recorder.append(turn)
        await self._recorder.secure()
        return bool(turn.instruction)

    async def _asked(self, user: RolloutUser, turns: Sequence[UserTurn], agent_message: str) -> UserTurn:
        """What the user decides. It is asked in no pause, and again where a pause took some of the time for it."""
        while True:
            await self._pausing.passed()
            held_s = self._held_s()
            try:
                turn = await user.turn(turns, agent_message, self.left_s)
            except RolloutFailed:
                if self._held_s() == held_s:
                    raise
            else:
                if turn.end_reason != EndReason.AGENT_TIMED_OUT or self._held_s() == held_s:
                    return turn


def _user_of(attempt: AttemptSpec, gate: Gate) -> RolloutUser | None:
    user, rollout_id = attempt.rollout.user, attempt.record.rollout_id
    if user is None:
        return None
    request = None
    if user.model is not None:
        request = ModelRequest(
            rollout_id=rollout_id,
            request_id=f"{rollout_id}/user/{attempt.number}",
            terms=user.model.terms,
            driver_id=attempt.labels.get(DRIVER_LABEL, ""),
            task_id=attempt.rollout.task.task_id,
        )
    return RolloutUser(user, gate, request, attempt.rollout.task.instruction)
