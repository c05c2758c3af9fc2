"""A trainer and its engine on a virtual clock: groups of rollouts of heavy-tailed durations, paced by a policy.

The engine runs at most `slots` rollouts at once, each for as long as it takes. The trainer takes a batch as soon as the
policy has one and it is idle, trains for `train_minutes`, and then has the next version. Rollout i of a run is the same
under each policy: its task, duration and reward are drawn by the seed and its number.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from penstock.client.pacing.meter import Bias, BiasMeter, Facts
from penstock.client.pacing.policies import Now, Policy
from penstock.client.types.trajectories import Reward

MEDIANS: Final = (1.0, 2.0, 4.0, 8.0)
"""Minutes of a rollout, of tasks of four kinds."""
SPREAD: Final = 1.28
"""Of the logarithm of a task's durations. With the four medians that of all durations is 1.5."""
LIMIT: Final = 120.0
"""Minutes, after which a rollout is ended without a reward of more than 0."""
TOKENS_A_MINUTE: Final = 400.0


@dataclass(frozen=True, slots=True)
class World:
    """What is simulated: a run of `steps` batches."""

    steps: int
    batch: int
    members: int = 8
    slots: int = 128
    train_minutes: float = 4.0


@dataclass(slots=True, eq=False)
class Simulated:
    """A group; see `penstock.client.pacing.policies.Group`."""

    number: int
    version: int
    facts: tuple[Facts, ...]
    running: int
    ready: int | None = None
    ended: list[Facts] = field(default_factory=list)
    is_taken: bool = False

    @property
    def size(self) -> int:
        """Its rollouts."""
        return len(self.facts)


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a run; all counts are of rollouts."""

    minutes: float
    started: int
    trained: int
    left_out: int
    dropped: int
    staleness: Sequence[int]
    """Of each trained group, in versions."""
    bias: Bias
    baselines: Sequence[tuple[float, float]]
    """Of each group with rollouts that are left out: how much higher than the mean of all its rewards are that of the
    rewards it has, and the one in which the others count with the mean of those left out before."""

    @property
    def rate(self) -> float:
        """Trained rollouts a minute."""
        return self.trained / self.minutes


def drawn(seed: int, number: int, members: int) -> tuple[Facts, ...]:
    """Returns the rollouts of a group, each with a reward. What takes longer succeeds less often."""
    random = Random(f"{seed} {number}")
    kind = random.randrange(len(MEDIANS))
    facts = []
    for _ in range(members):
        minutes = min(LIMIT, MEDIANS[kind] * math.exp(SPREAD * random.gauss(0.0, 1.0)))
        chance = 0.0 if minutes == LIMIT else 0.8 / (1.0 + minutes / 8.0)
        reward = Reward(float(random.random() < chance))
        facts.append(Facts(f"kind {kind}", int(minutes * TOKENS_A_MINUTE), 60 * minutes, reward))
    return tuple(facts)


class Simulation:
    """One run of a policy."""

    def __init__(self, policy: Policy, world: World, seed: int) -> None:
        self._policy, self._world, self._seed = policy, world, seed
        self._clock = self._trained_at = 0.0
        self._version, self._is_taken = 0, False
        self._groups: list[Simulated] = []
        self._ends: list[tuple[float, int, int, Simulated]] = []
        self._busy = self._number = self._ready = 0
        self._left_out = self._dropped = 0
        self._gone: set[int] = set()
        """Groups that were dropped while they ran."""
        self._meter = BiasMeter()
        self._staleness: list[int] = []
        self._late, self._late_sum = 0, 0.0
        """Those that were left out and have ended, and their rewards."""
        self._baselines: list[tuple[float, float]] = []

    def run(self) -> Run:
        """Runs it until all batches are taken."""
        steps = 0
        while True:
            if self._is_taken and self._clock >= self._trained_at:
                self._version, self._is_taken = self._version + 1, False
            if not self._is_taken:
                steps += self._take()
            if steps == self._world.steps:
                break
            while self._busy + self._world.members <= self._world.slots and self._policy.admits(self._now()):
                self._start()
            self._advance()
        bias = self._meter.report()
        started = self._number * self._world.members
        counts = (bias.trained, self._left_out, self._dropped)
        return Run(self._clock, started, *counts, self._staleness, bias, self._baselines)

    def _now(self) -> Now:
        started = self._number * self._world.members
        return Now(self._groups, self._version, self._is_taken, started=started, left_out=self._left_out)

    def _start(self) -> None:
        facts = drawn(self._seed, self._number, self._world.members)
        group = Simulated(self._number, self._version, facts, len(facts))
        self._groups.append(group)
        for index, item in enumerate(facts):
            self._meter.start(item.task_id)
            self._meter.end(item)  # its classes are known here from the start
            heapq.heappush(self._ends, (self._clock + (item.seconds or 0.0) / 60, self._number, index, group))
        self._number, self._busy = self._number + 1, self._busy + len(facts)

    def _take(self) -> bool:
        """Takes a batch, if there is one."""
        choice = self._policy.choose(self._now())
        taken, dropped = ({group.number for group in groups} for groups in (choice.train, choice.drop))
        for group in self._groups:
            if group.number in taken:
                self._staleness.append(self._version - group.version)
                self._left_out += group.running
                group.is_taken = True
                if group.running and self._late:
                    self._compare(group)
                for facts in group.ended:
                    self._meter.train(facts)
            elif group.number in dropped:
                self._dropped += group.size
                self._busy -= group.running
                self._gone.add(group.number)
        self._groups = [group for group in self._groups if group.number not in taken | dropped]
        if taken:
            self._is_taken, self._trained_at = True, self._clock + self._world.train_minutes
        return bool(taken)

    def _compare(self, group: Simulated) -> None:
        whole, known = map(_mean, (group.facts, group.ended))
        expected = self._late_sum / self._late
        reckoned = (known * len(group.ended) + expected * group.running) / group.size
        self._baselines.append((known - whole, reckoned - whole))

    def _advance(self) -> None:
        """Goes to the next event: the end of a rollout, or that of a training."""
        if self._is_taken and (not self._ends or self._trained_at <= self._ends[0][0]):
            self._clock = self._trained_at
            return
        self._clock, _, index, group = heapq.heappop(self._ends)
        if group.number in self._gone:
            return
        group.running -= 1
        group.ended.append(group.facts[index])
        if group.is_taken:
            self._late, self._late_sum = self._late + 1, self._late_sum + _mean([group.facts[index]])
        self._busy -= 1
        if not group.running:
            group.ready, self._ready = self._ready, self._ready + 1


def _mean(facts: Sequence[Facts]) -> float:
    rewards = [one.reward.value for one in facts if one.reward is not None]
    return sum(rewards) / len(rewards)
