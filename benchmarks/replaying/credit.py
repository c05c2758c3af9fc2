"""How often branches find the call that decided a rollout: tasks in which one call, known to the verifier, is pivotal.

Each step of the agent writes one of four words, drawn by a seed. The verifier looks at the word of one step alone. In
half of the tasks only one word is right, and the parent wrote it; in the others only one is wrong, and it wrote that.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from benchmarks import world
from benchmarks.report import Row, Section
from penstock.analysis.credit import RolloutCredit, Value, credited, of, turns_of
from penstock.client import Command, Completion, LogprobsMode, ModelCall, Penstock, RewardFrom, Task, Verifier
from penstock.client.types.trajectories import Trajectory
from penstock_codec import tiny_tokenizer
from penstock_codec.codec import Codec
from penstock_codec.tokenizer_files import TokenizerFiles

WORDS: Final = ("red", "green", "blue", "black")
DECIDING: Final = WORDS[0]
"""What the parent wrote at the pivotal call."""
STEPS: Final = 4
"""Calls that write a word; one more ends the agent."""
BRANCHES: Final = 8
"""Of each call."""
TASKS: Final = 20
DRAWN: Final = 2000
"""Rollouts in arithmetic alone, for each probability."""
AIM: Final = 0.9


@dataclass(slots=True)
class Planted:
    """A task of which one call is pivotal, and the policy that does it; deterministic by its seed."""

    seed: int
    run_id: str
    _first: dict[str, tuple[int, int]] = field(default_factory=dict)
    _begun: Counter[int] = field(default_factory=Counter)

    @property
    def pivot(self) -> int:
        """The index of the call that decides."""
        return Random(f"pivot {self.seed}").randrange(STEPS)

    @property
    def reward(self) -> float:
        """The parent's: 1 = its word is the only one that is right, 0 = the only one that is wrong."""
        return float(self.seed % 2)

    @property
    def task(self) -> Task:
        """The agent's instruction, the same for all."""
        check = f"{'' if self.reward else '! '}grep -q {DECIDING} step{self.pivot}.txt"
        return Task(
            task_id="planted",
            instruction="Write a word at each step.",
            verifier=Verifier(commands=[Command(shell=check)], reward=RewardFrom.PASSED_SHARE),
        )

    def word(self, rollout_id: str, index: int) -> str:
        """What a rollout writes at a step: the parent, and a branch from its first call of its own."""
        if rollout_id == self.run_id:
            return DECIDING if index == self.pivot else self._drawn("parent", index)
        if rollout_id not in self._first:
            # By the order of arrival, whatever their ids: the branches of a call are alike.
            self._first[rollout_id] = (index, self._begun[index])
            self._begun[index] += 1
        return self._drawn(self._first[rollout_id], index)

    def _drawn(self, whose: object, index: int) -> str:
        return Random(f"{self.seed} {whose} {index}").choice(WORDS)

    def completion(self, codec: Codec, rollout_id: str, index: int) -> Completion:
        """The answer to a call, whose logprobs say that a word is one of four, and that all else is certain."""
        text, logprob = "done", 0.0
        if index < STEPS:
            command = f"echo {self.word(rollout_id, index)} > step{index}.txt"
            text = f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'
            logprob = -math.log(len(WORDS))
        ids = np.asarray([*tiny_tokenizer.bytewise(text), codec.end_of_turn_id], np.int32)
        logprobs = np.zeros(ids.size, np.float32)
        logprobs[0] = logprob
        return Completion.of_tokens(ids, logprobs, policy_version=1, logprobs_mode=LogprobsMode.PROCESSED)


@asynccontextmanager
async def answering(ps: Penstock, codec: Codec, planted: Planted) -> AsyncIterator[None]:
    """Answers all calls of a planted task's run."""
    async with ps.intercept(run_id=planted.run_id) as session:

        async def answer(call: ModelCall) -> None:
            await call.deliver(planted.completion(codec, call.rollout_id, call.index))

        async def answer_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                async for call in session.calls():
                    tasks.create_task(answer(call))

        work = asyncio.create_task(answer_all())
        try:
            yield
            session.finish()
            await work
        finally:
            work.cancel()
            await asyncio.wait([work])


async def credit_of(ps: Penstock, codec: Codec, planted: Planted) -> tuple[RolloutCredit, Trajectory]:
    """Runs the parent and branches of each of its calls; returns what they say, and the parent's trajectory."""
    async with answering(ps, codec, planted):
        parent = await ps.rollouts.create(planted.task, "shell", run_id=planted.run_id, rollout_id=planted.run_id)
        result = await parent.result()
        if result.reward is None or result.reward.value != planted.reward:
            raise RuntimeError(f"the parent went wrong: {result.outcome}")
        found = await of(ps, result, budget=BRANCHES * (STEPS + 1), n=BRANCHES)
    return found, await parent.trajectory()


async def measure(place: Path) -> list[Section]:
    """The share of tasks whose pivotal call is found; by services, and by arithmetic for other probabilities."""
    found = 0
    trajectories = []
    async with world.scripted(place) as running:
        codec = Codec.load(TokenizerFiles.from_directory(place / "model"))
        for number in range(TASKS):
            planted = Planted(number, f"planted-{number}")
            credit, trajectory = await credit_of(running.ps, codec, planted)
            found += credit.pivotal is not None and credit.pivotal.index == planted.pivot
            trajectories.append(trajectory)
    note = f"{found} of {TASKS}; aim {AIM:.0%}"
    rows = [Row("found, deciding word 1 in 4", 100 * found / TASKS, "%", note)]
    for one_in in (2, 4, 8):
        by_errors, by_size = drawn(trajectories[0], 1 / one_in)
        also = {"the largest advantage alone, %": 100 * by_size}
        rows.append(Row(f"arithmetic alone, 1 in {one_in}", 100 * by_errors, "%", f"{DRAWN} rollouts drawn", also))
    return [Section(f"The pivotal call of {STEPS + 1}, by {BRANCHES} branches of each", rows)]


def drawn(trajectory: Trajectory, share: float) -> tuple[float, float]:
    """Returns how often the call is found if branches decide as the parent did with this probability.

    By the advantage in standard errors, and by the largest advantage alone.
    """
    calls, random, found, largest = turns_of(trajectory), np.random.default_rng(0), 0, 0
    for _ in range(DRAWN):
        pivot, reward = int(random.integers(STEPS)), float(random.integers(2))
        values = {}
        for number, call in enumerate(calls):
            decided = random.random(BRANCHES) < (share if number <= pivot else 1.0)
            values[call.call_id] = Value(tuple(np.where(decided, reward, 1.0 - reward).tolist()))
        credit = credited("drawn", calls, values, reward)
        found += credit.pivotal is not None and credit.pivotal.index == pivot
        largest += max(credit.turns, key=lambda turn: abs(turn.advantage or 0.0)).index == pivot
    return found / DRAWN, largest / DRAWN
