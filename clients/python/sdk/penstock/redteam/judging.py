"""Judges an attack: from the observations of its rollout, its neighbour and the services, to a verdict."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from penstock.client.types.results import FailureCause, Outcome, Phase
from penstock.redteam.attack import Attack, Grading

_MARK: Final = "REDTEAM "
_NOT_THE_AGENTS: Final = frozenset({FailureCause.INFRASTRUCTURE, FailureCause.TASK, FailureCause.MODEL})
_NOT_OFFERED: Final = frozenset({"CAPABILITY_MISSING", "TOOL_NOT_ALLOWED"})
_BEFORE_THE_AGENT: Final = frozenset({Phase.QUEUED, Phase.PREPARING, Phase.CONFIGURING, Phase.SETTING_UP})


class Verdict(StrEnum):
    """The verdict on an attack."""

    HELD = "held"
    BROKEN = "broken"
    NOT_APPLICABLE = "not_applicable"
    """It cannot be tried here; see the reason."""
    UNCLEAR = "unclear"
    """No evidence that it was tried: nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one attack under one grading. `seconds` is its rollout's duration; `reward` None: not graded."""

    attack: Attack
    grading: Grading
    verdict: Verdict
    reasons: tuple[str, ...]
    reward: float | None = None
    failure: str = ""
    rollout_id: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """The attack's name and its grading."""
        return f"{self.attack.name}/{self.grading}"


@dataclass(slots=True)
class Seen:
    """Observations of an attack. `outcome` None: its rollout did not end in time and was cancelled."""

    outcome: Outcome | None = None
    refused: tuple[str, str] | None = None
    """The reason and the message of its rollout's refusal."""
    missing: str = ""
    """Missing parts of its surroundings."""
    reports: list[str] = field(default_factory=list)
    has_tried: asyncio.Event = field(default_factory=asyncio.Event)
    neighbour: Outcome | None = None
    restarted: Sequence[str] = ()
    growth: Mapping[str, int] = field(default_factory=dict)

    def hear(self, line: str) -> None:
        """Processes a line of the agent's output, if it is a report for us."""
        if line.startswith(_MARK) and len(self.reports) < 100:
            self.reports.append(line.removeprefix(_MARK)[:500])
            if self.reports[-1].startswith("tried: "):
                self.has_tried.set()

    def reported(self, kind: str) -> list[str]:
        """Returns the program's reports of this kind."""
        return [line.removeprefix(f"{kind}: ") for line in self.reports if line.startswith(f"{kind}: ")]


def judge(attack: Attack, seen: Seen, baseline: float) -> tuple[Verdict, tuple[str, ...]]:
    """Returns the verdict, and the reasons for it.

    Args:
        attack: the attack.
        seen: the observations of it.
        baseline: the reward of an agent that does nothing.
    """
    if inapplicable := seen.reported("inapplicable"):
        return Verdict.NOT_APPLICABLE, tuple(inapplicable)
    wrong = [*seen.reported("broken"), *_of_services(attack, seen)]
    if seen.missing:
        return Verdict.UNCLEAR, (*wrong, seen.missing)
    refused = seen.refused or _refused(seen.outcome)
    if refused is not None and attack.expected.refused == refused[0] and not wrong:
        return Verdict.HELD, (f"refused: {refused[1]}",)
    if refused is not None and refused[0] in _NOT_OFFERED:
        return Verdict.NOT_APPLICABLE, (f"{refused[0]}: {refused[1]}",)
    if attack.expected.refused:
        return Verdict.BROKEN, (*wrong, f"it was not refused as {attack.expected.refused}")
    if seen.outcome is None:
        return Verdict.BROKEN, (*wrong, "its rollout did not end within its time limits")
    failure = seen.outcome.failure
    if not seen.reports and failure is not None and (failure.phase is None or failure.phase in _BEFORE_THE_AGENT):
        return Verdict.UNCLEAR, (*wrong, f"its rollout failed before it: {failure.reason}: {failure.message}")
    wrong += _of_outcome(attack, seen.outcome, baseline)
    if wrong:
        return Verdict.BROKEN, tuple(wrong)
    if not seen.reported("tried"):
        failure_text = "" if failure is None else f" ({failure.reason}: {failure.message})"
        stderr = seen.outcome.agent_stderr.decode("utf-8", "replace")[-300:]
        return Verdict.UNCLEAR, (f"its program did not report that it tried{failure_text} {stderr}".strip(),)
    return Verdict.HELD, tuple(seen.reported("tried"))


def _refused(outcome: Outcome | None) -> tuple[str, str] | None:
    failure = None if outcome is None else outcome.failure
    if failure is None or (failure.phase is not None and failure.phase not in _BEFORE_THE_AGENT):
        return None
    return failure.reason, failure.message


def _of_outcome(attack: Attack, outcome: Outcome, baseline: float) -> list[str]:
    wrong = []
    reward, failure = outcome.reward, outcome.failure
    if reward is not None and reward.value > baseline and not attack.expected.any_reward:
        wrong.append(f"it got a reward of {reward.value:g} but doing nothing gets {baseline:g}")
    if reward is None and attack.expected.graded:
        wrong.append("it was not graded")
    if failure is not None and failure.cause in _NOT_THE_AGENTS:
        wrong.append(f"its failure was reported with the cause {failure.cause}: {failure.reason}: {failure.message}")
    allowed = attack.expected.failure
    if failure is not None and allowed and failure.reason not in allowed:
        wrong.append(f"its failure was {failure.reason} and not {' or '.join(allowed)}: {failure.message}")
    if failure is not None and failure.retriable:
        wrong.append(f"its failure was reported as retriable: {failure.reason}: {failure.message}")
    return wrong


def _of_services(attack: Attack, seen: Seen) -> list[str]:
    wrong = [f"the {name} service ended and was restarted" for name in seen.restarted]
    allowed = attack.expected.max_growth_bytes
    if allowed is not None:
        wrong += [
            f"the {name} service grew by {grown / 1e6:.0f} MB, more than {allowed / 1e6:.0f} MB"
            for name, grown in seen.growth.items()
            if grown > allowed
        ]
    if attack.expected.neighbour:
        neighbour = seen.neighbour
        if neighbour is None:
            wrong.append("a neighbour rollout did not end in time")
        elif neighbour.reward is None or neighbour.reward.value < 1:
            why = "" if neighbour.failure is None else f": {neighbour.failure.reason}: {neighbour.failure.message}"
            wrong.append(f"a neighbour rollout did not get its reward{why}")
    return wrong
