"""Rollouts whose driver is killed or stopped at random moments.

None is lost, no token is sampled twice, and rewards are the same.

`python -m tests.support.services.restarts --count 64 --kills 50 --seed 1` runs the rollouts undisturbed, then again
among the kills, and prints what it found; tests/faults/driver/test_restarts.py runs a short one. Moments are counts of
recorded events and not times, so that a slow machine is killed as often.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.copying import REPLY, training
from tests.support.policy import Trainer
from tests.support.services.restarting import GUARD_S, RestartableStack, insisting, restartable
from tests.support.services.stack import Running
from tests.support.waiting import eventually_async

from penstock.client import (
    Command,
    CommandFinished,
    PhaseChanged,
    Progress,
    RewardFrom,
    RolloutHandle,
    SeedFile,
    Task,
    Verifier,
)
from penstock.client.errors import AlreadyExists

LEFT_S = 90.0
"""A sandbox that a killed driver had asked for, to learn what an image has, ends with its lease of a minute."""
EVENTS = 12
"""Fewer events than each rollout has."""
WORDS = ("kiwi", "plum", "fig")
"""What an agent copies, by the rollout's number: the first is right."""


@dataclass(frozen=True)
class Plan:
    """`count` rollouts at once, among whose events the driver is killed `kills` times, or with `stops` stopped."""

    count: int
    kills: int
    seed: int
    stops: bool = False


@dataclass
class Story:
    """What is known of one rollout: its end, and what its agent was answered."""

    failure: str = ""
    reward: float | None = None
    attempts: int = 0
    calls: Counter[int] = field(default_factory=Counter)
    """How often the trainer was asked, by the call's number."""
    tokens: int = 0
    events: Counter[str] = field(default_factory=Counter)


@dataclass
class Account:
    """What became of everything."""

    plan: Plan
    kills: int = 0
    faults: list[str] = field(default_factory=list)
    rewards: Counter[float | None] = field(default_factory=Counter)
    seconds: float = 0.0

    def judge(self, calm: dict[int, Story], stormy: dict[int, Story]) -> None:
        """Compare each rollout with the same one of the undisturbed run."""
        for number, before in calm.items():
            after = stormy[number]
            self.rewards[after.reward] += 1
            if after != before:
                self.faults.append(f"rollout {number}: {after} and not {before}")
            if after.failure or after.attempts != 1 or set(after.calls.values()) != {1}:
                self.faults.append(f"rollout {number}: {after}")
        if self.kills != self.plan.kills:
            self.faults.append(f"{self.kills} kills and not {self.plan.kills}")

    def __str__(self) -> str:
        rewards = ", ".join(f"{count} with reward {reward}" for reward, count in self.rewards.most_common())
        how = "stops" if self.plan.stops else "kills"
        lines = [
            f"{self.plan.count} rollouts, {self.kills} {how} of the driver in {self.seconds:.0f} s ({self.plan})",
            f"  {rewards}",
        ]
        return "\n".join([*lines, *(f"  FAULT {fault}" for fault in self.faults)])


class Restarts:
    """One run of a plan."""

    def __init__(self, running: Running, stack: RestartableStack, plan: Plan) -> None:
        self._running = running
        self._stack = stack
        self._plan = plan
        self._seen = 0
        self._last = Counter[str]()
        """The last event seen of each rollout: an event is counted once."""
        self._progress = asyncio.Event()
        self.account = Account(plan)

    async def run(self) -> Account:
        """Both runs, and their comparison."""
        began = time.monotonic()
        calm = await self._rollouts()
        self._seen = 0
        killing = asyncio.create_task(self._kill())
        stormy = await self._rollouts()
        async with asyncio.timeout(GUARD_S):
            await killing  # the last moment may be the last event
        left = await self._left()
        self.account.judge(calm, stormy)
        self.account.faults += [f"{sandbox_id} is left" for sandbox_id in left]
        self.account.seconds = time.monotonic() - began
        return self.account

    async def _left(self) -> list[str]:
        """Sandboxes that are still there once the lease of each one without an owner has ended."""
        left: list[str] = []

        async def is_nothing_left() -> bool:
            left[:] = [sandbox_id async for sandbox_id, _ in self._running.ps.sandboxes.list()]
            return not left

        with suppress(AssertionError):  # what is left is a fault of the account
            await eventually_async(is_nothing_left, "nothing is left", within=LEFT_S)
        return left

    async def _rollouts(self) -> dict[int, Story]:
        label = secrets.token_hex(8)
        async with training(self._running, label, REPLY) as trainer:
            stories = await asyncio.gather(
                *(self._rollout(number, label, trainer) for number in range(self._plan.count))
            )
        return dict(enumerate(stories))

    async def _rollout(self, number: int, label: str, trainer: Trainer) -> Story:
        rollout_id = f"{label}-{number}"
        handle = await insisting(lambda: self._create(rollout_id, number, label), f"creating {rollout_id}")
        story = Story()
        await insisting(lambda: self._watch(handle, story), f"the events of {rollout_id}", lambda: self._seen)
        result = await insisting(handle.result, f"the result of {rollout_id}")
        story.failure = "" if result.failure is None else f"{result.failure.reason}: {result.failure.message}"
        story.reward = None if result.reward is None else result.reward.value
        story.attempts = result.rollout.attempts
        mine = [call for call in trainer.calls if call.rollout_id == rollout_id]
        story.calls = Counter(call.index for call in mine)
        answers = [trainer.answers[call.call_id].token_ids for call in mine]
        story.tokens = sum(0 if ids is None else len(ids) for ids in answers)
        return story

    async def _create(self, rollout_id: str, number: int, label: str) -> RolloutHandle:
        rollouts = self._running.ps.rollouts
        try:
            return await rollouts.create(task(number), "shell", rollout_id=rollout_id, labels={"test": label})
        except AlreadyExists:  # the answer to an earlier try was lost, the rollout was not
            return await rollouts.attach(rollout_id)

    async def _watch(self, handle: RolloutHandle, story: Story) -> None:
        async for event in handle.events(after=self._last[handle.rollout_id]):
            self._last[handle.rollout_id] = event.sequence
            # Preparation and grading may have begun again, and say so; nothing else is done twice.
            if not isinstance(event.payload, Progress | PhaseChanged | CommandFinished):
                story.events[type(event.payload).__name__] += 1
            self._seen += 1
            self._progress.set()

    async def _kill(self) -> None:
        dice = random.Random(self._plan.seed)
        for moment in sorted(dice.randrange(self._plan.count * EVENTS) for _ in range(self._plan.kills)):
            while self._seen < moment:
                self._progress.clear()
                await self._progress.wait()
            await self._stack.restart("driver", kill=not self._plan.stops)
            self.account.kills += 1


def task(number: int) -> Task:
    """Copies a word, which is right in one of three; the reward says so."""
    word = WORDS[number % len(WORDS)]
    return Task(
        task_id=f"restarts-{number % len(WORDS)}",
        instruction="Run work.sh with bash: it copies the word in note.txt to out.txt.",
        files=[SeedFile("work.sh", f"sed s/kiwi/{word}/ note.txt > out.txt\n".encode())],
        setup=[Command(shell="echo kiwi > note.txt")],
        verifier=Verifier(
            commands=[
                Command(shell='[ "$(cat out.txt)" = kiwi ] && r=1 || r=0.25; echo $r > "$PENSTOCK_REWARD_FILE"'),
            ],
            reward=RewardFrom.FILE,
        ),
    )


async def restarts(plan: Plan, folder: Path) -> Account:
    """Run a plan on a stack of its own."""
    async with restartable(folder) as (running, stack):
        return await Restarts(running, stack, plan).run()


def main() -> int:
    """Run the command; return 0 if nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stops", action="store_true", help="SIGTERM instead of kill -9")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-restarts-") as folder:
        account = asyncio.run(restarts(Plan(given.count, given.kills, given.seed, given.stops), Path(folder)))
    print(account)
    return 1 if account.faults else 0


if __name__ == "__main__":
    sys.exit(main())
