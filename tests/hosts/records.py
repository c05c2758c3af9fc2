"""What the harness saw of each rollout and each loss, from which `truths` are judged, and what services log of their
work. Times are Unix seconds."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.hosts import engine

LOST = {"NODE_LOST", "GATE_LOST"}
CREATIONS = ("/CreateSandbox", "/ForkSandboxes", "/PrepareSnapshot")
"""Calls of a sandbox service that make sandboxes."""
HOME_LOST = "HOME_LOST"
"""The reason of the end of a rollout whose driver came back without its disk: its client creates it again."""

End = tuple[str, float | None]
"""Reason ("" = completed) and reward."""


@dataclass
class Attempt:
    """One attempt. `node` and `gate` are empty where it ended before they were seen."""

    began: float
    node: str = ""
    gate: str = ""
    agent_ended: float | None = None
    graded: float | None = None
    failed: float | None = None
    reason: str = ""
    """Of its failure; empty = it did not fail."""

    def was_lost(self, failed: float, reason: str, message: str) -> None:
        """Record its failure; a loss names the place."""
        self.failed, self.reason = failed, reason
        place = next((word for word in message.split() if word[1:].isdigit() and word[0] in "ng"), "")
        if reason == "NODE_LOST":
            self.node = place
        elif reason == "GATE_LOST":
            self.gate = place

    @property
    def place(self) -> str:
        """The lost node or gate."""
        return {"NODE_LOST": self.node, "GATE_LOST": self.gate}.get(self.reason, "")


@dataclass
class Story:
    """One rollout at one driver, as its client saw it. The client's `number` may have several, one after another."""

    rollout_id: str
    number: int
    driver: str
    attempts: list[Attempt] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    """Each end that was seen: there must be one."""
    created: float = 0.0
    ended: float = 0.0
    calls: dict[str, list[int]] | None = None
    """Sampled token ids of each call in its trajectory; None = it was not read."""
    unread: str = ""
    """Why it was not."""
    problems: list[str] = field(default_factory=list)
    """What `penstock verify` finds in it."""

    def lose_home(self) -> None:
        """Record that its driver has lost it."""
        self.ends.append((HOME_LOST, None))
        self.ended = time.time()

    @property
    def reason(self) -> str:
        """Why it failed; empty = it did not."""
        return self.ends[-1][0] if self.ends else "NO_END"

    @property
    def reward(self) -> float | None:
        """Its reward."""
        return self.ends[-1][1] if self.ends else None


@dataclass
class Lost:
    """A host that was lost, from `at` until `back`; None = it stays away."""

    name: str
    at: float
    back: float | None = None
    served: float | None = None
    """When it served again, where `back` is when it may have been there again at the earliest; None = `back`."""
    running: int = 0
    """Attempts there that had not ended when it was lost, by what their clients had seen; of a driver, rollouts."""


@dataclass(frozen=True)
class Report:
    """One line of a service's log. The times of a call are of its beginning and its end."""

    began: float
    ended: float
    facts: Mapping[str, Any]

    @property
    def rollout_id(self) -> str:
        """The rollout that it is about; empty = none."""
        return str(self.facts.get("rollout_id", ""))


def reports(log: str, event: str) -> Iterator[Report]:
    """The lines of an event in a service's log. Of a service that was killed, the last may be a part of a line."""
    for line in log.splitlines():
        if f'"{event}"' in line and line.startswith("{") and line.endswith("}"):
            facts = json.loads(line)
            if facts["event"] == event:
                ended = datetime.fromisoformat(facts["timestamp"]).timestamp()
                yield Report(ended - facts.get("ms", 0.0) / 1e3, ended, facts)


def calls(log: str, methods: str | tuple[str, ...]) -> Iterator[Report]:
    """The calls of these methods in a service's log, in the order of their ends. A method begins with a slash."""
    return (one for one in reports(log, "rpc") if one.facts["method"].endswith(methods))


@dataclass
class Seen:
    """A whole run."""

    max_attempts: int
    places: tuple[str, ...]
    """All nodes and gates."""
    noticed_s: float = 8.0
    """The most that the 99th percentile of the time from a loss to the failure of the attempts there may be."""
    waited_s: float = 30.0
    """The most that a rollout may wait for a host that is lost."""
    home_s: float = 30.0
    """The same of its driver's host."""
    engines: Mapping[str, str] = field(default_factory=dict)
    """The engine of each gate that has one alone."""
    stories: list[Story] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    """Rollouts that could not be followed to their end, with the error."""
    losses: list[Lost] = field(default_factory=list)
    listed: dict[str, End | None] = field(default_factory=dict)
    """What the drivers list afterwards: reason and reward, None = it has not ended."""
    wiped: dict[str, float] = field(default_factory=dict)
    """Drivers that lost their disk, and when: they list nothing that is older."""
    unlisted_drivers: set[str] = field(default_factory=set)
    """Drivers that do not answer any more."""
    answers: dict[str, list[list[int]]] = field(default_factory=dict)
    """See `engine.read`."""
    sampled: dict[str, list[str]] = field(default_factory=dict)
    """By rollout, the calls that were sampled, with repetitions."""
    disturbances: list[Lost] = field(default_factory=list)
    """All losses, also of processes that are back at once."""
    undisturbed: dict[str, list[list[int]]] = field(default_factory=dict)
    """Those of engines that were not lost, and whose gates were not."""
    during: Counter[str] | None = None
    """What living hosts had at the first loss, by kind; None = nothing was lost."""
    left: list[str] = field(default_factory=list)
    left_s: float = 0.0
    """Seconds until nothing was left on living hosts."""
    keys: int = 0
    """Agent keys of attempts at hosts that were cut, which were tried."""
    accepted_keys: list[str] = field(default_factory=list)
    refused_s: float = 0.0
    """The most seconds after which a gate that is back refused the keys of attempts that were lost with it."""
    seconds: float = 0.0

    def take_answers(self, logs: list[Path]) -> None:
        """Read the logs of engines and trainers."""
        self.answers = engine.read(logs)
        for session, calls in engine.sessions(logs).items():
            self.sampled.setdefault(session.partition("#")[0], []).extend(calls)

    def final(self) -> dict[int, Story]:
        """The last story of each number."""
        return {story.number: story for story in self.stories}
