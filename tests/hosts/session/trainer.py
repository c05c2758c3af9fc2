"""The trainer: one session, whose calls it answers with what depends on the prompt alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Final

import numpy as np
from tests.hosts.session.account import Account
from tests.support.policy import prompt_text, sampled

from penstock.client import Completion, InterceptSession, LogprobsMode, ModelCall, PenstockError, StalePolicy

_QUESTION: Final = re.compile(r"Which is number (\d+)\?")


def question(number: int) -> str:
    """What an agent asks."""
    return f"Which is number {number}?"


def answer(number: int) -> str:
    """What it is answered."""
    return f"That is number {number}."


def _reply(prompt: str) -> str:
    asked = _QUESTION.findall(prompt)
    return answer(int(asked[-1])) if asked else "Go on."


class Trainer:
    """Answers every call of a session at once, but for those of rollouts that it keeps."""

    def __init__(self, session: InterceptSession, account: Account, version: int) -> None:
        self.version = version
        """Of its weights."""
        self._session = session
        self._account = account
        self._kept: dict[str, asyncio.Queue[ModelCall]] = {}

    async def run(self) -> None:
        """Until the session ends or is finished."""
        async with asyncio.TaskGroup() as tasks:
            async for call in self._session.calls():
                self._account.taken[call.call_id] += 1
                self._account.least[call.call_id] = call.min_policy_version
                if (kept := self._kept.get(call.rollout_id)) is not None:
                    kept.put_nowait(call)
                else:
                    tasks.create_task(self.answer(call))

    def keep(self, rollout_ids: Iterable[str]) -> asyncio.Queue[ModelCall]:
        """Answer no call of these rollouts from now on: they come into the queue."""
        calls: asyncio.Queue[ModelCall] = asyncio.Queue()
        self._kept |= dict.fromkeys(rollout_ids, calls)
        return calls

    def keep_no_more(self, rollout_ids: Iterable[str]) -> None:
        """Answer calls of these rollouts that come from now on."""
        for rollout_id in rollout_ids:
            del self._kept[rollout_id]

    async def answer(self, call: ModelCall) -> str:
        """Answer a call with the present weights; returns why that was refused."""
        ids, completion = self._sampled(call, self.version)
        self._account.sent[call.call_id] = ids
        try:
            await call.deliver(completion)
        except PenstockError as error:
            self._account.refused[call.call_id] = error.reason
            return error.reason
        self._account.accepted[call.call_id] += 1
        return ""

    async def is_too_old(self, call: ModelCall, version: int) -> bool:
        """Whether the gate refuses an answer of these weights."""
        _, completion = self._sampled(call, version)
        try:
            await call.deliver(completion)
        except StalePolicy:
            return True
        return False

    @staticmethod
    def _sampled(call: ModelCall, version: int) -> tuple[tuple[int, ...], Completion]:
        ids, logprobs = sampled(_reply(prompt_text(call)))
        completion = Completion.of_tokens(
            np.array(ids), np.array(logprobs), policy_version=version, logprobs_mode=LogprobsMode.PROCESSED
        )
        return tuple(ids), completion
