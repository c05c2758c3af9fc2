"""A rollout's user: after each end of the agent, it decides what the agent is given next, or that it has enough.

Invariant: the decision depends on the turns before it and on the agent's last message alone. So a next process of this
driver that asks again sends a model the same request, to which the gate has the answer (decision 094).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Final

from penstock_chassis.aio.retry import Backoff, Delays
from penstock_chassis.errors import DeadlineExceeded, NotFound, PenstockError, ResourceExhausted, Unavailable
from penstock_driver.domain.failures import failure_of
from penstock_driver.domain.ports import Gate, GateOpening, ModelRequest
from penstock_driver.domain.rollout import Cause, Component, Failure, Phase, RolloutFailed
from penstock_driver.domain.users import END, MAX_TEXT_BYTES, EndReason, User, UserModel, UserTurn, user_id
from penstock_driver.grading.judge import NAMELESS_MODEL

_TRIES: Final = 3
"""How often a model is asked that does not answer; a gate that is away is waited for until the time is over."""
_DELAYS: Final = Delays(0.2, 10.0)
_REFUSED: Final = frozenset({"USER_REFUSED", "FIELD_INVALID", "CALL_TOO_LARGE"})
"""Reasons of the gate that concern the question, whose largest part the agent writes."""
_SILENT: Final = "(The agent wrote no message.)"
_RULES: Final = (
    "The agent was given the task below. Write your next message to it, and nothing else. "
    f"When you want nothing more of it, write {END}."
)


class _Ended(Exception):
    """The conversation is over, for an EndReason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RolloutUser:
    """The user of one attempt.

    Args:
        user: who it is.
        gate: that of the rollout.
        request: what is opened there for a model.
        instruction: the task's.
    """

    def __init__(self, user: User, gate: Gate, request: ModelRequest | None, instruction: str) -> None:
        self._user = user
        self._gate = gate
        self._request = request
        self._instruction = cut(instruction, MAX_TEXT_BYTES)
        self._opening: GateOpening | None = None
        self._is_kept_waiting = False

    async def turn(self, before: Sequence[UserTurn], agent_message: str, most_s: float) -> UserTurn:
        """Return what the user decides, given its turns before, within `most_s` seconds: what is left to the agent.

        A failure is none that the agent can cause, by what it writes or when it ends. RolloutFailed (USER_UNANSWERED,
        GATE_LOST).
        """
        index, user = len(before) + 1, self._user
        if user.model is None and len(before) >= len(user.script):
            return UserTurn(index, agent_message, end_reason=EndReason.SCRIPT_ENDED)
        if len(before) >= user.max_instructions:
            return UserTurn(index, agent_message, end_reason=EndReason.MAX_INSTRUCTIONS)
        if user.model is None:
            return UserTurn(index, agent_message, user.script[len(before)])
        try:
            text = await self._said(user.model, before, agent_message, most_s)
        except _Ended as end:
            return UserTurn(index, agent_message, end_reason=end.reason)
        instruction = cut(text.replace("\0", "").strip(), MAX_TEXT_BYTES)
        if END in text or not instruction:
            return UserTurn(index, agent_message, end_reason=EndReason.USER_ENDED)
        return UserTurn(index, agent_message, instruction)

    async def _said(self, model: UserModel, before: Sequence[UserTurn], agent_message: str, most_s: float) -> str:
        """What the model writes. Raises _Ended."""
        limit_s, self._is_kept_waiting = min(most_s, model.timeout_s), False
        try:
            async with asyncio.timeout(limit_s):
                opening = self._opening or await self._open()
                name = opening.model_name or NAMELESS_MODEL
                body = request_body(model, name, self._instruction, before, agent_message)
                return await self._asked(body, limit_s)
        except TimeoutError:
            if most_s < model.timeout_s and not self._is_kept_waiting:
                raise _Ended(EndReason.AGENT_TIMED_OUT) from None
            message = f"it took longer than {limit_s:.1f} s, its timeout or what is left of limits.agent"
            raise _unanswered(message, is_passing=True) from None

    async def _open(self) -> GateOpening:
        assert self._request is not None
        backoff = Backoff(_DELAYS)
        while True:
            try:
                self._opening = await self._gate.open_user(self._request)
                break
            except (Unavailable, ResourceExhausted, DeadlineExceeded):
                self._is_kept_waiting = True
                await backoff.wait()
            except NotFound as error:
                raise _lost("the gate does not know the rollout any more") from error
            except PenstockError as error:
                if error.reason == "USER_TOO_LATE":
                    raise _lost("the gate has closed the rollout") from error
                raise RolloutFailed(failure_of(error, Phase.RUNNING, Component.GATE)) from error
        if self._opening is None:
            raise _lost("the gate has closed the user's part of the rollout")
        return self._opening

    async def _asked(self, body: bytes, timeout_s: float) -> str:
        assert self._request is not None
        rollout_id, backoff, tries = self._request.rollout_id, Backoff(_DELAYS), 0
        while True:
            try:
                return await self._gate.ask_user(rollout_id, body, timeout_s)
            except PenstockError as error:
                if error.reason == "BUDGET_EXHAUSTED":
                    raise _Ended(EndReason.USER_BUDGET) from error
                if error.reason in _REFUSED:
                    raise _Ended(EndReason.USER_REFUSED) from error
                is_passing = isinstance(error, Unavailable | DeadlineExceeded) or error.reason == "RATE_LIMIT"
                tries += error.reason == "USER_UNANSWERED"
                if not is_passing or tries >= _TRIES:
                    if await self._is_used_up(rollout_id):
                        raise _Ended(EndReason.USER_BUDGET) from error
                    raise _unanswered(error.message, is_passing=is_passing) from error
                # Its own deadline is that of the question.
                self._is_kept_waiting = self._is_kept_waiting or not isinstance(error, DeadlineExceeded)
                await backoff.wait()

    async def _is_used_up(self, rollout_id: str) -> bool:
        try:
            return bool((await self._gate.answered(user_id(rollout_id))).exhausted_budget)
        except PenstockError:
            return False


def request_body(
    model: UserModel, name: str, instruction: str, before: Sequence[UserTurn], agent_message: str
) -> bytes:
    """The request that asks a model for the user's next message: the conversation, with the roles exchanged."""
    messages = [{"role": "system", "content": f"{model.prompt}\n\n{_RULES}\n\n{instruction}"}]
    for turn in before:
        messages.append({"role": "user", "content": turn.agent_message or _SILENT})
        messages.append({"role": "assistant", "content": turn.instruction})
    messages.append({"role": "user", "content": agent_message or _SILENT})
    request: dict[str, object] = {"model": name, "messages": messages, "max_tokens": model.max_tokens}
    if model.temperature is not None:
        request["temperature"] = model.temperature
    return json.dumps(request, ensure_ascii=False).encode()


def cut(text: str, most_bytes: int) -> str:
    """The beginning of a text, of at most so many bytes."""
    data = text.encode("utf-8", "replace")
    return text if len(data) <= most_bytes else data[:most_bytes].decode("utf-8", "ignore")


def _unanswered(why: str, *, is_passing: bool) -> RolloutFailed:
    message = f"the model that plays the user did not answer: {why}"
    return RolloutFailed(Failure(Cause.MODEL, "USER_UNANSWERED", message, is_passing, Phase.RUNNING))


def _lost(why: str) -> RolloutFailed:
    message = f"the user cannot be asked: {why}"
    return RolloutFailed(
        Failure(Cause.INFRASTRUCTURE, "GATE_LOST", message, True, Phase.RUNNING, component=Component.GATE)
    )
