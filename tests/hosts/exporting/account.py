"""What clients, engines, gates and the place of the exports have of a run, and what must be true of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.hosts.records import Story

Key = tuple[str, int]
"""Id of a rollout, and its attempt."""


@dataclass
class Account:
    """`store_dies`: it is away for a part of the run."""

    url: str
    store_dies: bool
    stories: list[Story] = field(default_factory=list)
    attempts: dict[str, int] = field(default_factory=dict)
    """Of each rollout, as its driver says at the end."""
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    """What the engines answered, by call."""
    files: int = 0
    in_files: Counter[Key] = field(default_factory=Counter)
    """How often each rollout is in files of the table `rollouts`."""
    for_readers: Counter[Key] = field(default_factory=Counter)
    """How often a reader gets it."""
    calls: dict[str, list[list[int]]] = field(default_factory=dict)
    """Sampled tokens of each call in the table `turns`, once for each row."""
    unstored: set[str] = field(default_factory=set)
    """Rollouts that had ended and were not stored when the store had been away for a while."""
    forgotten_early: set[str] = field(default_factory=set)
    """Those of them that no gate had any more."""
    forgotten: int = 0
    """Rollouts that were stored, and that no gate had any more by then."""
    never_stored: set[str] = field(default_factory=set)
    """What drivers say at the end."""
    at_gates: set[str] = field(default_factory=set)
    """What gates have at the end."""
    requests: Counter[str] = field(default_factory=Counter)
    """Of drivers to the store, by what the proxy did with them."""
    proof: str = ""
    """What `penstock verify` says of the store."""
    is_proven: bool = False
    away_s: float = 0.0
    """From the store's death until it was back."""
    stored_s: float = 0.0
    """From then (or the last end) until all was stored."""
    forgotten_s: float = 0.0
    """From then until the gates had forgotten all."""
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """The report, for people."""
        failing = sum(count for fault, count in self.requests.items() if fault != "none")
        lines = [
            f"rollouts            {len(self.stories)}, ended {sum(bool(story.ends) for story in self.stories)}",
            f"at                  {self.url}: {len(self.in_files)} rollouts, {self.files} files of each table, "
            f"{max(self.in_files.values(), default=0)} time each; {len(self.calls)} calls",
            f"all stored          after {self.stored_s:.1f} s",
            f"gates have none     {self.forgotten_s:.1f} s later",
            f"verify              {self.proof}",
            f"seconds             {self.seconds:.0f}",
        ]
        if self.store_dies:
            lines[1:1] = [
                f"store               away for {self.away_s:.1f} s; {len(self.unstored)} waited, of which gates had "
                f"{len(self.unstored - self.forgotten_early)}, and none of {self.forgotten} that were stored",
                f"requests            {sum(self.requests.values())}, failed by the proxy {failing}: "
                f"{dict(sorted(self.requests.items()))}",
            ]
        return lines

    def faults(self) -> list[str]:
        """Everything that is not as it must be."""
        return [*self._ends(), *self._stored(), *self._kept()]

    def _ends(self) -> Iterator[str]:
        for story in self.stories:
            if [reward for _, reward in story.ends] != [1.0]:
                yield f"{story.rollout_id} ended as {story.ends}"

    def _stored(self) -> Iterator[str]:
        wanted = Counter({(story.rollout_id, self.attempts.get(story.rollout_id, 1)): 1 for story in self.stories})
        for what, found in (("files have", self.in_files), ("a reader gets", self.for_readers)):
            for key in wanted.keys() | found.keys():
                if found[key] != wanted[key]:
                    yield f"{what} {key} {found[key]} times, not {wanted[key]}"
        for rollout_id in self.never_stored:
            yield f"{rollout_id} is not stored, its driver says"
        for call_id in self.answers.keys() | self.calls.keys():
            rows = self.calls.get(call_id, [])
            if len(rows) != 1:
                yield f"call {call_id} has {len(rows)} rows"
            elif rows[0] not in self.answers.get(call_id, []):
                yield f"call {call_id} has other tokens than the engine sampled"
        if not self.is_proven:
            yield f"verify: {self.proof}"

    def _kept(self) -> Iterator[str]:
        for rollout_id in self.forgotten_early:
            yield f"no gate has {rollout_id}, which was not stored"
        for rollout_id in self.at_gates:
            yield f"a gate still has {rollout_id}"
        if not self.store_dies:
            return
        if not self.unstored or not self.forgotten:
            yield "the store's absence shows nothing: no rollout waited for it, or none was stored before"
        for fault in ("error", "lost request", "lost answer", "none"):
            if not self.requests[fault]:
                yield f"the proxy had no request with {fault}"
