"""Agents at gates, as coroutines: each asks one numbered question after another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import aiohttp
from tests.hosts.session.account import Account, Recorded
from tests.hosts.session.trainer import answer, question
from tests.support.services.asking import ask

from penstock.client import GateRolloutHandle, Penstock, PolicyConstraint

LABELS: Final = {"trainer": "one"}
PATIENCE_S: Final = 300.0
"""Guard on one question, over a restart of its gate."""
_OF_ROLLOUT: Final = 4
"""Agents that share a rollout."""


class Agents:
    """All agents. `gates` are connections to one gate each."""

    def __init__(self, http: aiohttp.ClientSession, gates: Mapping[str, Penstock], account: Account) -> None:
        self._http = http
        self._gates = gates
        self._account = account
        self._rollouts: dict[str, list[GateRolloutHandle]] = {name: [] for name in gates}
        self._present: dict[str, list[GateRolloutHandle]] = {}
        """Those whose agents ask."""
        self._working: dict[str, list[asyncio.Task[None]]] = {}

    @property
    def answered(self) -> int:
        """Answers so far."""
        return sum(self._account.answered.values())

    async def open(self, gate: str) -> GateRolloutHandle:
        """Open a rollout, whose answers must have the newest weights."""
        policy = PolicyConstraint(max_staleness=0)
        rollout = await self._gates[gate].gate.open(run_id="questions", labels=LABELS, policy=policy)
        self._rollouts[gate].append(rollout)
        return rollout

    async def prepare(self, gate: str, agents: int) -> list[str]:
        """Open the rollouts of so many agents at a gate; returns their ids."""
        self._present[gate] = [await self.open(gate) for _ in range(-(-agents // _OF_ROLLOUT))]
        return [rollout.rollout_id for rollout in self._present[gate]]

    async def work(self, numbers: deque[int], agents: int) -> None:
        """Ask all these questions, so many at once at each gate that is prepared. Those of a lost gate go on at the
        others.
        """
        while numbers:
            async with asyncio.TaskGroup() as tasks:
                for gate, rollouts in self._present.items():
                    self._working[gate] = [
                        tasks.create_task(self._ask(gate, rollouts[place // _OF_ROLLOUT], numbers))
                        for place in range(agents)
                    ]

    def lose(self, gate: str) -> None:
        """A gate is lost: its agents end, as those of a failed attempt do."""
        del self._present[gate]
        for task in self._working.pop(gate):
            task.cancel()

    async def one(self, rollout: GateRolloutHandle, text: str) -> str:
        """One call of a rollout; returns the answer."""
        return await ask(self._http, rollout, text, within=PATIENCE_S)

    async def calls(self, gate: str, rollout: GateRolloutHandle) -> int:
        """How many calls a gate has of a rollout."""
        return len([call async for call in self._gates[gate].gate.calls(rollout.rollout_id)])

    async def close(self, gate: str, rollout_ids: Sequence[str]) -> None:
        """Close rollouts, as the driver does after an attempt."""
        for rollout_id in rollout_ids:
            await self._gates[gate].gate.close(rollout_id, "ATTEMPT_LOST")

    async def read(self) -> None:
        """What the gates have recorded."""
        for gate, rollouts in self._rollouts.items():
            for rollout in rollouts:
                trajectory = await self._gates[gate].gate.capture(rollout.rollout_id)
                for call in trajectory.calls:
                    ids = () if call.completion is None else call.completion.token_ids
                    leased = 0.0 if call.lease_time is None else call.lease_time.timestamp()
                    tokens = () if ids is None else tuple(int(one) for one in ids)
                    self._account.recorded.append(Recorded(gate, call.call_id, call.state, leased, tokens))

    async def _ask(self, gate: str, rollout: GateRolloutHandle, numbers: deque[int]) -> None:
        while numbers:
            number = numbers.popleft()
            try:
                text = await self.one(rollout, question(number))
            except asyncio.CancelledError:
                numbers.append(number)
                raise
            if text == answer(number):
                self._account.answered[number] += 1
                self._account.answered_at[gate] += 1
            else:
                self._account.wrong.append(f"question {number} was answered {text!r}")
