"""What agents, trainer and gates have of a run, and what must be true of it. Times are Unix seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from penstock.client.intercept.session import GONE_S

LOST: Final = "GATE_LOST"


@dataclass(frozen=True)
class Recorded:
    """A call in a gate's record. `leased` is 0.0 if it never was."""

    gate: str
    call_id: str
    state: str
    leased: float
    token_ids: tuple[int, ...]


@dataclass
class Pause:
    """From the acknowledgement of all gates to the request to go on; what each gate held, and had leased, then."""

    began: float
    leased: int
    """Calls that were leased when it began."""
    ended: float = 0.0
    held: dict[str, int] = field(default_factory=dict)


@dataclass
class Account:
    """`calls` were asked for in all, and `budget` is the run's that has one."""

    calls: int
    budget: int
    answered: Counter[int] = field(default_factory=Counter)
    """How often an agent had the right answer to each question."""
    answered_at: Counter[str] = field(default_factory=Counter)
    """By gate."""
    wrong: list[str] = field(default_factory=list)
    """Answers that belong to another question."""
    taken: Counter[str] = field(default_factory=Counter)
    """How often the trainer got each call."""
    least: dict[str, int | None] = field(default_factory=dict)
    """The least policy version of each call, as the trainer got it."""
    sent: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """What the trainer answered."""
    accepted: Counter[str] = field(default_factory=Counter)
    """How often a gate accepted an answer to each call."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why an answer was refused, by call."""
    given_up: dict[str, str] = field(default_factory=dict)
    """Calls that the trainer had of the lost gate, and why their answers were refused; "" = one was accepted."""
    recorded: list[Recorded] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    announced: list[tuple[float, int]] = field(default_factory=list)
    """Since when all gates knew a version, while agents asked."""
    rounds: int = 0
    """Announcements in a pause, each followed by an old and a new answer at every gate."""
    misjudged: list[str] = field(default_factory=list)
    """What a gate did with those that is not as it must be."""
    restart_s: float = 0.0
    """From the kill of a gate to the first answer of it afterwards."""
    lost_s: float = 0.0
    """From the loss of a gate until the session gave its calls up."""
    meanwhile: int = 0
    """Calls that were answered at other gates in that time."""
    budget_delivered: list[int] = field(default_factory=list)
    """Calls of each rollout of the run with a budget, by its gate."""
    budget_answered: int = 0
    """Answers to them that a gate accepted."""
    budget_homes: list[tuple[str, str]] = field(default_factory=list)
    """Driver and gate of each of them."""
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """The report, for people."""
        held = [f"{gate} {count}" for pause in self.pauses for gate, count in sorted(pause.held.items())]
        drivers = sorted({driver for driver, _ in self.budget_homes})
        return [
            f"questions           {self.calls}, answered {sum(self.answered.values())}, by gate "
            f"{dict(sorted(self.answered_at.items()))}",
            f"calls at gates      {len(self.recorded)}, delivered {len(self._delivered())}, accepted "
            f"{sum(self.accepted.values())}, given to the trainer {sum(self.taken.values())} times",
            f"gate restarted      {self.restart_s:.1f} s to its next answer",
            f"gate lost           {len(self.given_up)} calls given up after {self.lost_s:.1f} s; {self.meanwhile} "
            "answered at the other meanwhile",
            f"pause               {self.pauses[0].leased} leased, held at {', '.join(held)}, none leased",
            f"announcements       {self.rounds} in pauses, {len(self.announced)} under load",
            f"budget              {sum(self.budget_delivered)} of {self.budget} calls, {self.budget_delivered} by "
            f"rollout, of {', '.join(drivers)}",
            f"seconds             {self.seconds:.0f}",
        ]

    def faults(self) -> list[str]:
        """Everything that is not as it must be."""
        return [*self._answers(), *self._records(), *self._flow(), *self._budget()]

    def _answers(self) -> Iterator[str]:
        yield from self.wrong
        for number in range(self.calls):
            if self.answered[number] != 1:
                yield f"question {number} was answered {self.answered[number]} times"
        for call_id, count in self.accepted.items():
            if count > 1:
                yield f"{count} answers to call {call_id} were accepted"
        for call_id, count in self.taken.items():
            if count > 1 and call_id not in self._lost():  # which are leased again when their gate is back
                yield f"the trainer got call {call_id} {count} times"
        for call_id, reason in self.refused.items():
            if call_id not in self._lost():
                yield f"the answer to call {call_id} was refused: {reason}"
        if not self.given_up:
            yield "the trainer had no call of the gate that was lost"
        for call_id, reason in self.given_up.items():
            if reason != LOST:
                yield f"call {call_id} of the lost gate ended with {reason!r}"
        if not self.meanwhile:
            yield "no call was answered while a gate was lost"

    def _records(self) -> Iterator[str]:
        delivered = self._delivered()
        for call_id, count in Counter(one.call_id for one in self.recorded).items():
            if count > 1:
                yield f"{count} records of call {call_id}"
        of_questions = {one.call_id for one in self.recorded}
        for call_id in (self.accepted.keys() & of_questions) - delivered.keys():
            yield f"call {call_id} was accepted, and no gate has it as delivered"
        for call_id in delivered.keys() - self.accepted.keys() - self._lost():
            yield f"a gate has call {call_id} as delivered, and its answer was never accepted"
        for call_id, one in delivered.items():
            if one.token_ids != self.sent.get(call_id):
                yield f"{one.gate} has other tokens of call {call_id} than the trainer sent"
        if len(delivered) < self.calls:
            yield f"the gates have {len(delivered)} delivered calls for {self.calls} questions"

    def _flow(self) -> Iterator[str]:
        for pause in self.pauses:
            for one in self.recorded:
                if pause.began < one.leased < pause.ended:
                    yield f"{one.gate} leased call {one.call_id} in a pause"
            for gate, count in pause.held.items():
                if not count:
                    yield f"{gate} held no call in the pause"
        for since, version in self.announced:
            for one in self.recorded:
                least = self.least.get(one.call_id)
                if one.leased > since and (least is None or least < version):
                    yield f"{one.gate} leased call {one.call_id} for version {least} after {version} was announced"
        yield from self.misjudged

    def _budget(self) -> Iterator[str]:
        if (sum(self.budget_delivered), self.budget_answered) != (self.budget, self.budget):
            yield (
                f"a budget of {self.budget} calls ended at {sum(self.budget_delivered)} in the gate's record and "
                f"{self.budget_answered} accepted answers"
            )
        if len({gate for _, gate in self.budget_homes}) != 1:
            yield f"rollouts of a run with a budget were at {self.budget_homes}"

    def _lost(self) -> set[str]:
        """Calls of the lost gate, and of the restarted one if it was away for so long that it was lost too."""
        late = {call_id for call_id, reason in self.refused.items() if reason == LOST and self.restart_s > GONE_S}
        return late | self.given_up.keys()

    def _delivered(self) -> dict[str, Recorded]:
        return {one.call_id: one for one in self.recorded if one.state == "delivered"}
