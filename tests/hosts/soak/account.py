"""What must be true after a soak, and its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.hosts import truths
from tests.hosts.records import Lost, Seen
from tests.hosts.soak.memory import Memory
from tests.hosts.soak.plan import Plan
from tests.hosts.soak.storm import Storm


@dataclass
class Account:
    """What became of everything."""

    plan: Plan
    seen: Seen
    storm: Storm
    memory: Memory
    faults_seen: list[str] = field(default_factory=list)
    """What was wrong while it ran."""
    causes: dict[str, str] = field(default_factory=dict)
    """Of the rollouts that failed."""
    kept: list[str] = field(default_factory=list)
    """Rollouts that drivers list although they were deleted."""
    load: float = 0.0

    def faults(self) -> list[str]:
        """Everything that is not as it must be."""
        self.seen.losses = self.storm.hosts
        self.seen.disturbances = [Lost(one.name, one.at, one.back) for one in self.storm.disturbances]
        return [
            *self.faults_seen,
            *truths.ends_once(self.seen),
            *truths.repeated_elsewhere(self.seen),
            *truths.logged_tokens(self.seen),
            *truths.proven(self.seen),
            *truths.sampled_once(self.seen),
            *truths.nothing_left(self.seen),
            *self._earned(),
            *self._named(),
            *(f"{one} is listed although it was deleted" for one in self.kept),
            *(
                f"{one.name} grew by {one.last - one.first:.0f} bytes and {one.files} files in {one.rollouts} rollouts"
                for one in self.memory.growths()
                if not one.is_flat
            ),
        ]

    def _earned(self) -> Iterator[str]:
        """Each reward is 1, but for agents that were killed; no other cause fails a rollout, or gives it a zero."""
        yield from truths.unearned(self.seen)
        killed = sum(one.kind == "agent" for one in self.storm.disturbances)
        spoiled = [story for story in self.seen.stories if story.reward != 1.0]
        by_agents = [story for story in spoiled if self.causes.get(story.rollout_id) in ("", "agent")]
        for story in spoiled:
            if story not in by_agents:
                cause = self.causes.get(story.rollout_id, "nobody")
                yield f"{story.rollout_id} has reward {story.reward}: {story.reason}, caused by {cause}"
        if len(by_agents) > killed:
            yield f"{[story.rollout_id for story in by_agents]} were spoiled by agents, of which {killed} were killed"

    def _named(self) -> Iterator[str]:
        yield from self.storm.unnamed
        for took in self.storm.named_s:
            if took > self.plan.named_s:
                yield f"`doctor --live` named a lost host after {took:.1f} s, at most {self.plan.named_s:g} s"

    def lines(self) -> list[str]:
        """The report, for people."""
        stories = self.seen.stories
        named = sorted(self.storm.named_s)
        rewards = Counter("none" if story.reward is None else f"{story.reward:g}" for story in stories)
        failed = Counter(one.reason for story in stories for one in story.attempts if one.reason)
        attempts = Counter(len(story.attempts) for story in stories)
        again = sum(truths.sampled_again(self.seen, story) for story in stories)
        report = [
            f"rollouts ended      {sum(bool(one.ends) for one in stories)} of {len(stories)} begun, in groups of "
            f"{self.plan.group}, in {self.seen.seconds:.0f} s; seed {self.plan.seed}; load at the end {self.load:.0f}",
            f"lost                {_counts(self.storm.counts())}",
            f"rewards             {_counts(rewards)}",
            f"failures            {_counts(Counter(story.reason for story in stories if story.reason))}",
            f"attempts            {_counts(Counter({str(count): often for count, often in attempts.items()}))}",
            f"failed attempts     {_counts(failed)}",
            f"sampled             {sum(map(len, self.seen.sampled.values()))} answers, {again} of them again",
            f"nothing left after  {self.seen.left_s:.1f} s",
            f"memory              at most {self.memory.peak / 2**20:.0f} MiB in all services",
        ]
        if named:
            p50, most = truths.percentile(named, 50), named[-1]
            report.append(f"named by doctor     {len(named)} hosts, p50 {p50:.1f} s, at most {most:.1f} s")
        report += [
            f"  {one.name:4} {one.first / 2**20:6.1f} to {one.last / 2**20:6.1f} MiB, {one.per_rollout / 1024:+.1f} KiB"
            f" for each of {one.rollouts} rollouts, {one.files:+d} files, {one.readings} readings"
            for one in self.memory.growths()
        ]
        return report


def _counts(counts: Counter[str]) -> str:
    ordered: Sequence[tuple[str, int]] = sorted(counts.items())
    return ", ".join(f"{name} {count}" for name, count in ordered) or "none"
